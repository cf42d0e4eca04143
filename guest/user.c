#include "user.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agent.h"

struct slice {
    const char *at;
    size_t length;
};

/* Cuts the next part off at a separator; false at the end. */
static bool cut(struct slice *rest, char separator, struct slice *part)
{
    if (!rest->at)
        return false;
    const char *found = memchr(rest->at, separator, rest->length);
    part->at = rest->at;
    part->length = found ? (size_t)(found - rest->at) : rest->length;
    if (found) {
        rest->length -= part->length + 1;
        rest->at = found + 1;
    } else {
        rest->at = NULL;
    }
    return true;
}

static bool number(struct slice part, uint32_t *to)
{
    uint64_t value = 0;
    if (part.length == 0 || part.length > 10)
        return false;
    for (size_t i = 0; i < part.length; i++) {
        if (part.at[i] < '0' || part.at[i] > '9')
            return false;
        value = value * 10 + (uint64_t)(part.at[i] - '0');
    }
    if (value > 0xfffffffeu) /* the last one means "unchanged" to the kernel */
        return false;
    *to = (uint32_t)value;
    return true;
}

static bool equal(struct slice part, const char *text)
{
    return part.length == strlen(text) && memcmp(part.at, text, part.length) == 0;
}

static bool copy(struct slice part, char *to, size_t room)
{
    if (part.length >= room || memchr(part.at, 0, part.length))
        return false;
    memcpy(to, part.at, part.length);
    to[part.length] = 0;
    return true;
}

/* name:password:uid:gid:comment:home:shell */
static bool passwd_line(struct slice line, const char *user, bool by_uid, uint32_t uid, struct account *account)
{
    struct slice name, part, uid_part, gid_part, home, shell;
    uint32_t found_uid, found_gid;
    if (!cut(&line, ':', &name) || !cut(&line, ':', &part) || !cut(&line, ':', &uid_part) || !cut(&line, ':', &gid_part) ||
        !cut(&line, ':', &part) || !cut(&line, ':', &home) || !cut(&line, ':', &shell))
        return false;
    if (!number(uid_part, &found_uid) || !number(gid_part, &found_gid))
        return false;
    if (by_uid ? found_uid != uid : !equal(name, user))
        return false;
    struct account found = {.uid = found_uid, .gid = found_gid};
    if (!copy(name, found.name, sizeof found.name) || !copy(home, found.home, sizeof found.home) ||
        !copy(shell, found.shell, sizeof found.shell))
        return false;
    *account = found;
    return true;
}

/* name:password:gid:member,member */
static void group_line(struct slice line, struct account *account)
{
    struct slice part, gid_part, members, member;
    uint32_t gid;
    if (!cut(&line, ':', &part) || !cut(&line, ':', &part) || !cut(&line, ':', &gid_part) || !cut(&line, ':', &members))
        return;
    if (!number(gid_part, &gid))
        return;
    while (cut(&members, ',', &member)) {
        if (equal(member, account->name) && gid != account->gid && account->group_count < MAX_GROUPS) {
            account->groups[account->group_count++] = gid;
            return;
        }
    }
}

bool account_find(const char *user, const char *passwd, size_t passwd_length, const char *group, size_t group_length,
                  struct account *account)
{
    uint32_t uid = 0;
    struct slice line, rest = {passwd, passwd_length};
    bool by_uid = number((struct slice){user, strlen(user)}, &uid);
    bool found = false;
    while (!found && cut(&rest, '\n', &line))
        found = passwd_line(line, user, by_uid, uid, account);
    if (!found && !by_uid)
        return false;
    if (!found) {
        *account = (struct account){.uid = uid, .gid = uid};
        snprintf(account->name, sizeof account->name, "%u", uid);
    }
    if (!account->home[0])
        strcpy(account->home, "/");
    if (!account->shell[0])
        strcpy(account->shell, "/bin/sh");
    account->groups[account->group_count++] = account->gid;
    rest = (struct slice){group, group_length};
    while (found && cut(&rest, '\n', &line))
        group_line(line, account);
    return true;
}

/* Reads a file of the sandbox; its content (to be freed) or NULL with *error = -errno. */
static char *read_account_file(const char *path, size_t *length, int *error)
{
    struct stat st;
    *length = 0;
    int fd = open_in_root(path, O_RDONLY | O_NONBLOCK, 0);
    if (fd < 0) {
        *error = fd;
        return NULL;
    }
    char *text = NULL;
    if (fstat(fd, &st) != 0)
        *error = -errno;
    else if (!S_ISREG(st.st_mode))
        *error = -EINVAL;
    else if (st.st_size > MAX_ACCOUNT_FILE)
        *error = -EFBIG;
    else if (!(text = malloc((size_t)st.st_size + 1)))
        *error = -ENOMEM;
    if (text) {
        ssize_t n;
        while (*length < (size_t)st.st_size && (n = read(fd, text + *length, (size_t)st.st_size - *length)) > 0)
            *length += (size_t)n;
    }
    close(fd);
    return text;
}

int account_lookup(const char *user, struct account *account)
{
    int error = 0, ignored;
    size_t passwd_length, group_length;
    char *passwd = read_account_file("/etc/passwd", &passwd_length, &error);
    if (!passwd && error != -ENOENT)
        return error;
    char *group = read_account_file("/etc/group", &group_length, &ignored);
    bool found = account_find(user, passwd, passwd_length, group, group_length, account);
    free(passwd);
    free(group);
    return found ? 0 : -ENOENT;
}
