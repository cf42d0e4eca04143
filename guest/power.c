#include "power.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "abi.h"
#include "agent.h"
#include "channel.h"
#include "loop.h"
#include "proc.h"
#include "setup.h"
#include "tree.h"

/* How long processes may take after SIGTERM, and the answer may take to get out. */
static const uint64_t GRACE_NS = 500000000u;

static bool going, rebooting;
static uint64_t deadline;

void power_down(bool reboot)
{
    if (going)
        return;
    going = true;
    rebooting = reboot;
    deadline = now_ns() + GRACE_NS;
    procs_kill_all(SIGTERM);
    procs_kill_all(SIGCONT);
}

void power_signal(void)
{
    if (agent.host_mode) {
        trees_kill_descendants();
        loop_stop();
    } else {
        power_down(false); /* only guest root can send it to PID 1 */
    }
}

uint64_t power_deadline(void)
{
    if (going && procs_alive() == 0 && channel_flushed())
        return 1; /* nothing to wait for */
    return going ? deadline : 0;
}

void power_expire(void)
{
    if (going && (now_ns() >= deadline || power_deadline() == 1)) {
        procs_kill_all(SIGKILL);
        loop_stop();
    }
}

static void pause_ms(long ms)
{
    struct timespec t = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&t, NULL);
}

static _Noreturn void off(bool reboot_instead)
{
    if (!reboot_instead) {
        /* Off takes the caller with it when the machine has no way to do it: then the kernel would halt for ever. */
        pid_t pid = fork();
        if (pid <= 0) {
            reboot(RB_POWER_OFF);
            if (pid == 0)
                _exit(1);
        }
        pause_ms(2000);
    }
    reboot(RB_AUTOBOOT);
    for (;;)
        pause();
}

/* A frozen one would never be flushed; it is an error on any other. */
static void thaw_upper(void)
{
    if (agent.upper_fd >= 0)
        ioctl(agent.upper_fd, HW_FITHAW, 0);
}

_Noreturn void power_finish(void)
{
    if (agent.host_mode) {
        trees_kill_descendants();
        while (waitpid(-1, NULL, WNOHANG) > 0)
            ;
        exit(0);
    }
    thaw_upper(); /* whoever waits to write to a frozen disk cannot even be killed */
    kill(-1, SIGKILL);
    for (int i = 0; i < 300; i++) {
        pid_t pid;
        while ((pid = waitpid(-1, NULL, WNOHANG)) > 0)
            ;
        if (pid < 0)
            break;
        pause_ms(10);
    }
    say("flushing the disk");
    thaw_upper(); /* again: a freeze may have been under way */
    setup_keep();
    if (agent.mount_ns_fd >= 0)
        close(agent.mount_ns_fd); /* the last one in the processes' namespace: its mounts go */
    sync();
    if (mount(NULL, "/hw/upper", NULL, MS_REMOUNT | MS_RDONLY, NULL) != 0)
        say("the disk cannot be made read-only: flushed only");
    say(rebooting ? "reboot" : "power off");
    off(rebooting || agent.vsock);
}

_Noreturn void fatal(const char *format, ...)
{
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    say("fatal: %s", text);
    if (agent.host_mode)
        exit(1);
    sync();
    off(false);
}
