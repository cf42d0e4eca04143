/* The writable file system: flush, freeze with a bound, grow. */
#ifndef HW_DISK_H
#define HW_DISK_H

#include <stdint.h>

/* They answer the request when it is done. */
void disk_sync(uint32_t request);
void disk_freeze(uint32_t request, uint64_t timeout_ms);
void disk_thaw(uint32_t request);
void disk_resize(uint32_t request, uint64_t octets); /* when the device is that large */
void disk_forget_requests(void);
uint64_t disk_deadline(void);
void disk_expire(void);

#endif
