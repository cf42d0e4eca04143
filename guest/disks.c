#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <unistd.h>

#include "agent.h"
#include "frame.h"
#include "init.h"
#include "loop.h"
#include "power.h"

enum content { CONTENT_UNKNOWN, CONTENT_EROFS, CONTENT_EXT4 };

static enum content content_of(const char *device)
{
    uint8_t block[2048];
    int fd = open(device, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? 0 : pread(fd, block, sizeof block, 0);
    if (fd >= 0)
        close(fd);
    if (n != (ssize_t)sizeof block)
        return CONTENT_UNKNOWN;
    if (get_u32(block + 1024) == 0xe0f5e1e2u)
        return CONTENT_EROFS;
    return block[1024 + 56] == 0x53 && block[1024 + 57] == 0xef ? CONTENT_EXT4 : CONTENT_UNKNOWN;
}

/* Looks once at all disks. Their letters say nothing: microvm counts them backwards. */
static void look(char base[32], char upper[32])
{
    DIR *dir = opendir("/sys/block");
    struct dirent *entry;
    while (dir && (entry = readdir(dir))) {
        char device[32];
        if (strncmp(entry->d_name, "vd", 2) != 0 || strlen(entry->d_name) > 16)
            continue;
        snprintf(device, sizeof device, "/dev/%.16s", entry->d_name);
        enum content content = content_of(device);
        if (content == CONTENT_EROFS)
            memcpy(base, device, sizeof device);
        else if (content == CONTENT_EXT4)
            memcpy(upper, device, sizeof device);
    }
    if (dir)
        closedir(dir);
}

void init_disks(void)
{
    char base[32] = "", upper[32] = "";
    uint64_t until = now_ns() + 10000000000u;
    for (look(base, upper); !base[0] || !upper[0]; look(base, upper)) {
        if (now_ns() > until)
            fatal("no disk with %s", base[0] ? "an ext4 file system (upper)" : "an erofs file system (base)");
        wait_a_little();
    }
    say("disks: base %s, upper %s", base, upper);
    memcpy(agent.upper_dev, upper, sizeof upper);
    make_folder("/hw", 0700);
    make_folder("/hw/base", 0755);
    make_folder("/hw/upper", 0755);
    make_folder("/hw/root", 0755);
    must_mount(base, "/hw/base", "erofs", MS_RDONLY | MS_NODEV, NULL);
    must_mount(upper, "/hw/upper", "ext4", MS_NODEV | MS_NOATIME, "errors=remount-ro");
    make_folder("/hw/upper/up", 0755);
    make_folder("/hw/upper/up/root", 0755);
    make_folder("/hw/upper/up/work", 0755);
    must_mount("overlay", "/hw/root", "overlay", MS_NOATIME,
               "lowerdir=/hw/base,upperdir=/hw/upper/up/root,workdir=/hw/upper/up/work,redirect_dir=on,metacopy=off");
    agent.upper_fd = open("/hw/upper", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    agent.root_fd = open("/hw/root", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (agent.upper_fd < 0 || agent.root_fd < 0)
        fatal("opening the disks: %s", strerror(errno));
}
