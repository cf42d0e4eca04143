#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#include "abi.h"
#include "agent.h"
#include "init.h"
#include "power.h"
#include "setup.h"
#include "trust.h"

#define ROOT "/hw/root"

static const struct {
    const char *name;
    unsigned major, minor, mode;
} nodes[] = {
    {"null", 1, 3, 0666}, {"zero", 1, 5, 0666},  {"full", 1, 7, 0666},      {"random", 1, 8, 0666},
    {"urandom", 1, 9, 0666}, {"tty", 5, 0, 0666}, {"fuse", 10, 229, 0666}, {"net/tun", 10, 200, 0666},
};

static const char *const links[][2] = {
    {"pts/ptmx", "ptmx"},     {"/proc/self/fd", "fd"},       {"/proc/self/fd/0", "stdin"},
    {"/proc/self/fd/1", "stdout"}, {"/proc/self/fd/2", "stderr"},
};

/* A small /dev of its own: no disk and no port of the agent in it. */
static void lay_out_dev(void)
{
    char path[64];
    must_mount("dev", ROOT "/dev", "tmpfs", MS_NOSUID, "mode=755,size=1m");
    make_folder(ROOT "/dev/pts", 0755);
    make_folder(ROOT "/dev/shm", 01777);
    make_folder(ROOT "/dev/net", 0755);
    for (size_t i = 0; i < sizeof nodes / sizeof nodes[0]; i++) {
        snprintf(path, sizeof path, ROOT "/dev/%s", nodes[i].name);
        if (mknod(path, S_IFCHR | nodes[i].mode, makedev(nodes[i].major, nodes[i].minor)) != 0 ||
            chmod(path, nodes[i].mode) != 0)
            fatal("%s: %s", path, strerror(errno));
    }
    for (size_t i = 0; i < sizeof links / sizeof links[0]; i++) {
        snprintf(path, sizeof path, ROOT "/dev/%s", links[i][1]);
        if (symlink(links[i][0], path) != 0)
            fatal("%s: %s", path, strerror(errno));
    }
    must_mount("devpts", ROOT "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620,gid=5");
    /* What lies here and in /run is memory that no memory killer gets back: with both full a session must still start. */
    must_mount("shm", ROOT "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777,size=30%");
}

static void put_resolver(void)
{
    static const char text[] = "nameserver 10.200.0.1\n";
    char old[sizeof text + 1];
    int fd = open_in_root("/etc/resolv.conf", O_RDONLY | O_NONBLOCK, 0);
    ssize_t n = fd < 0 ? -1 : read(fd, old, sizeof old);
    if (fd >= 0)
        close(fd);
    if (n == (ssize_t)sizeof text - 1 && memcmp(old, text, sizeof text - 1) == 0)
        return;
    int etc = open_in_root("/etc", O_PATH | O_DIRECTORY, 0);
    unlinkat(etc, "resolv.conf", 0); /* often a link into a folder that is not there */
    fd = openat(etc, "resolv.conf", O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
    if (fd < 0 || write(fd, text, sizeof text - 1) != (ssize_t)sizeof text - 1)
        say("/etc/resolv.conf: %s", strerror(errno));
    if (fd >= 0)
        close(fd);
    if (etc >= 0)
        close(etc);
}

/* In a child: a namespace in which the overlay is moved over / (not only chrooted to: `unshare -U` refuses a chroot). */
static int enter_moved_root(void)
{
    if (unshare(CLONE_NEWNS) != 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0)
        return errno;
    umount2("/hw/base", MNT_DETACH); /* the overlay holds them; nobody inside needs to see them */
    umount2("/hw/upper", MNT_DETACH);
    if (chdir(ROOT) != 0 || mount(".", "/", NULL, MS_MOVE, NULL) != 0 || chroot(".") != 0 || chdir("/") != 0)
        return errno;
    return mount(NULL, "/", NULL, MS_REC | MS_SHARED, NULL) == 0 ? 0 : errno; /* what tools expect of a root */
}

static void make_namespace(void)
{
    int ready[2], done[2];
    char path[64];
    int error = EIO;
    if (pipe2(ready, O_CLOEXEC) != 0 || pipe2(done, O_CLOEXEC) != 0)
        fatal("mount namespace: %s", strerror(errno));
    pid_t pid = fork();
    if (pid == 0) {
        close(done[1]);
        error = enter_moved_root();
        char end;
        if (write(ready[1], &error, sizeof error) == (ssize_t)sizeof error && read(done[0], &end, 1) < 0)
            _exit(1);
        _exit(0);
    }
    close(ready[1]);
    close(done[0]);
    if (pid < 0 || read(ready[0], &error, sizeof error) != (ssize_t)sizeof error || error != 0)
        fatal("mount namespace: %s", strerror(error));
    snprintf(path, sizeof path, "/proc/%d/ns/mnt", (int)pid);
    agent.mount_ns_fd = open(path, O_RDONLY | O_CLOEXEC);
    if (agent.mount_ns_fd < 0)
        fatal("mount namespace: %s", strerror(errno));
    close(ready[0]);
    close(done[1]);
    waitpid(pid, NULL, 0);
}

void init_root(void)
{
    static const char *const folders[] = {"/proc", "/sys", "/dev", "/run", "/tmp", "/etc"};
    char path[64];
    for (size_t i = 0; i < sizeof folders / sizeof folders[0]; i++) {
        snprintf(path, sizeof path, ROOT "%s", folders[i]);
        make_folder(path, 0755);
    }
    chmod(ROOT "/tmp", 01777); /* on the disk: what is large does not cost memory */
    must_mount("proc", ROOT "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    must_mount("sys", ROOT "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    must_mount("cgroup2", ROOT "/sys/fs/cgroup", "cgroup2", MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY, NULL);
    must_mount("run", ROOT "/run", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=10%");
    make_folder(ROOT "/run/hatchway", 0755);
    must_mount("trust", ROOT "/run/hatchway", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=755,size=3m");
    make_folder(ROOT "/run/lock", 01777);
    chmod(ROOT "/run/lock", 01777);
    lay_out_dev();
    put_resolver();
    setup_lay_out();
    trust_lay_out();
    make_namespace();
    say("root: ready");
}
