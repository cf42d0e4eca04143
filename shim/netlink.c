/* The little that is said to the kernel over netlink. */
#include "shim.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>

enum { FAMILY = 16, ROUTE = 0, NETFILTER = 12, ADD_MEMBERSHIP = 1, SOL_NETLINK_ = 270, RULES_GROUP = 7, ERROR_ = 2 };

struct k_sockaddr_nl {
	uint16_t family, pad;
	uint32_t pid, groups;
};

bool netlink_ask(const void *message, size_t length, char *error)
{
	struct {
		struct k_nlmsghdr head;
		int code;
		char rest[256];
	} answer;
	int fd = socket(FAMILY, SOCK_RAW | SOCK_CLOEXEC, ROUTE);
	bool good = fd >= 0 && send(fd, message, length, 0) == (ssize_t)length;
	ssize_t got = good ? recv(fd, &answer, sizeof answer, 0) : -1; /* the kernel has answered before send returns */
	if (got < (ssize_t)(sizeof answer.head + sizeof answer.code) || answer.head.type != ERROR_)
		good = failed_errno(error, "rtnetlink");
	else if (answer.code != 0) {
		errno = -answer.code;
		good = failed_errno(error, "rtnetlink: request %u", ((const struct k_nlmsghdr *)message)->type);
	}
	if (fd >= 0)
		close(fd);
	return good;
}

int netlink_watch_rules(char *error)
{
	int group = RULES_GROUP, fd = socket(FAMILY, SOCK_RAW | SOCK_CLOEXEC | SOCK_NONBLOCK, NETFILTER);
	struct k_sockaddr_nl any = {.family = FAMILY};
	if (fd >= 0 && bind(fd, (struct sockaddr *)&any, sizeof any) == 0 &&
	    setsockopt(fd, SOL_NETLINK_, ADD_MEMBERSHIP, &group, sizeof group) == 0)
		return fd;
	failed_errno(error, "watching the rules");
	if (fd >= 0)
		close(fd);
	return -1;
}
