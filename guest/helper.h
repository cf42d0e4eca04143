/* Short-lived children for what may block in the kernel (flushing, freezing, growing a file system), so that the loop does not. */
#ifndef HW_HELPER_H
#define HW_HELPER_H

#include <stdbool.h>
#include <sys/types.h>

/* Runs work(argument) in a child; done(argument2, error) is called with its errno (0: fine, EIO: it was killed). 0 or -errno;
   -EAGAIN: MAX_REQUESTS are running. */
int helper_run(int (*work)(int argument), int argument, void (*done)(unsigned context, int error), unsigned context);
/* A child ended; true when it was a helper. */
bool helper_reaped(pid_t pid, int status);

#endif
