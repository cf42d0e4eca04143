#include "octets.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../abi.h"
#include "upload.h"

enum { BLOCK = 4096 };

_Alignas(BLOCK) uint8_t piece[PIECE];

void pipe_widen(int fd)
{
    fcntl(fd, F_SETPIPE_SZ, 1 << 20);
}

/* Whether to try again after a failed call. */
static bool again(int fd, short events)
{
    if (errno == EAGAIN) {
        struct pollfd wait = {fd, events, 0};
        return poll(&wait, 1, -1) >= 0 || errno == EINTR;
    }
    return errno == EINTR;
}

bool write_whole(int fd, const void *data, size_t length)
{
    const char *at = data;
    while (length > 0) {
        ssize_t n = write(fd, at, length);
        if (n < 0 && !again(fd, POLLOUT))
            return false;
        if (n > 0) {
            at += n;
            length -= (size_t)n;
        }
    }
    return true;
}

static _Noreturn void nobody_reads(void)
{
    upload_discard();
    _exit(1);
}

void write_all(int fd, const void *data, size_t length)
{
    if (!write_whole(fd, data, length))
        nobody_reads();
}

ssize_t read_some(int fd, void *data, size_t room)
{
    ssize_t n;
    while ((n = read(fd, data, room)) < 0 && again(fd, POLLIN))
        ;
    return n;
}

static enum moved copy_octets(int in, int out, uint64_t limit, uint64_t *count)
{
    while (limit > 0) {
        ssize_t n = read_some(in, piece, limit < sizeof piece ? (size_t)limit : sizeof piece);
        if (n <= 0)
            return n == 0 ? MOVED_END : MOVED_READ_FAILED;
        if (out == STDOUT_FILENO)
            write_all(out, piece, (size_t)n);
        else if (!write_whole(out, piece, (size_t)n))
            return MOVED_WRITE_FAILED;
        limit -= (uint64_t)n;
        *count += (uint64_t)n;
    }
    return MOVED_ALL;
}

enum moved move_octets(int in, int out, uint64_t limit, uint64_t *count)
{
    while (limit > 0) {
        ssize_t n = splice(in, NULL, out, NULL, limit < 1 << 20 ? (size_t)limit : 1 << 20, SPLICE_F_MOVE);
        if (n == 0)
            return MOVED_END;
        if (n < 0) {
            if (errno == EPIPE && out == STDOUT_FILENO)
                nobody_reads();
            if (errno == EINTR)
                continue;
            /* Not between these two, or which of them it was is not to be seen: the plain way goes on from here and says. */
            return copy_octets(in, out, limit, count);
        }
        limit -= (uint64_t)n;
        *count += (uint64_t)n;
    }
    return MOVED_ALL;
}

enum moved receive_piece(int in, int out, uint64_t limit, uint64_t *count)
{
    size_t have = 0, room = limit < sizeof piece ? (size_t)limit : sizeof piece;
    ssize_t n = 1;
    while (have < room && (n = read_some(in, piece + have, room - have)) > 0)
        have += (size_t)n;
    int error = n < 0 ? errno : 0;
    if (have > 0 && !write_whole(out, piece, have))
        return MOVED_WRITE_FAILED;
    *count += have;
    errno = error;
    return n < 0 ? MOVED_READ_FAILED : have < room ? MOVED_END : MOVED_ALL;
}

/* ---- past the cache, one piece ahead: the disk writes one while the next is taken from the pipe ---- */

struct ahead {
    int fd, flags;           /* the file, and its flags as they were */
    bool on;                 /* it is written past the cache */
    unsigned long context;    /* 0: each piece is waited for */
    off_t at;                /* where the next piece goes, with a context */
    const uint8_t *data;     /* the piece on its way: */
    size_t length, done;
    bool pending;
};

static struct ahead ahead_begin(int fd)
{
    struct ahead to = {.fd = fd, .flags = fcntl(fd, F_GETFL), .at = lseek(fd, 0, SEEK_CUR)};
    to.on = to.flags >= 0 && fcntl(fd, F_SETFL, to.flags | O_DIRECT) == 0;
    if (!to.on || to.at < 0 || to.flags & O_APPEND || syscall(SYS_io_setup, 1, &to.context) != 0)
        to.context = 0;
    return to;
}

/* Writes from here on as everybody does. */
static bool ahead_stop(struct ahead *to)
{
    to->on = false;
    fcntl(to->fd, F_SETFL, to->flags);
    return !to->context || lseek(to->fd, to->at, SEEK_SET) == to->at;
}

/* Waits for the piece on its way. What the file system did not take goes the usual way; false with errno where it cannot. */
static bool ahead_settle(struct ahead *to)
{
    struct hw_io_event event = {0};
    if (to->pending) {
        to->pending = false;
        while (syscall(SYS_io_getevents, to->context, 1, 1, &event, NULL) < 0)
            if (errno != EINTR)
                return false;
        to->done = event.result > 0 ? (size_t)event.result : 0;
        to->at += (off_t)to->done;
    }
    size_t left = to->length - to->done;
    const uint8_t *rest = to->data + to->done;
    to->length = to->done = 0;
    return left == 0 || (ahead_stop(to) && write_whole(to->fd, rest, left));
}

/* Has a piece of whole blocks written. */
static void ahead_write(struct ahead *to, const uint8_t *data, size_t length)
{
    struct hw_iocb request = {.opcode = HW_IOCB_PWRITE, .fd = (uint32_t)to->fd, .buffer = (uintptr_t)data, .length = length, .offset = to->at};
    struct hw_iocb *requests[] = {&request};
    to->data = data;
    to->length = length;
    to->done = 0;
    to->pending = to->context && syscall(SYS_io_submit, to->context, 1, requests) == 1;
    if (!to->pending && !to->context) {
        ssize_t n = write(to->fd, data, length);
        to->done = n > 0 ? (size_t)n : 0;
    }
}

static enum moved receive_pieces(int in, struct ahead *to, uint64_t *limit, uint64_t *count)
{
    static _Alignas(BLOCK) uint8_t other[PIECE];
    for (bool odd = false; to->on && *limit > 0; odd = !odd) {
        uint8_t *data = odd ? other : piece;
        size_t have = 0, room = *limit < PIECE ? (size_t)*limit : PIECE;
        ssize_t n = 1;
        while (have < room && (n = read_some(in, data + have, room - have)) > 0)
            have += (size_t)n;
        int error = n < 0 ? errno : 0;
        if (!ahead_settle(to))
            return MOVED_WRITE_FAILED;
        size_t whole = to->on ? have / BLOCK * BLOCK : 0;
        if (whole > 0)
            ahead_write(to, data, whole);
        if (whole < have && (!ahead_settle(to) || (to->on && !ahead_stop(to)) || !write_whole(to->fd, data + whole, have - whole)))
            return MOVED_WRITE_FAILED; /* the end, or a file system that takes it in another way */
        *limit -= have;
        *count += have;
        if (n < 0) {
            errno = error;
            return MOVED_READ_FAILED;
        }
        if (have < room)
            return MOVED_END;
    }
    return MOVED_ALL;
}

enum moved receive_octets(int in, int out, uint64_t limit, uint64_t *count)
{
    struct ahead to = ahead_begin(out);
    enum moved moved = receive_pieces(in, &to, &limit, count);
    int error = errno;
    if (!ahead_settle(&to) && moved != MOVED_READ_FAILED && moved != MOVED_WRITE_FAILED) {
        moved = MOVED_WRITE_FAILED;
        error = errno;
    }
    if (to.on && !ahead_stop(&to) && moved == MOVED_ALL) {
        moved = MOVED_WRITE_FAILED;
        error = errno;
    }
    if (to.context)
        syscall(SYS_io_destroy, to.context);
    errno = error;
    return moved == MOVED_ALL ? move_octets(in, out, limit, count) : moved;
}
