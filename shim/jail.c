/* The jail: what the VMM can see, and the loss of everything that it must not have. */
#include "shim.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#ifndef PR_CAP_AMBIENT
#define PR_CAP_AMBIENT 47
#define PR_CAP_AMBIENT_CLEAR_ALL 4
#endif

bool jail_join_cgroups(const struct config *config, char *error)
{
	for (int i = 0; i < config->cgroups; i++)
		if (write(config->cgroup_fd[i], "0", 1) != 1)
			return failed_errno(error, "joining cgroup %d", i);
	return true;
}

bool jail_clone_tree(struct config *config, char *error)
{
	config->tree_fd = k_open_tree(config->root_fd, "", AT_EMPTY_PATH | K_OPEN_TREE_CLONE | K_OPEN_TREE_CLOEXEC);
	if (config->tree_fd < 0)
		return errno == ENOSYS ? failed(error, "this kernel has no open_tree: Linux 5.12 or newer is needed")
		                       : failed_errno(error, "the jail's root folder");
	struct k_mount_attr attr = {.attr_set = K_ATTR_RDONLY | K_ATTR_NOSUID | K_ATTR_NODEV};
	if (k_mount_setattr(config->tree_fd, "", AT_EMPTY_PATH, &attr) < 0)
		return errno == ENOSYS ? failed(error, "this kernel has no mount_setattr: Linux 5.12 or newer is needed")
		                       : failed_errno(error, "making the jail's root read-only");
	return true;
}

/* Mounts a new tmpfs on the folder `name` of the jail's root; returns its descriptor. */
static int small_tmpfs(int tree, const char *name, const char *size, const char *inodes, const char *mode, unsigned attributes,
                       char *error)
{
	int fs = k_fsopen("tmpfs", K_FSOPEN_CLOEXEC);
	if (fs < 0 || k_fsconfig(fs, K_FSCONFIG_SET_STRING, "size", size, 0) < 0 ||
	    k_fsconfig(fs, K_FSCONFIG_SET_STRING, "nr_inodes", inodes, 0) < 0 ||
	    k_fsconfig(fs, K_FSCONFIG_SET_STRING, "mode", mode, 0) < 0 ||
	    k_fsconfig(fs, K_FSCONFIG_CMD_CREATE, NULL, NULL, 0) < 0)
		return failed_errno(error, "tmpfs for /%s", name), -1;
	int mount = k_fsmount(fs, K_FSMOUNT_CLOEXEC, attributes);
	close(fs);
	if (mount < 0)
		return failed_errno(error, "tmpfs for /%s", name), -1;
	if (k_move_mount(mount, "", tree, name, K_MOVE_MOUNT_F_EMPTY_PATH) < 0)
		return failed_errno(error, "mounting /%s (the VMM tree needs that folder)", name), -1;
	return mount;
}

/* In a user namespace no device node can be made: the host's is bound over an empty file. */
static bool bind_device(int dev, const char *path, const char *name)
{
	struct k_mount_attr attr = {.attr_set = K_ATTR_RDONLY | K_ATTR_NOSUID | K_ATTR_NOEXEC};
	int source = k_open_tree(AT_FDCWD, path, K_OPEN_TREE_CLONE | K_OPEN_TREE_CLOEXEC);
	int empty = openat(dev, name, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
	bool good = source >= 0 && empty >= 0 && k_mount_setattr(source, "", AT_EMPTY_PATH, &attr) == 0 &&
	            k_move_mount(source, "", dev, name, K_MOVE_MOUNT_F_EMPTY_PATH) == 0;
	int number = errno;
	close(source);
	close(empty);
	errno = number;
	return good;
}

/* A device node of its own where that is allowed; `own` ones are the VMM's alone. */
static bool add_device(const struct config *config, int dev, const char *name, bool own, char *error)
{
	char path[32];
	struct stat stat;
	snprintf(path, sizeof path, "/dev/%s", name);
	if (lstat(path, &stat) < 0)
		return failed_errno(error, "%s", path);
	if (!S_ISCHR(stat.st_mode))
		return failed(error, "%s is not a character device", path);
	bool good;
	if (!config->no_userns_drop && mknodat(dev, name, S_IFCHR | (own ? 0600 : 0666), stat.st_rdev) == 0)
		good = !own || fchownat(dev, name, config->uid, config->gid, AT_SYMLINK_NOFOLLOW) == 0;
	else
		good = bind_device(dev, path, name);
	return good || failed_errno(error, "%s in the jail", path);
}

static bool populate(const struct config *config, char *error)
{
	umask(0);
	int dev = small_tmpfs(config->tree_fd, "dev", "64k", "16", "0755", K_ATTR_NOSUID | K_ATTR_NOEXEC, error);
	if (dev < 0)
		return false;
	bool good = add_device(config, dev, "null", false, error) && add_device(config, dev, "zero", false, error) &&
	            add_device(config, dev, "urandom", false, error);
	for (int i = 0; good && i < config->devices; i++)
		good = add_device(config, dev, config->device[i], true, error);
	if (good) {
		struct k_mount_attr attr = {.attr_set = K_ATTR_RDONLY | K_ATTR_NOSUID | K_ATTR_NOEXEC};
		if (k_mount_setattr(dev, "", AT_EMPTY_PATH, &attr) < 0)
			good = failed_errno(error, "making /dev read-only");
	}
	close(dev);
	if (!good)
		return false;
	int tmp = small_tmpfs(config->tree_fd, "tmp", "4m", "256", "1777", K_ATTR_NOSUID | K_ATTR_NODEV | K_ATTR_NOEXEC, error);
	if (tmp >= 0)
		close(tmp);
	return tmp >= 0;
}

/* A procfs that is attached nowhere: only the shim, through this descriptor, can look at its VMM with it. Not being able to
 * make one (a container that hides parts of /proc) costs capture and inject, not the VM. */
static void private_proc(struct config *config)
{
	int fs = k_fsopen("proc", K_FSOPEN_CLOEXEC);
	if (fs >= 0 && k_fsconfig(fs, K_FSCONFIG_CMD_CREATE, NULL, NULL, 0) == 0)
		config->proc_fd = k_fsmount(fs, K_FSMOUNT_CLOEXEC, K_ATTR_NOSUID | K_ATTR_NODEV | K_ATTR_NOEXEC);
	if (config->proc_fd < 0)
		failed_errno(config->proc_error, "no private procfs");
	if (fs >= 0)
		close(fs);
}

/* The score survives fork and exec, and cannot be lowered again by the VMM. */
static void expect_oom_first(const struct config *config)
{
	if (config->proc_fd < 0)
		return;
	int fd = openat(config->proc_fd, "self/oom_score_adj", O_WRONLY | O_CLOEXEC);
	if (fd >= 0) {
		ssize_t ignored = write(fd, "500", 3);
		(void)ignored;
		close(fd);
	}
}

bool jail_enter(struct config *config, char *error)
{
	if (mount("", "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0)
		return failed_errno(error, "private mounts");
	private_proc(config);
	int old = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (old < 0 || k_move_mount(config->tree_fd, "", AT_FDCWD, "/", K_MOVE_MOUNT_F_EMPTY_PATH) < 0)
		return failed_errno(error, "mounting the jail's root");
	if (!populate(config, error))
		return false;
	if (fchdir(config->tree_fd) < 0 || syscall(SYS_pivot_root, ".", ".") < 0)
		return failed_errno(error, "pivot_root");
	if (fchdir(old) < 0 || umount2(".", MNT_DETACH) < 0 || chdir("/") < 0)
		return failed_errno(error, "detaching the host's file systems");
	close(old);
	close(config->tree_fd);
	if (sethostname("hatchway", 8) < 0)
		return failed_errno(error, "sethostname");
	return true;
}

bool jail_set_limits(const struct config *config, char *error)
{
	struct {
		int what;
		unsigned long long value;
	} limits[] = {
	        {RLIMIT_CORE, 0},
	        {RLIMIT_NOFILE, config->nofile},
	        {RLIMIT_FSIZE, config->fsize},
	        {RLIMIT_NPROC, config->nproc},
	        {RLIMIT_MSGQUEUE, 0},
	};
	for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++) {
		struct rlimit now, want = {limits[i].value, limits[i].value};
		if (getrlimit(limits[i].what, &now) < 0)
			return failed_errno(error, "getrlimit %d", limits[i].what);
		if (want.rlim_max > now.rlim_max) /* only ever lower: a user namespace's root may not raise */
			want.rlim_cur = want.rlim_max = now.rlim_max;
		if (setrlimit(limits[i].what, &want) < 0)
			return failed_errno(error, "setrlimit %d", limits[i].what);
	}
	return true;
}

static bool capabilities_gone(void)
{
	struct k_cap_header header = {.version = K_CAP_VERSION_3};
	struct k_cap_data data[2] = {0};
	if (syscall(SYS_capget, &header, data) < 0)
		return false;
	return !(data[0].effective | data[0].permitted | data[0].inheritable | data[1].effective | data[1].permitted |
	         data[1].inheritable);
}

bool jail_drop(const struct config *config, bool vmm, char *error)
{
	if (vmm)
		expect_oom_first(config);
	for (int cap = 0; cap < 64; cap++)
		if (prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) < 0) {
			if (errno == EINVAL)
				break;
			return failed_errno(error, "dropping capability %d", cap);
		}
	if (prctl(PR_SET_SECUREBITS, K_SECUREBITS, 0, 0, 0) < 0)
		return failed_errno(error, "securebits");
	if (!config->no_userns_drop) {
		if (syscall(SYS_setgroups, 0, NULL) < 0 || syscall(SYS_setresgid, config->gid, config->gid, config->gid) < 0 ||
		    syscall(SYS_setresuid, config->uid, config->uid, config->uid) < 0)
			return failed_errno(error, "changing to uid %u", config->uid);
	}
	struct k_cap_header header = {.version = K_CAP_VERSION_3};
	struct k_cap_data none[2] = {0};
	if (syscall(SYS_capset, &header, none) < 0)
		return failed_errno(error, "capset");
	prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
		return failed_errno(error, "no_new_privs");
	/* The VMM has the shim's uid: it must not be able to look into it or steer it. (exec makes the VMM dumpable again.) */
	if (prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) < 0)
		return failed_errno(error, "dumpable");
	if (!capabilities_gone())
		return failed(error, "capabilities are still there after dropping them");
	if (!config->no_userns_drop && (getuid() != config->uid || geteuid() != config->uid || setuid(0) == 0))
		return failed(error, "root is still reachable after changing to uid %u", config->uid);
	return true;
}

/* Puts every passed descriptor at its number. They first move out of the way, above all targets. A VMM that takes paths gets none. */
static bool place_descriptors(const struct config *config, struct exec_fds *fds)
{
	struct pass list[MAX_PASS + 1];
	int count = config->paths ? 0 : config->passes;
	memcpy(list, config->pass, sizeof config->pass);
	if (config->tap_to != 0 && !config->paths)
		list[count++] = (struct pass){config->tap_fd, config->tap_to};
	int null = open("/dev/null", O_RDWR | O_CLOEXEC);
	int report = fcntl(fds->report, F_DUPFD_CLOEXEC, MAX_TARGET_FD + 1);
	int opens = fds->opens < 0 ? -1 : fcntl(fds->opens, F_DUPFD_CLOEXEC, MAX_TARGET_FD + 1);
	if (null < 0 || report < 0 || (fds->opens >= 0 && opens < 0) || dup2(null, 0) < 0 || dup2(fds->console, 1) < 0 ||
	    dup2(fds->log, 2) < 0)
		return false;
	for (int i = 0; i < count; i++)
		if ((list[i].from = fcntl(list[i].from, F_DUPFD_CLOEXEC, MAX_TARGET_FD + 1)) < 0)
			return false;
	if (k_close_range(3, MAX_TARGET_FD, 0) < 0 || k_close_range(MAX_TARGET_FD + 1, ~0u, K_CLOSE_RANGE_CLOEXEC) < 0)
		return false;
	for (int i = 0; i < count; i++)
		if (dup2(list[i].from, list[i].to) < 0)
			return false;
	fds->report = report;
	fds->opens = opens;
	return true;
}

/* The last thing before the VMM is executed: its system calls are bounded, and its opens answered by the shim. */
static bool confine(const struct config *config, const struct exec_fds *fds, char *error)
{
	int listener = -1;
	if (!seccomp_confine(config->paths ? &listener : NULL, error))
		return false;
	return !config->paths || send_fd(fds->opens, "opens", 5, listener) || failed_errno(error, "handing over its opens");
}

/* In the VMM's process. Returns only by failing, then having written the reason to fds.report. */
int exec_vmm(const struct config *config, struct exec_fds fds)
{
	char error[ERROR_BYTES + 16] = "";
	sigset_t none;
	/* The first process reads our number in its own PID namespace off this message. */
	if (send(fds.sync, "vmm", 3, MSG_NOSIGNAL) != 3)
		failed_errno(error, "jail_failed telling the launcher");
	else if (!jail_drop(config, true, error + snprintf(error, sizeof error, "jail_failed ")))
		;
	else if (prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) < 0)
		failed_errno(error, "jail_failed death signal");
	else if (!place_descriptors(config, &fds))
		failed_errno(error, "jail_failed passing descriptors");
	else if (!jail_set_limits(config, error + snprintf(error, sizeof error, "jail_failed ")))
		;
	else if (!confine(config, &fds, error + snprintf(error, sizeof error, "jail_failed ")))
		;
	else {
		sigemptyset(&none);
		for (int signal_number = 1; signal_number < NSIG; signal_number++)
			signal(signal_number, SIG_DFL);
		sigprocmask(SIG_SETMASK, &none, NULL);
		execve(config->argv[0], config->argv, config->env);
		failed_errno(error, "spawn_failed %.200s", config->argv[0]);
	}
	ssize_t ignored = write(fds.report, error, strlen(error));
	(void)ignored;
	return 127;
}
