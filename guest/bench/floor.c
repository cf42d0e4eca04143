/* The bare guest of `hatchway bench stream`: PID 1 of a machine that does nothing but move octets through the agent's port, with
   writes and reads of the agent's size. The host asks with 16 octets: `w` or `r`, 7 octets that mean nothing, a count (u64). For `w` it gets
   that many octets, for `r` it gives them and then gets one. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
    WRITE_SIZE = 32 << 10, /* the port takes no more in one write, and the agent gives it no more */
    READ_SIZE = 96 << 10,  /* as large as the agent's parser */
    REQUEST = 16,
};

static char buffer[READ_SIZE];

static _Noreturn void stop(const char *what)
{
    fprintf(stderr, "hatchway-floor: %s: %s\n", what, strerror(errno));
    for (;;)
        pause();
}

static void load_modules(void)
{
    char line[512];
    FILE *list = fopen("/modules", "re");
    while (list && fgets(line, sizeof line, list)) {
        line[strcspn(line, "\n")] = 0;
        int fd = open(line, O_RDONLY | O_CLOEXEC);
        if (fd < 0 || (syscall(SYS_finit_module, fd, "", 0) != 0 && errno != EEXIST))
            stop(line);
        close(fd);
    }
    if (list)
        fclose(list);
}

static int open_port(void)
{
    static const struct timespec little = {0, 2000000};
    int fd;
    while ((fd = open("/dev/vport0p1", O_RDWR | O_NONBLOCK | O_CLOEXEC)) < 0)
        nanosleep(&little, NULL); /* the host has a bound */
    return fd;
}

/* Waits until the port may be ready; without a host it says at once that it hung up, again and again. */
static void wait_for(int port, short events)
{
    static const struct timespec little = {0, 1000000};
    struct pollfd one = {.fd = port, .events = events};
    if (poll(&one, 1, -1) > 0 && !(one.revents & events))
        nanosleep(&little, NULL);
}

static void move_in(int port, char *to, size_t room, uint64_t count)
{
    while (count > 0) {
        ssize_t n = read(port, to, count < room ? (size_t)count : room);
        if (n > 0)
            count -= (uint64_t)n;
        else
            wait_for(port, POLLIN);
    }
}

static void move_out(int port, uint64_t count)
{
    while (count > 0) {
        ssize_t n = write(port, buffer, count < WRITE_SIZE ? (size_t)count : WRITE_SIZE);
        if (n > 0)
            count -= (uint64_t)n;
        else
            wait_for(port, POLLOUT);
    }
}

int main(void)
{
    if (getpid() != 1) {
        fputs("hatchway-floor is the first process of a virtual machine; hatchway bench stream starts it there.\n", stderr);
        return 2;
    }
    if (mount("dev", "/dev", "devtmpfs", 0, NULL) != 0)
        stop("mounting /dev");
    load_modules();
    int port = open_port();
    for (;;) {
        char request[REQUEST] = {0};
        uint64_t count;
        for (size_t have = 0; have < sizeof request; have++)
            move_in(port, request + have, 1, 1);
        memcpy(&count, request + 8, sizeof count);
        if (request[0] == 'w') {
            move_out(port, count);
        } else {
            move_in(port, buffer, sizeof buffer, count);
            move_out(port, 1);
        }
    }
}
