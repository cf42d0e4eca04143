/* Starts that the kernel refuses, with the parts of a whole agent that has a folder of its own for its cgroups. */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
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
    struct proc *proc = proc_new(number, "key");
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
    trees_use_cgroups(fd);
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

int main(void)
{
    int fd;
    while ((fd = open("/dev/null", O_RDWR | O_CLOEXEC)) >= 0 && fd < 3)
        ;
    agent.root_fd = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    agent.null_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    CHECK(agent.root_fd >= 0 && agent.null_fd >= 0 && loop_open() && procs_open());
    RUN(a_cgroup_that_cannot_be_made_costs_no_descriptor);
    return 0;
}
