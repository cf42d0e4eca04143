/* Starts that the kernel refuses and trees of many processes, with the parts of a whole agent and folders in place of cgroups. */
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../agent.h"
#include "../fields.h"
#include "../loop.h"
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
    return 0;
}
