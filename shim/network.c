/* The network of one VM: a namespace with lo and tap0, and no way out of it. */
#include "shim.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sched.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#define TUNSETIFF_ 0x400454ca
#define TUNSETPERSIST_ 0x400454cb
#define IFF_TAP_ 0x0002
#define IFF_NO_PI_ 0x1000
#define IFF_VNET_HDR_ 0x4000
#define ARPHRD_ETHER_ 1

/* The same in every namespace, so that any snapshot fits any slot. */
#define TAP_ADDRESS "10.200.0.1"
#define TAP_NETMASK "255.255.255.0"
static const unsigned char tap_mac[6] = {0x02, 0xfc, 0, 0, 0, 0x01};

/* /proc/sys/net shows the caller's namespace. A kernel without IPv6 has nothing to switch off there. */
static bool sysctl(const char *path, const char *value, bool optional, char *error)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC);
	if (fd < 0)
		return (optional && errno == ENOENT) || failed_errno(error, "%s", path);
	bool good = write(fd, value, strlen(value)) == (ssize_t)strlen(value);
	if (!good)
		failed_errno(error, "%s", path);
	close(fd);
	return good;
}

static bool up(int sock, const char *name, char *error)
{
	struct ifreq request = {0};
	strcpy(request.ifr_name, name);
	if (ioctl(sock, SIOCGIFFLAGS, &request) < 0)
		return failed_errno(error, "flags of %s", name);
	request.ifr_flags |= IFF_UP;
	return ioctl(sock, SIOCSIFFLAGS, &request) == 0 || failed_errno(error, "setting %s up", name);
}

static bool address(int sock, unsigned long verb, const char *text, char *error)
{
	struct ifreq request = {.ifr_name = "tap0"};
	struct sockaddr_in in = {.sin_family = AF_INET};
	inet_pton(AF_INET, text, &in.sin_addr);
	memcpy(&request.ifr_addr, &in, sizeof in);
	return ioctl(sock, verb, &request) == 0 || failed_errno(error, "address %s of tap0", text);
}

static bool tap(int sock, int *fd, char *error)
{
	*fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
	if (*fd < 0)
		return failed_errno(error, "/dev/net/tun");
	struct ifreq request = {.ifr_name = "tap0"};
	request.ifr_flags = IFF_TAP_ | IFF_NO_PI_ | IFF_VNET_HDR_;
	if (ioctl(*fd, TUNSETIFF_, &request) < 0)
		return failed_errno(error, "making tap0");
	/* Persistent: it goes with its namespace, in the background. Else the end of the VMM would wait for its removal. */
	if (ioctl(*fd, TUNSETPERSIST_, 1) < 0)
		return failed_errno(error, "keeping tap0");
	request = (struct ifreq){.ifr_name = "tap0"};
	request.ifr_hwaddr.sa_family = ARPHRD_ETHER_;
	memcpy(request.ifr_hwaddr.sa_data, tap_mac, sizeof tap_mac);
	if (ioctl(sock, SIOCSIFHWADDR, &request) < 0)
		return failed_errno(error, "hardware address of tap0");
	return address(sock, SIOCSIFADDR, TAP_ADDRESS, error) && address(sock, SIOCSIFNETMASK, TAP_NETMASK, error) &&
	       up(sock, "tap0", error);
}

/* A VMM that takes paths opens the device itself and attaches to tap0 by its name: two cannot be attached at once. */
bool network_leave_tap(struct config *config, char *error)
{
	close(config->tap_fd);
	config->tap_fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
	return config->tap_fd >= 0 || failed_errno(error, "/dev/net/tun");
}

bool network_make(struct config *config, char *error)
{
	if (unshare(CLONE_NEWNET) < 0)
		return failed_errno(error, "a new network namespace");
	if (!sysctl("/proc/sys/net/ipv4/ip_forward", "0", false, error) ||
	    !sysctl("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1", true, error) ||
	    !sysctl("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1", true, error) ||
	    !sysctl("/proc/sys/net/ipv6/conf/all/accept_ra", "0", true, error) ||
	    !sysctl("/proc/sys/net/ipv6/conf/default/accept_ra", "0", true, error) ||
	    !sysctl("/proc/sys/net/ipv4/conf/all/accept_redirects", "0", false, error) ||
	    !sysctl("/proc/sys/net/ipv4/conf/default/accept_redirects", "0", false, error))
		return false;
	int sock = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (sock < 0)
		return failed_errno(error, "socket");
	bool good = up(sock, "lo", error) && tap(sock, &config->tap_fd, error);
	close(sock);
	return good;
}
