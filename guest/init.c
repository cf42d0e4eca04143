#include "init.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "abi.h"
#include "agent.h"
#include "loop.h"
#include "power.h"
#include "proto.h"
#include "setup.h"
#include "vsock.h"

static const uint64_t DEVICE_WAIT_NS = 10000000000u;
static const char PORT_NAME[] = "hatchway.agent";

void make_folder(const char *path, unsigned mode)
{
    if (mkdir(path, mode) != 0 && errno != EEXIST)
        fatal("%s: %s", path, strerror(errno));
}

void must_mount(const char *source, const char *target, const char *type, unsigned long flags, const char *options)
{
    if (mount(source, target, type, flags, options) != 0)
        fatal("mounting %s at %s: %s", type ? type : source, target, strerror(errno));
}

void wait_a_little(void)
{
    struct timespec t = {0, 2000000};
    nanosleep(&t, NULL);
}

static bool ends_with(const char *text, const char *end)
{
    size_t a = strlen(text), b = strlen(end);
    return a >= b && strcmp(text + a - b, end) == 0;
}

static void load_module(const char *path)
{
    int compressed = ends_with(path, ".xz") || ends_with(path, ".zst") || ends_with(path, ".gz") ? 4 : 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        fatal("module %s: %s", path, strerror(errno));
    long error = raw6(SYS_finit_module, fd, (long)"", compressed, 0, 0, 0);
    if (error < 0 && error != -EEXIST)
        fatal("module %s: %s", path, strerror((int)-error));
    close(fd);
}

static void load_modules(const char *path)
{
    char line[512];
    unsigned count = 0;
    FILE *list = fopen(path, "re");
    if (!list) {
        say("%s: none listed", path);
        return;
    }
    while (fgets(line, sizeof line, list)) {
        line[strcspn(line, "\r\n")] = 0;
        if (line[0] && line[0] != '#') {
            load_module(line);
            count++;
        }
    }
    fclose(list);
    say("%s: %u loaded", path, count);
}

/* The device node of the port that bears our name; false when it is not there (yet). */
static bool find_port(char *path, size_t room)
{
    DIR *dir = opendir("/sys/class/virtio-ports");
    struct dirent *entry;
    bool found = false;
    while (dir && !found && (entry = readdir(dir))) {
        char file[320], name[64];
        snprintf(file, sizeof file, "/sys/class/virtio-ports/%s/name", entry->d_name);
        int fd = entry->d_name[0] == '.' ? -1 : open(file, O_RDONLY | O_CLOEXEC);
        ssize_t n = fd < 0 ? 0 : read(fd, name, sizeof name - 1);
        if (fd >= 0)
            close(fd);
        name[n > 0 ? n : 0] = 0;
        name[strcspn(name, "\n")] = 0;
        if (strcmp(name, PORT_NAME) == 0) {
            snprintf(path, room, "/dev/%s", entry->d_name);
            found = access(path, F_OK) == 0;
        }
    }
    if (dir)
        closedir(dir);
    return found;
}

/* The host's end is a port of a virtio-serial device or, where there is such a device instead, a vsock. */
static int open_channel(void)
{
    char path[300];
    uint64_t until = now_ns() + DEVICE_WAIT_NS;
    while (!find_port(path, sizeof path)) {
        if (vsock_present()) {
            load_modules("/modules-vsock");
            agent.vsock = true;
            int listener = vsock_listen();
            if (listener < 0)
                fatal("vsock: %s", strerror(errno));
            say("vsock");
            return listener;
        }
        if (now_ns() > until)
            fatal("neither a virtio-serial port %s nor a vsock", PORT_NAME);
        wait_a_little();
    }
    int fd = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
    if (fd < 0)
        fatal("%s: %s", path, strerror(errno));
    say("port: %s", path);
    return fd;
}

/* Descriptors 0 to 3 are the console: messages go there, and the child of a spawn puts its own over them. */
static void open_console(void)
{
    for (int fd = 0; fd <= 3; fd++)
        close(fd);
    for (int fd = 0; fd <= 3; fd++)
        if (open("/dev/console", O_RDWR | O_NOCTTY | (fd == 3 ? O_CLOEXEC : 0)) < 0 &&
            open("/dev/null", O_RDWR | (fd == 3 ? O_CLOEXEC : 0)) < 0)
            fatal("neither /dev/console nor /dev/null can be opened");
}

/* The agent is served before what it runs: highest priority, which its children do not inherit. */
static void take_priority(void)
{
    int normal[1] = {0};
    raw6(SYS_sched_setscheduler, 0, SCHED_OTHER | 0x40000000 /* SCHED_RESET_ON_FORK */, (long)normal, 0, 0, 0);
    setpriority(PRIO_PROCESS, 0, -20);
}

int init_sandbox(void)
{
    umask(022);
    make_folder("/proc", 0755);
    make_folder("/sys", 0755);
    make_folder("/dev", 0755);
    mount("dev", "/dev", "devtmpfs", MS_NOSUID, NULL); /* the kernel may have done it */
    open_console();
    must_mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    must_mount("sys", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    say("%s", HW_BUILD);
    agent.null_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    agent.random_fd = open("/dev/urandom", O_RDWR | O_CLOEXEC);
    load_modules("/modules");
    init_disks();
    init_cgroups();
    init_root();
    setup_first();
    init_network();
    take_priority();
    return open_channel();
}
