#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <net/route.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "agent.h"
#include "init.h"

static void set_address(struct sockaddr *to, const char *address)
{
    struct sockaddr_in in = {.sin_family = AF_INET};
    inet_pton(AF_INET, address, &in.sin_addr);
    memcpy(to, &in, sizeof in);
}

static int up(int fd, const char *name)
{
    struct ifreq request = {0};
    strncpy(request.ifr_name, name, IFNAMSIZ - 1);
    if (ioctl(fd, SIOCGIFFLAGS, &request) != 0)
        return -1;
    request.ifr_flags |= IFF_UP;
    return ioctl(fd, SIOCSIFFLAGS, &request);
}

static int address(int fd, const char *name, unsigned long what, const char *value)
{
    struct ifreq request = {0};
    strncpy(request.ifr_name, name, IFNAMSIZ - 1);
    set_address(&request.ifr_addr, value);
    return ioctl(fd, what, &request);
}

static int default_route(int fd, const char *gateway)
{
    struct rtentry route = {.rt_flags = RTF_UP | RTF_GATEWAY};
    set_address(&route.rt_dst, "0.0.0.0");
    set_address(&route.rt_genmask, "0.0.0.0");
    set_address(&route.rt_gateway, gateway);
    return ioctl(fd, SIOCADDRT, &route);
}

/* The host takes no IPv6 from here: what would only wait for answers is refused at once. lo keeps ::1. */
static void no_ipv6(const char *name)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/sys/net/ipv6/conf/%s/disable_ipv6", name);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return; /* a kernel without it */
    if (write(fd, "1", 1) != 1)
        say("network: %s: %s", path, strerror(errno));
    close(fd);
}

void init_network(void)
{
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        say("network: %s", strerror(errno));
        return;
    }
    if (up(fd, "lo") != 0)
        say("network: lo: %s", strerror(errno));
    if (if_nametoindex("eth0") == 0) {
        say("network: lo only");
        close(fd);
        return;
    }
    no_ipv6("eth0");
    if (address(fd, "eth0", SIOCSIFADDR, "10.200.0.2") != 0 ||
               address(fd, "eth0", SIOCSIFNETMASK, "255.255.255.0") != 0 || up(fd, "eth0") != 0 ||
               default_route(fd, "10.200.0.1") != 0) {
        say("network: eth0: %s", strerror(errno));
    } else {
        say("network: eth0 10.200.0.2/24");
    }
    close(fd);
}
