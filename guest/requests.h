/* The host's requests: each is checked, done and answered. */
#ifndef HW_REQUESTS_H
#define HW_REQUESTS_H

#include "frame.h"

/* Acts on one frame of a connection whose HELLO was accepted. */
void request_frame(const struct frame *frame);
/* A HELLO came: requests in progress are forgotten, the host sends them again. */
void requests_forget(void);

#endif
