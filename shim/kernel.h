/* Kernel interfaces that the C library's headers lack: numbers and layouts from the kernel's user-space headers. */
#ifndef HATCHWAY_KERNEL_H
#define HATCHWAY_KERNEL_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef AT_EMPTY_PATH
#define AT_EMPTY_PATH 0x1000
#endif
#define K_OPEN_TREE_CLONE 1
#define K_OPEN_TREE_CLOEXEC 02000000
#define K_MOVE_MOUNT_F_EMPTY_PATH 0x4
#define K_FSCONFIG_SET_STRING 1
#define K_FSCONFIG_CMD_CREATE 6
#define K_FSOPEN_CLOEXEC 1
#define K_FSMOUNT_CLOEXEC 1
#define K_ATTR_RDONLY 0x1
#define K_ATTR_NOSUID 0x2
#define K_ATTR_NODEV 0x4
#define K_ATTR_NOEXEC 0x8
#define K_CLOSE_RANGE_CLOEXEC 4

struct k_mount_attr {
	uint64_t attr_set, attr_clr, propagation, userns_fd;
};

struct k_clone_args {
	uint64_t flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls;
};

struct k_cap_header {
	uint32_t version;
	int pid;
};

struct k_cap_data {
	uint32_t effective, permitted, inheritable;
};

#define K_CAP_VERSION_3 0x20080522
/* NOROOT, NO_SETUID_FIXUP and NO_CAP_AMBIENT_RAISE, each with its lock, and the lock of KEEP_CAPS (which stays off). */
#define K_SECUREBITS (1u << 0 | 1u << 1 | 1u << 2 | 1u << 3 | 1u << 5 | 1u << 6 | 1u << 7)

/* seccomp's questions to a supervisor. */
struct k_notification {
	uint64_t id;
	uint32_t pid, flags;
	int number;
	uint32_t architecture;
	uint64_t instruction, argument[6];
};

struct k_notification_answer {
	uint64_t id;
	int64_t value;
	int error;
	uint32_t flags;
};

struct k_notification_fd {
	uint64_t id;
	uint32_t flags, from, new_fd, new_flags;
};

#define K_NOTIFICATION_CONTINUE 1
#define K_NOTIFICATION_RECEIVE _IOWR('!', 0, struct k_notification)
#define K_NOTIFICATION_ANSWER _IOWR('!', 1, struct k_notification_answer)
#define K_NOTIFICATION_VALID _IOW('!', 2, uint64_t)
#define K_NOTIFICATION_FD _IOW('!', 3, struct k_notification_fd)

/* netlink: what network.c asks of the kernel. */
struct k_nlmsghdr {
	uint32_t length;
	uint16_t type, flags;
	uint32_t sequence, port;
};

struct k_rtmsg {
	uint8_t family, destination_length, source_length, tos, table, protocol, scope, type;
	uint32_t flags;
};

struct k_ifinfomsg {
	uint8_t family, padding;
	uint16_t type;
	int32_t index;
	uint32_t flags, change;
};

struct k_attr_u32 {
	uint16_t length, type;
	uint32_t value;
};

#define K_NLM_F_REQUEST 1
#define K_NLM_F_ACK 4
#define K_NLM_F_EXCL 0x200
#define K_NLM_F_CREATE 0x400
#define K_RTM_SETLINK 19
#define K_RTM_NEWROUTE 24
#define K_RTM_NEWRULE 32
#define K_RTPROT_STATIC 4
#define K_RT_SCOPE_HOST 254
#define K_RTN_LOCAL 2
#define K_RTA_OIF 4
#define K_IFLA_TXQLEN 13
#define K_FR_ACT_TO_TBL 1
#define K_FRA_FWMARK 10

static inline int k_open_tree(int dir, const char *path, unsigned flags)
{
	return (int)syscall(SYS_open_tree, dir, path, flags);
}

static inline int k_move_mount(int from, const char *from_path, int to, const char *to_path, unsigned flags)
{
	return (int)syscall(SYS_move_mount, from, from_path, to, to_path, flags);
}

static inline int k_mount_setattr(int dir, const char *path, unsigned flags, struct k_mount_attr *attr)
{
	return (int)syscall(SYS_mount_setattr, dir, path, flags, attr, sizeof *attr);
}

static inline int k_fsopen(const char *type, unsigned flags)
{
	return (int)syscall(SYS_fsopen, type, flags);
}

static inline int k_fsconfig(int fs, unsigned command, const char *key, const char *value, int aux)
{
	return (int)syscall(SYS_fsconfig, fs, command, key, value, aux);
}

static inline int k_fsmount(int fs, unsigned flags, unsigned attributes)
{
	return (int)syscall(SYS_fsmount, fs, flags, attributes);
}

static inline int k_close_range(unsigned first, unsigned last, unsigned flags)
{
	return (int)syscall(SYS_close_range, first, last, flags);
}

#endif
