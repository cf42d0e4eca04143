#include "setup.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "abi.h"
#include "agent.h"
#include "channel.h"
#include "helper.h"
#include "init.h"
#include "loop.h"
#include "proto.h"
#include "trust.h"

enum { MAX_ENV_BYTES = 256 << 10, MAX_HOSTS_FILE = 64 << 10, SMALL_ENV = 16 << 10 };

static const char *no_environment[] = {NULL};
static const char **environment = no_environment; /* one piece of memory: pointers, then text */

/* A usual environment fits here, in pages that are there since the start: asking the kernel for memory costs milliseconds
   after a restore. Two, because the next one is made while the former is read. */
static _Alignas(16) char small_environment[2][SMALL_ENV];

static void *environment_room(size_t size)
{
    if (size > SMALL_ENV)
        return malloc(size);
    return (char *)environment == small_environment[0] ? small_environment[1] : small_environment[0];
}

static void environment_free(const char **old)
{
    if (old != no_environment && (char *)old != small_environment[0] && (char *)old != small_environment[1])
        free((void *)old);
}

const char *const *setup_environment(void) { return environment; }

/* ---- files of the sandbox ----

   Host name, hosts and machine-id lie on a small tmpfs and are bound over the sandbox's own: SETUP stands between a restore
   and a sandbox that is ready, where the processor is emulated every line of kernel code is translated first, and a write to
   memory takes a tenth of what a write through the overlay to a journal takes. */

#define IDENTITY "/hw/identity"

enum { IDENTITY_PAGE = 4096 };

struct identity_file {
    const char *name; /* of the file in the memory */
    const char *path; /* what it lies over, in the sandbox */
    int fd;           /* what the processes see, or -1 */
    int disk_fd;      /* what lies under it, on the disk, or -1 */
    char *page;       /* its first page, mapped, or NULL */
    _Alignas(8) char last[IDENTITY_PAGE]; /* what we wrote last, zeros behind it */
    size_t length;
};

static struct identity_file hostname_file = {.name = "hostname", .path = "/etc/hostname", .fd = -1, .disk_fd = -1};
static struct identity_file hosts_file = {.name = "hosts", .path = "/etc/hosts", .fd = -1, .disk_fd = -1};
static struct identity_file machine_id_file = {.name = "machine-id", .path = "/etc/machine-id", .fd = -1, .disk_fd = -1};
/* What the kernel says is the same in everything that is restored from one snapshot. */
static struct identity_file boot_id_file = {
    .name = "boot_id", .path = "/proc/sys/kernel/random/boot_id", .fd = -1, .disk_fd = -1};

static sigjmp_buf no_page;
static char *volatile touched; /* the page that no_page is about, or NULL */

/* Anybody with root's rights may send SIGBUS, at any time: only a fault (the kernel lets nobody forge its code) in the page that is
   being touched leads back there. */
static void page_is_gone(int signal_number, siginfo_t *info, void *context)
{
    (void)context;
    if (info->si_code <= 0)
        return;
    char *page = touched;
    if (!page || (char *)info->si_addr < page || (char *)info->si_addr >= page + IDENTITY_PAGE) {
        signal(signal_number, SIG_DFL); /* a fault of ours: it comes again and ends us, as without a handler */
        return;
    }
    siglongjmp(no_page, 1);
}

static void touch_nothing(void)
{
    __asm__ volatile("" ::: "memory"); /* what was to be done to the page is done */
    touched = NULL;
}

/* By words: the library's memcmp goes octet by octet, eight times as many instructions to translate and emulate. */
static bool same_page(const char *page, const char *last)
{
    typedef uint64_t __attribute__((may_alias)) word;
    const word *left = (const word *)page, *right = (const word *)last;
    for (size_t i = 0; i < IDENTITY_PAGE / sizeof *left; i++)
        if (left[i] != right[i])
            return false;
    return true;
}

/* Not inlined: no variable of its caller may live across what a jump back comes to. */
__attribute__((noinline)) static bool overwrite(struct identity_file *file, const char *text, size_t length)
{
    bool ours = same_page(file->page, file->last);
    if (ours) {
        memcpy(file->page, text, length);
        memcpy(file->last, text, length);
    }
    touch_nothing();
    return ours;
}

/* Overwrites the file through its mapping, with no system call, where it is as we left it and keeps its length. A process that
   emptied it has taken the page away: then touching it is a SIGBUS, and the answer is no. */
static bool put_in_place(struct identity_file *file, const char *text, size_t length)
{
    if (!file->page || length != file->length || length == 0)
        return false;
    touched = file->page;
    if (sigsetjmp(no_page, 0) != 0) {
        touched = NULL;
        return false;
    }
    return overwrite(file, text, length);
}

static int write_whole(int fd, const char *text, size_t length)
{
    struct stat st;
    if (pwrite(fd, text, length, 0) != (ssize_t)length)
        return errno ? errno : ENOSPC;
    if (fstat(fd, &st) != 0 || ((size_t)st.st_size != length && ftruncate(fd, (off_t)length) != 0))
        return errno;
    return 0;
}

static int put_file(struct identity_file *file, const char *text, size_t length)
{
    if (file->fd < 0 || put_in_place(file, text, length))
        return 0; /* one that could not be laid out was told of */
    int error = write_whole(file->fd, text, length);
    file->length = 0;
    if (error == 0 && length > 0 && length <= sizeof file->last) {
        memset(file->last, 0, sizeof file->last);
        memcpy(file->last, text, length);
        file->length = length;
        touched = file->page;
        if (file->page && sigsetjmp(no_page, 0) == 0)
            *(volatile char *)file->page = text[0]; /* so that the page is there when it counts */
        touch_nothing();
    }
    return error;
}

static size_t get_file(int fd, char *to, size_t room)
{
    ssize_t n = fd < 0 ? 0 : pread(fd, to, room, 0);
    return n > 0 ? (size_t)n : 0;
}

/* Gives the file a body in memory, with what the disk has of it, and binds it over the one on the disk. */
static void lay_out(struct identity_file *file)
{
    static char text[MAX_HOSTS_FILE];
    char path[64], target[64];
    struct stat st;
    bool on_disk = file != &boot_id_file;
    int disk_fd = on_disk ? open_in_root(file->path, O_RDWR | O_CREAT | O_NONBLOCK, 0644) : open_in_root(file->path, O_RDONLY, 0);
    if (disk_fd < 0 || fstat(disk_fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        say("%s: %s", file->path, disk_fd < 0 ? strerror(-disk_fd) : "not a file");
        if (disk_fd >= 0)
            close(disk_fd);
        return;
    }
    snprintf(path, sizeof path, IDENTITY "/%s", file->name);
    snprintf(target, sizeof target, "/proc/self/fd/%d", disk_fd);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    size_t length = get_file(disk_fd, text, sizeof text);
    if (fd < 0 || write_whole(fd, text, length) != 0 || mount(path, target, NULL, MS_BIND, NULL) != 0) {
        say("%s: %s", file->path, strerror(errno));
        close(disk_fd);
        if (fd >= 0)
            close(fd);
        return;
    }
    file->fd = fd;
    if (on_disk)
        file->disk_fd = disk_fd;
    else
        close(disk_fd);
    void *page = mmap(NULL, IDENTITY_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    file->page = page == MAP_FAILED ? NULL : page;
}

void setup_lay_out(void)
{
    make_folder(IDENTITY, 0700);
    must_mount("identity", IDENTITY, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=700,size=512k");
    struct sigaction action = {.sa_sigaction = page_is_gone, .sa_flags = SA_NODEFER | SA_SIGINFO};
    sigaction(SIGBUS, &action, NULL);
    lay_out(&hostname_file);
    lay_out(&hosts_file);
    lay_out(&machine_id_file);
    lay_out(&boot_id_file);
}

void setup_keep(void)
{
    static char text[MAX_HOSTS_FILE];
    struct identity_file *const files[] = {&hostname_file, &hosts_file, &machine_id_file};
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        size_t length = get_file(files[i]->fd, text, sizeof text);
        if (files[i]->disk_fd < 0)
            continue;
        if (length > 0 && length < sizeof text && write_whole(files[i]->disk_fd, text, length) != 0)
            say("%s could not be kept: %s", files[i]->path, strerror(errno));
        close(files[i]->disk_fd); /* open for writing, it would keep the disk from being made read-only */
        files[i]->disk_fd = -1;
    }
}

/* The line of the sandbox's own name in /etc/hosts, always of one length: another name changes nothing around it. */
enum { OWN_NAME = 10, OWN_LINE = OWN_NAME + MAX_HOSTNAME + 1 };
static const char OWN_ADDRESS[] = "127.0.1.1\t";

static void own_line(char *to, const char *hostname)
{
    size_t length = strlen(hostname);
    memcpy(to, OWN_ADDRESS, OWN_NAME);
    memcpy(to + OWN_NAME, hostname, length);
    memset(to + OWN_NAME + length, ' ', MAX_HOSTNAME - length);
    to[OWN_LINE - 1] = '\n';
}

/* Makes the sandbox's own name resolve (sudo asks for it): the line of 127.0.1.1 in /etc/hosts is ours, the rest is kept. */
static int put_hosts(const char *hostname)
{
    static char old[MAX_HOSTS_FILE], new[MAX_HOSTS_FILE + OWN_LINE];
    if (hosts_file.length >= OWN_LINE) { /* we wrote it last, our line behind the others: only that changes */
        memcpy(new, hosts_file.last, hosts_file.length);
        own_line(new + hosts_file.length - OWN_LINE, hostname);
        if (put_in_place(&hosts_file, new, hosts_file.length))
            return 0;
    }
    size_t length = get_file(hosts_file.fd, old, sizeof old), out = 0;
    if (length == sizeof old)
        return 0; /* somebody's own, and large */
    if (length == 0)
        out = (size_t)snprintf(new, sizeof new, "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n");
    for (size_t at = 0; at < length;) {
        const char *end = memchr(old + at, '\n', length - at);
        size_t line = end ? (size_t)(end - (old + at)) + 1 : length - at;
        if (line < 9 || strncmp(old + at, "127.0.1.1", 9) != 0 || (line > 9 && !isspace((unsigned char)old[at + 9]))) {
            memcpy(new + out, old + at, line);
            out += line;
            if (!end)
                new[out++] = '\n';
        }
        at += line;
    }
    own_line(new + out, hostname);
    return put_file(&hosts_file, new, out + OWN_LINE);
}

static int put_hostname(const char *hostname)
{
    char line[MAX_HOSTNAME + 2];
    size_t length = strlen(hostname);
    if (sethostname(hostname, length) != 0)
        return errno;
    memcpy(line, hostname, length);
    line[length] = '\n';
    int error = put_file(&hostname_file, line, length + 1);
    return error ? error : put_hosts(hostname);
}

static int put_machine_id(const char *id)
{
    char line[33];
    memcpy(line, id, 32);
    line[32] = '\n';
    return put_file(&machine_id_file, line, sizeof line);
}

static int put_boot_id(const char *id)
{
    char line[BOOT_ID_LENGTH + 1];
    memcpy(line, id, BOOT_ID_LENGTH);
    line[BOOT_ID_LENGTH] = '\n';
    return put_file(&boot_id_file, line, sizeof line);
}

static bool valid_hostname(const char *name);
static bool valid_machine_id(const char *id);

/* A line that a file of the sandbox consists of, without its end; "" when there is none. */
static void get_line(int fd, char *to, size_t room)
{
    size_t n = get_file(fd, to, room - 1);
    to[n] = 0;
    to[strcspn(to, "\n")] = 0;
}

static bool has_host_keys(void);

void setup_first(void)
{
    memset(small_environment, 1, sizeof small_environment); /* the pages are there from now on */
    static const char digits[] = "0123456789abcdef";
    char id[40], hostname[MAX_HOSTNAME + 2];
    uint8_t random[16];
    get_line(machine_id_file.fd, id, sizeof id);
    if (!valid_machine_id(id) && agent.random_fd >= 0 && read(agent.random_fd, random, 16) == 16) {
        for (int i = 0; i < 16; i++) {
            id[2 * i] = digits[random[i] >> 4];
            id[2 * i + 1] = digits[random[i] & 15];
        }
        id[32] = 0;
    }
    get_line(hostname_file.fd, hostname, sizeof hostname);
    if (!valid_hostname(hostname))
        strcpy(hostname, "sandbox");
    int error = put_machine_id(id);
    if (error == 0)
        error = put_hostname(hostname);
    get_line(boot_id_file.fd, id, sizeof id);
    if (error == 0 && strlen(id) == BOOT_ID_LENGTH)
        error = put_boot_id(id); /* the page is there from now on */
    if (error)
        say("identity files: %s", strerror(error));
    has_host_keys(); /* looked at once before anything is restored */
}

/* ---- the request ---- */

static bool valid_hostname(const char *name)
{
    size_t length = strlen(name);
    if (length == 0 || length > MAX_HOSTNAME || name[0] == '-' || name[0] == '.')
        return false;
    for (size_t i = 0; i < length; i++)
        if (!isalnum((unsigned char)name[i]) && name[i] != '-' && name[i] != '.')
            return false;
    return true;
}

static bool valid_machine_id(const char *id)
{
    return strlen(id) == 32 && strspn(id, "0123456789abcdef") == 32;
}

static bool valid_boot_id(const char *id)
{
    static const char form[] = "00000000-0000-0000-0000-000000000000";
    for (size_t i = 0; i < BOOT_ID_LENGTH; i++)
        if (form[i] == '-' ? id[i] != '-' : !id[i] || !strchr("0123456789abcdef", id[i]))
            return false;
    return id[BOOT_ID_LENGTH] == 0;
}

static int add_entropy(const uint8_t *data, size_t length)
{
    struct {
        int bits, size;
        uint8_t data[MAX_ENTROPY];
    } pool = {.bits = (int)length * 8, .size = (int)length};
    if (agent.random_fd < 0)
        return 0;
    memcpy(pool.data, data, length);
    if (ioctl(agent.random_fd, HW_RNDADDENTROPY, &pool) != 0 || ioctl(agent.random_fd, HW_RNDRESEEDCRNG) != 0)
        return errno;
    return 0;
}

static bool replaced(const uint8_t *payload, size_t length, const char *old)
{
    struct field_reader reader = fields_of(payload, length);
    struct field field;
    size_t name = strcspn(old, "=") + 1;
    while (field_next(&reader, &field))
        if (field.tag == F_ENV && field.length >= name && memcmp(field.value, old, name) == 0)
            return true;
    return false;
}

/* Merges the ENV fields into the environment, or puts them in its place; 0 or errno. */
static int set_environment(const uint8_t *payload, size_t length, bool replace)
{
    struct field_reader reader = fields_of(payload, length);
    struct field field;
    size_t count = 0, octets = 0;
    while (field_next(&reader, &field)) {
        if (field.tag == F_ENV) {
            count++;
            octets += (size_t)field.length + 1;
        }
    }
    for (const char **old = environment; !replace && *old; old++) {
        if (!replaced(payload, length, *old)) {
            count++;
            octets += strlen(*old) + 1;
        }
    }
    if (count > MAX_STRINGS || octets > MAX_ENV_BYTES)
        return E2BIG;
    const char **made = environment_room((count + 1) * sizeof *made + octets);
    if (!made)
        return ENOMEM;
    char *text = (char *)(made + count + 1);
    size_t at = 0;
    for (const char **old = environment; !replace && *old; old++) {
        if (!replaced(payload, length, *old)) {
            made[at++] = text;
            text = stpcpy(text, *old) + 1;
        }
    }
    reader = fields_of(payload, length);
    while (field_next(&reader, &field)) {
        if (field.tag == F_ENV) {
            made[at++] = text;
            memcpy(text, field.value, field.length);
            text[field.length] = 0;
            text += field.length + 1;
        }
    }
    made[at] = NULL;
    environment_free(environment);
    environment = made;
    return 0;
}

/* ---- host keys ---- */

enum { KEYS_WITHIN_S = 10 };
static uint32_t keys_request;
static bool keys_under_way;

static int etc_watch = -1; /* tells that something came to /etc since it was armed */

/* Watches /etc for one change. Whoever moves it away, or mounts something over it, changes it too as far as it can be seen; a mount is not. */
static bool arm_etc_watch(void)
{
    char path[32];
    if (etc_watch < 0)
        etc_watch = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    int etc = etc_watch < 0 ? -1 : open_in_root("/etc", O_PATH | O_DIRECTORY, 0);
    if (etc < 0)
        return false;
    snprintf(path, sizeof path, "/proc/self/fd/%d", etc);
    int watch = inotify_add_watch(etc_watch, path, IN_CREATE | IN_MOVED_TO | IN_MOVE_SELF | IN_DELETE_SELF | IN_ONESHOT | IN_ONLYDIR);
    close(etc);
    return watch >= 0;
}

static bool etc_has_changed(void)
{
    _Alignas(struct inotify_event) char events[2 * (sizeof(struct inotify_event) + 256)];
    bool changed = false;
    while (read(etc_watch, events, sizeof events) > 0)
        changed = true;
    return changed || errno != EAGAIN;
}

/* Whether the sandbox has keys of a host: only then is there anything to renew. Where there is no folder for them, a look at what is watched
   says that there still is none: to walk the paths anew takes longer after a restore than all the rest of a SETUP. */
static bool has_host_keys(void)
{
    static const char *const names[] = {"rsa", "ecdsa", "ed25519", "dsa"};
    static bool no_folder;
    char path[64];
    if (no_folder && !etc_has_changed())
        return false;
    bool armed = arm_etc_watch(); /* before the look, so that what comes behind it is told */
    int folder = open_in_root("/etc/ssh", O_PATH | O_NOFOLLOW, 0);
    no_folder = armed && folder == -ENOENT;
    if (folder >= 0)
        close(folder);
    if (no_folder)
        return false;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        snprintf(path, sizeof path, "/etc/ssh/ssh_host_%s_key", names[i]);
        int fd = open_in_root(path, O_PATH | O_NOFOLLOW, 0);
        if (fd >= 0) {
            close(fd);
            return true;
        }
    }
    return false;
}

/* In a child: removes the keys and has new ones made by the sandbox's own program. */
static int work_keys(int mount_ns)
{
    static char shell[] = "sh", option[] = "-c",
                script[] = "rm -f /etc/ssh/ssh_host_*_key /etc/ssh/ssh_host_*_key.pub && exec ssh-keygen -A >/dev/null 2>&1 </dev/null",
                path[] = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    char *const argv[] = {shell, option, script, NULL}, *const envp[] = {path, NULL};
    alarm(KEYS_WITHIN_S);
    if (syscall(SYS_setns, mount_ns, HW_CLONE_NEWNS) != 0)
        return errno;
    close(mount_ns);
    execve("/bin/sh", argv, envp);
    return errno;
}

static void done_keys(unsigned context, int error)
{
    (void)context;
    keys_under_way = false;
    respond(keys_request, error ? EIO : 0, "the host keys of ssh could not be made anew (ssh-keygen -A: %d)", error);
}

void setup_request(uint32_t request, const uint8_t *payload, size_t length)
{
    struct field_reader reader = fields_of(payload, length);
    struct field field, entropy = {0}, ca = {0};
    uint64_t time_ns = 0;
    uint32_t flags = 0;
    char hostname[MAX_HOSTNAME + 1] = "", machine_id[33] = "", boot_id[BOOT_ID_LENGTH + 1] = "";
    bool env = false, authority = false, fine = true;
    while (field_next(&reader, &field)) {
        switch (field.tag) {
        case F_TIME_NS: fine &= field_u64(&field, &time_ns) && time_ns > 0; break;
        case F_FLAGS: fine &= field_u32(&field, &flags); break;
        case F_ENTROPY: fine &= field.length <= MAX_ENTROPY; entropy = field; break;
        case F_HOSTNAME: fine &= field_text(&field, hostname, sizeof hostname) && valid_hostname(hostname); break;
        case F_MACHINE_ID: fine &= field_text(&field, machine_id, sizeof machine_id) && valid_machine_id(machine_id); break;
        case F_BOOT_ID: fine &= field_text(&field, boot_id, sizeof boot_id) && valid_boot_id(boot_id); break;
        case F_CA:
            fine &= trust_valid((const char *)field.value, field.length);
            ca = field;
            authority = true;
            break;
        case F_ENV:
            fine &= field.length > 0 && !memchr(field.value, 0, field.length) && memchr(field.value, '=', field.length);
            env = true;
            break;
        default: break;
        }
        if (!fine) {
            respond(request, EINVAL, "field %u of SETUP is malformed or out of bounds", field.tag);
            return;
        }
    }
    if (reader.bad) {
        respond(request, EINVAL, "the fields of SETUP are malformed");
        return;
    }
    const char *what = "environment";
    int error = 0;
    if (env || flags & SETUP_REPLACE_ENV)
        error = set_environment(payload, length, flags & SETUP_REPLACE_ENV);
    if (!agent.host_mode) {
        struct timespec t = {.tv_sec = (time_t)(time_ns / 1000000000u), .tv_nsec = (long)(time_ns % 1000000000u)};
        if (!error && time_ns && (what = "clock", clock_settime(CLOCK_REALTIME, &t) != 0))
            error = errno;
        if (!error && entropy.length && (what = "entropy", 1))
            error = add_entropy(entropy.value, entropy.length);
        if (!error && hostname[0] && (what = "host name", 1))
            error = put_hostname(hostname);
        if (!error && machine_id[0] && (what = "machine-id", 1))
            error = put_machine_id(machine_id);
        if (!error && boot_id[0] && (what = "boot id", 1))
            error = put_boot_id(boot_id);
        if (!error && authority && (what = "trust store", 1))
            error = trust_set((const char *)ca.value, ca.length);
        if (!error && flags & SETUP_RENEW_KEYS && !keys_under_way && has_host_keys()) {
            what = "host keys";
            int started = helper_run(work_keys, agent.mount_ns_fd, done_keys, 0);
            if (started == 0) {
                keys_under_way = true;
                keys_request = request;
                return; /* answered when they are there */
            }
            error = -started;
        }
    }
    respond(request, error, "setting the %s: %s", what, strerror(error));
}
