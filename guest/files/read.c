/* stat and read. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "args.h"
#include "entry.h"
#include "octets.h"
#include "ops.h"
#include "path.h"
#include "say.h"

enum { PEEK = 65536 };

void op_stat(void)
{
    const char *path = args_path("path");
    char target[PATH_ROOM] = "";
    struct stat st;
    int fd = open(path, O_PATH | O_CLOEXEC | (args_flag("follow") ? 0 : O_NOFOLLOW));
    if (fd < 0 || fstat(fd, &st) != 0)
        fail_at(errno, path);
    if (S_ISLNK(st.st_mode) && readlinkat(fd, "", target, sizeof target - 1) < 0)
        fail_at(errno, path);
    struct line *line = say_ok();
    entry_member(line, path, &st, S_ISLNK(st.st_mode) ? target : NULL);
    say_end(line);
}

/* What a small file has, before its size is said: the kernel's own files have none before they are read. */
struct peek {
    size_t length;
    bool whole;
};

static struct peek peek_at(int fd, uint64_t start, const char *path)
{
    struct peek peek = {0, false};
    while (!peek.whole) {
        uint8_t beyond;
        bool full = peek.length == PEEK;
        ssize_t n = pread(fd, full ? &beyond : piece + peek.length, full ? 1 : PEEK - peek.length, (off_t)(start + peek.length));
        if (n < 0 && errno != EINTR)
            fail_at(errno, path);
        if (n > 0 && full)
            return peek;
        if (n > 0)
            peek.length += (size_t)n;
        peek.whole = n == 0;
    }
    return peek;
}

void op_read(void)
{
    const char *path = args_path("path");
    uint64_t offset = args_number("offset", 0, 0, INT64_MAX), wanted = args_number("length", UINT64_MAX, 0, INT64_MAX);
    bool tail = args_has("tail");
    struct stat st;
    if (tail && (args_has("offset") || args_has("length")))
        fail(EINVAL, "tail stands beside no offset and no length");
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st) != 0)
        fail_at(errno, path);
    if (!S_ISREG(st.st_mode))
        fail(S_ISDIR(st.st_mode) ? EISDIR : EINVAL, "%.900s: not a regular file", path);
    uint64_t size = (uint64_t)st.st_size;
    if (tail) {
        wanted = args_number("tail", 0, 0, INT64_MAX);
        offset = size > wanted ? size - wanted : 0;
    }
    struct peek peek = {0, false};
    bool known = true, small = size <= PEEK;
    uint64_t length = offset < size ? size - offset : 0;
    if (small) {
        peek = peek_at(fd, offset, path);
        known = peek.whole;
        length = peek.length;
        if (peek.whole && (peek.length > 0 || offset <= size))
            st.st_size = (off_t)(offset + peek.length);
    }
    if (length > wanted)
        length = wanted;

    struct line *line = say_head();
    entry_member(line, path, &st, NULL);
    line_unsigned(line, "offset", offset);
    if (known) {
        line_unsigned(line, "length", length);
    } else {
        line_key(line, "length");
        line_raw(line, "null");
    }
    say_end(line);

    uint64_t bytes = 0;
    say_count("bytes", &bytes);
    if (small) {
        write_all(STDOUT_FILENO, piece, (size_t)length);
        bytes = length;
    }
    if (!small || !known) {
        pipe_widen(STDOUT_FILENO);
        if (lseek(fd, (off_t)(offset + bytes), SEEK_SET) < 0)
            fail_at(errno, path);
        switch (move_octets(fd, STDOUT_FILENO, known ? length : wanted - length, &bytes)) {
        case MOVED_READ_FAILED:
            fail_at(errno, path);
        case MOVED_END:
            if (known)
                fail(ESTALE, "%.900s: became shorter while it was read", path);
            break;
        default:
            break;
        }
    }
    say_end(say_ok());
}
