#include "upload.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "path.h"

#define PREFIX ".hatchway-upload."
#ifndef HW_NAMELESS
#define HW_NAMELESS O_TMPFILE /* tests replace it by what a file system without such files refuses */
#endif

enum { MAX_SWEPT = 4096 /* entries looked at: a sweep is a favour, not the work */, NO_REPLACE = 1 /* RENAME_NOREPLACE */ };

static struct {
    int fd, folder;
    char name[64]; /* empty: it has none */
} upload = {.fd = -1};
static bool no_nameless; /* tried, and not had */
static bool caught;

void unused_name(char name[64], const char *prefix)
{
    uint64_t number = 0;
    if (getrandom(&number, sizeof number, GRND_NONBLOCK) != sizeof number)
        number = (uint64_t)getpid() << 32;
    snprintf(name, 64, "%s%016llx", prefix, (unsigned long long)number);
}

/* The program is ended: no half file stays under a name. Only what a signal handler may do. */
static void ended(int signal)
{
    if (upload.fd >= 0 && upload.name[0])
        unlinkat(upload.folder, upload.name, 0);
    _exit(128 + signal);
}

static int open_named(int folder)
{
    for (int tries = 0; tries < 100; tries++) {
        struct stat st;
        char name[64];
        unused_name(name, PREFIX);
        int fd = openat(folder, name, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
        if (fd < 0 && errno == EEXIST)
            continue;
        if (fd < 0)
            return -1;
        memcpy(upload.name, name, sizeof name);
        upload.fd = fd;
        /* The lock says that somebody lives who writes it. A sweep may have come first. */
        if (flock(fd, LOCK_EX) == 0 && fstat(fd, &st) == 0 && st.st_nlink > 0)
            return fd;
        close(fd);
        upload.fd = -1;
    }
    errno = EAGAIN;
    return -1;
}

int upload_open(int folder)
{
    upload.folder = folder;
    upload.name[0] = 0;
    if (!caught) {
        caught = true;
        for (int i = 0; i < 3; i++)
            signal((int[]){SIGTERM, SIGINT, SIGHUP}[i], ended);
    }
    if (!no_nameless) {
        upload.fd = openat(folder, ".", HW_NAMELESS | O_RDWR | O_CLOEXEC, 0600);
        if (upload.fd >= 0 && access(path_of_fd(upload.fd), F_OK) == 0 && flock(upload.fd, LOCK_EX) == 0)
            return upload.fd;
        if (upload.fd < 0 && errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)
            return -1;
        if (upload.fd >= 0)
            close(upload.fd); /* without /proc it would never get a name */
        upload.fd = -1;
        no_nameless = true;
    }
    return open_named(folder);
}

static int take_name(const char *name, bool replace)
{
    if (!upload.name[0]) {
        char between[64];
        if (linkat(AT_FDCWD, path_of_fd(upload.fd), upload.folder, name, AT_SYMLINK_FOLLOW) == 0)
            return 0;
        if (errno != EEXIST || !replace)
            return errno;
        unused_name(between, PREFIX);
        if (linkat(AT_FDCWD, path_of_fd(upload.fd), upload.folder, between, AT_SYMLINK_FOLLOW) != 0)
            return errno;
        memcpy(upload.name, between, sizeof between);
    }
    if (syscall(SYS_renameat2, upload.folder, upload.name, upload.folder, name, replace ? 0 : NO_REPLACE) != 0)
        return errno;
    upload.name[0] = 0;
    return 0;
}

int upload_place(const char *name, bool replace)
{
    int error = take_name(name, replace);
    upload_discard();
    return error;
}

void upload_discard(void)
{
    if (upload.fd < 0)
        return;
    if (upload.name[0])
        unlinkat(upload.folder, upload.name, 0);
    close(upload.fd);
    upload.fd = -1;
}

void upload_sweep(int folder)
{
    int fd = folder_open(folder, ".");
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    struct dirent *entry;
    for (int looked = 0; dir && looked < MAX_SWEPT && (entry = readdir(dir)); looked++) {
        struct stat st;
        if (strncmp(entry->d_name, PREFIX, strlen(PREFIX)) != 0)
            continue;
        int left = openat(folder, entry->d_name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
        if (left < 0)
            continue;
        if (fstat(left, &st) == 0 && S_ISREG(st.st_mode) && flock(left, LOCK_EX | LOCK_NB) == 0)
            unlinkat(folder, entry->d_name, 0);
        close(left);
    }
    if (dir)
        closedir(dir);
    else if (fd >= 0)
        close(fd);
}
