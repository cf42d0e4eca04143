/* Numbers of the guest channel (docs/protocols/guest-channel.md) and every bound of the agent, in one place. */
#ifndef HW_PROTO_H
#define HW_PROTO_H

#include <stdint.h>

#define HW_VERSION 1u
#ifndef HW_BUILD
#define HW_BUILD "hatchway-agent 0.1.0"
#endif

enum {
    FRAME_HEADER = 16,
    FRAME_TRAILER = 4,
    FRAME_MAX_PAYLOAD = 65536,
    FRAME_MAX = FRAME_HEADER + FRAME_MAX_PAYLOAD + FRAME_TRAILER,
    FRAME_MORE = 1, /* flags bit 0 of a SPAWN frame: another one with the same stream follows */
};

enum frame_type {
    T_HELLO = 1,
    T_HELLO_ACK = 2,
    T_READY = 3,
    T_RESPONSE = 4,
    T_PING = 16,
    T_SETUP = 17,
    T_SPAWN = 18,
    T_SIGNAL = 19,
    T_CLOSE = 20,
    T_RESIZE = 21,
    T_SYNC = 22,
    T_FREEZE = 23,
    T_THAW = 24,
    T_RESIZE_DISK = 25,
    T_SHUTDOWN = 26,
    T_METRICS = 27,
    T_DIAL = 28,
    T_OUTPUT = 32,
    T_OUTPUT_ACK = 33,
    T_INPUT = 34,
    T_INPUT_ACK = 35,
    T_PROC = 36,
};

enum field_tag {
    F_VERSION = 1,
    F_NONCE = 2,
    F_EPOCH = 3,
    F_BOOT_ID = 4,
    F_AGENT = 5,
    F_UPTIME_NS = 6,
    F_STATUS = 7,
    F_MESSAGE = 8,
    F_TIME_NS = 9,
    F_ENTROPY = 10,
    F_HOSTNAME = 11,
    F_MACHINE_ID = 12,
    F_ENV = 13,
    F_ARG = 14,
    F_CWD = 15,
    F_USER = 16,
    F_SIGNAL = 17,
    F_SCOPE = 18,
    F_OFFSET = 19,
    F_LIMIT = 20,
    F_FD = 21,
    F_KEY = 22,
    F_UID = 23,
    F_GID = 24,
    F_ROWS = 25,
    F_COLS = 26,
    F_FLAGS = 27,
    F_TIMEOUT_MS = 28,
    F_PID = 29,
    F_EXIT_CODE = 30,
    F_EXIT_SIGNAL = 31,
    F_REASON = 32,
    F_STDOUT_TOTAL = 33,
    F_STDERR_TOTAL = 34,
    F_STDIN_OFFSET = 35,
    F_UTIME_US = 36,
    F_STIME_US = 37,
    F_MAXRSS_KIB = 38,
    F_STATE = 39,
    F_SIZE = 40,
    F_STDOUT_ACK = 41,
    F_STDERR_ACK = 42,
    F_WALL_US = 43,
    F_MEM_TOTAL_KIB = 44,
    F_MEM_AVAILABLE_KIB = 45,
    F_DISK_TOTAL = 46,
    F_DISK_FREE = 47,
    F_LIMIT_MEMORY = 48,
    F_LIMIT_CPU_MS = 49,
    F_LIMIT_NOFILE = 50,
    F_LIMIT_PIDS = 51,
    F_PORT = 52,
    F_HOST = 53,
    F_CPUS = 54,
    F_PROCESSES = 55,
    F_LOAD1_MILLI = 56,
    F_LIMIT_FSIZE = 57,
    F_CA = 58,
    F_MEM_CACHED_KIB = 59,
};

enum spawn_flag { SPAWN_STDIN = 1, SPAWN_PTY = 2, SPAWN_MERGE = 4, SPAWN_BUILTIN = 8, SPAWN_TIMEOUT_LEADER = 16 };
enum setup_flag { SETUP_REPLACE_ENV = 1, SETUP_RENEW_KEYS = 2 };
enum shutdown_flag { SHUTDOWN_REBOOT = 1 };
enum close_flag { CLOSE_IF_OVER = 1 };
enum signal_scope { SCOPE_TREE = 0, SCOPE_LEADER = 1 };
enum proc_state { STATE_STARTING = 0, STATE_RUNNING = 1, STATE_EXITED = 2, STATE_CLOSED = 3 };
enum exit_reason {
    REASON_NONE = 0,
    REASON_EXITED = 1,
    REASON_SIGNALED = 2,
    REASON_TIMEOUT = 3,
    REASON_OOM = 4,
    REASON_SPAWN_FAILED = 5,
};

enum {
    MAX_PROCS = 256,
    MAX_BUILTINS = 32,    /* known at once, beside the processes */
    MAX_CONNECTIONS = 512,
    MAX_PLACES = MAX_PROCS + MAX_BUILTINS + MAX_CONNECTIONS,
    MAX_REQUESTS = 32,          /* in progress at once */
    MAX_WAITERS = 4,            /* requests that wait for the same start or connection */
    DIAL_MS = 10000,
    MAX_STRINGS = 1024,         /* ARG and ENV fields of one SPAWN */
    MAX_STRING_BYTES = 1 << 20, /* of them in all */
    MAX_SPAWN_FRAMES = 17,
    MAX_ASSEMBLIES = 4,              /* SPAWNs of several frames that are under way */
    MAX_SPAWN_BYTES = 4 << 20,       /* of SPAWNs under way, in all */
    MAX_KEY = 64,
    MAX_MESSAGE = 512,
    MAX_PATH = 4096,
    MAX_HOSTNAME = 64,
    BOOT_ID_LENGTH = 36,
    MAX_ENTROPY = 512,
    MAX_CA = 16384,
    MAX_FREEZE_MS = 60000,
    MAX_GROUPS = 64,
    MAX_HOST = 64,
    MIN_LIMIT_MEMORY = 1 << 20,
    MAX_LIMIT_NOFILE = 1 << 20,
    MAX_ACCOUNT_FILE = 1 << 20, /* /etc/passwd, /etc/group */

    CHUNK = 4096,
    OUTPUT_FRAME_DATA = 65536 - FRAME_HEADER - FRAME_TRAILER - 16, /* two writes to the port, which takes 32 KiB in one */
    OUTPUT_BYTES = 8 * OUTPUT_FRAME_DATA, /* kept per output stream */
    OUTPUT_POOL_BYTES = 16 << 20,    /* kept over all processes */
    INPUT_BYTES = 512 << 10,         /* buffered per process, while INPUT_POOL_LARGE lasts */
    INPUT_BYTES_SMALL = 8 << 10,     /* for the processes after that */
    INPUT_POOL_LARGE = 8 << 20,
    FLOOD_PIPE = 256 << 10,          /* what the pipe of a stream holds once much goes through it */
};

#endif
