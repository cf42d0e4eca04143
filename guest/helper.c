#include "helper.h"

#include <errno.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "abi.h"
#include "proto.h"
#include "stream.h"

static struct {
    pid_t pid;
    void (*done)(unsigned context, int error);
    unsigned context;
} helpers[MAX_REQUESTS];

int helper_run(int (*work)(int argument), int argument, void (*done)(unsigned context, int error), unsigned context)
{
    for (int i = 0; i < MAX_REQUESTS; i++) {
        if (helpers[i].pid != 0)
            continue;
        streams_fork();
        pid_t pid = fork();
        if (pid < 0)
            return -errno;
        if (pid == 0) {
            /* Pipe ends of processes must not live on here; the one descriptor it needs does. */
            int fd = argument;
            if (argument > 2) {
                if (argument != 3)
                    fd = dup2(argument, 3);
                raw6(SYS_close_range, 4, (long)~0u, 0, 0, 0, 0);
            }
            _exit(work(fd) & 0xff);
        }
        helpers[i].pid = pid;
        helpers[i].done = done;
        helpers[i].context = context;
        return 0;
    }
    return -EAGAIN;
}

bool helper_reaped(pid_t pid, int status)
{
    for (int i = 0; i < MAX_REQUESTS; i++) {
        if (helpers[i].pid == pid) {
            helpers[i].pid = 0;
            helpers[i].done(helpers[i].context, WIFEXITED(status) ? WEXITSTATUS(status) : EIO);
            return true;
        }
    }
    return false;
}
