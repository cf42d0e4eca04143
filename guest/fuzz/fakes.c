/* What the fuzzer must not really do: start programs, fork, switch the machine off. */
#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../agent.h"
#include "../files/files.h"
#include "../helper.h"
#include "../init.h"
#include "../power.h"
#include "../spawn.h"

struct agent agent = {.host_mode = true, .root_fd = -1, .mount_ns_fd = -1, .upper_fd = -1, .null_fd = -1, .random_fd = -1, .self_fd = -1};

void say(const char *format, ...)
{
    (void)format;
}

int open_in_root(const char *path, int flags, unsigned mode)
{
    (void)path;
    (void)flags;
    (void)mode;
    return -ENOENT;
}

/* A process that wrote something and never reads; one in four fails. It walks the strings as the real one does. */
int spawn_start(struct proc *proc, const struct spawn_request *request)
{
    int in[2], out[2];
    unsigned args = 0, envs = 0;
    struct field_reader reader = fields_of(request->payload, request->length);
    struct field field;
    while (field_next(&reader, &field)) {
        char *copy = field.tag == F_ARG || field.tag == F_ENV ? malloc((size_t)field.length + 1) : NULL;
        args += field.tag == F_ARG;
        envs += field.tag == F_ENV;
        if (copy)
            memcpy(copy, field.value, field.length);
        free(copy);
    }
    if (args != request->args || envs != request->envs)
        abort();
    if (proc->number % 4 == 3) {
        proc_failed(proc, "fake");
        return 0;
    }
    if (pipe(in) != 0 || pipe(out) != 0)
        abort();
    static const char text[3000];
    if (write(out[1], text, sizeof text) != (ssize_t)sizeof text)
        abort();
    close(out[1]);
    close(in[0]);
    if (!(request->flags & SPAWN_STDIN)) {
        close(in[1]);
        in[1] = -1;
    }
    struct proc_ends ends = {.in = in[1], .out = out[0], .err = -1, .pty = request->flags & SPAWN_PTY};
    if (!proc_connect(proc, &ends))
        abort();
    proc_running(proc);
    return 0;
}

int files_main(int argc, char **argv)
{
    (void)argc;
    (void)argv;
    abort(); /* nothing is started here */
}

/* Nothing outside is connected to: a port is closed, or a peer that said something and ended, or one that cannot be written to. */
int connect(int fd, const struct sockaddr *address, socklen_t length)
{
    static const char text[5000];
    const struct sockaddr_in *in = (const void *)address;
    int pair[2];
    (void)length;
    unsigned kind = ntohs(in->sin_port) % 4; /* it stands at the same place in an address of IPv6 */
    if (kind == 0) {
        errno = ECONNREFUSED;
        return -1;
    }
    if (kind == 1)
        return 0; /* never connected: the first use of it fails */
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) != 0 || dup2(pair[0], fd) != fd)
        abort();
    if (write(pair[1], text, sizeof text) != (ssize_t)sizeof text)
        abort();
    if (kind == 2 && shutdown(pair[1], SHUT_RD) != 0)
        abort();
    close(pair[0]);
    close(pair[1]);
    return 0;
}

bool spawn_wait(struct proc *proc, uint32_t request_id)
{
    (void)proc;
    (void)request_id;
    abort(); /* nothing stays in STATE_STARTING here */
}

void spawn_forget_waiters(void) {}
void spawn_check(struct job *job) { (void)job; }
void spawn_detach(struct job *job) { (void)job; }
unsigned spawns_waiting(void) { return 0; }
void spawns_sweep(void) {}

int helper_run(int (*work)(int argument), int argument, void (*done)(unsigned context, int error), unsigned context)
{
    (void)work;
    (void)argument;
    done(context, 0);
    return 0;
}

bool helper_reaped(pid_t pid, int status)
{
    (void)pid;
    (void)status;
    return false;
}

void make_folder(const char *path, unsigned mode)
{
    (void)path;
    (void)mode;
    abort(); /* nothing is mounted here */
}

void must_mount(const char *source, const char *target, const char *type, unsigned long flags, const char *options)
{
    (void)source;
    (void)target;
    (void)type;
    (void)flags;
    (void)options;
    abort();
}

void power_down(bool reboot) { (void)reboot; }
void power_signal(void) {}
uint64_t power_deadline(void) { return 0; }
void power_expire(void) {}

void fatal(const char *format, ...)
{
    (void)format;
    abort();
}
