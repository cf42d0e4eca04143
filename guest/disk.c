#include "disk.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/statfs.h>
#include <time.h>
#include <unistd.h>

#include "abi.h"
#include "agent.h"
#include "channel.h"
#include "helper.h"
#include "loop.h"
#include "proto.h"

/* A request belongs to the connection that it came in: an answer for an earlier one is not sent. */
static unsigned connection;
static enum { THAWED, FREEZING, FROZEN } state;
static uint64_t thaw_at;
static bool thaw_when_frozen;

struct waiting {
    uint32_t request;
    unsigned connection;
    bool used;
    bool freeze; /* it waits for the freeze that is under way */
};
static struct waiting waiting[MAX_REQUESTS];

void disk_forget_requests(void)
{
    connection++;
}

static int remember(uint32_t request)
{
    for (int i = 0; i < MAX_REQUESTS; i++) {
        if (!waiting[i].used) {
            waiting[i] = (struct waiting){request, connection, true, false};
            return i;
        }
    }
    return -1;
}

/* The request of a context, if its connection is still there. */
static bool recall(unsigned context, uint32_t *request)
{
    *request = waiting[context].request;
    waiting[context].used = false;
    return waiting[context].connection == connection;
}

static void start(uint32_t request, int (*work)(int), int fd, void (*done)(unsigned, int))
{
    int context = remember(request);
    int error = context < 0 ? -EAGAIN : helper_run(work, fd, done, (unsigned)context);
    if (error < 0) {
        if (context >= 0)
            waiting[context].used = false;
        respond(request, -error, "too many requests in progress, or no memory for one more");
    }
}

/* ---- flush ---- */

static int work_sync(int fd) { return syncfs(fd) == 0 ? 0 : errno; }

static void done_sync(unsigned context, int error)
{
    uint32_t request;
    if (recall(context, &request))
        respond(request, error, "flushing the disk: %s", strerror(error));
}

void disk_sync(uint32_t request)
{
    if (agent.upper_fd < 0)
        respond_done(request);
    else
        start(request, work_sync, agent.upper_fd, done_sync);
}

/* ---- freeze ---- */

static int work_freeze(int fd) { return ioctl(fd, HW_FIFREEZE, 0) == 0 ? 0 : errno; }

static int thaw(void)
{
    int error = 0;
    if (state == FROZEN && agent.upper_fd >= 0 && ioctl(agent.upper_fd, HW_FITHAW, 0) != 0 && errno != EINVAL)
        error = errno;
    if (error == 0) {
        state = THAWED;
        thaw_at = 0;
    }
    return error;
}

static void done_freeze(unsigned context, int error)
{
    (void)context; /* whoever asked meanwhile has the same answer */
    if (error == EIO) /* it was killed, maybe with the disk frozen: nobody would ever thaw it */
        ioctl(agent.upper_fd, HW_FITHAW, 0);
    state = error == 0 ? FROZEN : THAWED;
    if (error == 0 && thaw_when_frozen) { /* it took longer than the disk may be frozen */
        thaw();
        error = ETIMEDOUT;
    }
    if (error != 0)
        thaw_at = 0;
    for (unsigned i = 0; i < MAX_REQUESTS; i++) {
        uint32_t request;
        if (waiting[i].used && waiting[i].freeze && recall(i, &request))
            respond(request, error, "freezing the disk: %s", strerror(error));
    }
}

void disk_freeze(uint32_t request, uint64_t timeout_ms)
{
    if (timeout_ms == 0 || timeout_ms > MAX_FREEZE_MS) {
        respond(request, EINVAL, "TIMEOUT_MS must be 1 to %d", MAX_FREEZE_MS);
        return;
    }
    uint64_t until = now_ns() + timeout_ms * 1000000u;
    if (state == FROZEN || agent.upper_fd < 0) {
        thaw_at = until;
        state = FROZEN;
        respond_done(request);
        return;
    }
    bool under_way = state == FREEZING;
    int context = remember(request);
    int error = context < 0 ? -EAGAIN : under_way ? 0 : helper_run(work_freeze, agent.upper_fd, done_freeze, (unsigned)context);
    if (error < 0) {
        if (context >= 0)
            waiting[context].used = false;
        respond(request, -error, "too many requests in progress, or no memory for one more");
        return;
    }
    waiting[context].freeze = true;
    state = FREEZING;
    thaw_at = until;
    thaw_when_frozen = false;
}

void disk_thaw(uint32_t request)
{
    if (state == FREEZING) {
        thaw_when_frozen = true;
        respond_done(request);
        return;
    }
    int error = thaw();
    respond(request, error, "thawing the disk: %s", strerror(error));
}

uint64_t disk_deadline(void) { return thaw_at; }

void disk_expire(void)
{
    if (thaw_at == 0 || now_ns() < thaw_at)
        return;
    if (state == FREEZING) {
        thaw_when_frozen = true;
        thaw_at = 0;
        return;
    }
    say("the disk was frozen for longer than allowed: thawing it");
    int error = thaw();
    if (error) {
        say("thawing failed: %s", strerror(error));
        thaw_at = now_ns() + 1000000000u;
    }
}

/* ---- grow ---- */

#define DEVICE_WITHIN_MS 5000

static uint64_t device_octets; /* what the device has grown to as its VMM says */

/* The kernel learns of a larger device some time after its VMM said so: what is read before would be grown to nothing. */
static int device_size(int device, uint64_t *octets)
{
    const struct timespec pause = {0, 1000000};
    for (int waited_ms = 0;; waited_ms++) {
        if (ioctl(device, HW_BLKGETSIZE64, octets) != 0)
            return errno;
        if (*octets >= device_octets)
            return 0;
        if (waited_ms >= DEVICE_WITHIN_MS)
            return ETIMEDOUT;
        nanosleep(&pause, NULL);
    }
}

static int work_resize(int fd)
{
    uint64_t octets = 0;
    struct statfs fs;
    int device = open(agent.upper_dev, O_RDONLY | O_CLOEXEC);
    if (device < 0)
        return errno;
    int error = device_size(device, &octets);
    if (error != 0)
        return error;
    if (fstatfs(fd, &fs) != 0)
        return errno;
    uint64_t blocks = octets / (uint64_t)fs.f_bsize;
    return ioctl(fd, HW_EXT4_IOC_RESIZE_FS, &blocks) == 0 ? 0 : errno;
}

static void answer_size(uint32_t request)
{
    struct statfs fs;
    if (fstatfs(agent.upper_fd >= 0 ? agent.upper_fd : agent.root_fd, &fs) != 0) {
        respond(request, errno, "the size of the disk: %s", strerror(errno));
        return;
    }
    struct field_writer writer = response_begin(0);
    write_u64(&writer, F_SIZE, (uint64_t)fs.f_blocks * (uint64_t)fs.f_bsize);
    response_end(request, &writer);
}

static void done_resize(unsigned context, int error)
{
    uint32_t request;
    if (!recall(context, &request))
        return;
    if (error)
        respond(request, error, "growing the disk: %s", strerror(error));
    else
        answer_size(request);
}

void disk_resize(uint32_t request, uint64_t octets)
{
    if (state != THAWED)
        respond(request, EBUSY, "the disk is frozen");
    else if (agent.upper_fd < 0)
        answer_size(request);
    else {
        device_octets = octets;
        start(request, work_resize, agent.upper_fd, done_resize);
    }
}
