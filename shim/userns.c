/* Rootless: the launcher is run as root of a user namespace with one id, the invoking user's. */
#include "shim.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>

static bool put(const char *path, const char *text, char *error)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC);
	bool good = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);
	if (!good)
		failed_errno(error, "%s", path);
	if (fd >= 0)
		close(fd);
	return good;
}

int netns_exec(const char *fd, char **argv)
{
	if (setns(atoi(fd), CLONE_NEWNET) < 0) {
		fprintf(stderr, "hatchway-shim: entering the network namespace: %s\n", strerror(errno));
		return 125;
	}
	execv(argv[0], argv);
	fprintf(stderr, "hatchway-shim: %s: %s\n", argv[0], strerror(errno));
	return 125;
}

int userns_exec(char **argv)
{
	char error[ERROR_BYTES], uid_map[32], gid_map[32];
	snprintf(uid_map, sizeof uid_map, "0 %u 1\n", geteuid());
	snprintf(gid_map, sizeof gid_map, "0 %u 1\n", getegid());
	if (unshare(CLONE_NEWUSER | CLONE_NEWNS) < 0) {
		fprintf(stderr,
		        "hatchway-shim: no user namespace: %s. Run as root, or allow them: sysctl kernel.unprivileged_userns_clone=1, "
		        "user.max_user_namespaces > 0, kernel.apparmor_restrict_unprivileged_userns=0\n",
		        strerror(errno));
		return 125;
	}
	if (!put("/proc/self/setgroups", "deny", error) || !put("/proc/self/uid_map", uid_map, error) ||
	    !put("/proc/self/gid_map", gid_map, error)) {
		fprintf(stderr, "hatchway-shim: %s\n", error);
		return 125;
	}
	if (mount("", "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0) {
		fprintf(stderr, "hatchway-shim: private mounts: %s\n", strerror(errno));
		return 125;
	}
	execv(argv[0], argv);
	fprintf(stderr, "hatchway-shim: %s: %s\n", argv[0], strerror(errno));
	return 127;
}
