/* The first process: waits for its claim if it was parked, makes the jail's init, reports, and goes. */
#include "shim.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

static struct config config;

static _Noreturn void report_error(const char *code, const char *error)
{
	char text[ERROR_BYTES + 64];
	int length = snprintf(text, sizeof text, "error=%s%s%s", code, *code ? " " : "", error);
	if (config.report_fd < 0 || send(config.report_fd, text, (size_t)length, MSG_NOSIGNAL) != length)
		fprintf(stderr, "hatchway-shim: %s\n", text);
	_exit(2);
}

/* Receives the claim: NUL-ended words, and descriptors, which are known by it as CLAIM_FD_BASE, CLAIM_FD_BASE + 1, … */
static void receive_claim(void)
{
	static char text[MAX_CLAIM];
	static char *word[MAX_CLAIM]; /* every one may be empty */
	static union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(MAX_CLAIM_FDS * sizeof(int))];
	} control;
	char error[ERROR_BYTES];
	struct iovec part = {text, sizeof text};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
	ssize_t length;
	do
		length = recvmsg(config.report_fd, &message, MSG_CMSG_CLOEXEC);
	while (length < 0 && errno == EINTR);
	if (length <= 0)
		_exit(0); /* the launcher is gone or wants us no more */
	if ((message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) || text[length - 1] != 0)
		report_error("invalid", "the claim is too large");
	for (struct cmsghdr *c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c)) {
		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
			continue;
		int count = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
		for (int i = 0; i < count; i++) {
			int fd;
			memcpy(&fd, CMSG_DATA(c) + (size_t)i * sizeof fd, sizeof fd);
			if (fd >= CLAIM_FD_BASE || dup3(fd, CLAIM_FD_BASE + i, O_CLOEXEC) < 0)
				report_error("jail_failed", "placing the claim's descriptors");
			close(fd);
		}
	}
	int words = 0;
	for (char *at = text; at < text + length; at += strlen(at) + 1)
		word[words++] = at;
	if (!config_parse(&config, words, word, error))
		report_error("invalid", error);
}

static pid_t clone_init(void)
{
	/* CLONE_PARENT: a child of whoever started us, who can reap it; when that one dies, of the host's init. */
	struct k_clone_args args = {0};
	args.flags = CLONE_PARENT | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS;
	if (!config.network && config.netns_fd < 0)
		args.flags |= CLONE_NEWNET;
	return (pid_t)syscall(SYS_clone3, &args, sizeof args);
}

/* One message of the jail: its text, and who sent it, in our PID namespace. */
static ssize_t hear(int sync, char *text, size_t room, pid_t *sender)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(struct ucred))];
	} control;
	struct iovec part = {text, room - 1};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
	ssize_t length;
	do
		length = recvmsg(sync, &message, 0);
	while (length < 0 && errno == EINTR);
	text[length < 0 ? 0 : length] = 0;
	struct cmsghdr *c = length < 0 ? NULL : CMSG_FIRSTHDR(&message);
	struct ucred who = {0};
	if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_CREDENTIALS)
		memcpy(&who, CMSG_DATA(c), sizeof who);
	*sender = who.pid;
	return length;
}

static unsigned long long start_time(pid_t pid)
{
	char path[32], text[1024];
	unsigned long long ticks = 0;
	snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t got = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
	if (fd >= 0)
		close(fd);
	if (got <= 0)
		return 0;
	text[got] = 0;
	char *at = strrchr(text, ')'); /* the name before it may hold anything */
	for (int field = 2; at && field < 22; field++)
		at = strchr(at + 1, ' ');
	if (at)
		sscanf(at, " %llu", &ticks);
	return ticks;
}

static int start(void)
{
	char error[ERROR_BYTES], text[ERROR_BYTES + 64];
	int sync[2], on = 1;
	if (!config_complete(&config, error))
		report_error("invalid", error);
	if (!jail_clone_tree(&config, error) || (config.paths && config.tap_to != 0 && !network_leave_tap(&config, error)))
		report_error("jail_failed", error);
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sync) < 0 ||
	    setsockopt(sync[0], SOL_SOCKET, SO_PASSCRED, &on, sizeof on) < 0)
		report_error("jail_failed", "socket pair");
	pid_t init = clone_init();
	if (init < 0) {
		failed_errno(error, "namespaces");
		report_error(errno == ENOMEM || errno == EAGAIN || errno == ENOSPC ? "host_exhausted" : "jail_failed", error);
	}
	if (init == 0) {
		close(sync[0]);
		init_main(&config, sync[1]);
	}
	close(sync[1]);
	pid_t vmm = 0, sender;
	for (;;) {
		ssize_t length = hear(sync[0], text, sizeof text, &sender);
		if (length <= 0)
			report_error("jail_failed", "the jail's init was killed while it started");
		if (!strcmp(text, "vmm"))
			vmm = sender;
		else if (!strcmp(text, "ok"))
			break;
		else if (!strncmp(text, "error=", 6))
			report_error("", text + 6);
	}
	unsigned long long ticks = start_time(init);
	int length = snprintf(text, sizeof text, "vmm=%u shim=%u", (unsigned)vmm, (unsigned)init);
	if (ticks == 0 || send(sync[0], text, (size_t)length, MSG_NOSIGNAL) != length)
		report_error("jail_failed", "the jail's init was killed while it started");
	length = snprintf(text, sizeof text, "pid=%d starttime=%llu\n", (int)init, ticks);
	return send(config.report_fd, text, (size_t)length, MSG_NOSIGNAL) == length ? 0 : 1;
}

int main(int argc, char **argv)
{
	char error[ERROR_BYTES];
	sigset_t chld;
	if (argc > 2 && !strcmp(argv[1], "--userns-exec"))
		return userns_exec(argv + 2);
	if (argc > 3 && !strcmp(argv[1], "--netns-exec"))
		return netns_exec(argv[2], argv + 3);
	signal(SIGPIPE, SIG_IGN);
	signal(SIGXFSZ, SIG_IGN);
	sigemptyset(&chld);
	sigaddset(&chld, SIGCHLD);
	sigprocmask(SIG_BLOCK, &chld, NULL);
	config_init(&config);
	if (!config_parse(&config, argc - 1, argv + 1, error)) {
		fprintf(stderr, "hatchway-shim: %s\n", error);
		return 2;
	}
	struct rlimit files;
	if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < 1024 && files.rlim_max >= 1024) {
		files.rlim_cur = 1024; /* room for the claim's descriptors */
		setrlimit(RLIMIT_NOFILE, &files);
	}
	if (config.network && (config.rules_fd < 0 || config.nft == NULL))
		report_error("invalid", "--network needs --rules-fd and --nft");
	if (!jail_join_cgroups(&config, error) || (config.network && !network_make(&config, error)))
		report_error("jail_failed", error);
	if (config.park) {
		bool told = config.network ? send_fds(config.report_fd, "parked", 6, config.held_fd, MAX_HELD)
		                           : send(config.report_fd, "parked", 6, MSG_NOSIGNAL) == 6;
		if (!told)
			return 0;
		receive_claim();
	}
	return start();
}
