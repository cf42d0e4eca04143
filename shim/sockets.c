/* Descriptors beside messages, and connections to sockets of the jail. */
#include "shim.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>

union control {
	struct cmsghdr align;
	char bytes[CMSG_SPACE(MAX_HELD * sizeof(int))];
};

bool send_fds(int socket, const char *text, size_t length, const int *fds, int count)
{
	union control control = {0};
	struct iovec part = {(char *)text, length};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = CMSG_SPACE((size_t)count * sizeof(int))};
	struct cmsghdr *header = CMSG_FIRSTHDR(&message);
	header->cmsg_level = SOL_SOCKET;
	header->cmsg_type = SCM_RIGHTS;
	header->cmsg_len = CMSG_LEN((size_t)count * sizeof(int));
	memcpy(CMSG_DATA(header), fds, (size_t)count * sizeof(int));
	return sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL) == (ssize_t)length;
}

bool send_fd(int socket, const char *text, size_t length, int fd)
{
	return send_fds(socket, text, length, &fd, 1);
}

int receive_fd(int socket)
{
	union control control;
	char text[16];
	int fd = -1;
	struct iovec part = {text, sizeof text};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = CMSG_LEN(sizeof fd)};
	if (recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC) <= 0)
		return -1;
	struct cmsghdr *header = CMSG_FIRSTHDR(&message);
	if (header && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS && header->cmsg_len == CMSG_LEN(sizeof fd))
		memcpy(&fd, CMSG_DATA(header), sizeof fd);
	return fd;
}

int dial(const char *path)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	strncpy(address.sun_path, path, sizeof address.sun_path - 1);
	/* Not waiting: for a Unix socket EAGAIN means that its queue is full. */
	if (fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address) == 0)
		return fd;
	int number = errno;
	if (fd >= 0)
		close(fd);
	errno = number;
	return -1;
}
