#include "dial.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "channel.h"
#include "fields.h"
#include "loop.h"
#include "stream.h"

/* Kernel memory for one direction of one connection: what waits beyond it waits at the other end. */
enum { SOCKET_BUFFER = 128 << 10 };

union address {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
};

static unsigned waiting; /* requests whose answer is not known yet */

static socklen_t length_of(const union address *address)
{
    return address->any.sa_family == AF_INET ? sizeof address->v4 : sizeof address->v6;
}

static bool same_host(const union address *a, const struct sockaddr *other)
{
    const union address *b = (const void *)other;
    if (!other || other->sa_family != a->any.sa_family)
        return false;
    if (a->any.sa_family == AF_INET)
        return a->v4.sin_addr.s_addr == b->v4.sin_addr.s_addr;
    return memcmp(&a->v6.sin6_addr, &b->v6.sin6_addr, sizeof a->v6.sin6_addr) == 0;
}

static bool is_own(const union address *address)
{
    if (address->any.sa_family == AF_INET && ntohl(address->v4.sin_addr.s_addr) >> 24 == 127)
        return true;
    struct ifaddrs *all, *at;
    if (getifaddrs(&all) != 0)
        return false;
    for (at = all; at && !same_host(address, at->ifa_addr); at = at->ifa_next)
        ;
    freeifaddrs(all);
    return at != NULL;
}

/* A literal address of the sandbox itself; 0 or errno. Whoever wants to leave it has a network with rules for that. */
static int read_host(const char *host, uint16_t port, union address *address)
{
    *address = (union address){.v6 = {0}};
    if (inet_pton(AF_INET, host, &address->v4.sin_addr) == 1) {
        address->v4.sin_family = AF_INET;
        address->v4.sin_port = htons(port);
    } else if (inet_pton(AF_INET6, host, &address->v6.sin6_addr) == 1 && !IN6_IS_ADDR_V4MAPPED(&address->v6.sin6_addr)) {
        address->v6.sin6_family = AF_INET6;
        address->v6.sin6_port = htons(port);
    } else {
        return EINVAL;
    }
    return is_own(address) ? 0 : EADDRNOTAVAIL;
}

static void answer_waiters(struct proc *proc, int error)
{
    for (unsigned i = 0; i < proc->dialling.waiting; i++)
        respond(proc->dialling.waiters[i], error, "port %u: %s", proc->dialling.port, strerror(error));
    waiting -= proc->dialling.waiting;
    proc->dialling.waiting = 0;
}

static bool wait_for(struct proc *proc, uint32_t request)
{
    if (proc->dialling.waiting >= MAX_WAITERS)
        return false;
    proc->dialling.waiters[proc->dialling.waiting++] = request;
    waiting++;
    return true;
}

/* Nothing came of it. Whoever waits is told and the place is free again; with nobody there it is kept for whoever asks. */
static void failed(struct proc *proc, int error)
{
    watch_close(&proc->in.watch);
    proc_set_deadline(proc, 0);
    if (proc->dialling.waiting > 0) {
        answer_waiters(proc, error);
        proc_forget(proc);
        return;
    }
    proc->dialling.error = error;
    proc->state = STATE_RUNNING;
    proc_connection_ended(proc, error);
}

static void connected(struct proc *proc)
{
    int fd = proc->in.watch.fd, one = 1;
    watch_set(&proc->in.watch, 0);
    struct proc_ends ends = {.in = fd, .out = fcntl(fd, F_DUPFD_CLOEXEC, 4), .err = -1};
    streams_prepare(proc);
    proc->in.watch.fd = fd; /* until the streams take it over */
    if (ends.out < 0) {
        failed(proc, errno);
        return;
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    proc_set_deadline(proc, 0);
    if (!proc_connect(proc, &ends)) {
        int error = errno;
        answer_waiters(proc, error);
        proc_forget(proc);
        return;
    }
    proc_running(proc);
    answer_waiters(proc, 0);
    input_start(proc);
}

/* Begins to connect; 0 or errno. */
static int begin(struct proc *proc, const union address *address)
{
    int size = SOCKET_BUFFER;
    int fd = socket(address->any.sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return errno;
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &size, sizeof size);
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
    proc->in.watch.fd = fd;
    if ((connect(fd, &address->any, length_of(address)) != 0 && errno != EINPROGRESS) || !watch_set(&proc->in.watch, EPOLLOUT)) {
        int error = errno;
        watch_close(&proc->in.watch);
        return error;
    }
    return 0;
}

static int begin_at(struct proc *proc, const char *host)
{
    union address address;
    int error = read_host(host, proc->dialling.port, &address);
    return error ? error : begin(proc, &address);
}

static void dial_ready(struct watch *watch, uint32_t events)
{
    struct proc *proc = watch->owner;
    int error = 0;
    socklen_t length = sizeof error;
    (void)events;
    if (getsockopt(watch->fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0)
        error = errno;
    if (error == 0) {
        connected(proc);
        return;
    }
    watch_close(watch);
    if (error == ECONNREFUSED && proc->dialling.again) {
        proc->dialling.again = false;
        if (begin_at(proc, "::1") == 0)
            return;
    }
    failed(proc, error);
}

/* A listener of the same machine has answered by now, unless its queue is full. */
static void see_at_once(struct proc *proc)
{
    struct pollfd pollfd = {.fd = proc->in.watch.fd, .events = POLLOUT};
    if (poll(&pollfd, 1, 0) == 1)
        dial_ready(&proc->in.watch, 0);
}

void dial_expire(struct proc *proc)
{
    if (proc->state == STATE_STARTING)
        failed(proc, ETIMEDOUT);
}

void dials_forget_waiters(void)
{
    struct proc *proc;
    for (unsigned i = 0; (proc = proc_each(&i));)
        proc->dialling.waiting = 0;
    waiting = 0;
}

void dial_drop(struct proc *proc)
{
    struct linger reset = {.l_onoff = 1};
    int fd = proc->in.watch.fd >= 0 ? proc->in.watch.fd : proc->out[0].watch.fd;
    if (fd >= 0)
        setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
    answer_waiters(proc, ECANCELED);
}

/* ---- the request ---- */

static void dial_new(uint32_t request, const char *key, uint32_t number, uint16_t port, const char *host)
{
    if (proc_by_number(number)) {
        respond(request, EEXIST, "process %u is there with another key", number);
        return;
    }
    if (waiting >= MAX_REQUESTS) {
        respond(request, EAGAIN, "%d connections are being made", MAX_REQUESTS);
        return;
    }
    struct proc *proc = proc_new(number, key, KIND_CONNECTION);
    if (!proc) {
        respond(request, EAGAIN, "too many connections: %d are known; close some", MAX_CONNECTIONS);
        return;
    }
    proc->dialling.port = port;
    proc->dialling.again = !host[0];
    proc->in.watch.ready = dial_ready;
    wait_for(proc, request);
    int error = begin_at(proc, host[0] ? host : "127.0.0.1");
    if (error == ECONNREFUSED && proc->dialling.again) {
        proc->dialling.again = false;
        error = begin_at(proc, "::1") ? ECONNREFUSED : 0;
    }
    if (error) {
        failed(proc, error);
        return;
    }
    proc_set_deadline(proc, now_ns() + DIAL_MS * (uint64_t)1000000);
    see_at_once(proc);
}

static void dial_known(uint32_t request, struct proc *proc)
{
    if (proc->kind != KIND_CONNECTION)
        respond(request, EEXIST, "the key is a process's");
    else if (proc->state != STATE_STARTING)
        respond(request, proc->dialling.error, "port %u: %s", proc->dialling.port, strerror(proc->dialling.error));
    else if (waiting >= MAX_REQUESTS || !wait_for(proc, request))
        respond(request, EAGAIN, "connection %u is being made and too many wait for it", proc->number);
}

void dial_request(uint32_t request, const uint8_t *payload, size_t length)
{
    struct field_reader reader = fields_of(payload, length);
    struct field field;
    char key[MAX_KEY + 1] = "", host[MAX_HOST + 1] = "";
    uint64_t number = 0;
    uint32_t port = 0;
    bool fine = true;
    while (fine && field_next(&reader, &field)) {
        switch (field.tag) {
        case F_KEY: fine = field_text(&field, key, sizeof key); break;
        case F_SIZE: fine = field_u64(&field, &number); break;
        case F_PORT: fine = field_u32(&field, &port); break;
        case F_HOST: fine = field_text(&field, host, sizeof host) && host[0]; break;
        default: break;
        }
    }
    if (!fine || reader.bad || !key[0] || number < 1 || number >= 1u << 31 || port < 1 || port > 65535) {
        respond(request, EINVAL, "DIAL needs a KEY, a number (SIZE) from 1 to 2^31 - 1 and a PORT; its fields are malformed or out of bounds");
        return;
    }
    struct proc *proc = proc_by_key(key);
    if (proc)
        dial_known(request, proc);
    else
        dial_new(request, key, (uint32_t)number, (uint16_t)port, host);
}
