#include "loop.h"

#include <errno.h>
#include <signal.h>
#include <stddef.h>
#include <sys/signalfd.h>
#include <time.h>
#include <unistd.h>

#include "channel.h"
#include "disk.h"
#include "helper.h"
#include "power.h"
#include "proc.h"
#include "spawn.h"
#include "stream.h"

static int epoll_fd = -1;
static bool running;
static void signals_ready(struct watch *watch, uint32_t events);
static struct watch signals = {.fd = -1, .ready = signals_ready};

static uint64_t clock_ns(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

uint64_t now_ns(void) { return clock_ns(CLOCK_MONOTONIC); }
uint64_t boot_ns(void) { return clock_ns(CLOCK_BOOTTIME); }
uint64_t wall_ns(void) { return clock_ns(CLOCK_REALTIME); }

bool watch_set(struct watch *watch, uint32_t events)
{
    if (watch->fd < 0 || watch->events == events)
        return true;
    int op = events == 0 ? EPOLL_CTL_DEL : watch->events == 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD;
    struct epoll_event event = {.events = events, .data.ptr = watch};
    if (epoll_ctl(epoll_fd, op, watch->fd, &event) != 0)
        return false;
    watch->events = events;
    return true;
}

void watch_close(struct watch *watch)
{
    if (watch->fd < 0)
        return;
    watch_set(watch, 0);
    close(watch->fd);
    watch->fd = -1;
    watch->events = 0;
}

static void signals_ready(struct watch *watch, uint32_t events)
{
    (void)events;
    struct signalfd_siginfo info[16];
    ssize_t n;
    while ((n = read(watch->fd, info, sizeof info)) > 0) {
        for (size_t i = 0; i < (size_t)n / sizeof info[0]; i++) {
            if (info[i].ssi_signo == SIGTERM || info[i].ssi_signo == SIGINT)
                power_signal();
        }
    }
    procs_reap();
}

bool loop_open(void)
{
    sigset_t set;
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (epoll_fd < 0)
        return false;
    /* SIGPIPE is blocked, not ignored: children start with an empty mask and so have the default for every signal. */
    sigemptyset(&set);
    sigaddset(&set, SIGPIPE);
    sigaddset(&set, SIGCHLD);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGHUP);
    if (sigprocmask(SIG_BLOCK, &set, NULL) != 0)
        return false;
    sigdelset(&set, SIGPIPE);
    signals.fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    return signals.fd >= 0 && watch_set(&signals, EPOLLIN);
}

void loop_stop(void) { running = false; }

static uint64_t sooner(uint64_t a, uint64_t b)
{
    if (a == 0 || b == 0)
        return a + b;
    return a < b ? a : b;
}

void loop_turn(int timeout)
{
    bool again = procs_reap_pending();
    again |= channel_pump();
    uint64_t deadline = sooner(sooner(procs_deadline(), channel_deadline()), sooner(disk_deadline(), power_deadline())); /* also what the pump began */
    deadline = sooner(deadline, streams_deadline());
    if (again) {
        timeout = 0;
    } else if (deadline != 0) {
        uint64_t now = now_ns();
        uint64_t ms = deadline <= now ? 0 : (deadline - now + 999999) / 1000000;
        int until = ms > 3600000 ? 3600000 : (int)ms;
        if (timeout < 0 || until < timeout)
            timeout = until;
    }
    struct epoll_event events[32];
    int n = epoll_wait(epoll_fd, events, 32, timeout);
    for (int i = 0; i < n; i++) {
        struct watch *watch = events[i].data.ptr;
        if (watch->fd >= 0) /* an earlier event of this round may have closed it */
            watch->ready(watch, events[i].events);
    }
    spawns_sweep();
    streams_turn();
    if (deadline != 0 && now_ns() >= deadline) {
        procs_expire();
        channel_expire();
        disk_expire();
        power_expire();
        streams_expire();
    }
}

void loop_run(void)
{
    running = true;
    while (running)
        loop_turn(-1);
}
