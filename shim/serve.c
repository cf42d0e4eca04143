/* The control socket of one VM, served by PID 1 of its jail. */
#include "shim.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

struct connection {
	int fd;
	bool watching, killing;
};

struct server {
	struct config *config;
	struct vmm vmm;
	bool ended, committed, log_open, console_open;
	int code, signal;
	struct tail tail, console;
	struct opens opens;
	struct connection connection[MAX_CONNECTIONS];
};

static void drop(struct connection *connection)
{
	close(connection->fd);
	*connection = (struct connection){.fd = -1};
}

/* A client that does not take its answers is dropped: nobody can make the shim wait. */
static void answer(struct connection *connection, const char *text, size_t length)
{
	if (connection->fd >= 0 && send(connection->fd, text, length, MSG_DONTWAIT | MSG_NOSIGNAL) != (ssize_t)length)
		drop(connection);
}

static void answer_error(struct connection *connection, const char *code, const char *message)
{
	char text[ERROR_BYTES + 64];
	int length = snprintf(text, sizeof text, "error code=%s message=%s", code, message);
	answer(connection, text, (size_t)length);
}

static void answer_status(struct server *server, struct connection *connection)
{
	char text[256];
	int length;
	if (server->ended)
		length = snprintf(text, sizeof text, "ok state=exited code=%d signal=%d id=%s generation=%llu", server->code,
		                  server->signal, server->config->id, server->config->generation);
	else
		length = snprintf(text, sizeof text, "ok state=running pid=%d shim=%d id=%s generation=%llu", server->vmm.host_pid,
		                  server->vmm.shim_pid, server->config->id, server->config->generation);
	answer(connection, text, (size_t)length);
}

static void answer_log(const struct server *server, struct connection *connection)
{
	char text[LOG_BYTES + 64];
	int head = snprintf(text, 64, "ok total=%llu text=", server->tail.total);
	answer(connection, text, (size_t)head + tail_copy(&server->tail, text + head));
}

static void answer_console(const struct server *server, struct connection *connection)
{
	static char text[CONSOLE_BYTES + 64];
	int head = snprintf(text, 64, "ok total=%llu text=", server->console.total);
	answer(connection, text, (size_t)head + tail_copy(&server->console, text + head));
}

/* The sockets that a VMM which takes paths made for itself: only the jail's own file system can be reached by these names. */
static void answer_dial(struct connection *connection, const struct request *request)
{
	static const char *const name[] = {"/tmp/api.sock", "/tmp/vsock.sock"};
	char error[ERROR_BYTES];
	if (!request->has_value || strcmp(request->key, "to") != 0 || request->value >= sizeof name / sizeof name[0]) {
		answer_error(connection, "invalid", "to= must be 0 (control) or 1 (guest channel)");
		return;
	}
	int fd = dial(name[request->value]);
	if (fd < 0) {
		const char *code = errno == EAGAIN ? "busy" : errno == ENOENT || errno == ECONNREFUSED ? "refused" : "io";
		failed_errno(error, "%s", name[request->value]);
		answer_error(connection, code, error);
		return;
	}
	if (connection->fd >= 0 && !send_fd(connection->fd, "ok", 2, fd))
		drop(connection);
	close(fd);
}

static void answer_network(const struct server *server, struct connection *connection)
{
	if (server->config->held_fd[0] < 0)
		answer_error(connection, "refused", "this VM has no network");
	else if (connection->fd >= 0 && !send_fds(connection->fd, "ok", 2, server->config->held_fd, MAX_HELD))
		drop(connection);
}

/* Takes `fd`: -1, or the descriptor to keep. */
static int answer_offer(struct server *server, struct connection *connection, const struct request *request, int fd)
{
	struct stat stat;
	bool offer = !strcmp(request->verb, "offer");
	if (!request->has_value || strcmp(request->key, "as") != 0)
		answer_error(connection, "invalid", "as= must be a number");
	else if (offer && (fd < 0 || fstat(fd, &stat) < 0 || !S_ISREG(stat.st_mode)))
		answer_error(connection, "invalid", "one descriptor of a regular file is needed");
	else if (!(offer ? opens_offer(&server->opens, request->value, fd) : opens_withdraw(&server->opens, request->value)))
		answer_error(connection, "invalid", "as= must be a number that is offered");
	else {
		answer(connection, "ok", 2);
		return offer ? -1 : fd;
	}
	return fd;
}

static void transfer(struct server *server, struct connection *connection, const struct request *request, int fd)
{
	struct transfer done = {0};
	struct memory_error error = {.code = "invalid"};
	int map = -1;
	bool capture = !strcmp(request->verb, "capture");
	struct stat stat;
	for (int i = 0; i < server->config->passes; i++)
		if (request->has_value && server->config->pass[i].to == (int)request->value)
			map = server->config->pass[i].from;
	if (!request->has_value || strcmp(request->key, "map") != 0 || map < 0)
		failed(error.text, "map= must be the number of a file that the VMM was given");
	else if (fd < 0 || fstat(fd, &stat) < 0 || !S_ISREG(stat.st_mode))
		failed(error.text, "one descriptor of a regular file is needed");
	else if (server->ended)
		error.code = "exited", failed(error.text, "the VMM has ended");
	else if (server->config->proc_fd < 0)
		error.code = "unsupported", failed(error.text, "%s", server->config->proc_error);
	else if (capture ? memory_capture(server->config->proc_fd, server->vmm.pid, map, fd, &done, &error)
	                 : memory_inject(server->config->proc_fd, server->vmm.pid, map, fd, &done, &error)) {
		char text[128];
		int length = snprintf(text, sizeof text, "ok pages=%llu runs=%llu bytes=%llu", (unsigned long long)done.pages,
		                      (unsigned long long)done.runs, (unsigned long long)done.bytes);
		answer(connection, text, (size_t)length);
		return;
	}
	answer_error(connection, error.code, error.text);
}

/* Returns the descriptor that is left to be closed. */
static int handle(struct server *server, struct connection *connection, const char *text, size_t length, int fd)
{
	struct request request;
	if (!request_parse(text, length, &request)) {
		answer_error(connection, "invalid", "not a request");
	} else if (!strcmp(request.verb, "status")) {
		answer_status(server, connection);
	} else if (!strcmp(request.verb, "watch")) {
		connection->watching = !server->ended;
		answer_status(server, connection);
	} else if (!strcmp(request.verb, "log")) {
		answer_log(server, connection);
	} else if (!strcmp(request.verb, "console")) {
		answer_console(server, connection);
	} else if (!strcmp(request.verb, "dial")) {
		answer_dial(connection, &request);
	} else if (!strcmp(request.verb, "network")) {
		answer_network(server, connection);
	} else if (!strcmp(request.verb, "offer") || !strcmp(request.verb, "withdraw")) {
		return answer_offer(server, connection, &request, fd);
	} else if (!strcmp(request.verb, "kill")) {
		if (server->ended) {
			answer(connection, "ok", 2);
		} else {
			connection->killing = true;
			kill(server->vmm.pid, SIGKILL);
		}
	} else if (!strcmp(request.verb, "reap")) {
		if (server->ended) {
			answer(connection, "ok", 2);
			_exit(0);
		}
		answer_error(connection, "running", "the VMM has not ended");
	} else if (!strcmp(request.verb, "capture") || !strcmp(request.verb, "inject")) {
		transfer(server, connection, &request, fd);
	} else {
		answer_error(connection, "unknown", "no such verb");
	}
	return fd;
}

/* One request, with at most one descriptor. */
static void receive(struct server *server, struct connection *connection)
{
	char text[MAX_REQUEST];
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int))];
	} control;
	struct iovec part = {text, sizeof text};
	/* Not all of `control`: the padding behind one descriptor has room for a second, which nobody would close. */
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = CMSG_LEN(sizeof(int))};
	int fd = -1;
	ssize_t length = recvmsg(connection->fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	if (length < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (length <= 0) {
		drop(connection);
		return;
	}
	for (struct cmsghdr *c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c))
		if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS && c->cmsg_len == CMSG_LEN(sizeof fd))
			memcpy(&fd, CMSG_DATA(c), sizeof fd);
	if (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC))
		answer_error(connection, "invalid", "a request has at most 4096 octets and one descriptor");
	else
		fd = handle(server, connection, text, (size_t)length, fd);
	if (fd >= 0)
		close(fd);
}

static bool trusted(const struct server *server, int fd)
{
	struct ucred peer;
	socklen_t size = sizeof peer;
	if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) < 0)
		return false;
	if (peer.uid == 0)
		return true;
	for (int i = 0; i < server->config->peers; i++)
		if (server->config->peer[i] == peer.uid)
			return true;
	return false;
}

static void welcome(struct server *server)
{
	int fd = accept4(server->config->control_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
	if (fd < 0)
		return;
	if (!trusted(server, fd)) {
		close(fd);
		return;
	}
	for (int i = 0; i < MAX_CONNECTIONS; i++)
		if (server->connection[i].fd < 0) {
			server->connection[i] = (struct connection){.fd = fd};
			return;
		}
	struct connection fifth = {.fd = fd};
	answer_error(&fifth, "busy", "all connections are taken");
	if (fifth.fd >= 0)
		close(fifth.fd);
}

static void read_pipe(int fd, struct tail *tail, bool *open)
{
	char data[4096];
	for (int i = 0; i < 4; i++) {
		ssize_t got = read(fd, data, sizeof data);
		if (got > 0) {
			tail_add(tail, data, (size_t)got);
			continue;
		}
		if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
			close(fd);
			*open = false;
		}
		return;
	}
}

static void read_log(struct server *server)
{
	read_pipe(server->vmm.log_fd, &server->tail, &server->log_open);
}

static void read_console(struct server *server)
{
	read_pipe(server->vmm.console_fd, &server->console, &server->console_open);
}

/* Reaps whatever ended; the VMM's end is told to those who wait for it. */
static void reap(struct server *server)
{
	int status;
	pid_t pid;
	while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
		if (pid != server->vmm.pid)
			continue;
		server->ended = true;
		server->code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
		server->signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
		kill(-1, SIGKILL); /* whatever it left behind in its namespace */
		if (server->log_open)
			read_log(server);
		if (server->console_open)
			read_console(server);
	}
	if (!server->ended)
		return;
	for (int i = 0; i < MAX_CONNECTIONS; i++) {
		struct connection *connection = &server->connection[i];
		if (connection->fd >= 0 && connection->killing) {
			connection->killing = false;
			answer(connection, "ok", 2);
		}
		if (connection->fd >= 0 && connection->watching) {
			connection->watching = false;
			answer_status(server, connection);
		}
	}
}

/* Until the launcher has recorded the VM it holds the other end of report_fd. If it goes away before, nobody knows of us. */
static void commit(struct server *server)
{
	char word[16];
	ssize_t got = recv(server->config->report_fd, word, sizeof word, MSG_DONTWAIT);
	if (got < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (got != 6 || memcmp(word, "commit", 6) != 0)
		_exit(1);
	server->committed = true;
	close(server->config->report_fd);
}

void serve(struct config *config, struct vmm vmm)
{
	static struct server server;
	static char log[LOG_BYTES], console[CONSOLE_BYTES];
	server = (struct server){.config = config, .vmm = vmm, .log_open = true, .console_open = vmm.console_fd >= 0};
	server.tail = (struct tail){.bytes = log, .room = sizeof log};
	server.console = (struct tail){.bytes = console, .room = sizeof console};
	opens_init(&server.opens, config, vmm.opens_fd);
	for (int i = 0; i < MAX_CONNECTIONS; i++)
		server.connection[i].fd = -1;
	sigset_t chld;
	sigemptyset(&chld);
	sigaddset(&chld, SIGCHLD);
	int signals = signalfd(-1, &chld, SFD_CLOEXEC | SFD_NONBLOCK);
	/* listen again, as ourselves: whoever connects sees the shim's pid and uid as its peer. */
	if (signals < 0 || fcntl(config->control_fd, F_SETFL, O_NONBLOCK) < 0 || listen(config->control_fd, 8) < 0)
		_exit(1);
	reap(&server);
	for (;;) {
		enum { SIGNALS, COMMIT, LISTEN, LOG, CONSOLE, OPENS, FIRST };
		struct pollfd poll_set[FIRST + MAX_CONNECTIONS] = {
		        [SIGNALS] = {signals, POLLIN, 0},
		        [COMMIT] = {server.committed ? -1 : config->report_fd, POLLIN, 0},
		        [LISTEN] = {config->control_fd, POLLIN, 0},
		        [LOG] = {server.log_open ? vmm.log_fd : -1, POLLIN, 0},
		        [CONSOLE] = {server.console_open ? vmm.console_fd : -1, POLLIN, 0},
		        [OPENS] = {server.opens.listener, POLLIN, 0},
		};
		for (int i = 0; i < MAX_CONNECTIONS; i++)
			poll_set[FIRST + i] = (struct pollfd){server.connection[i].fd, POLLIN, 0};
		if (poll(poll_set, FIRST + MAX_CONNECTIONS, -1) < 0 && errno != EINTR)
			_exit(1);
		if (poll_set[SIGNALS].revents) {
			struct signalfd_siginfo info;
			while (read(signals, &info, sizeof info) > 0)
				;
			reap(&server);
		}
		if (poll_set[COMMIT].revents)
			commit(&server);
		if (poll_set[LOG].revents)
			read_log(&server);
		if (poll_set[CONSOLE].revents)
			read_console(&server);
		if (poll_set[OPENS].revents & POLLIN)
			opens_answer(&server.opens);
		else if (poll_set[OPENS].revents) /* nobody is left who could ask */
			opens_init(&server.opens, config, -1);
		for (int i = 0; i < MAX_CONNECTIONS; i++)
			if (poll_set[FIRST + i].revents && server.connection[i].fd == poll_set[FIRST + i].fd)
				receive(&server, &server.connection[i]);
		if (poll_set[LISTEN].revents)
			welcome(&server);
	}
}
