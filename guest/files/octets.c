#include "octets.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <unistd.h>

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

enum moved receive_octets(int in, int out, uint64_t limit, uint64_t *count)
{
    int flags = fcntl(out, F_GETFL);
    bool direct = flags >= 0 && fcntl(out, F_SETFL, flags | O_DIRECT) == 0;
    while (direct && limit > 0) {
        size_t have = 0, room = limit < sizeof piece ? (size_t)limit : sizeof piece;
        ssize_t n = 1;
        while (have < room && (n = read_some(in, piece + have, room - have)) > 0)
            have += (size_t)n;
        int error = n < 0 ? errno : 0;
        size_t whole = have / BLOCK * BLOCK;
        ssize_t done = whole ? write(out, piece, whole) : 0;
        size_t written = done > 0 ? (size_t)done : 0;
        if (written < have) { /* the end, or a file system that takes it in another way */
            fcntl(out, F_SETFL, flags);
            direct = false;
            if (!write_whole(out, piece + written, have - written))
                return MOVED_WRITE_FAILED;
        }
        limit -= have;
        *count += have;
        if (n < 0) {
            errno = error;
            return MOVED_READ_FAILED;
        }
        if (have < room)
            return MOVED_END;
    }
    if (flags >= 0)
        fcntl(out, F_SETFL, flags);
    return move_octets(in, out, limit, count);
}
