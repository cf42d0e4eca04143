#include "channel.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "agent.h"
#include "frame.h"
#include "loop.h"
#include "proc.h"
#include "requests.h"
#include "stream.h"
#include "vsock.h"

enum {
    QUEUE = 128 << 10,     /* answers that wait to be sent; while they are many no further request is read */
    ANSWER_ROOM = 1024,    /* more than the longest answer */
    PROC_ROOM = 1024,      /* more than the longest PROC frame */
    TX = 4 << 16,          /* what one read of a stream gives at most, as frames */
    RETRY_MS = 20,
    ROUNDS = 8,            /* writes before others get their turn */
    READS = 64,            /* reads: the port gives 4 KiB in one */
};

static void port_ready(struct watch *watch, uint32_t events);
static void listener_ready(struct watch *watch, uint32_t events);

static struct watch port = {.fd = -1, .ready = port_ready};
static struct watch listener = {.fd = -1, .ready = listener_ready};
static struct frame_parser parser;
static uint8_t queue[QUEUE];
static size_t queue_start, queue_end;
static uint8_t tx[TX];
static size_t tx_start, tx_end;
static bool greeted;    /* a HELLO was accepted; before that nothing else is */
static bool ready_due;  /* the list of processes after HELLO_ACK is not complete */
static bool readable;   /* there may be octets to read: the port is watched edge by edge, because its hang-up never ends */
static bool writable;
static bool retry_soon; /* a bound of work was reached: go on at once */
static uint64_t retry_at; /* the kernel had no memory for the port: no edge will say when it has again */

bool channel_use_port(int fd)
{
    port.fd = fd;
    readable = writable = true;
    return watch_set(&port, EPOLLIN | EPOLLOUT | EPOLLET);
}

bool channel_use_listener(int fd)
{
    listener.fd = fd;
    return watch_set(&listener, EPOLLIN);
}

static void port_ready(struct watch *watch, uint32_t events)
{
    (void)watch;
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR | EPOLLRDHUP))
        readable = true;
    if (events & (EPOLLOUT | EPOLLHUP | EPOLLERR))
        writable = true;
}

static void listener_ready(struct watch *watch, uint32_t events)
{
    (void)events;
    if (port.fd >= 0)
        return;
    int fd = accept4(watch->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0)
        return;
    if (!vsock_from_host(fd)) {
        close(fd);
        return;
    }
    if (!channel_use_port(fd)) {
        watch_close(&port);
        return;
    }
    watch_set(&listener, 0); /* the next one waits until this one is gone */
}

static void disconnected(void)
{
    if (listener.fd < 0)
        return; /* the port stays; its host end comes back */
    watch_close(&port);
    watch_set(&listener, EPOLLIN);
}

/* ---- answers ---- */

struct field_writer response_begin(int status)
{
    if (queue_start == queue_end)
        queue_start = queue_end = 0;
    if (QUEUE - queue_end < ANSWER_ROOM) {
        memmove(queue, queue + queue_start, queue_end - queue_start);
        queue_end -= queue_start;
        queue_start = 0;
    }
    size_t room = QUEUE - queue_end;
    if (room < ANSWER_ROOM) /* cannot be: requests are bounded; if it is, the answer is left out and not half there */
        return (struct field_writer){.at = NULL, .end = NULL, .full = true};
    struct field_writer writer = {.at = queue + queue_end + FRAME_HEADER, .end = queue + queue_end + room - FRAME_TRAILER};
    write_u32(&writer, F_STATUS, (uint32_t)status);
    return writer;
}

void response_end(uint32_t request, struct field_writer *writer)
{
    if (!writer->at)
        return;
    uint8_t *frame = queue + queue_end;
    queue_end += frame_finish(frame, T_RESPONSE, 0, request, (uint32_t)(writer->at - frame - FRAME_HEADER));
}

void respond_done(uint32_t request)
{
    struct field_writer writer = response_begin(0);
    response_end(request, &writer);
}

void respond(uint32_t request, int status, const char *format, ...)
{
    char text[MAX_MESSAGE];
    struct field_writer writer = response_begin(status);
    if (status != 0) {
        va_list args;
        va_start(args, format);
        vsnprintf(text, sizeof text, format, args);
        va_end(args);
        write_text(&writer, F_MESSAGE, text);
    }
    response_end(request, &writer);
}

/* ---- handshake ---- */

static void hello(const struct frame *frame)
{
    struct field_reader reader = fields_of(frame->payload, frame->length);
    struct field field, nonce = {0};
    uint32_t version = 0;
    uint64_t epoch = 0;
    bool fine = true;
    while (field_next(&reader, &field)) {
        if (field.tag == F_VERSION)
            fine &= field_u32(&field, &version);
        else if (field.tag == F_EPOCH)
            fine &= field_u64(&field, &epoch);
        else if (field.tag == F_NONCE)
            nonce = field;
    }
    if (!fine || reader.bad || nonce.length != 16)
        return;
    queue_start = queue_end = 0;
    tx_start = 0;
    requests_forget();
    struct field_writer writer = {.at = tx + FRAME_HEADER, .end = tx + sizeof tx - FRAME_TRAILER};
    write_u32(&writer, F_VERSION, HW_VERSION);
    write_bytes(&writer, F_NONCE, nonce.value, nonce.length);
    write_u64(&writer, F_EPOCH, epoch);
    write_text(&writer, F_BOOT_ID, agent.boot_id);
    write_text(&writer, F_AGENT, HW_BUILD);
    write_u64(&writer, F_UPTIME_NS, boot_ns());
    tx_end = frame_finish(tx, T_HELLO_ACK, 0, 0, (uint32_t)(writer.at - tx - FRAME_HEADER));
    greeted = ready_due = version == HW_VERSION;
    if (greeted)
        procs_resync();
}

static void act(const struct frame *frame)
{
    if (frame->type == T_HELLO)
        hello(frame);
    else if (greeted)
        request_frame(frame);
}

/* Reading or writing failed. The host went away, which the port tells with an edge when it is back, or something that passes. */
static void failed(int error)
{
    if (listener.fd < 0 && error != EPIPE && error != ECONNRESET && error != ENODEV)
        retry_at = now_ns() + RETRY_MS * (uint64_t)1000000;
    disconnected();
}

uint64_t channel_deadline(void) { return retry_at; }

void channel_expire(void)
{
    if (retry_at != 0 && now_ns() >= retry_at) {
        retry_at = 0;
        readable = writable = true;
    }
}

/* ---- out ---- */

static void put_proc(struct proc *proc, uint8_t state)
{
    size_t length = proc_describe(proc, state, tx + tx_end + FRAME_HEADER, PROC_ROOM - FRAME_HEADER - FRAME_TRAILER);
    tx_end += frame_finish(tx + tx_end, T_PROC, 0, proc->number, (uint32_t)length);
    proc->told = state;
}

static void put_input_ack(struct proc *proc)
{
    uint8_t *frame = tx + tx_end;
    struct field_writer writer = {.at = frame + FRAME_HEADER, .end = frame + PROC_ROOM - FRAME_TRAILER};
    write_u64(&writer, F_STDIN_OFFSET, input_taken(proc));
    write_u64(&writer, F_LIMIT, proc->in.grant);
    tx_end += frame_finish(frame, T_INPUT_ACK, 0, proc->number, (uint32_t)(writer.at - frame - FRAME_HEADER));
    proc->in.ack_due = false;
}

static void put_output(struct proc *proc, struct output *output, int fd)
{
    uint64_t sendable = output_sendable(output);
    size_t length = sendable < OUTPUT_FRAME_DATA ? (size_t)sendable : OUTPUT_FRAME_DATA;
    uint8_t *frame = tx + tx_end;
    uint8_t *payload = frame + FRAME_HEADER;
    memset(payload, 0, 8);
    payload[0] = (uint8_t)fd;
    put_u64(payload + 8, output->sent);
    for (size_t done = 0; done < length;) {
        size_t part;
        const uint8_t *data = ring_at(&output->ring, output->sent, &part);
        if (part > length - done)
            part = length - done;
        memcpy(payload + 16 + done, data, part);
        output->sent += part;
        done += part;
    }
    tx_end += frame_finish(frame, T_OUTPUT, 0, proc->number, (uint32_t)(16 + length));
}

/* Chooses what goes next, whole frames at a time: the list after HELLO_ACK, answers, states, input credit, then output. */
static void fill(void)
{
    struct proc *proc;
    struct output *output;
    int fd;
    while (ready_due && TX - tx_end >= PROC_ROOM + FRAME_HEADER + FRAME_TRAILER) {
        if ((proc = procs_next_resync())) {
            proc->resync = false;
            put_proc(proc, proc->state == STATE_STARTING ? STATE_RUNNING : proc->state);
        } else {
            tx_end += frame_finish(tx + tx_end, T_READY, 0, 0, 0);
            ready_due = false;
        }
    }
    if (ready_due || !greeted)
        return;
    size_t room = TX / 2 > tx_end ? TX / 2 - tx_end : 0;
    size_t waiting = queue_end - queue_start;
    size_t part = waiting < room ? waiting : room;
    memcpy(tx + tx_end, queue + queue_start, part);
    tx_end += part;
    queue_start += part;
    if (queue_start < queue_end)
        return;
    while (tx_end + 2 * PROC_ROOM <= TX / 2 && (proc = procs_next_dirty())) {
        proc->dirty = false;
        if (proc->state == STATE_CLOSED && proc->told < STATE_EXITED)
            put_proc(proc, STATE_EXITED);
        put_proc(proc, proc->state);
    }
    while (tx_end + PROC_ROOM <= TX / 2 && (proc = procs_next_input_ack()))
        put_input_ack(proc);
    while (TX - tx_end >= OUTPUT_FRAME_DATA + 16 + FRAME_HEADER + FRAME_TRAILER && (output = procs_next_output(&proc, &fd)))
        put_output(proc, output, fd);
}

static void send_out(void)
{
    for (int round = 0; writable; round++) {
        if (tx_start == tx_end) {
            tx_start = tx_end = 0;
            fill();
            if (tx_end == 0)
                return;
        }
        if (round >= ROUNDS) {
            retry_soon = true;
            return;
        }
        ssize_t n = write(port.fd, tx + tx_start, tx_end - tx_start);
        if (n > 0) {
            tx_start += (size_t)n;
        } else if (n < 0 && errno == EAGAIN) {
            writable = false; /* also while no host is connected */
        } else if (n < 0 && errno != EINTR) {
            writable = false;
            failed(errno);
        }
    }
}

/* ---- in ---- */

/* Acts on what the parser has; false when answers must be sent before more can be taken. */
static bool take_frames(void)
{
    struct frame frame;
    for (;;) {
        /* A request leaves one answer; starts, connections and helpers in progress leave MAX_REQUESTS each, later. */
        if (QUEUE - (queue_end - queue_start) < (3 * MAX_REQUESTS + 4) * ANSWER_ROOM)
            return false;
        if (!frame_next(&parser, &frame))
            return true;
        act(&frame);
    }
}

static bool take_in(void)
{
    bool clear = take_frames();
    for (int round = 0; clear && readable && port.fd >= 0; round++) {
        if (round >= READS) {
            retry_soon = true;
            break;
        }
        size_t room;
        uint8_t *to = frame_space(&parser, &room);
        ssize_t n = read(port.fd, to, room);
        if (n > 0) {
            frame_commit(&parser, (size_t)n);
            clear = take_frames();
        } else if (n < 0 && errno == EAGAIN) {
            readable = false;
        } else if (n == 0) {
            readable = false; /* no host: the port says so with each edge */
            disconnected();
        } else if (errno != EINTR) {
            readable = false;
            failed(errno);
        }
    }
    return clear;
}

bool channel_pump(void)
{
    retry_soon = false;
    if (port.fd < 0)
        return false;
    bool clear = take_in();
    if (port.fd >= 0)
        send_out();
    if (!clear && port.fd >= 0 && writable)
        retry_soon = true; /* answers got out: there is room for more requests */
    return retry_soon;
}

bool channel_flushed(void)
{
    return port.fd < 0 || !greeted || (tx_start == tx_end && queue_start == queue_end);
}

void channel_feed(const uint8_t *data, size_t count)
{
    while (count > 0) {
        size_t room;
        uint8_t *to = frame_space(&parser, &room);
        size_t part = count < room ? count : room;
        memcpy(to, data, part);
        frame_commit(&parser, part);
        data += part;
        count -= part;
        while (!take_frames() || tx_end > 0) { /* as if the host read everything at once */
            tx_start = tx_end = 0;
            fill();
        }
    }
    do {
        tx_start = tx_end = 0;
        fill();
    } while (tx_end > 0);
}
