#include "attributes.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/xattr.h>

#include "args.h"
#include "path.h"

enum { NAME_ROOM = 256, NAMES_ROOM = 65536, TOLD = 5120 /* octets of names and values of one entry */ };

#define SPACE "user."

static char prefix[NAME_ROOM]; /* with the namespace; empty: nobody asked */
static const char *given;      /* NAME=VALUE lines, or NULL */

/* Text without control characters: what JSON shows as it is, and a line of ours can hold. */
static bool is_text(const char *octets, size_t length)
{
    for (size_t i = 0; i < length; i++)
        if ((unsigned char)octets[i] < 0x20 || octets[i] == 0x7f)
            return false;
    return utf8_whole(octets, length);
}

void attributes_take(void)
{
    const char *of = args_text("attributes_of");
    given = args_text("attributes");
    if (given && !of)
        fail(EINVAL, "attributes stand beside attributes_of only");
    if (!of)
        return;
    if (strlen(of) >= 64 || !is_text(of, strlen(of)))
        fail(EINVAL, "attributes_of is no beginning of a name");
    snprintf(prefix, sizeof prefix, SPACE "%s", of);
    for (const char *at = given; at && *at;) {
        size_t length = strcspn(at, "\n"), name = strcspn(at, "=\n");
        if (name == 0 || at[name] != '=' || strlen(prefix) + name >= NAME_ROOM || !is_text(at, length))
            fail(EINVAL, "an attribute is not NAME=VALUE, its name is too long, or it is no text");
        at += length + (at[length] == '\n');
    }
}

static bool is_ours(const char *name)
{
    return strncmp(name, prefix, strlen(prefix)) == 0 && name[strlen(prefix)] != 0;
}

void attributes_tell(struct line *line, int fd)
{
    static char names[NAMES_ROOM], value[TOLD];
    uint64_t left_out = 0;
    size_t told = 0;
    if (!prefix[0])
        return;
    char path[40];
    snprintf(path, sizeof path, "%s", path_of_fd(fd));
    ssize_t length = listxattr(path, names, sizeof names);
    line_key(line, "attributes");
    line_raw(line, "{");
    for (const char *name = names; length > 0 && name < names + length; name += strlen(name) + 1) {
        if (!is_ours(name))
            continue;
        ssize_t size = getxattr(path, name, value, sizeof value - 1);
        const char *shown = name + strlen(prefix);
        if (size < 0 && errno == ENODATA)
            continue; /* gone meanwhile */
        if (size < 0 || told + strlen(shown) + (size_t)size > TOLD || !is_text(shown, strlen(shown)) || !is_text(value, (size_t)size)) {
            left_out++;
            continue;
        }
        told += strlen(shown) + (size_t)size;
        value[size] = 0;
        line_pair(line, shown, value);
    }
    line_raw(line, "}");
    if (left_out || (length < 0 && errno == ERANGE))
        line_unsigned(line, "attributes_left_out", left_out ? left_out : 1);
}

static bool remove_ours(int fd)
{
    static char names[NAMES_ROOM];
    ssize_t length = flistxattr(fd, names, sizeof names);
    if (length < 0)
        return errno == EOPNOTSUPP; /* then there are none */
    for (const char *name = names; name < names + length; name += strlen(name) + 1)
        if (is_ours(name) && fremovexattr(fd, name) != 0 && errno != ENODATA)
            return false;
    return true;
}

bool attributes_replace(int fd)
{
    if (!given)
        return true;
    if (!remove_ours(fd))
        return false;
    for (const char *at = given; *at;) {
        char name[NAME_ROOM];
        size_t length = strcspn(at, "\n"), size = strcspn(at, "=");
        size_t before = strlen(prefix);
        memcpy(name, prefix, before); /* attributes_take() has seen to it that there is room */
        memcpy(name + before, at, size);
        name[before + size] = 0;
        if (fsetxattr(fd, name, at + size + 1, length - size - 1, 0) != 0) {
            if (errno == EOPNOTSUPP)
                errno = ENOSYS;
            return false;
        }
        at += length + (at[length] == '\n');
    }
    return true;
}
