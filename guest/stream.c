#include "stream.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <termios.h>
#include <unistd.h>

enum {
    READ_AT_ONCE = 4 * OUTPUT_FRAME_DATA, /* of one stream before the others get their turn */
    FLOOD = 32768,      /* octets that are much, */
    FLOOD_MS = 20,      /* where they are moved in this time, */
    FLOOD_TURNS = 32,   /* and for so many turns of the loop after it */
    REST_MS = 1000,     /* without any octet kept, after which the pages of a flood are given back */
    LARGE_INPUTS = INPUT_POOL_LARGE / INPUT_BYTES,
    INPUT_CHUNKS = LARGE_INPUTS * (INPUT_BYTES / CHUNK + 1) + MAX_PLACES * (INPUT_BYTES_SMALL / CHUNK + 1),
};

_Static_assert(INPUT_BYTES <= (RING_CHUNKS - 1) * CHUNK, "a ring holds what is granted, wherever in a chunk it begins");

static struct pool output_pool, input_pool;
static unsigned large_inputs; /* processes whose grant is INPUT_BYTES */
static unsigned starved;      /* outputs that wait for the pool */
static unsigned flood;        /* turns of the loop for which the agent is patient */
static bool patient;
static uint64_t rest_at; /* when the pools give their pages back; 0: they have none to give, or are in use */

/* While much goes through, the agent leaves the processor to whoever fills a pipe until that one blocks, instead of interrupting him for
   each write: batch tasks do not preempt. There are four times less switches then, each of which costs most of all under emulation. */
static void be_patient(bool is)
{
    struct sched_param zero = {0};
    if (patient == is)
        return;
    patient = is; /* by number: musl has no more than the name; refused, it is slower */
    syscall(SYS_sched_setscheduler, 0, (is ? SCHED_BATCH : SCHED_OTHER) | SCHED_RESET_ON_FORK, &zero);
}

void streams_turn(void)
{
    flood -= flood > 0;
    be_patient(flood > 0);
    bool spare = pool_spare(&output_pool) || pool_spare(&input_pool);
    if (!spare)
        rest_at = 0;
    else if (rest_at == 0)
        rest_at = now_ns() + REST_MS * (uint64_t)1000000;
}

uint64_t streams_deadline(void) { return rest_at; }

void streams_expire(void)
{
    if (rest_at == 0 || now_ns() < rest_at)
        return;
    rest_at = 0;
    pool_rest(&output_pool);
    pool_rest(&input_pool);
}

void streams_fork(void) { be_patient(false); }

/* Octets were moved, perhaps few at a time. Where it is a pipe, a flood gets more room in it. */
static void moved(size_t count, int fd, bool *large)
{
    static uint64_t since_ns;
    static size_t sum;
    sum += count;
    if (sum >= FLOOD) {
        uint64_t now = now_ns();
        if (now - since_ns < FLOOD_MS * (uint64_t)1000000)
            flood = FLOOD_TURNS;
        since_ns = now;
        sum = 0;
    }
    if (flood == FLOOD_TURNS && !*large) {
        fcntl(fd, F_SETPIPE_SZ, FLOOD_PIPE);
        *large = true;
    }
}

bool streams_open(void)
{
    return pool_open(&output_pool, OUTPUT_POOL_BYTES / CHUNK, 2 * (MAX_PROCS + MAX_BUILTINS) + MAX_CONNECTIONS) && pool_open(&input_pool, INPUT_CHUNKS, 0);
}

bool streams_idle(void)
{
    return output_pool.available == output_pool.total && input_pool.available == input_pool.total && starved == 0 && large_inputs == 0;
}

static void output_ready(struct watch *watch, uint32_t events);
static void input_ready(struct watch *watch, uint32_t events);

void streams_prepare(struct proc *proc)
{
    for (int i = 0; i < 2; i++) {
        proc->out[i].watch = (struct watch){.fd = -1, .ready = output_ready, .owner = proc};
        ring_open(&proc->out[i].ring, &output_pool, OUTPUT_BYTES);
    }
    proc->in.watch = (struct watch){.fd = -1, .ready = input_ready, .owner = proc};
}

static bool adopt(struct watch *watch, int fd)
{
    watch->fd = fd;
    return fd < 0 || fcntl(fd, F_SETFL, O_NONBLOCK | (fcntl(fd, F_GETFL) & O_ACCMODE)) == 0;
}

bool streams_connect(struct proc *proc, const struct proc_ends *ends)
{
    bool fine = adopt(&proc->in.watch, ends->in);
    fine &= adopt(&proc->out[0].watch, ends->out);
    fine &= adopt(&proc->out[1].watch, ends->err);
    proc->pty = ends->pty;
    if (ends->in >= 0) {
        bool large = large_inputs < LARGE_INPUTS;
        proc->in.grant = large ? INPUT_BYTES : INPUT_BYTES_SMALL;
        large_inputs += large;
        ring_open(&proc->in.ring, &input_pool, proc->in.grant);
        proc->in.ack_due = true; /* tells the host what it may send */
    }
    for (int i = 0; i < 2; i++)
        fine &= watch_set(&proc->out[i].watch, EPOLLIN);
    return fine;
}

bool streams_at_end(const struct proc *proc)
{
    return proc->out[0].watch.fd < 0 && proc->out[1].watch.fd < 0 && (proc->kind != KIND_CONNECTION || proc->in.watch.fd < 0);
}

void streams_close(struct proc *proc)
{
    watch_close(&proc->out[0].watch);
    watch_close(&proc->out[1].watch);
    input_close(proc);
}

static void resume_starved(void);

void streams_drop(struct proc *proc)
{
    for (int i = 0; i < 2; i++) {
        ring_drop(&proc->out[i].ring);
        starved -= proc->out[i].starved;
        proc->out[i].starved = false;
    }
    resume_starved();
}

void streams_resync(struct proc *proc)
{
    for (int i = 0; i < 2; i++)
        proc->out[i].credit = false;
    proc->in.ack_due = proc->in.grant > 0;
}

/* ---- output ---- */

uint64_t output_sendable(const struct output *output)
{
    uint64_t until = output->limit < output->ring.end ? output->limit : output->ring.end;
    return output->credit && until > output->sent ? until - output->sent : 0;
}

static void set_starved(struct output *output, bool is)
{
    starved = starved - output->starved + is;
    output->starved = is;
}

static void output_ready(struct watch *watch, uint32_t events)
{
    struct proc *proc = watch->owner;
    struct output *output = watch == &proc->out[0].watch ? &proc->out[0] : &proc->out[1];
    struct iovec vectors[RING_VECTORS];
    bool dry;
    (void)events;
    int n = ring_room(&output->ring, READ_AT_ONCE, vectors, &dry);
    if (n == 0) { /* full: this pipe alone waits until the host acknowledged */
        set_starved(output, dry);
        watch_set(watch, 0);
        return;
    }
    ssize_t got = readv(watch->fd, vectors, n);
    ring_produced(&output->ring, got > 0 ? (size_t)got : 0);
    if (got > 0)
        moved((size_t)got, watch->fd, &output->large);
    if (got > 0 || (got < 0 && (errno == EAGAIN || errno == EINTR)))
        return;
    int error = got < 0 ? errno : 0;
    watch_close(watch); /* end of file; EIO is that of a terminal */
    if (proc->kind == KIND_CONNECTION)
        proc_connection_ended(proc, error);
    else
        proc_stream_ended(proc);
}

static void resume(struct output *output)
{
    if (output->watch.fd >= 0 && output->watch.events == 0 && ring_used(&output->ring) < output->ring.bound) {
        set_starved(output, false);
        watch_set(&output->watch, EPOLLIN);
    }
}

static void resume_starved(void)
{
    struct proc *proc;
    if (starved == 0 || output_pool.available <= output_pool.reserve)
        return;
    for (unsigned i = 0; (proc = proc_each(&i));)
        for (int k = 0; k < 2; k++)
            if (proc->out[k].starved)
                resume(&proc->out[k]);
}

static void acknowledge(struct output *output, uint64_t ack, const uint64_t *limit)
{
    struct ring *ring = &output->ring;
    if (ack > ring->end)
        ack = ring->end; /* stored what was never written: nothing can be made of it */
    ring_free_to(ring, ack);
    if (!output->credit || output->sent < ring->base) {
        output->sent = ring->base;
        output->credit = true;
    }
    if (limit)
        output->limit = *limit > UINT64_MAX - ring->base ? UINT64_MAX : ring->base + *limit;
    resume(output);
}

void proc_output_ack(struct proc *proc, const uint64_t *stdout_ack, const uint64_t *stderr_ack, const uint64_t *limit)
{
    const uint64_t *acks[2] = {stdout_ack, stderr_ack};
    for (int i = 0; i < 2; i++) {
        struct output *output = &proc->out[i];
        if (!output->credit)
            output->limit = 0;
        if (acks[i])
            acknowledge(output, *acks[i], limit);
    }
    resume_starved();
}

/* ---- input ---- */

uint64_t input_taken(const struct proc *proc)
{
    return proc->in.watch.fd < 0 ? proc->in.next : proc->in.ring.base;
}

void input_close(struct proc *proc)
{
    struct input *input = &proc->in;
    if (input->watch.fd < 0)
        return;
    watch_close(&input->watch);
    ring_drop(&input->ring);
    large_inputs -= input->grant == INPUT_BYTES;
    input->ack_due = true;
    if (proc->kind == KIND_CONNECTION)
        proc_stream_ended(proc);
}

static void end_of_input(struct proc *proc)
{
    if (proc->pty) { /* what a person types to end the input; the line discipline understands it */
        struct termios mode;
        char end[2] = {4, 4};
        if (tcgetattr(proc->in.watch.fd, &mode) == 0) {
            if (!(mode.c_lflag & ICANON)) {
                input_close(proc);
                return;
            }
            end[0] = end[1] = (char)mode.c_cc[VEOF];
        }
        /* Within a line the first one only hands over what there is of it; the second is the end. */
        ssize_t count = proc->in.mid_line ? 2 : 1;
        ssize_t n = write(proc->in.watch.fd, end, (size_t)count);
        proc->in.mid_line &= n < 1;
        if ((n > 0 && n < count) || (n < 0 && errno == EAGAIN)) {
            watch_set(&proc->in.watch, EPOLLOUT);
            return;
        }
    }
    if (proc->kind == KIND_CONNECTION)
        shutdown(proc->in.watch.fd, SHUT_WR); /* the output has the same socket */
    input_close(proc);
}

static bool in_line(const struct proc *proc, uint8_t last)
{
    return proc->pty && last != '\n' && last != '\r';
}

/* Gives the process what its pipe takes now. */
static void push(struct proc *proc)
{
    struct input *input = &proc->in;
    while (input->watch.fd >= 0 && ring_used(&input->ring) > 0) {
        struct iovec vectors[RING_VECTORS];
        size_t one;
        ssize_t n = writev(input->watch.fd, vectors, ring_kept(&input->ring, vectors));
        if (n > 0) {
            input->mid_line = in_line(proc, *ring_at(&input->ring, input->ring.base + (uint64_t)n - 1, &one));
            ring_free_to(&input->ring, input->ring.base + (uint64_t)n);
            input->ack_due = true;
        } else if (n < 0 && errno == EINTR) {
            continue;
        } else if (n < 0 && errno == EAGAIN) {
            watch_set(&input->watch, EPOLLOUT);
            return;
        } else {
            if (proc->kind == KIND_CONNECTION && !proc->message[0])
                snprintf(proc->message, sizeof proc->message, "%s", strerror(errno));
            input_close(proc); /* nobody reads it any more */
            return;
        }
    }
    if (input->watch.fd < 0)
        return;
    watch_set(&input->watch, 0);
    if (input->eof)
        end_of_input(proc);
}

void input_start(struct proc *proc)
{
    if (proc->in.eof)
        push(proc);
}

/* Gives octets that nothing is ahead of, without keeping them; returns how many the process's pipe took. */
static size_t give(struct proc *proc, const uint8_t *data, size_t count)
{
    struct input *input = &proc->in;
    if (count == 0)
        return 0;
    moved(count, input->watch.fd, &input->large);
    ssize_t n = write(input->watch.fd, data, count);
    if (n <= 0)
        return 0; /* push() looks at why */
    input->mid_line = in_line(proc, data[n - 1]);
    ring_pass(&input->ring, (size_t)n);
    input->next += (uint64_t)n;
    input->ack_due = true;
    return (size_t)n;
}

static void input_ready(struct watch *watch, uint32_t events)
{
    (void)events;
    push(watch->owner);
}

void proc_input(struct proc *proc, uint64_t offset, const uint8_t *data, size_t count, bool eof)
{
    struct input *input = &proc->in;
    if (proc->kind == KIND_CONNECTION && proc->state == STATE_STARTING) { /* no credit was given yet: only an end may come */
        input->eof |= eof && count == 0 && offset == input->next;
        return;
    }
    if (offset > input->next || offset + count < offset) { /* a hole: the host starts again from what is acknowledged */
        input->ack_due = true;
        return;
    }
    uint64_t known = input->next - offset;
    if (known > count) { /* an old one, and its EOF came when it was new */
        input->ack_due = true;
        return;
    }
    data += known;
    count -= (size_t)known;
    if (input->watch.fd < 0 || input->eof) {
        input->next += count;
        input->ack_due = true;
        return;
    }
    uint64_t room = input->grant - ring_used(&input->ring);
    if (count > room) { /* beyond the credit: what fits is taken, the acknowledgement says so */
        count = (size_t)room;
        eof = false;
    }
    size_t direct = ring_used(&input->ring) == 0 && proc->state != STATE_STARTING ? give(proc, data, count) : 0;
    if (!ring_put(&input->ring, data + direct, count - direct))
        return;
    input->next += count - direct;
    input->eof = eof;
    if (known > 0)
        input->ack_due = true;
    if (proc->state != STATE_STARTING || count > 0 || eof)
        push(proc);
}

int proc_resize(struct proc *proc, uint32_t rows, uint32_t cols)
{
    struct winsize size = {.ws_row = (unsigned short)rows, .ws_col = (unsigned short)cols};
    if (!proc->pty)
        return -ENOTTY;
    if (rows == 0 || cols == 0 || rows > 65535 || cols > 65535)
        return -EINVAL;
    if (proc->out[0].watch.fd < 0)
        return -ESRCH;
    return ioctl(proc->out[0].watch.fd, TIOCSWINSZ, &size) == 0 ? 0 : -errno;
}
