/* PID 1 of the jail: builds it, starts the VMM, then serves. */
#include "shim.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

static _Noreturn void give_up(int sync, const char *code, const char *error)
{
	char text[ERROR_BYTES + 32];
	int length = snprintf(text, sizeof text, "error=%s%s%s", code, *code ? " " : "", error);
	send(sync, text, (size_t)length, MSG_NOSIGNAL);
	_exit(1);
}

static bool stdio_to_null(char *error)
{
	int null = open("/dev/null", O_RDWR);
	if (null < 0 || dup2(null, 0) < 0 || dup2(null, 1) < 0 || dup2(null, 2) < 0)
		return failed_errno(error, "/dev/null of the jail");
	if (null > 2)
		close(null);
	return true;
}

/* Closes all that the shim does not need any more. The files stay that the VMM can have mapped, so that `capture` can tell
 * its mapping; sockets must go, because a socket is dead only when nobody holds it. */
static void close_rest(struct config *config, const int *keep, int count)
{
	struct stat stat;
	for (int i = 0; i < config->passes; i++)
		if (fstat(config->pass[i].from, &stat) < 0 || !S_ISREG(stat.st_mode))
			config->pass[i].from = -1;
	for (int fd = 3; fd <= MAX_FD; fd++) {
		bool needed = false;
		for (int i = 0; i < count; i++)
			needed |= keep[i] == fd;
		for (int i = 0; i < config->passes; i++)
			needed |= config->pass[i].from == fd;
		if (!needed)
			close(fd);
	}
	k_close_range(MAX_FD + 1, ~0u, 0);
}

void init_main(struct config *config, int sync)
{
	char error[ERROR_BYTES] = "";
	int exec_report[2], log_pipe[2], console_pipe[2] = {-1, -1}, opens[2] = {-1, -1}, opens_fd = -1;
	if (setsid() < 0 || prctl(PR_SET_NAME, "hatchway-shim", 0, 0, 0) < 0)
		give_up(sync, "jail_failed", "setsid");
	if (config->netns_fd >= 0 && setns(config->netns_fd, CLONE_NEWNET) < 0) {
		failed_errno(error, "entering the network namespace");
		give_up(sync, "jail_failed", error);
	}
	config->argv = read_strings(config->argv_fd, "arguments", error);
	config->env = config->argv ? read_strings(config->env_fd, "environment", error) : NULL;
	if (config->argv == NULL || config->env == NULL)
		give_up(sync, "invalid", error);
	if (config->argv[0] == NULL || config->argv[0][0] != '/')
		give_up(sync, "invalid", "arguments: the first must be an absolute path in the jail");
	if (!jail_enter(config, error) || !stdio_to_null(error))
		give_up(sync, "jail_failed", error);
	if (pipe2(exec_report, O_CLOEXEC) < 0 || pipe2(log_pipe, O_CLOEXEC) < 0 ||
	    (config->paths && (pipe2(console_pipe, O_CLOEXEC) < 0 ||
	                       socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, opens) < 0)))
		give_up(sync, "jail_failed", "pipes");
	pid_t pid = fork();
	if (pid < 0)
		give_up(sync, "host_exhausted", "fork of the VMM");
	if (pid == 0) {
		close(exec_report[0]);
		close(log_pipe[0]);
		int console = config->paths ? console_pipe[1] : log_pipe[1];
		_exit(exec_vmm(config, (struct exec_fds){exec_report[1], sync, console, log_pipe[1], opens[1]}));
	}
	close(exec_report[1]);
	close(log_pipe[1]);
	close(console_pipe[1]);
	close(opens[1]);
	if (!jail_drop(config, false, error))
		give_up(sync, "jail_failed", error);
	ssize_t got;
	do
		got = read(exec_report[0], error, sizeof error - 1);
	while (got < 0 && errno == EINTR);
	if (got != 0) {
		error[got < 0 ? 0 : got] = 0;
		give_up(sync, got < 0 ? "jail_failed" : "", error);
	}
	close(exec_report[0]);
	if (config->paths && (opens_fd = receive_fd(opens[0])) < 0)
		give_up(sync, "jail_failed", "its opens were not handed over");
	unsigned vmm_pid, shim_pid;
	char line[64] = "";
	if (send(sync, "ok", 2, MSG_NOSIGNAL) != 2 || recv(sync, line, sizeof line - 1, 0) <= 0 ||
	    sscanf(line, "vmm=%u shim=%u", &vmm_pid, &shim_pid) != 2)
		_exit(1); /* the first process died: so did the start */
	fcntl(log_pipe[0], F_SETFL, O_NONBLOCK);
	if (config->paths)
		fcntl(console_pipe[0], F_SETFL, O_NONBLOCK);
	int *held = config->held_fd;
	int keep[] = {config->control_fd, config->report_fd, config->proc_fd, log_pipe[0], console_pipe[0],
	              opens_fd, config->paths ? config->tap_fd : -1, held[0], held[1], held[2], held[3]};
	_Static_assert(MAX_HELD == 4, "all of them are kept");
	close_rest(config, keep, sizeof keep / sizeof keep[0]);
	free(config->argv);
	free(config->env);
	serve(config, (struct vmm){.pid = pid,
	                           .host_pid = (pid_t)vmm_pid,
	                           .shim_pid = (pid_t)shim_pid,
	                           .log_fd = log_pipe[0],
	                           .console_fd = console_pipe[0],
	                           .opens_fd = opens_fd});
}
