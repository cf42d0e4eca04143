/* The guest channel where the monitor has no virtio-serial: a listening vsock socket (docs/protocols/guest-channel.md). */
#ifndef HW_VSOCK_H
#define HW_VSOCK_H

#include <stdbool.h>

/* True when the machine has a virtio-vsock device, whether or not its driver is loaded. */
bool vsock_present(void);

/* A socket that listens on the agent's port, or -1 and errno. */
int vsock_listen(void);

/* True for every socket that is no vsock, and for one whose peer is the host: nothing in the guest may speak in its place. */
bool vsock_from_host(int fd);

#endif
