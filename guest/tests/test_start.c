/* Starts that the kernel refuses and trees of many processes, with the parts of a whole agent and folders in place of cgroups. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../agent.h"
#include "../channel.h"
#include "../fields.h"
#include "../frame.h"
#include "../loop.h"
#include "../pressure.h"
#include "../proc.h"
#include "../spawn.h"
#include "check.h"

static struct proc *start_true(uint32_t number)
{
    static uint8_t payload[256];
    static struct spawn_request request;
    struct field_writer writer = {payload, payload + sizeof payload, false};
    write_text(&writer, F_ARG, "true");
    request = (struct spawn_request){.payload = payload, .length = (size_t)(writer.at - payload), .args = 1, .string_bytes = 4};
    struct proc *proc = proc_new(number, "key", KIND_PROCESS);
    CHECK(proc);
    CHECK_EQUAL(spawn_start(proc, &request), 0);
    return proc;
}

/* Writes to this descriptor fail so often for want of memory. */
static int poor_fd = -1, poor_times;
ssize_t __real_write(int fd, const void *data, size_t count);
ssize_t __wrap_write(int fd, const void *data, size_t count);
ssize_t __wrap_write(int fd, const void *data, size_t count)
{
    if (fd == poor_fd && poor_times > 0) {
        poor_times--;
        errno = ENOMEM;
        return -1;
    }
    return __real_write(fd, data, count);
}

/* Descriptors below 64 that are open, one bit each. */
static uint64_t open_descriptors(void)
{
    uint64_t open = 0;
    for (int fd = 0; fd < 64; fd++)
        open |= (uint64_t)(fcntl(fd, F_GETFD) >= 0) << fd;
    return open;
}

static void a_cgroup_that_cannot_be_made_costs_no_descriptor(void)
{
    char folder[] = "/tmp/hatchway-test-XXXXXX";
    CHECK(mkdtemp(folder));
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    CHECK(fd > 3);
    CHECK_EQUAL(rmdir(folder), 0); /* nothing can be made in a folder that is gone */
    struct tree_limits usual = {0, 0};
    trees_use_cgroups(fd, -1, &usual);
    uint64_t before = open_descriptors();
    for (uint32_t number = 1; number <= 3; number++) {
        struct proc *proc = start_true(number);
        CHECK(proc->state == STATE_CLOSED && proc->reason == REASON_SPAWN_FAILED);
        CHECK(strstr(proc->message, "cgroup"));
        CHECK_EQUAL(open_descriptors(), before);
        proc_forget(proc);
    }
    CHECK_EQUAL(open_descriptors(), before);
    close(fd);
}

static pid_t sleeper(void)
{
    pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        sigset_t none;
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, NULL);
        for (;;)
            pause();
    }
    CHECK(pid > 0);
    return pid;
}

/* More processes than any buffer holds: each is signalled, and no half of a number is. */
static void a_signal_reaches_all_of_a_large_cgroup(void)
{
    char folder[] = "/tmp/hatchway-test-XXXXXX", path[64];
    CHECK(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/cgroup.procs", folder);
    for (int cut = 65536 - 12; cut <= 65536 + 12; cut++) {
        pid_t spared = sleeper(), last = sleeper();
        FILE *file = fopen(path, "w");
        CHECK(file);
        int digits = snprintf(NULL, 0, "%d", (int)spared), at = 0;
        while (cut - digits - at >= 24)
            at += fprintf(file, "99999999999\n");
        while (cut - digits - at > 0)
            at += fprintf(file, "\n");
        fprintf(file, "%d9999999\n", (int)spared); /* its first digits end at octet `cut` */
        for (int i = 0; i < 6000; i++)
            fprintf(file, "99999999999\n");
        fprintf(file, "%d\n", (int)last);
        CHECK_EQUAL(fclose(file), 0);
        struct tree tree = {.cgroup_fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC)};
        CHECK_EQUAL(tree_signal(&tree, 0, SIGTERM), 0);
        int status;
        CHECK(waitpid(last, &status, 0) == last && WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM);
        CHECK_EQUAL(waitpid(spared, NULL, WNOHANG), 0);
        CHECK_EQUAL(kill(spared, SIGKILL), 0);
        CHECK(waitpid(spared, &status, 0) == spared && WTERMSIG(status) == SIGKILL);
        close(tree.cgroup_fd);
    }
    unlink(path);
    rmdir(folder);
}

static void put_text(const char *folder, const char *name, const char *text)
{
    char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "w");
    CHECK(file && fputs(text, file) >= 0 && fclose(file) == 0);
}

static bool said(const char *folder, const char *name, const char *text)
{
    char path[128], got[64] = "";
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "r");
    CHECK(file);
    if (!fgets(got, sizeof got, file))
        got[0] = 0;
    CHECK(fclose(file) == 0);
    return strcmp(got, text) == 0;
}

static void a_cgroup_that_was_removed_is_forgotten(void)
{
    char folder[] = "/tmp/hatchway-test-XXXXXX", path[64];
    struct tree_limits usual = {0, 0}, none = {0, 0};
    CHECK(mkdtemp(folder));
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    trees_use_cgroups(fd, -1, &usual);
    uint64_t before = open_descriptors();
    for (int round = 0; round < 3; round++) {
        struct tree tree;
        CHECK_EQUAL(tree_take(&tree, &none), 0);
        snprintf(path, sizeof path, "%s/%u", folder, tree.name);
        put_text(path, "cgroup.events", "populated 1\nfrozen 0\n");
        tree_release(&tree, 0);
        trees_drain(); /* somebody is in it: it is kept */
        CHECK(open_descriptors() != before);
        char events[80];
        snprintf(events, sizeof events, "%s/cgroup.events", path);
        CHECK_EQUAL(unlink(events), 0);
        CHECK_EQUAL(rmdir(path), 0);
        trees_drain();
        CHECK_EQUAL(open_descriptors(), before);
    }
    close(fd);
    CHECK_EQUAL(rmdir(folder), 0);
}

/* What was bounded lower, or met the memory killer, is not handed to the next as if it were new. */
static void a_cgroup_is_used_again_only_like_new(void)
{
    char folder[] = "/tmp/hatchway-test-XXXXXX", path[64], wanted[64];
    struct tree_limits usual = {1000, 100}, none = {0, 0}, few = {0, 7}, small = {500, 0}, large = {2000, 200};
    CHECK(mkdtemp(folder));
    put_text(folder, "memory.events", "oom 0\noom_kill 0\noom_group_kill 0\n");
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    trees_use_cgroups(fd, -1, &usual);
    struct tree tree;
    CHECK_EQUAL(tree_take(&tree, &none), 0);
    snprintf(path, sizeof path, "%s/%u", folder, tree.name);
    strcpy(wanted, path);
    put_text(path, "cgroup.events", "populated 0\nfrozen 0\n");
    put_text(path, "memory.max", "");
    put_text(path, "pids.max", "");
    put_text(path, "memory.current", "0\n");
    put_text(path, "memory.events", "oom_kill 0\n");
    tree_release(&tree, 0);
    CHECK_EQUAL(tree_take(&tree, &few), 0); /* processes may be bounded in a used one */
    snprintf(path, sizeof path, "%s/%u", folder, tree.name);
    CHECK(strcmp(path, wanted) == 0 && said(path, "pids.max", "7"));
    put_text(path, "pids.max", "");
    tree_release(&tree, 0);
    CHECK(said(path, "pids.max", "100"));
    CHECK_EQUAL(tree_take(&tree, &large), 0); /* no more than the usual */
    CHECK(tree.limits.memory == 0 && tree.limits.pids == 0);
    CHECK(!tree_oom(&tree));
    put_text(path, "memory.events", "oom_kill 1\n");
    put_text(folder, "memory.events", "oom_kill 1\n");
    CHECK(tree_oom(&tree));
    tree_release(&tree, 0);
    CHECK_EQUAL(tree_take(&tree, &none), 0);
    snprintf(path, sizeof path, "%s/%u", folder, tree.name);
    CHECK(strcmp(path, wanted) != 0);
    put_text(path, "cgroup.events", "populated 0\nfrozen 0\n");
    put_text(path, "memory.current", "501\n"); /* half of it is taken by what its processes left */
    tree_release(&tree, 0);
    CHECK_EQUAL(tree_take(&tree, &none), 0);
    snprintf(wanted, sizeof wanted, "%s/%u", folder, tree.name);
    CHECK(strcmp(path, wanted) != 0);
    put_text(wanted, "cgroup.events", "populated 0\nfrozen 0\n");
    tree_release(&tree, 0);
    CHECK(tree_take(&tree, &small) < 0); /* it gets a new one, and its own bound cannot be set here: the start must fail */
    close(tree.cgroup_fd);
    close(fd);
    char command[96];
    snprintf(command, sizeof command, "rm -r %s", folder);
    CHECK_EQUAL(system(command), 0);
}

static void wait_killed(pid_t pid)
{
    int status;
    CHECK(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

/* More resident memory than a `sleeper` has; well apart from another of these, as the kernel's count is not exact. */
static pid_t large_sleeper(size_t size)
{
    pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        static volatile char memory[64 << 20];
        for (size_t i = 0; i < size && i < sizeof memory; i += 4096)
            memory[i] = 1;
        kill(getpid(), SIGSTOP);
        for (;;)
            pause();
    }
    CHECK(pid > 0 && waitpid(pid, NULL, WUNTRACED) == pid);
    return pid;
}

static void who_has_no_memory_to_run_in_is_relieved(void)
{
    char folder[] = "/tmp/hatchway-test-XXXXXX", procs[64];
    CHECK(mkdtemp(folder));
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    pressure_watch(fd); /* there is nothing to watch here: it says so and goes on */
    struct proc *proc = proc_new(1, "key", KIND_PROCESS);
    CHECK(proc);
    proc->tree.cgroup_fd = fcntl(fd, F_DUPFD_CLOEXEC, 4);
    pid_t leader = sleeper(), first = large_sleeper(64 << 20), second = large_sleeper(32 << 20);
    proc->pid = leader;
    snprintf(procs, sizeof procs, "%d\n%d\n%d\n", (int)leader, (int)first, (int)second);
    put_text(folder, "cgroup.procs", procs);
    put_text(folder, "cgroup.events", "populated 1\n");
    put_text(folder, "cgroup.kill", "");
    put_text(folder, "memory.max", "max\n"); /* no bound */
    put_text(folder, "memory.current", "999000\n");
    put_text(folder, "memory.stat", "anon 1\nactive_file 100\ninactive_file 100\n");
    pressure_relieve();
    put_text(folder, "memory.max", "1000000\n");
    put_text(folder, "memory.current", "900000\n"); /* some is left */
    pressure_relieve();
    put_text(folder, "memory.current", "999000\n");
    put_text(folder, "memory.stat", "anon 1\nactive_file 50000\ninactive_file 50000\n"); /* some can be had back */
    pressure_relieve();
    CHECK_EQUAL(waitpid(-1, NULL, WNOHANG), 0);
    put_text(folder, "memory.stat", "anon 1\nactive_file 100\ninactive_file 100\n");
    pressure_relieve();
    wait_killed(first);
    pressure_relieve();
    wait_killed(second);
    CHECK(!proc->killed_by_memory && said(folder, "cgroup.kill", "") && waitpid(leader, NULL, WNOHANG) == 0);
    pressure_relieve(); /* again, and that was not enough: all of it goes */
    CHECK(proc->killed_by_memory && said(folder, "cgroup.kill", "1"));
    CHECK_EQUAL(kill(leader, SIGKILL), 0);
    wait_killed(leader);
    put_text(folder, "cgroup.events", "populated 0\n");
    proc_forget(proc);
    close(fd);
    char command[96];
    snprintf(command, sizeof command, "rm -r %s", folder);
    CHECK_EQUAL(system(command), 0);
}

/* The port's kernel buffers may be had no more for a moment: no edge tells when they can. */
static void a_port_without_memory_is_tried_again(void)
{
    static uint8_t frame[FRAME_MAX], got[4096];
    int pair[2];
    CHECK_EQUAL(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair), 0);
    CHECK(channel_use_port(pair[0]));
    poor_fd = pair[0];
    poor_times = 3;
    struct field_writer writer = {frame + FRAME_HEADER, frame + sizeof frame - FRAME_TRAILER, false};
    write_u32(&writer, F_VERSION, HW_VERSION);
    write_bytes(&writer, F_NONCE, got, 16);
    size_t length = frame_finish(frame, T_HELLO, 0, 0, (uint32_t)(writer.at - frame - FRAME_HEADER));
    CHECK_EQUAL(write(pair[1], frame, length), (ssize_t)length);
    ssize_t n = -1;
    for (int turn = 0; turn < 300 && n < 0; turn++) {
        loop_turn(100);
        n = read(pair[1], got, sizeof got);
    }
    CHECK(n > 0 && memcmp(got, "HWF1", 4) == 0 && got[4] == T_HELLO_ACK);
    CHECK_EQUAL(poor_times, 0);
    poor_fd = -1;
}

int main(void)
{
    int fd;
    while ((fd = open("/dev/null", O_RDWR | O_CLOEXEC)) >= 0 && fd < 3)
        ;
    agent.root_fd = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    agent.null_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    CHECK(agent.root_fd >= 0 && agent.null_fd >= 0 && loop_open() && procs_open());
    RUN(a_cgroup_that_cannot_be_made_costs_no_descriptor);
    RUN(a_signal_reaches_all_of_a_large_cgroup);
    RUN(a_cgroup_that_was_removed_is_forgotten);
    RUN(a_cgroup_is_used_again_only_like_new);
    RUN(who_has_no_memory_to_run_in_is_relieved);
    RUN(a_port_without_memory_is_tried_again);
    return 0;
}
