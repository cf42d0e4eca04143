#include "vsock.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

/* From the kernel's vm_sockets.h, which musl's compiler does not find. */
#define FAMILY 40
#define ANY_CID 0xffffffffu
#define HOST_CID 2u
#define VIRTIO_VSOCK 19

/* Below 1024: the kernel keeps these ports for root, so that no other user can take ours. */
enum { AGENT_PORT = 1000, BACKLOG = 8 };

struct address {
    unsigned short family, reserved;
    unsigned port, cid;
    unsigned char zero[4];
};

bool vsock_present(void)
{
    DIR *dir = opendir("/sys/bus/virtio/devices");
    struct dirent *entry;
    bool found = false;
    while (dir && !found && (entry = readdir(dir))) {
        char file[320], text[16];
        snprintf(file, sizeof file, "/sys/bus/virtio/devices/%s/device", entry->d_name);
        int fd = entry->d_name[0] == '.' ? -1 : open(file, O_RDONLY | O_CLOEXEC);
        ssize_t n = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
        if (fd >= 0)
            close(fd);
        text[n > 0 ? n : 0] = 0;
        found = strtol(text, NULL, 16) == VIRTIO_VSOCK;
    }
    if (dir)
        closedir(dir);
    return found;
}

int vsock_listen(void)
{
    struct address address = {.family = FAMILY, .port = AGENT_PORT, .cid = ANY_CID};
    int fd = socket(FAMILY, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -1;
    if (bind(fd, (struct sockaddr *)&address, sizeof address) == 0 && listen(fd, BACKLOG) == 0)
        return fd;
    int number = errno;
    close(fd);
    errno = number;
    return -1;
}

bool vsock_from_host(int fd)
{
    struct address peer = {0};
    socklen_t size = sizeof peer;
    int family = 0;
    socklen_t family_size = sizeof family;
    if (getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &family, &family_size) != 0)
        return false;
    if (family != FAMILY)
        return true;
    return getpeername(fd, (struct sockaddr *)&peer, &size) == 0 && peer.family == FAMILY && peer.cid == HOST_CID;
}
