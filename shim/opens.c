/* Files of a VMM that takes paths only: the kernel asks the shim about each of its opens, and /hatchway/N is answered with the
 * descriptor that was passed, or offered later, as N. Every other path is the kernel's own affair, in a jail without files.
 *
 * Nothing is decided by a path that could be exchanged after it was read: whatever the VMM opens, it gets descriptors that are its
 * own in any case. What is answered is a duplicate: position and access mode are those of whoever opened the file. */
#include "shim.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/uio.h>

void opens_init(struct opens *opens, const struct config *config, int listener)
{
	if (listener < 0 && opens->config != NULL) { /* the VMM ended */
		if (opens->listener >= 0)
			close(opens->listener);
		for (int i = 0; i < MAX_OFFERS; i++)
			if (opens->offered[i] >= 0)
				close(opens->offered[i]);
	}
	*opens = (struct opens){.listener = listener, .config = config};
	for (int i = 0; i < MAX_OFFERS; i++)
		opens->offered[i] = -1;
}

bool opens_offer(struct opens *opens, unsigned long long number, int fd)
{
	if (opens->listener < 0 || number < FIRST_OFFER || number >= FIRST_OFFER + MAX_OFFERS)
		return false;
	int *place = &opens->offered[number - FIRST_OFFER];
	if (*place >= 0)
		close(*place);
	*place = fd;
	return true;
}

bool opens_withdraw(struct opens *opens, unsigned long long number)
{
	if (number < FIRST_OFFER || number >= FIRST_OFFER + MAX_OFFERS || opens->offered[number - FIRST_OFFER] < 0)
		return false;
	close(opens->offered[number - FIRST_OFFER]);
	opens->offered[number - FIRST_OFFER] = -1;
	return true;
}

/* Copies what is at an address of the VMM, up to the end of what is mapped there, page by page. */
static size_t peek(pid_t pid, uint64_t address, char *to, size_t length)
{
	size_t first = 4096 - address % 4096;
	if (first > length)
		first = length;
	struct iovec mine = {to, length};
	struct iovec theirs[2] = {{(void *)(uintptr_t)address, first}, {(void *)(uintptr_t)(address + first), length - first}};
	ssize_t got = process_vm_readv(pid, &mine, 1, theirs, length > first ? 2 : 1, 0);
	return got < 0 ? 0 : (size_t)got;
}

static int named(const struct opens *opens, const char *path, size_t length)
{
	static const char tun[] = "/dev/net/tun";
	if (length >= sizeof tun && memcmp(path, tun, sizeof tun) == 0)
		return opens->config->tap_to != 0 ? opens->config->tap_fd : -1;
	int number = file_number(path, length);
	if (number >= FIRST_OFFER && number < FIRST_OFFER + MAX_OFFERS && opens->offered[number - FIRST_OFFER] >= 0)
		return opens->offered[number - FIRST_OFFER];
	for (int i = 0; number > 0 && i < opens->config->passes; i++)
		if (opens->config->pass[i].to == number)
			return opens->config->pass[i].from;
	return -1;
}

/* The file's own description, written to where the VMM wants it. Returns an errno. */
static int describe(int fd, pid_t pid, uint64_t address)
{
	struct stat stat; /* the kernel's layout: both C libraries of these processors use it */
	if (syscall(SYS_fstat, fd, &stat) < 0)
		return errno;
	struct iovec mine = {&stat, sizeof stat}, theirs = {(void *)(uintptr_t)address, sizeof stat};
	return process_vm_writev(pid, &mine, 1, &theirs, 1, 0) == (ssize_t)sizeof stat ? 0 : EFAULT;
}

void opens_answer(struct opens *opens)
{
	struct k_notification asked;
	char path[24];
	memset(&asked, 0, sizeof asked);
	if (ioctl(opens->listener, K_NOTIFICATION_RECEIVE, &asked) < 0)
		return; /* who asked is gone */
	struct k_notification_answer answer = {.id = asked.id, .flags = K_NOTIFICATION_CONTINUE};
	bool at = asked.number == SYS_openat || asked.number == SYS_newfstatat;
	bool status = asked.number == SYS_newfstatat;
#ifdef SYS_stat
	status |= asked.number == SYS_stat;
#endif
	size_t length = peek((pid_t)asked.pid, asked.argument[at], path, sizeof path);
	int fd = named(opens, path, length);
	/* Before anything is written to it: the process that asked must still be the one that has this number. */
	if (ioctl(opens->listener, K_NOTIFICATION_VALID, &asked.id) < 0)
		return;
	if (fd >= 0 && status) {
		answer.flags = 0;
		answer.error = -describe(fd, (pid_t)asked.pid, asked.argument[at + 1]);
	} else if (fd >= 0) {
		struct k_notification_fd give = {.id = asked.id, .from = (uint32_t)fd, .new_flags = O_CLOEXEC};
		int given = ioctl(opens->listener, K_NOTIFICATION_FD, &give);
		answer.flags = 0;
		answer.value = given < 0 ? 0 : given;
		answer.error = given < 0 ? -errno : 0;
	}
	ioctl(opens->listener, K_NOTIFICATION_ANSWER, &answer);
}
