/* list: pages in a fixed order, in constant memory. Of a folder the smallest names behind the last one are kept, so many as a page (or a
   batch, where folders inside are listed too) may need; the folder is read again for the next ones. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "args.h"
#include "entry.h"
#include "ops.h"
#include "path.h"
#include "say.h"

enum { MAX_LIMIT = 2000, MAX_DEPTH = 32, BATCH = 64, SLOTS = MAX_DEPTH * BATCH };

static struct {
    char slots[SLOTS][NAME_MAX + 1]; /* for one level, or BATCH for each */
    char *names[SLOTS];              /* likewise */
    char base[PATH_ROOM];            /* the absolute path of the folder that is being read */
    size_t root;                     /* of it: the listed one */
    char last[PATH_ROOM];            /* the entry told last, relative */
    uint64_t entries, skipped, limit;
    int depth;
    bool more;
} list;

static void sift(char *names[], size_t count, size_t at)
{
    for (size_t child; (child = 2 * at + 1) < count; at = child) {
        if (child + 1 < count && strcmp(names[child + 1], names[child]) > 0)
            child++;
        if (strcmp(names[at], names[child]) >= 0)
            return;
        char *other = names[at];
        names[at] = names[child];
        names[child] = other;
    }
}

/* The smallest names behind `after`, in order. A heap whose top is the largest of those kept. */
static size_t smallest(DIR *dir, const char *after, char *names[], char (*slots)[NAME_MAX + 1], size_t room)
{
    struct dirent *entry;
    size_t count = 0;
    rewinddir(dir);
    errno = 0;
    while ((entry = readdir(dir))) {
        const char *name = entry->d_name;
        if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0 || strcmp(name, after) <= 0 || strlen(name) > NAME_MAX)
            continue;
        if (count < room) {
            names[count] = slots[count];
            strcpy(names[count++], name);
            for (size_t i = count == room ? room / 2 : 0; i-- > 0;)
                sift(names, count, i);
        } else if (strcmp(name, names[0]) < 0) {
            strcpy(names[0], name);
            sift(names, count, 0);
        }
    }
    if (errno)
        fail_at(errno, list.base);
    if (count < room)
        for (size_t i = count / 2; i-- > 0;)
            sift(names, count, i);
    for (size_t end = count; end > 1; end--) {
        char *largest = names[0];
        names[0] = names[end - 1];
        names[end - 1] = largest;
        sift(names, end - 1, 0);
    }
    return count;
}

static void tell(int folder, const char *name, const struct stat *st)
{
    static struct line line;
    char target[PATH_ROOM] = "";
    if (S_ISLNK(st->st_mode) && readlinkat(folder, name, target, sizeof target - 1) < 0)
        return; /* no link any more */
    line.length = 0;
    line_raw(&line, "{");
    entry_members(&line, list.base, st, S_ISLNK(st->st_mode) ? target : NULL, folder, name);
    line_raw(&line, "}\n");
    out_line(&line);
    list.entries++;
    strcpy(list.last, list.base + list.root);
}

static void list_folder(DIR *dir, int level, const char *after);

/* What is in a folder inside; `after` is what was told of it before. */
static void descend(int folder, const char *name, int level, const char *after)
{
    int fd = folder_open(folder, name);
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    if (dir) {
        list_folder(dir, level, after);
        closedir(dir);
    } else {
        int error = errno;
        if (fd >= 0)
            close(fd);
        if (error != ENOENT && error != ENOTDIR && error != ELOOP)
            list.skipped++;
    }
}

/* An entry, and what is in it. False: the page is full. */
static bool list_entry(int folder, const char *name, int level)
{
    struct stat st;
    size_t length = strlen(list.base);
    if (fstatat(folder, name, &st, AT_SYMLINK_NOFOLLOW) != 0) {
        list.skipped += errno != ENOENT;
        return true;
    }
    if (list.entries == list.limit) {
        list.more = true;
        return false;
    }
    if (!path_join(list.base, name)) {
        list.skipped++;
        return true;
    }
    tell(folder, name, &st);
    if (S_ISDIR(st.st_mode) && level + 1 < list.depth)
        descend(folder, name, level + 1, "");
    list.base[length] = 0;
    return !list.more;
}

static void list_folder(DIR *dir, int level, const char *after)
{
    char last[NAME_MAX + 1] = "";
    size_t room = list.depth == 1 ? (size_t)list.limit + 1 : BATCH;
    char **names = list.names + level * BATCH; /* one level alone has them all */
    char(*slots)[NAME_MAX + 1] = list.slots + level * BATCH;
    if (*after) {
        size_t length = strcspn(after, "/"), base = strlen(list.base);
        memcpy(last, after, length);
        last[length] = 0;
        if (level + 1 < list.depth && path_join(list.base, last)) {
            descend(dirfd(dir), last, level + 1, after[length] ? after + length + 1 : "");
            list.base[base] = 0;
        }
    }
    for (size_t count = room; count == room && !list.more;) {
        count = smallest(dir, last, names, slots, room);
        for (size_t i = 0; i < count && list_entry(dirfd(dir), names[i], level); i++)
            ;
        if (count > 0)
            strcpy(last, names[count - 1]);
    }
}

static void check_after(const char *after)
{
    for (const char *at = after; *at;) {
        size_t length = strcspn(at, "/");
        if (length == 0 || length > NAME_MAX || (length <= 2 && memcmp(at, "..", length) == 0) || strlen(after) >= PATH_ROOM)
            fail(EINVAL, "after is no path of an entry below path");
        at += length + (at[length] == '/');
    }
}

void op_list(void)
{
    const char *path = args_path("path"), *after = args_text("after");
    list.depth = (int)args_number("depth", 1, 1, MAX_DEPTH);
    list.limit = args_number("limit", 1000, 1, MAX_LIMIT);
    check_after(after ? after : "");
    DIR *dir = opendir(path);
    if (!dir || !path_absolute(path, list.base))
        fail_at(errno, path);
    list.root = strlen(list.base);
    if (list.base[list.root - 1] != '/')
        list.root++;
    list_folder(dir, 0, after ? after : "");
    closedir(dir);
    say_count("entries", &list.entries);
    say_count("skipped", &list.skipped);
    struct line *line = say_ok();
    if (list.more)
        line_octets(line, "next", list.last, strlen(list.last));
    say_end(line);
}
