/* Pieces of the kernel's interface that a C library may lack headers for (musl-gcc ships none of <linux/...>), and system
   calls that leave errno alone: the child of a spawn shares the agent's memory and must not touch it. */
#ifndef HW_ABI_H
#define HW_ABI_H

#include <stdint.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>

#ifndef SYS_clone3
#define SYS_clone3 435
#endif
#ifndef SYS_close_range
#define SYS_close_range 436
#endif
#ifndef SYS_openat2
#define SYS_openat2 437
#endif
#ifndef SYS_finit_module
#error "finit_module is required"
#endif

#define HW_CLONE_VM 0x00000100ull
#define HW_CLONE_CLEAR_SIGHAND 0x100000000ull
#define HW_CLONE_INTO_CGROUP 0x200000000ull
#define HW_CLONE_NEWNS 0x00020000

struct hw_clone_args {
    uint64_t flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid, set_tid_size, cgroup;
};

struct hw_open_how {
    uint64_t flags, mode, resolve;
};
#define HW_RESOLVE_NO_MAGICLINKS 0x02
#define HW_RESOLVE_BENEATH 0x08
#define HW_RESOLVE_IN_ROOT 0x10

#define HW_FIFREEZE _IOWR('X', 119, int)
#define HW_FITHAW _IOWR('X', 120, int)
#define HW_RNDADDENTROPY _IOW('R', 0x03, int[2])
#define HW_RNDRESEEDCRNG _IO('R', 0x07)
#define HW_EXT4_IOC_RESIZE_FS _IOW('f', 16, uint64_t)
#define HW_BLKGETSIZE64 _IOR(0x12, 114, size_t)
#define HW_TIOCGPTPEER _IO('T', 0x41)
#define HW_TIOCSPTLCK _IOW('T', 0x31, int)

static inline long raw6(long n, long a, long b, long c, long d, long e, long f)
{
#if defined(__x86_64__)
    long result;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
#elif defined(__aarch64__)
    register long x8 __asm__("x8") = n;
    register long x0 __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    register long x4 __asm__("x4") = e;
    register long x5 __asm__("x5") = f;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
    return x0;
#else
#error "x86_64 or aarch64"
#endif
}

#define RAW(n, a, b, c, d) raw6((n), (long)(a), (long)(b), (long)(c), (long)(d), 0, 0)

/* clone3() whose child runs fn(argument) on the stack named in args and never returns. Gives the pid or -errno. */
long hw_clone3(struct hw_clone_args *args, unsigned long size, void (*fn)(void *), void *argument);

/* Asynchronous writes, of linux/aio_abi.h. */
struct hw_iocb {
    uint64_t data;
    uint32_t key, rw_flags;
    uint16_t opcode;
    int16_t priority;
    uint32_t fd;
    uint64_t buffer, length;
    int64_t offset;
    uint64_t reserved;
    uint32_t flags, result_fd;
};
struct hw_io_event {
    uint64_t data, request;
    int64_t result, result2;
};
enum { HW_IOCB_PWRITE = 1 };

#endif
