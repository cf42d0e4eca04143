/* What the sandbox uses. */
#ifndef HW_METRICS_H
#define HW_METRICS_H

#include <stdint.h>

/* METRICS: answers. */
void metrics_request(uint32_t request);

#endif
