/* A stand-in for a VMM that tries what a hostile one would. It serves descriptor 10, a listening stream socket, or with the
 * argument `paths` /tmp/api.sock: a line in, a line out. Numbers are decimal. */
#include "../kernel.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/un.h>

static char out[8192];
static unsigned char *memory;
static int current; /* who is talked with */

static void say(const char *text)
{
	strncat(out, text, sizeof out - strlen(out) - 1);
}

static void result(long value)
{
	char text[64];
	if (value >= 0)
		snprintf(text, sizeof text, "ok %ld", value);
	else
		snprintf(text, sizeof text, "errno %d", errno);
	say(text);
}

static void whoami(void)
{
	struct k_cap_header header = {.version = K_CAP_VERSION_3};
	struct k_cap_data data[2] = {0};
	char text[512];
	int bound = 0;
	syscall(SYS_capget, &header, data);
	for (int cap = 0; cap < 64; cap++)
		bound += prctl(PR_CAPBSET_READ, cap, 0, 0, 0) == 1;
	struct rlimit core, files, size;
	getrlimit(RLIMIT_CORE, &core);
	getrlimit(RLIMIT_NOFILE, &files);
	getrlimit(RLIMIT_FSIZE, &size);
	snprintf(text, sizeof text,
	         "uid=%u euid=%u gid=%u groups=%d pid=%d ppid=%d caps=%x bound=%d nnp=%d core=%llu nofile=%llu fsize=%llu", getuid(),
	         geteuid(), getgid(), getgroups(0, NULL), getpid(), getppid(),
	         data[0].effective | data[0].permitted | data[0].inheritable | data[1].effective | data[1].permitted, bound,
	         prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0), (unsigned long long)core.rlim_cur, (unsigned long long)files.rlim_cur,
	         (unsigned long long)size.rlim_cur);
	say(text);
}

static void list(const char *path)
{
	DIR *dir = opendir(path);
	if (dir == NULL) {
		result(-1);
		return;
	}
	for (struct dirent *entry; (entry = readdir(dir));)
		if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, "..")) {
			say(entry->d_name);
			say(" ");
		}
	closedir(dir);
}

static void descriptors(void)
{
	for (int fd = 0; fd < 1024; fd++)
		if (fcntl(fd, F_GETFD) >= 0) {
			char text[16];
			snprintf(text, sizeof text, "%d ", fd);
			say(text);
		}
}

static void interfaces(void)
{
	struct if_nameindex *all = if_nameindex();
	for (struct if_nameindex *i = all; i && i->if_index; i++) {
		say(i->if_name);
		say(" ");
	}
}

static long attempt(const char *what, const char *path)
{
	if (!strcmp(what, "mount"))
		return mount("none", path, "tmpfs", 0, NULL);
	if (!strcmp(what, "remount"))
		return mount("none", path, NULL, MS_REMOUNT | MS_BIND, NULL);
	if (!strcmp(what, "umount"))
		return umount2(path, MNT_DETACH);
	if (!strcmp(what, "mknod"))
		return mknod(path, S_IFCHR | 0666, makedev(1, 1));
	if (!strcmp(what, "setuid"))
		return setuid(0);
	if (!strcmp(what, "setgroups"))
		return setgroups(0, NULL);
	if (!strcmp(what, "chroot"))
		return chroot(path);
	if (!strcmp(what, "read"))
		return open(path, O_RDONLY | O_CLOEXEC);
	if (!strcmp(what, "write"))
		return open(path, O_RDWR | O_CLOEXEC);
	if (!strcmp(what, "create"))
		return open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	if (!strcmp(what, "mkdir"))
		return mkdir(path, 0700);
	if (!strcmp(what, "kill"))
		return kill(atoi(path), SIGKILL);
	if (!strcmp(what, "ptrace"))
		return ptrace(PTRACE_ATTACH, atoi(path), 0, 0);
	if (!strcmp(what, "unshare"))
		return unshare(atoi(path));
	if (!strcmp(what, "raise"))
		return setrlimit(RLIMIT_NOFILE, &(struct rlimit){1 << 19, 1 << 19});
	if (!strcmp(what, "chmod"))
		return chmod(path, 0777);
	if (!strcmp(what, "rawsocket"))
		return socket(AF_INET, SOCK_RAW, 1);
	if (!strcmp(what, "socket")) /* family, or family:protocol */
		return socket(atoi(path), SOCK_RAW | SOCK_CLOEXEC, strchr(path, ':') ? atoi(strchr(path, ':') + 1) : 0);
	if (!strcmp(what, "uring"))
		return syscall(SYS_io_uring_setup, 1, (char[256]){0});
	errno = EINVAL;
	return -1;
}

/* The last octets of a page that has nothing behind it: a path that does not end. */
static char *end_of_memory(void)
{
	char *two = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	munmap(two + 4096, 4096);
	memcpy(two + 4096 - 12, "/hatchway/20", 12);
	return two + 4096 - 12;
}

static void obey(char *line)
{
	char verb[32] = "", first[256] = "", second[256] = "";
	int words = sscanf(line, "%31s %255s %255s", verb, first, second);
	long a = atol(first), b = atol(second);
	out[0] = 0;
	if (words < 1)
		say("empty");
	else if (!strcmp(verb, "whoami"))
		whoami();
	else if (!strcmp(verb, "ls"))
		list(first);
	else if (!strcmp(verb, "fds"))
		descriptors();
	else if (!strcmp(verb, "interfaces"))
		interfaces();
	else if (!strcmp(verb, "try"))
		result(attempt(first, second));
	else if (!strcmp(verb, "size")) { /* path */
		struct stat found;
		result(stat(first, &found) == 0 ? (long)found.st_size : -1);
	} else if (!strcmp(verb, "badopen")) /* an address that is not mapped, and one at the end of what is */
		result(syscall(SYS_openat, AT_FDCWD, a ? (void *)a : end_of_memory(), O_RDONLY));
	else if (!strcmp(verb, "tun")) { /* descriptor of /dev/net/tun, name */
		struct ifreq request = {.ifr_flags = 0x5002};
		snprintf(request.ifr_name, sizeof request.ifr_name, "%.15s", second);
		result(ioctl((int)a, 0x400454ca, &request));
	} else if (!strcmp(verb, "link")) /* to, path */
		result(unlink(second) < 0 ? -1 : symlink(first, second));
	else if (!strcmp(verb, "console")) { /* KiB of standard output */
		for (long i = 0; i < a * 16; i++)
			fprintf(stdout, "%063ld\n", i);
		fflush(stdout);
		say("ok");
	} else if (!strcmp(verb, "getenv"))
		say(getenv(first) ? getenv(first) : "unset");
	else if (!strcmp(verb, "write")) /* descriptor */
		result(write((int)a, "x", 1));
	else if (!strcmp(verb, "fill")) { /* descriptor, octets at its end: against the bound of file sizes */
		result(ftruncate((int)a, b));
	} else if (!strcmp(verb, "pour")) { /* descriptor, MiB to write to it */
		static char piece[1 << 20];
		long done = 0;
		while (done < b && write((int)a, piece, sizeof piece) == (ssize_t)sizeof piece)
			done++;
		result(done == b ? 0 : -1);
	} else if (!strcmp(verb, "map")) { /* descriptor, octets */
		memory = mmap(NULL, (size_t)b, PROT_READ | PROT_WRITE, MAP_PRIVATE, (int)a, 0);
		result(memory == MAP_FAILED ? -1 : 0);
	} else if (!strcmp(verb, "share")) {
		memory = mmap(NULL, (size_t)b, PROT_READ | PROT_WRITE, MAP_SHARED, (int)a, 0);
		result(memory == MAP_FAILED ? -1 : 0);
	} else if (!strcmp(verb, "poke")) { /* page, value of all its octets */
		memset(memory + a * 4096, (int)b, 4096);
		result(0);
	} else if (!strcmp(verb, "pokemany")) { /* count of pages, step */
		for (long i = 0; i < a; i++)
			memset(memory + i * b * 4096, (int)(i % 251 + 1), 4096);
		result(0);
	} else if (!strcmp(verb, "peek")) { /* page, octet in it */
		result(memory[a * 4096 + b]);
	} else if (!strcmp(verb, "hog")) { /* MiB */
		for (long i = 0; i < a; i++) {
			char *piece = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
			if (piece == MAP_FAILED)
				break;
			memset(piece, 1, 1 << 20);
		}
		result(0);
	} else if (!strcmp(verb, "fork")) { /* count */
		long made = 0;
		for (; made < a; made++) {
			pid_t pid = fork();
			if (pid < 0)
				break;
			if (pid == 0) {
				pause();
				_exit(0);
			}
		}
		result(made);
	} else if (!strcmp(verb, "print")) {
		fprintf(stderr, "%s\n", first);
		say("ok");
	} else if (!strcmp(verb, "flood")) { /* KiB of standard error */
		for (long i = 0; i < a * 16; i++)
			fprintf(stderr, "%063ld\n", i);
		say("ok");
	} else if (!strcmp(verb, "hand")) { /* descriptor: a duplicate goes to whoever asks, before the answer */
		union {
			struct cmsghdr align;
			char bytes[CMSG_SPACE(sizeof(int))];
		} control = {0};
		int fd = (int)a;
		struct iovec part = {"!", 1};
		struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
		struct cmsghdr *header = CMSG_FIRSTHDR(&message);
		header->cmsg_level = SOL_SOCKET;
		header->cmsg_type = SCM_RIGHTS;
		header->cmsg_len = CMSG_LEN(sizeof fd);
		memcpy(CMSG_DATA(header), &fd, sizeof fd);
		result(sendmsg(current, &message, MSG_NOSIGNAL) == 1 ? 0 : -1);
	} else if (!strcmp(verb, "exit"))
		_exit((int)a);
	else if (!strcmp(verb, "abort"))
		abort();
	else
		say("unknown");
}

int main(int argc, char **argv)
{
	if (argc > 1 && !strcmp(argv[1], "exit-at-once")) {
		fprintf(stderr, "no such machine\n");
		return 3;
	}
	int listener = 10;
	if (argc > 1 && !strcmp(argv[1], "paths")) {
		struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = "/tmp/api.sock"};
		listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
		if (bind(listener, (struct sockaddr *)&address, sizeof address) < 0 || listen(listener, 8) < 0)
			return 1;
	}
	for (;;) {
		int client = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
		if (client < 0)
			return 1;
		current = client;
		FILE *in = fdopen(client, "r");
		char line[1024];
		while (in && fgets(line, sizeof line, in)) {
			obey(line);
			say("\n");
			if (send(client, out, strlen(out), MSG_NOSIGNAL) < 0)
				break;
		}
		if (in)
			fclose(in);
	}
}
