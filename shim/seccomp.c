/* System calls that no VMM needs and that widen what it can try on the host's kernel. A VMM's own filter comes on top. */
#include "shim.h"

#include <errno.h>
#include <sched.h>
#include <stddef.h>
#include <sys/prctl.h>


#define SECCOMP_SET_MODE_FILTER_ 1
#define NEW_LISTENER 8
#define RET_ALLOW 0x7fff0000u
#define RET_ERRNO 0x00050000u
#define RET_KILL 0x80000000u
#define RET_ASK 0x7fc00000u

#if defined(__x86_64__)
#define ARCHITECTURE 0xc000003eu
#elif defined(__aarch64__)
#define ARCHITECTURE 0xc00000b7u
#else
#error "tell seccomp.c the audit number of this architecture"
#endif

struct bpf_instruction {
	uint16_t code;
	uint8_t if_true, if_false;
	uint32_t k;
};

struct bpf_program {
	uint16_t length;
	const struct bpf_instruction *instructions;
};

enum { LOAD = 0x20, EQUAL = 0x15, AT_LEAST = 0x35, ANY_BIT = 0x45, RETURN = 0x06 };

/* struct seccomp_data: number, architecture, instruction pointer, arguments (little-endian) */
enum { NUMBER = 0, ARCH = 4, ARGUMENT_0 = 16, ARGUMENT_2 = 32 };

#define NEW_NAMESPACES \
	(CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET)

static const uint32_t denied[] = {
        SYS_unshare, SYS_setns, SYS_mount, SYS_umount2, SYS_pivot_root, SYS_chroot, SYS_open_tree, SYS_move_mount, SYS_fsopen,
        SYS_fsmount, SYS_fsconfig, SYS_fspick, SYS_mount_setattr, SYS_ptrace, SYS_process_vm_readv, SYS_process_vm_writev,
        SYS_io_uring_setup, SYS_io_uring_enter, SYS_io_uring_register, /* a second way to system calls, which no filter sees */
        SYS_bpf, SYS_perf_event_open, SYS_keyctl, SYS_add_key, SYS_request_key, SYS_init_module, SYS_finit_module,
        SYS_delete_module, SYS_kexec_load, SYS_kexec_file_load, SYS_reboot, SYS_swapon, SYS_swapoff, SYS_acct, SYS_quotactl, SYS_syslog,
        SYS_open_by_handle_at, SYS_name_to_handle_at, SYS_pidfd_getfd, SYS_userfaultfd, SYS_fanotify_init, SYS_lookup_dcookie,
        SYS_settimeofday, SYS_clock_settime, SYS_adjtimex, SYS_clock_adjtime, SYS_sethostname, SYS_setdomainname, SYS_vhangup,
#ifdef SYS_modify_ldt
        SYS_modify_ldt,
#endif
};

/* Families of sockets that no VMM needs reach further than its network namespace (AF_VSOCK: the host's and other VMs' services)
 * or into rarely used parts of the kernel (AF_ALG and many more). Of netlink there is what lists interfaces. */
enum { UNIX = 1, INET = 2, INET6 = 10, NETLINK = 16, NETLINK_ROUTE_ = 0 };

/* What opens.c answers: they name a file by its path. */
static const uint32_t asked[] = {
#ifdef SYS_open
        SYS_open, SYS_stat,
#endif
        SYS_openat, SYS_newfstatat,
};

bool seccomp_confine(int *listener, char *error)
{
	enum { COUNT = sizeof denied / sizeof denied[0], ASKED = sizeof asked / sizeof asked[0] };
	struct bpf_instruction filter[(COUNT + ASKED) * 2 + 32];
	unsigned n = 0;
#define ADD(...) filter[n++] = (struct bpf_instruction){__VA_ARGS__}
	ADD(LOAD, 0, 0, ARCH);
	ADD(EQUAL, 1, 0, ARCHITECTURE);
	ADD(RETURN, 0, 0, RET_KILL);
	ADD(LOAD, 0, 0, NUMBER);
	ADD(AT_LEAST, 0, 1, 0x40000000); /* the x32 numbers, which name the same calls */
	ADD(RETURN, 0, 0, RET_KILL);
	for (unsigned i = 0; i < COUNT; i++) {
		ADD(EQUAL, 0, 1, denied[i]);
		ADD(RETURN, 0, 0, RET_ERRNO | EPERM);
	}
	for (unsigned i = 0; listener && i < ASKED; i++) {
		ADD(EQUAL, 0, 1, asked[i]);
		ADD(RETURN, 0, 0, RET_ASK);
	}
	ADD(EQUAL, 0, 9, SYS_socket);
	ADD(LOAD, 0, 0, ARGUMENT_0);
	ADD(EQUAL, 5, 0, UNIX);
	ADD(EQUAL, 4, 0, INET);
	ADD(EQUAL, 3, 0, INET6);
	ADD(EQUAL, 0, 3, NETLINK);
	ADD(LOAD, 0, 0, ARGUMENT_2);
	ADD(EQUAL, 0, 1, NETLINK_ROUTE_);
	ADD(RETURN, 0, 0, RET_ALLOW);
	ADD(RETURN, 0, 0, RET_ERRNO | EAFNOSUPPORT);
	/* clone3 keeps its flags where a filter cannot look; C libraries then use clone. */
	ADD(EQUAL, 0, 1, SYS_clone3);
	ADD(RETURN, 0, 0, RET_ERRNO | ENOSYS);
	ADD(EQUAL, 0, 3, SYS_clone);
	ADD(LOAD, 0, 0, ARGUMENT_0);
	ADD(ANY_BIT, 0, 1, NEW_NAMESPACES);
	ADD(RETURN, 0, 0, RET_ERRNO | EPERM);
	ADD(RETURN, 0, 0, RET_ALLOW);
#undef ADD
	struct bpf_program program = {(uint16_t)n, filter};
	long done = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER_, listener ? NEW_LISTENER : 0, &program);
	if (done >= 0 && listener)
		*listener = (int)done;
	return done >= 0 || failed_errno(error, "seccomp");
}
