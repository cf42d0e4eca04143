/* hatchway-shim: what its files share. docs/protocols/shim.md is the contract. */
#ifndef HATCHWAY_SHIM_H
#define HATCHWAY_SHIM_H

#include "kernel.h"

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

enum {
	ID_LENGTH = 20,
	MAX_PASS = 96,
	MAX_CGROUPS = 8,
	MAX_DEVICES = 4,
	MAX_PEERS = 8,
	MAX_CLAIM = 16384,
	MAX_CLAIM_FDS = 120,
	CLAIM_FD_BASE = 300,
	MAX_FD = CLAIM_FD_BASE + MAX_CLAIM_FDS - 1, /* of every descriptor that is named to the shim */
	MIN_TARGET_FD = 10,
	MAX_TARGET_FD = 255,
	MAX_REQUEST = 4096,
	MAX_CONNECTIONS = 4,
	MAX_STRINGS = 1024,
	MAX_STRINGS_BYTES = 1 << 20,
	LOG_BYTES = 3072,
	CONSOLE_BYTES = 65536,
	FIRST_OFFER = 40,
	MAX_OFFERS = 10,
	ERROR_BYTES = 512,
	NFT_WITHIN_S = 10,
};

/* What the launcher is given of a network, and what the shim keeps of it: in this order everywhere. */
enum { HELD_TCP, HELD_DNS_UDP, HELD_DNS_TCP, HELD_NETFILTER, MAX_HELD };

struct pass {
	int from, to;
};

/* Everything that the command line, or the claim of a parked shim, says. */
struct config {
	char id[ID_LENGTH + 1];
	bool has_uid, has_gid, has_generation;
	uid_t uid;
	gid_t gid;
	unsigned long long generation;
	int control_fd, root_fd, argv_fd, env_fd, report_fd, netns_fd;
	struct pass pass[MAX_PASS];
	int passes;
	int cgroup_fd[MAX_CGROUPS];
	int cgroups;
	char device[MAX_DEVICES][16];
	int devices;
	uid_t peer[MAX_PEERS];
	int peers;
	unsigned long long nofile, fsize, nproc;
	bool no_userns_drop, network, park, paths;
	int tap_to, rules_fd;
	const char *nft;

	int tap_fd;  /* made by network_make; with `paths` a second one, which is not attached to tap0 yet */
	int held_fd[MAX_HELD]; /* sockets of the network, -1 without one */
	int tree_fd; /* detached clone of root_fd, made by jail_clone_tree */
	int proc_fd; /* private procfs of the jail's PID namespace, -1 where the kernel refuses it */
	char proc_error[ERROR_BYTES];
	char **argv, **env;
};

/* args.c. Both return false and fill `error` when something is wrong; nothing else is changed by that. */
void config_init(struct config *config);
bool config_parse(struct config *config, int count, char *const *words, char *error);
bool config_complete(const struct config *config, char *error);
/* Reads a file of NUL-ended strings into an array that ends with NULL; NULL and `error` on failure. */
char **read_strings(int fd, const char *what, char *error);

/* network.c: a network namespace of its own with lo, tap0, its rules and its sockets. */
bool network_make(struct config *config, char *error);
bool network_leave_tap(struct config *config, char *error);

/* netlink.c: one request to rtnetlink, and a socket that hears of every change of the namespace's rules (-1 on failure). */
bool netlink_ask(const void *message, size_t length, char *error);
int netlink_watch_rules(char *error);

/* jail.c */
bool jail_join_cgroups(const struct config *config, char *error);
bool jail_clone_tree(struct config *config, char *error);
bool jail_enter(struct config *config, char *error);
bool jail_drop(const struct config *config, bool vmm, char *error);
bool jail_set_limits(const struct config *config, char *error);
/* What the VMM's process keeps until it executes the VMM: who hears of a failure, the first process, where its standard output and
 * error go, and (with `paths`, else -1) where the listener of its opens goes. */
struct exec_fds {
	int report, sync, console, log, opens;
};
int exec_vmm(const struct config *config, struct exec_fds fds);

/* seccomp.c: needs no_new_privs. With `listener` opens and stats are asked of whoever has the descriptor that is stored there. */
bool seccomp_confine(int *listener, char *error);

/* opens.c: the files of a VMM that takes paths only. */
struct opens {
	int listener;              /* -1 when there is none (any more) */
	int offered[MAX_OFFERS];   /* descriptors FIRST_OFFER and up, -1 where there is none */
	const struct config *config;
};
void opens_init(struct opens *opens, const struct config *config, int listener);
/* Gives the VMM a file under a number; takes `fd`. */
bool opens_offer(struct opens *opens, unsigned long long number, int fd);
bool opens_withdraw(struct opens *opens, unsigned long long number);
void opens_answer(struct opens *opens);

/* init.c: PID 1 of the jail. Never returns. */
_Noreturn void init_main(struct config *config, int sync);

/* serve.c: the control socket. Never returns. */
struct vmm {
	pid_t pid;      /* in the jail's PID namespace */
	pid_t host_pid; /* in the launcher's */
	pid_t shim_pid; /* of the shim, in the launcher's */
	int log_fd;
	int console_fd, opens_fd; /* -1 without `paths` */
};
_Noreturn void serve(struct config *config, struct vmm vmm);

/* request.c: the grammar of requests, of the paths that mean descriptors, and the bounded tail of what the VMM wrote. */
struct request {
	char verb[16];
	char key[16];
	unsigned long long value;
	bool has_value;
};
bool request_parse(const char *text, size_t length, struct request *request);

/* The number N of a path /hatchway/N, -1 for any other; `text` has a NUL within `length`. */
int file_number(const char *text, size_t length);

struct tail {
	char *bytes;
	size_t room, start, used;
	unsigned long long total;
};
void tail_add(struct tail *tail, const char *data, size_t length);
size_t tail_copy(const struct tail *tail, char *out);

/* runs.c: lists of page runs, bounded by joining near ones. */
struct run {
	uint64_t first, pages;
};
struct runs {
	struct run *run;
	size_t count, limit;
	uint64_t gap; /* pages between two runs that are worth joining */
	uint64_t pages;
};
bool runs_init(struct runs *runs, size_t limit);
void runs_add(struct runs *runs, uint64_t first, uint64_t pages);
void runs_free(struct runs *runs);

/* A mapping of the VMM, of whole pages. */
struct area {
	uint64_t start, end, offset, inode;
	unsigned major, minor;
	bool private;
};
bool area_parse(const char *line, struct area *area);

/* memory.c: both work on the VMM's mapping of the file behind `map_fd`, and fill `code` and `error` on failure. */
struct transfer {
	uint64_t pages, runs, bytes;
};
struct memory_error {
	const char *code;
	char text[ERROR_BYTES];
};
bool memory_capture(int proc_fd, pid_t pid, int map_fd, int out_fd, struct transfer *done, struct memory_error *error);
bool memory_inject(int proc_fd, pid_t pid, int map_fd, int in_fd, struct transfer *done, struct memory_error *error);

/* userns.c: becomes root of a new user namespace, or enters the network namespace behind a descriptor, and executes `argv`. Both
 * return an exit code on failure. */
int userns_exec(char **argv);
int netns_exec(const char *fd, char **argv);

/* sockets.c: descriptors beside a message, one the other way; and a connection to a socket of the jail, which never waits. */
bool send_fds(int socket, const char *text, size_t length, const int *fds, int count);
bool send_fd(int socket, const char *text, size_t length, int fd);
int receive_fd(int socket);
int dial(const char *path);

/* Formats "what: reason of errno". Always false, so that callers can return it. */
bool failed(char *error, const char *format, ...) __attribute__((format(printf, 2, 3)));
bool failed_errno(char *error, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
