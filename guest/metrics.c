#include "metrics.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statfs.h>
#include <unistd.h>

#include "agent.h"
#include "channel.h"
#include "loop.h"
#include "proto.h"
#include "tree.h"

static uint64_t number_after(const char *text, const char *name)
{
    const char *found = strstr(text, name);
    return found ? strtoull(found + strlen(name), NULL, 10) : 0;
}

static void read_text(const char *path, char *to, size_t room)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? 0 : read(fd, to, room - 1);
    to[n > 0 ? n : 0] = 0;
    if (fd >= 0)
        close(fd);
}

/* "0.52 …" as 520. */
static uint32_t load_milli(const char *text)
{
    char *end;
    unsigned long whole = strtoul(text, &end, 10), hundredths = *end == '.' ? strtoul(end + 1, NULL, 10) : 0;
    return (uint32_t)(whole * 1000 + hundredths % 100 * 10);
}

void metrics_request(uint32_t request)
{
    char text[2048];
    struct statfs fs = {0};
    unsigned long long user = 0, nice = 0, system = 0, idle, iowait, irq = 0, softirq = 0;
    uint64_t tick_us = 1000000u / (uint64_t)sysconf(_SC_CLK_TCK);
    struct field_writer writer = response_begin(0);
    read_text("/proc/meminfo", text, sizeof text);
    write_u64(&writer, F_MEM_TOTAL_KIB, number_after(text, "MemTotal:"));
    write_u64(&writer, F_MEM_AVAILABLE_KIB, number_after(text, "MemAvailable:"));
    write_u64(&writer, F_MEM_CACHED_KIB, number_after(text, "\nCached:") + number_after(text, "\nBuffers:"));
    fstatfs(agent.upper_fd >= 0 ? agent.upper_fd : agent.root_fd, &fs);
    write_u64(&writer, F_DISK_TOTAL, (uint64_t)fs.f_blocks * (uint64_t)fs.f_bsize);
    write_u64(&writer, F_DISK_FREE, (uint64_t)fs.f_bavail * (uint64_t)fs.f_bsize);
    write_u64(&writer, F_UPTIME_NS, boot_ns());
    read_text("/proc/stat", text, sizeof text);
    sscanf(text, "cpu %llu %llu %llu %llu %llu %llu %llu", &user, &nice, &system, &idle, &iowait, &irq, &softirq);
    write_u64(&writer, F_UTIME_US, (user + nice) * tick_us);
    write_u64(&writer, F_STIME_US, (system + irq + softirq) * tick_us);
    write_u32(&writer, F_CPUS, (uint32_t)sysconf(_SC_NPROCESSORS_ONLN));
    write_u32(&writer, F_PROCESSES, trees_tasks());
    read_text("/proc/loadavg", text, sizeof text);
    write_u32(&writer, F_LOAD1_MILLI, load_milli(text));
    response_end(request, &writer);
}
