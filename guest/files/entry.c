#include "entry.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "args.h"
#include "attributes.h"
#include "octets.h"
#include "path.h"

enum { MAX_ACCOUNTS = 256 << 10, NAME_ROOM = 65, CACHED = 16 };

/* One of the two files, read when the first name is wanted, and the names found last. */
struct accounts {
    const char *path;
    char *text; /* "" where there is no such file */
    struct {
        uint32_t id;
        char name[NAME_ROOM]; /* empty: it has none */
    } cache[CACHED];
    unsigned cached;
};

static struct accounts users = {.path = "/etc/passwd"}, groups = {.path = "/etc/group"};

static char *read_accounts(const char *path)
{
    static char nothing[1];
    struct stat st;
    char *text = NULL;
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_size <= MAX_ACCOUNTS && (text = malloc((size_t)st.st_size + 1))) {
        size_t length = 0;
        ssize_t n;
        while (length < (size_t)st.st_size && (n = read_some(fd, text + length, (size_t)st.st_size - length)) > 0)
            length += (size_t)n;
        text[length] = 0;
    }
    if (fd >= 0)
        close(fd);
    return text ? text : nothing;
}

/* name:anything:id:… */
static void find_name(const char *text, uint32_t id, char name[NAME_ROOM])
{
    name[0] = 0;
    for (const char *line = text; *line;) {
        size_t length = strcspn(line, "\n"), first = strcspn(line, ":\n"), second;
        if (line[first] == ':' && first > 0 && first < NAME_ROOM) {
            second = first + 1 + strcspn(line + first + 1, ":\n");
            char *end;
            if (line[second] == ':' && line[second + 1] >= '0' && line[second + 1] <= '9' && strtoull(line + second + 1, &end, 10) == id &&
                (*end == ':' || *end == '\n' || *end == 0)) {
                memcpy(name, line, first);
                name[first] = 0;
                return;
            }
        }
        line += length + (line[length] == '\n');
    }
}

static const char *name_of(struct accounts *accounts, uint32_t id)
{
    unsigned kept = accounts->cached < CACHED ? accounts->cached : CACHED;
    for (unsigned i = 0; i < kept; i++)
        if (accounts->cache[i].id == id)
            return accounts->cache[i].name[0] ? accounts->cache[i].name : NULL;
    if (!accounts->text)
        accounts->text = read_accounts(accounts->path);
    unsigned i = accounts->cached++ % CACHED;
    accounts->cache[i].id = id;
    find_name(accounts->text, id, accounts->cache[i].name);
    return accounts->cache[i].name[0] ? accounts->cache[i].name : NULL;
}

const char *user_name(uid_t uid)
{
    return name_of(&users, uid);
}

const char *passwd_text(void)
{
    if (!users.text)
        users.text = read_accounts(users.path);
    return users.text;
}

const char *group_name(gid_t gid)
{
    return name_of(&groups, gid);
}

static void account(struct line *line, const char *key, const char *name, uint32_t id)
{
    char digits[16];
    snprintf(digits, sizeof digits, "%u", id);
    line_text(line, key, name ? name : digits);
}

static const char *type_of(mode_t mode)
{
    switch (mode & S_IFMT) {
    case S_IFREG:
        return "file";
    case S_IFDIR:
        return "dir";
    case S_IFLNK:
        return "symlink";
    case S_IFIFO:
        return "fifo";
    case S_IFSOCK:
        return "socket";
    case S_IFCHR:
        return "char";
    default:
        return "block";
    }
}

/* A disk may hold times that this has no room for: the first or last there is stands for them. */
static int64_t nanoseconds(const struct timespec *time)
{
    int64_t second = 1000000000, most = INT64_MAX / second;
    if (time->tv_sec >= most || time->tv_sec <= -most)
        return time->tv_sec > 0 ? INT64_MAX : INT64_MIN;
    return (int64_t)time->tv_sec * second + time->tv_nsec;
}

static bool links, attributes;

void entry_take(void)
{
    links = args_flag("links");
    attributes = args_has("attributes_of");
}

/* Where a symbolic link leads in the end: the kernel knows the path of what it opens. */
static void tell_link(struct line *line, int fd, const struct stat *st)
{
    char path[PATH_ROOM];
    ssize_t length = readlink(path_of_fd(fd), path, sizeof path - 1);
    if (length <= 0)
        return;
    line_key(line, "leads_to");
    line_raw(line, "{");
    line_octets(line, "path", path, (size_t)length);
    line_text(line, "type", type_of(st->st_mode));
    line_unsigned(line, "mode", st->st_mode & 07777);
    line_raw(line, "}");
}

static void tell_more(struct line *line, const struct stat *st, int at, const char *name)
{
    struct stat found;
    int fd = openat(at, name, O_PATH | O_CLOEXEC);
    if (fd >= 0 && fstat(fd, &found) == 0) {
        if (links && S_ISLNK(st->st_mode))
            tell_link(line, fd, &found);
        if (found.st_dev == st->st_dev && found.st_ino == st->st_ino)
            attributes_tell(line, fd);
    }
    if (fd >= 0)
        close(fd);
}

void entry_members(struct line *line, const char *absolute, const struct stat *st, const char *target, int at, const char *name)
{
    const char *slash = strrchr(absolute, '/');
    const char *last = slash && slash[1] ? slash + 1 : absolute;
    line_octets(line, "path", absolute, strlen(absolute));
    line_octets(line, "name", last, strlen(last));
    line_text(line, "type", type_of(st->st_mode));
    line_unsigned(line, "size", (uint64_t)st->st_size);
    line_unsigned(line, "mode", st->st_mode & 07777);
    line_unsigned(line, "uid", st->st_uid);
    line_unsigned(line, "gid", st->st_gid);
    account(line, "user", user_name(st->st_uid), st->st_uid);
    account(line, "group", group_name(st->st_gid), st->st_gid);
    line_signed(line, "mtime_ns", nanoseconds(&st->st_mtim));
    if (target)
        line_octets(line, "target", target, strlen(target));
    if (attributes || (links && S_ISLNK(st->st_mode)))
        tell_more(line, st, at, name);
}

void entry_member(struct line *line, const char *path, const struct stat *st, const char *target)
{
    char absolute[PATH_ROOM];
    if (!path_absolute(path, absolute))
        strcpy(absolute, "/"); /* args_path() has refused such */
    line_key(line, "entry");
    line_raw(line, "{");
    entry_members(line, absolute, st, target, AT_FDCWD, path);
    line_raw(line, "}");
}
