/* watch: what changes below a path, as lines, until nobody reads them any more. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "args.h"
#include "entry.h"
#include "octets.h"
#include "ops.h"
#include "path.h"
#include "say.h"

enum {
    MAX_WATCHES = 8192,
    MAX_LEVELS = 256,
    PAIR_MS = 20, /* the second half of a rename comes at once, if it comes */
    WATCHED = IN_MODIFY | IN_ATTRIB | IN_CREATE | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO | IN_DELETE_SELF | IN_MOVE_SELF | IN_EXCL_UNLINK,
};

/* A folder (or the one file) that is watched. Its path is its name behind that of its parent, so that a rename above costs nothing. */
struct node {
    int wd; /* 0: unused */
    int parent;
    char *name;
};

static struct node nodes[MAX_WATCHES]; /* the first one is the path itself */
static uint64_t watches, unreadable;
static int inotify, highest; /* the highest number of a watch so far */
static bool recursive, started, entries, marks;
static const char *root_path;
static struct stat root;

/* The first half of a rename, until the second one comes. */
static struct {
    uint32_t cookie; /* 0: none */
    int node;
    bool folder;
    char name[NAME_MAX + 1];
} half;

static bool node_path(int node, char path[PATH_ROOM])
{
    if (node == 0)
        return path_absolute(root_path, path);
    return node_path(nodes[node].parent, path) && path_join(path, nodes[node].name);
}

/* The kernel counts watches up from 1, so that the first look finds most of them. */
static int slot_with(int wanted, int wd)
{
    for (int i = 0; i < MAX_WATCHES; i++) {
        int slot = (wd - 1 + i) % MAX_WATCHES;
        if (nodes[slot].wd == wanted)
            return slot;
    }
    return -1;
}

static int node_of(int wd)
{
    return wd > 0 && wd <= highest ? slot_with(wd, wd) : -1;
}

static int child_of(int parent, const char *name)
{
    for (int i = 1; i < MAX_WATCHES; i++)
        if (nodes[i].wd && nodes[i].parent == parent && strcmp(nodes[i].name, name) == 0)
            return i;
    return -1;
}

static void forget(int node)
{
    free(nodes[node].name);
    nodes[node] = (struct node){0, 0, NULL};
    watches--;
}

static bool is_below(int node, int above)
{
    while (node != above && node != 0)
        node = nodes[node].parent;
    return node == above;
}

/* A folder left what is watched, and all below it with it. */
static void unwatch(int node)
{
    for (int i = MAX_WATCHES - 1; i > 0; i--)
        if (nodes[i].wd && i != node && is_below(i, node)) {
            inotify_rm_watch(inotify, nodes[i].wd);
            nodes[i].wd = -nodes[i].wd; /* until all are found: the way up leads through them */
        }
    for (int i = MAX_WATCHES - 1; i > 0; i--)
        if (nodes[i].wd < 0)
            forget(i);
    inotify_rm_watch(inotify, nodes[node].wd);
    forget(node);
}

/* The entry that an event is about, as it is by now, if it is. */
static void tell_entry(struct line *line, const char *path)
{
    struct stat st;
    char target[PATH_ROOM] = "";
    if (fstatat(AT_FDCWD, path, &st, AT_SYMLINK_NOFOLLOW) != 0 || (S_ISLNK(st.st_mode) && readlink(path, target, sizeof target - 1) < 0))
        return;
    entry_member(line, path, &st, S_ISLNK(st.st_mode) ? target : NULL);
}

static void tell_how(const char *event, int node, const char *name, bool folder, const char *from, bool moved)
{
    static struct line line;
    char path[PATH_ROOM];
    if (!node_path(node, path) || (name && !path_join(path, name)))
        return; /* no such path can be given to anybody */
    const char *slash = strrchr(path, '/');
    line.length = 0;
    line_raw(&line, "{");
    line_text(&line, "event", event);
    line_octets(&line, "path", path, strlen(path));
    line_octets(&line, "name", slash[1] ? slash + 1 : path, strlen(slash[1] ? slash + 1 : path));
    line_bool(&line, "dir", folder);
    if (from)
        line_octets(&line, "from", from, strlen(from));
    if (moved)
        line_bool(&line, "moved", true);
    if (entries)
        tell_entry(&line, path);
    line_raw(&line, "}\n");
    out_line(&line);
}

static void tell(const char *event, int node, const char *name, bool folder, const char *from)
{
    tell_how(event, node, name, folder, from, false);
}

static void tell_overflow(const char *reason, int node, const char *name)
{
    static struct line line;
    char path[PATH_ROOM];
    if (!node_path(node, path) || (name && !path_join(path, name)))
        path_absolute(root_path, path);
    line.length = 0;
    line_raw(&line, "{");
    line_text(&line, "event", "overflow");
    line_text(&line, "reason", reason);
    line_octets(&line, "path", path, strlen(path));
    line_raw(&line, "}\n");
    out_line(&line);
}

/* Watches what is open as `fd`; its node, or -1 (said). */
static int watch_node(int parent, const char *name, int fd)
{
    int wd = inotify_add_watch(inotify, path_of_fd(fd), WATCHED), error = errno;
    int node = wd > 0 ? node_of(wd) : -1, unused = node >= 0 || wd <= 0 ? node : slot_with(0, wd);
    char *copy = name ? strdup(name) : NULL;
    if (wd > 0 && unused >= 0 && (copy || !name)) {
        if (node < 0)
            watches++;
        free(nodes[unused].name);
        nodes[unused] = (struct node){wd, parent, copy};
        if (wd > highest)
            highest = wd;
        return unused;
    }
    free(copy);
    if (wd > 0)
        inotify_rm_watch(inotify, wd);
    bool bound = wd > 0 || error == ENOSPC || error == ENOMEM;
    if (!started && bound)
        fail(EMFILE, "%.900s: more folders than can be watched", root_path);
    if (!started && !name)
        fail_at(error, root_path);
    if (started)
        tell_overflow(bound ? "watches" : "unreadable", parent, name);
    else
        unreadable++;
    return -1;
}

/* Watches a folder and, below it, all others; `told` says what is found as if it had just come. */
static void watch_tree(int parent, const char *name, int fd, int level, bool told)
{
    int node = watch_node(parent, name, fd);
    DIR *dir = node < 0 || !recursive ? NULL : fdopendir(fd);
    if (!dir) {
        close(fd);
        return;
    }
    struct dirent *entry;
    while ((entry = readdir(dir))) {
        const char *inside = entry->d_name;
        if (strcmp(inside, ".") == 0 || strcmp(inside, "..") == 0)
            continue;
        struct stat st;
        if (fstatat(fd, inside, &st, AT_SYMLINK_NOFOLLOW) != 0)
            continue;
        if (told)
            tell("create", node, inside, S_ISDIR(st.st_mode), NULL);
        if (!S_ISDIR(st.st_mode))
            continue;
        int below = level < MAX_LEVELS ? folder_open(fd, inside) : -1;
        if (below >= 0)
            watch_tree(node, inside, below, level + 1, told);
        else if (level >= MAX_LEVELS || (errno != ENOENT && errno != ELOOP && errno != ENOTDIR)) {
            if (started)
                tell_overflow("unreadable", node, inside);
            else
                unreadable++;
        }
    }
    closedir(dir);
}

static _Noreturn void ended(const char *how)
{
    struct line *line = say_ok();
    line_text(line, "ended", how);
    say_end(line);
    exit(0);
}

/* Opens the path anew: to hold it open would keep it from going away. */
static int open_root(int flags)
{
    struct stat st;
    int fd = open(root_path, flags | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st) != 0 || st.st_dev != root.st_dev || st.st_ino != root.st_ino)
        ended("removed");
    return fd;
}

/* A folder inside that was just named in an event; -1 where it is gone. */
static int open_below(int node, const char *name)
{
    if (node == 0) {
        int at = open_root(O_PATH | O_DIRECTORY), fd = folder_open(at, name);
        close(at);
        return fd;
    }
    int at = open_below(nodes[node].parent, nodes[node].name), fd = at < 0 ? -1 : folder_open(at, name);
    if (at >= 0)
        close(at);
    return fd;
}

static void folder_came(int node, const char *name)
{
    if (!recursive)
        return;
    int fd = open_below(node, name);
    if (fd >= 0)
        watch_tree(node, name, fd, 1, true);
    else if (errno != ENOENT && errno != ELOOP && errno != ENOTDIR)
        tell_overflow("unreadable", node, name);
}

static void end_half(void)
{
    if (!half.cookie)
        return;
    half.cookie = 0;
    if (!nodes[half.node].wd)
        return;
    tell_how("remove", half.node, half.name, half.folder, NULL, true);
    int child = half.folder ? child_of(half.node, half.name) : -1;
    if (child > 0)
        unwatch(child);
}

static void moved_to(int node, const char *name, bool folder, uint32_t cookie)
{
    if (!half.cookie || half.cookie != cookie) {
        end_half();
        tell("create", node, name, folder, NULL);
        if (folder)
            folder_came(node, name);
        return;
    }
    char from[PATH_ROOM];
    half.cookie = 0;
    bool known = nodes[half.node].wd && node_path(half.node, from) && path_join(from, half.name);
    int replaced = folder ? child_of(node, name) : -1, child = folder ? child_of(half.node, half.name) : -1;
    if (replaced > 0 && replaced != child)
        unwatch(replaced); /* an empty folder that this one took the place of */
    char *copy = child > 0 ? strdup(name) : NULL;
    if (copy) {
        free(nodes[child].name);
        nodes[child].name = copy;
        nodes[child].parent = node;
    }
    tell(known ? "rename" : "create", node, name, folder, known ? from : NULL);
}

static void of_root(const struct inotify_event *event)
{
    struct stat st;
    if (event->mask & (IN_DELETE_SELF | IN_UNMOUNT | IN_IGNORED))
        ended("removed");
    if (event->mask & IN_MOVE_SELF)
        ended("moved");
    /* A file that was removed or replaced, but which somebody holds open: its number of links changed. */
    if (event->mask & IN_ATTRIB && !S_ISDIR(root.st_mode) &&
        (stat(root_path, &st) != 0 || st.st_dev != root.st_dev || st.st_ino != root.st_ino))
        ended("removed");
}

static void open_inotify(void)
{
    inotify = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    if (inotify < 0)
        fail(errno, "inotify: %s", strerror(errno));
}

static void watch_all(void)
{
    /* A folder is opened to be read, anything else only to be named. */
    watch_tree(0, NULL, open_root(recursive ? O_RDONLY | O_DIRECTORY : O_PATH), 0, false);
}

/* Folders may have come and gone unseen: everything is begun anew. */
static void start_again(void)
{
    tell_overflow("queue", 0, NULL);
    half.cookie = 0;
    for (int i = 0; i < MAX_WATCHES; i++)
        if (nodes[i].wd)
            forget(i);
    close(inotify);
    highest = 0;
    open_inotify();
    watch_all();
    if (!nodes[0].wd)
        ended("removed");
}

static void handle(const struct inotify_event *event)
{
    int node = node_of(event->wd);
    if (node < 0)
        return; /* of a watch that was given up */
    const char *name = event->len ? event->name : NULL;
    bool folder = event->mask & IN_ISDIR;
    if (!(event->mask & IN_MOVED_TO))
        end_half();
    if (node == 0 && !name)
        of_root(event);
    if (event->mask & IN_IGNORED) {
        if (node > 0)
            forget(node);
    } else if (!name && node > 0) {
        return; /* a folder inside, about itself: its parent has told it */
    } else if (event->mask & IN_MOVED_FROM) {
        half.cookie = event->cookie;
        half.node = node;
        half.folder = folder;
        memcpy(half.name, name, strlen(name) + 1); /* a name of a folder */
    } else if (event->mask & IN_MOVED_TO) {
        moved_to(node, name, folder, event->cookie);
    } else if (event->mask & IN_CREATE) {
        tell("create", node, name, folder, NULL);
        if (folder)
            folder_came(node, name);
    } else if (event->mask & IN_DELETE) {
        tell("remove", node, name, folder, NULL);
    } else if (event->mask & (IN_MODIFY | IN_ATTRIB)) {
        tell(event->mask & IN_MODIFY ? "modify" : "chmod", node, name, folder || (!name && S_ISDIR(root.st_mode)), NULL);
    }
}

static uint64_t marks_due;

/* Each octet of descriptor 0 asks for a mark behind all that had happened before. */
static void take_marks(void)
{
    char octets[256];
    ssize_t n = read(STDIN_FILENO, octets, sizeof octets);
    if (n > 0)
        marks_due += (uint64_t)n;
    else if (n == 0 || (errno != EAGAIN && errno != EINTR))
        marks = false;
}

static void tell_marks(void)
{
    static struct line line;
    for (; marks_due > 0; marks_due--) {
        line.length = 0;
        line_raw(&line, "{\"event\":\"mark\"}\n");
        out_line(&line);
    }
}

/* Waits for events; false where none came in the time. A reader that is gone ends the program. */
static bool wait_for_events(int timeout_ms)
{
    struct pollfd ends[3] = {{inotify, POLLIN, 0}, {STDOUT_FILENO, 0, 0}, {marks ? STDIN_FILENO : -1, POLLIN, 0}};
    int n = poll(ends, 3, timeout_ms);
    if (ends[1].revents & (POLLERR | POLLHUP | POLLNVAL))
        exit(0);
    if (n > 0 && ends[2].revents)
        take_marks();
    return n > 0 && ends[0].revents;
}

/* File systems that others change unseen: the kernel tells nothing of that. */
static bool is_foreign(int fd)
{
    static const unsigned long magic[] = {0x6969 /* NFS */, 0x517b /* SMB */, 0xff534d42 /* CIFS */, 0xfe534d42 /* SMB 2 */, 0x65735546 /* FUSE */,
                                          0x01021997 /* 9P */, 0x00c36400 /* Ceph */};
    struct statfs fs;
    for (size_t i = 0; fstatfs(fd, &fs) == 0 && i < sizeof magic / sizeof magic[0]; i++)
        if (((unsigned long)fs.f_type & 0xffffffff) == magic[i])
            return true;
    return false;
}

void op_watch(void)
{
    static char events[65536] __attribute__((aligned(8)));
    root_path = args_path("path");
    recursive = args_flag("recursive");
    entries = args_flag("entries");
    marks = args_flag("marks");
    open_inotify();
    int fd = open(root_path, O_PATH | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &root) != 0)
        fail_at(errno, root_path);
    if (args_flag("local") && is_foreign(fd))
        fail(EREMOTE, "%.900s: is on a file system of the network, whose changes are not all seen here", root_path);
    close(fd);
    recursive = recursive && S_ISDIR(root.st_mode);
    watch_all();
    started = true;
    struct line *line = say_head();
    entry_member(line, root_path, &root, NULL);
    line_unsigned(line, "watches", watches);
    line_unsigned(line, "unreadable", unreadable);
    say_end(line);
    for (;;) {
        uint64_t due = marks_due;
        bool came = wait_for_events(half.cookie ? PAIR_MS : marks_due ? 0 : -1);
        if (!came && marks_due != due)
            continue; /* what happened before it was asked for is looked for after it was */
        if (!came && (half.cookie || marks_due)) {
            end_half();
            tell_marks();
            out_flush();
        }
        if (!came)
            continue;
        ssize_t length = read(inotify, events, sizeof events);
        if (length < 0 && errno != EAGAIN && errno != EINTR)
            fail(errno, "inotify: %s", strerror(errno));
        for (ssize_t at = 0; at < length;) {
            const struct inotify_event *event = (const void *)(events + at);
            if (event->mask & IN_Q_OVERFLOW) {
                start_again();
                break;
            }
            handle(event);
            at += (ssize_t)(sizeof *event + event->len);
        }
        out_flush();
    }
}
