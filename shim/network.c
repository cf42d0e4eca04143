/* The network of one VM: a namespace with lo and tap0, no way out of it, its rules, and the sockets that the gateway serves.
 *
 * The order is the point: settings, then tap0, which stays down, then the rules, then the sockets, and only then tap0 up. Whatever
 * fails, the namespace goes with the process, and nothing was ever up without rules. */
#include "shim.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <net/if_arp.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#define TUNSETIFF_ 0x400454ca
#define TUNSETPERSIST_ 0x400454cb
#define IFF_TAP_ 0x0002
#define IFF_NO_PI_ 0x1000
#define IFF_VNET_HDR_ 0x4000
#define ARPHRD_ETHER_ 1
#define IP_TRANSPARENT_ 19
#define IP_RECVORIGDSTADDR_ 20

/* The same in every namespace, so that any snapshot fits any slot. The rules (launcher/ruleset.py) name them too. */
#define TAP_ADDRESS "10.200.0.1"
#define TAP_NETMASK "255.255.255.0"
#define GUEST_ADDRESS "10.200.0.2"
static const unsigned char tap_mac[6] = {0x02, 0xfc, 0, 0, 0, 0x01};
static const unsigned char guest_mac[6] = {0x02, 0xfc, 0, 0, 0, 0x02};

enum { TAP_QUEUE = 256 };
enum { TCP_PORT = 15001, DNS_UDP_PORT = 53, DNS_TCP_PORT = 15053, TCP_BACKLOG = 256, DNS_BACKLOG = 16 };

/* /proc/sys/net shows the caller's namespace. A kernel without IPv6 has nothing to switch off there. */
static const struct setting {
	const char *path, *value;
	bool optional;
} settings[] = {
        {"/proc/sys/net/ipv4/ip_forward", "0", false}, /* first: it sets others back */
        {"/proc/sys/net/ipv6/conf/all/disable_ipv6", "1", true},
        {"/proc/sys/net/ipv6/conf/default/disable_ipv6", "1", true},
        {"/proc/sys/net/ipv6/conf/all/accept_ra", "0", true},
        {"/proc/sys/net/ipv6/conf/default/accept_ra", "0", true},
        {"/proc/sys/net/ipv6/conf/all/autoconf", "0", true},
        {"/proc/sys/net/ipv6/conf/default/autoconf", "0", true},
        {"/proc/sys/net/ipv4/conf/all/rp_filter", "1", false},
        {"/proc/sys/net/ipv4/conf/default/rp_filter", "1", false},
        {"/proc/sys/net/ipv4/conf/all/accept_redirects", "0", false},
        {"/proc/sys/net/ipv4/conf/default/accept_redirects", "0", false},
        {"/proc/sys/net/ipv4/conf/all/send_redirects", "0", false},
        {"/proc/sys/net/ipv4/conf/default/send_redirects", "0", false},
        {"/proc/sys/net/ipv4/conf/all/accept_source_route", "0", false},
        {"/proc/sys/net/ipv4/conf/default/accept_source_route", "0", false},
        {"/proc/sys/net/ipv4/conf/all/route_localnet", "0", false},
        {"/proc/sys/net/ipv4/conf/default/route_localnet", "0", false},
        {"/proc/sys/net/ipv4/conf/all/arp_ignore", "1", false},
        {"/proc/sys/net/ipv4/conf/default/arp_ignore", "1", false},
        {"/proc/sys/net/ipv4/icmp_echo_ignore_all", "1", false},
        {"/proc/sys/net/ipv4/tcp_syncookies", "1", true},
        /* Port 53 without CAP_NET_BIND_SERVICE, which the service does not have. */
        {"/proc/sys/net/ipv4/ip_unprivileged_port_start", "53", false},
};

static bool apply(const struct setting *setting, char *error)
{
	int fd = open(setting->path, O_WRONLY | O_CLOEXEC);
	if (fd < 0)
		return (setting->optional && errno == ENOENT) || failed_errno(error, "%s", setting->path);
	bool good = write(fd, setting->value, strlen(setting->value)) == (ssize_t)strlen(setting->value);
	if (!good)
		failed_errno(error, "%s", setting->path);
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

/* The kernel has a place ready for each packet that may wait, four times: 32 KiB of a slot, with the 1,000 that it would take. (The ioctl
 * for it is for root of the host alone.) */
static bool short_queue(char *error)
{
	struct {
		struct k_nlmsghdr head;
		struct k_ifinfomsg link;
		struct k_attr_u32 length;
	} queue = {
	        .head = {sizeof queue, K_RTM_SETLINK, K_NLM_F_REQUEST | K_NLM_F_ACK, 1, 0},
	        .link = {.family = AF_UNSPEC, .index = (int)if_nametoindex("tap0")},
	        .length = {sizeof queue.length, K_IFLA_TXQLEN, TAP_QUEUE},
	};
	return netlink_ask(&queue, sizeof queue, error);
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
	return short_queue(error) && address(sock, SIOCSIFADDR, TAP_ADDRESS, error) && address(sock, SIOCSIFNETMASK, TAP_NETMASK, error);
}

/* Who has the guest's address is never asked for: the table of neighbours is one for the whole host. */
static bool neighbour(int sock, char *error)
{
	struct arpreq entry = {.arp_flags = ATF_PERM | ATF_COM, .arp_dev = "tap0"};
	struct sockaddr_in in = {.sin_family = AF_INET};
	inet_pton(AF_INET, GUEST_ADDRESS, &in.sin_addr);
	memcpy(&entry.arp_pa, &in, sizeof in);
	entry.arp_ha.sa_family = ARPHRD_ETHER_;
	memcpy(entry.arp_ha.sa_data, guest_mac, sizeof guest_mac);
	return ioctl(sock, SIOCSARP, &entry) == 0 || failed_errno(error, "the guest's neighbour entry");
}

/* Runs nft in this namespace on the rules, and says what it said when it failed. */
static bool rules(const struct config *config, char *error)
{
	int said[2], status = 0;
	char text[ERROR_BYTES / 2] = "";
	size_t used = 0;
	if (pipe2(said, O_CLOEXEC) < 0)
		return failed_errno(error, "pipe");
	pid_t pid = fork();
	if (pid == 0) {
		char *const argv[] = {"nft", "-f", "-", NULL}, *const envp[] = {NULL};
		sigset_t none;
		sigemptyset(&none);
		sigprocmask(SIG_SETMASK, &none, NULL);
		if (dup2(config->rules_fd, 0) < 0 || dup2(said[1], 1) < 0 || dup2(said[1], 2) < 0)
			_exit(126);
		alarm(NFT_WITHIN_S);
		execve(config->nft, argv, envp);
		_exit(127);
	}
	close(said[1]);
	for (ssize_t got; used < sizeof text - 1 && (got = read(said[0], text + used, sizeof text - 1 - used)) != 0;)
		if (got > 0)
			used += (size_t)got;
		else if (errno != EINTR)
			break;
	close(said[0]);
	for (size_t i = 0; i < used; i++)
		if (text[i] == '\n')
			text[i] = ' ';
	if (pid < 0 || waitpid(pid, &status, 0) != pid)
		return failed_errno(error, "running nft");
	if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
		return failed(error, "nft did not take the rules of tap0 (%s %d): %s", WIFEXITED(status) ? "exit" : "signal",
		              WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status), text);
	return true;
}

/* What TPROXY has marked is delivered here, whatever its destination is. */
static bool deliver_marked(char *error)
{
	enum { TABLE = 100, MARK = 1 };
	int lo = (int)if_nametoindex("lo");
	struct {
		struct k_nlmsghdr head;
		struct k_rtmsg route;
		struct k_attr_u32 device;
	} route = {
	        .head = {sizeof route, K_RTM_NEWROUTE, K_NLM_F_REQUEST | K_NLM_F_ACK | K_NLM_F_CREATE, 1, 0},
	        .route = {.family = AF_INET, .table = TABLE, .protocol = K_RTPROT_STATIC, .scope = K_RT_SCOPE_HOST, .type = K_RTN_LOCAL},
	        .device = {sizeof route.device, K_RTA_OIF, (uint32_t)lo},
	};
	struct {
		struct k_nlmsghdr head;
		struct k_rtmsg rule; /* fib_rule_hdr has the same form */
		struct k_attr_u32 mark;
	} rule = {
	        .head = {sizeof rule, K_RTM_NEWRULE, K_NLM_F_REQUEST | K_NLM_F_ACK | K_NLM_F_CREATE | K_NLM_F_EXCL, 2, 0},
	        .rule = {.family = AF_INET, .table = TABLE, .type = K_FR_ACT_TO_TBL},
	        .mark = {sizeof rule.mark, K_FRA_FWMARK, MARK},
	};
	return netlink_ask(&route, sizeof route, error) && netlink_ask(&rule, sizeof rule, error);
}

static int transparent(int kind, uint16_t port, int backlog, const char *what, char *error)
{
	int on = 1, fd = socket(AF_INET, kind | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	struct sockaddr_in in = {.sin_family = AF_INET, .sin_port = htons(port)};
	if (fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
	    setsockopt(fd, IPPROTO_IP, IP_TRANSPARENT_, &on, sizeof on) == 0 &&
	    (kind != SOCK_DGRAM || (setsockopt(fd, IPPROTO_IP, IP_RECVORIGDSTADDR_, &on, sizeof on) == 0 &&
	                            setsockopt(fd, IPPROTO_IP, IP_PKTINFO, &on, sizeof on) == 0)) &&
	    bind(fd, (struct sockaddr *)&in, sizeof in) == 0 && (backlog == 0 || listen(fd, backlog) == 0))
		return fd;
	failed_errno(error, "the socket for %s", what);
	if (fd >= 0)
		close(fd);
	return -1;
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
	for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++)
		if (!apply(&settings[i], error))
			return false;
	int sock = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (sock < 0)
		return failed_errno(error, "socket");
	int *held = config->held_fd;
	bool good = up(sock, "lo", error) && tap(sock, &config->tap_fd, error) && rules(config, error) && deliver_marked(error) &&
	            (held[HELD_TCP] = transparent(SOCK_STREAM, TCP_PORT, TCP_BACKLOG, "TCP", error)) >= 0 &&
	            (held[HELD_DNS_UDP] = transparent(SOCK_DGRAM, DNS_UDP_PORT, 0, "DNS over UDP", error)) >= 0 &&
	            (held[HELD_DNS_TCP] = transparent(SOCK_STREAM, DNS_TCP_PORT, DNS_BACKLOG, "DNS over TCP", error)) >= 0 &&
	            (held[HELD_NETFILTER] = netlink_watch_rules(error)) >= 0 && up(sock, "tap0", error) && neighbour(sock, error);
	close(sock);
	return good;
}
