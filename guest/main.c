#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "abi.h"
#include "agent.h"
#include "builtin.h"
#include "channel.h"
#include "init.h"
#include "loop.h"
#include "power.h"
#include "pressure.h"
#include "proc.h"
#include "tree.h"

struct agent agent = {
    .root_fd = -1, .mount_ns_fd = -1, .upper_fd = -1, .null_fd = -1, .random_fd = -1, .self_fd = -1,
};

void say(const char *format, ...)
{
    char text[600];
    int n = snprintf(text, sizeof text - 1, "hatchway-agent: ");
    va_list args;
    va_start(args, format);
    n += vsnprintf(text + n, sizeof text - 1 - (size_t)n, format, args);
    va_end(args);
    if (n > (int)sizeof text - 2)
        n = (int)sizeof text - 2;
    text[n++] = '\n';
    if (write(STDERR_FILENO, text, (size_t)n) < 0)
        return; /* nobody to tell */
}

int open_in_root(const char *path, int flags, unsigned mode)
{
    struct hw_open_how how = {
        .flags = (uint64_t)(unsigned)(flags | O_CLOEXEC),
        .mode = mode,
        .resolve = HW_RESOLVE_IN_ROOT | HW_RESOLVE_NO_MAGICLINKS,
    };
    return (int)raw6(SYS_openat2, agent.root_fd, (long)path, (long)&how, sizeof how, 0, 0);
}

/* Descriptors 0 to 3 must be taken: the child of a spawn moves its own to these numbers. */
static void occupy_low_descriptors(const char *path)
{
    int fd;
    while ((fd = open(path, O_RDWR | O_CLOEXEC)) >= 0 && fd <= 3)
        ;
    if (fd > 3)
        close(fd);
}

static void read_boot_id(void)
{
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? 0 : read(fd, agent.boot_id, sizeof agent.boot_id - 1);
    agent.boot_id[n > 0 ? n : 0] = 0;
    agent.boot_id[strcspn(agent.boot_id, "\n")] = 0;
    if (fd >= 0)
        close(fd);
}

static int listen_at(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path)
        fatal("the socket's path is longer than %zu octets", sizeof address.sun_path - 1);
    strcpy(address.sun_path, path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    struct stat st;
    if (lstat(path, &st) == 0 && S_ISSOCK(st.st_mode))
        unlink(path);
    mode_t mask = umask(0177);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof address) != 0 || listen(fd, 8) != 0)
        fatal("%s: %s", path, strerror(errno));
    umask(mask);
    return fd;
}

static void open_self(void)
{
    agent.self_fd = open("/proc/self/exe", O_PATH | O_CLOEXEC);
    if (agent.self_fd < 0)
        fatal("the agent's own binary: %s", strerror(errno));
}

static void host_mode(const char *path)
{
    agent.host_mode = true;
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    agent.root_fd = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    agent.null_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    open_self();
    read_boot_id();
    if (!loop_open() || !procs_open() || !channel_use_listener(listen_at(path)))
        fatal("start-up: %s", strerror(errno));
    loop_run();
    unlink(path);
}

static void sandbox_mode(void)
{
    int port = init_sandbox();
    /* Who cannot read a program can neither trace it: what runs outside the bounds of a user's own processes stays what it is. */
    if (chmod("/proc/self/exe", 0711) != 0)
        say("the agent's own binary: %s", strerror(errno));
    open_self();
    read_boot_id();
    if (!loop_open() || !procs_open() || !(agent.vsock ? channel_use_listener(port) : channel_use_port(port)))
        fatal("start-up: %s", strerror(errno));
    pressure_watch(trees_folder());
    say("ready");
    loop_run();
}

int main(int argc, char **argv)
{
    builtin_main *builtin = argc > 0 ? builtin_find(argv[0], strlen(argv[0])) : NULL;
    if (builtin) {
        prctl(PR_SET_NAME, argv[0]);
        return builtin(argc, argv);
    }
    struct rlimit files = {.rlim_cur = 8192, .rlim_max = 1048576};
    if (getpid() == 1) {
        setrlimit(RLIMIT_NOFILE, &files);
        sandbox_mode();
    } else if (argc == 3 && strcmp(argv[1], "--host-mode") == 0) {
        occupy_low_descriptors("/dev/null");
        if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < files.rlim_max) {
            files.rlim_cur = files.rlim_max < 8192 ? files.rlim_max : 8192;
            setrlimit(RLIMIT_NOFILE, &files);
        }
        host_mode(argv[2]);
    } else if (argc == 2 && strcmp(argv[1], "--version") == 0) {
        puts(HW_BUILD);
        return 0;
    } else {
        fputs("usage: hatchway-agent --host-mode SOCKET (or as PID 1 of a sandbox, without arguments)\n", stderr);
        return 2;
    }
    power_finish();
}
