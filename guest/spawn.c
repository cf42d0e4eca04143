#include "spawn.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>

#include "abi.h"
#include "agent.h"
#include "builtin.h"
#include "channel.h"
#include "job.h"
#include "stream.h"
#include "trust.h"

enum { EXTRA_ENV = 8 };

static const char DEFAULT_PATH[] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

static struct job *jobs;
static struct job *dead; /* given back after the round of events that may still name them */
static size_t job_octets;

static void explain(struct proc *proc, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void explain(struct proc *proc, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(proc->message, sizeof proc->message, format, args);
    va_end(args);
}

static char *take(char **at, const void *from, size_t length)
{
    char *here = *at;
    memcpy(here, from, length);
    here[length] = 0;
    *at += length + 1;
    return here;
}

static bool same_name(const char *a, const char *b)
{
    size_t n = strcspn(a, "=");
    return strncmp(a, b, n) == 0 && b[n] == '=' && a[n] == '=';
}

/* Later settings replace earlier ones of the same name; count is small enough for the square of it. */
static unsigned set(char **envp, unsigned count, char *setting)
{
    for (unsigned i = 0; i < count; i++) {
        if (same_name(envp[i], setting)) {
            envp[i] = setting;
            return count;
        }
    }
    envp[count] = setting;
    return count + 1;
}

static unsigned set_default(char **envp, unsigned count, char **at, const char *name, const char *value)
{
    char *setting = *at;
    *at += sprintf(*at, "%s=%s", name, value) + 1;
    return set(envp, count, setting);
}

static unsigned count_strings(const char *const *list, size_t *octets)
{
    unsigned count = 0;
    for (; list && list[count]; count++)
        *octets += strlen(list[count]) + 1;
    return count;
}

/* Lays a start out in one piece of memory: the job, the pointers, the strings. */
static struct job *prepare(const struct spawn_request *request, const struct account *account)
{
    size_t base_octets = 0;
    unsigned base = count_strings(request->env_base, &base_octets);
    const char *const *trusts = trust_environment();
    unsigned trusted = count_strings(trusts, &base_octets);
    size_t pointers = (size_t)request->args + 2 + request->envs + base + trusted + EXTRA_ENV + 2;
    size_t octets = sizeof(struct job) + pointers * sizeof(char *) + request->string_bytes + request->args + request->envs +
                    base_octets + sizeof(struct account) + sizeof DEFAULT_PATH + MAX_PATH + 256;
    if (job_octets + octets > MAX_SPAWN_BYTES)
        return NULL;
    struct job *job = malloc(octets);
    if (!job)
        return NULL;
    memset(job, 0, offsetof(struct job, attempt));
    job->octets = octets;
    job->report.fd = job->in = job->out = job->err = job->report_end = -1;
    job->account = *account;
    char **at = (char **)(void *)(job + 1);
    char *text = (char *)(at + pointers);
    job->argv = at + 1;
    job->envp = job->argv + request->args + 1;

    unsigned args = 0, envs = 0;
    envs = set_default(job->envp, envs, &text, "PATH", DEFAULT_PATH);
    envs = set_default(job->envp, envs, &text, "HOME", account->home);
    envs = set_default(job->envp, envs, &text, "USER", account->name);
    envs = set_default(job->envp, envs, &text, "LOGNAME", account->name);
    envs = set_default(job->envp, envs, &text, "SHELL", account->shell);
    if (request->flags & SPAWN_PTY)
        envs = set_default(job->envp, envs, &text, "TERM", "xterm-256color");
    for (unsigned i = 0; i < trusted; i++)
        envs = set(job->envp, envs, take(&text, trusts[i], strlen(trusts[i])));
    for (unsigned i = 0; i < base; i++)
        envs = set(job->envp, envs, take(&text, request->env_base[i], strlen(request->env_base[i])));
    struct field_reader reader = fields_of(request->payload, request->length);
    struct field field;
    while (field_next(&reader, &field)) {
        if (field.tag == F_ARG)
            job->argv[args++] = take(&text, field.value, field.length);
        else if (field.tag == F_ENV)
            envs = set(job->envp, envs, take(&text, field.value, field.length));
    }
    job->argv[args] = NULL;
    job->envp[envs] = NULL;
    job->path = DEFAULT_PATH;
    for (unsigned i = 0; i < envs; i++)
        if (strncmp(job->envp[i], "PATH=", 5) == 0)
            job->path = job->envp[i] + 5;
    job->cwd_is_home = !request->has_cwd;
    job->cwd = take(&text, request->has_cwd ? request->cwd : account->home,
                    strlen(request->has_cwd ? request->cwd : account->home));
    job->terminal = request->flags & SPAWN_PTY;
    job->builtin = request->flags & SPAWN_BUILTIN;
    job->nofile[0] = job->nofile[1] = request->nofile;
    job->fsize[0] = job->fsize[1] = request->fsize;
    job->switch_user = account->uid != geteuid() || account->gid != getegid() || !agent.host_mode;
    job_octets += octets;
    job->next = jobs;
    jobs = job;
    return job;
}

static void release(struct job *job)
{
    struct job **link = &jobs;
    while (*link != job)
        link = &(*link)->next;
    *link = job->next;
    job_octets -= job->octets;
    bool watched = job->report.events != 0;
    watch_close(&job->report);
    if (!watched) {
        free(job);
        return;
    }
    job->next = dead;
    dead = job;
}

void spawns_sweep(void)
{
    while (dead) {
        struct job *job = dead;
        dead = job->next;
        free(job);
    }
}

static void close_one(int fd)
{
    if (fd >= 0 && fd != agent.null_fd)
        close(fd);
}

static bool make_pipe(int *ours, int *theirs, bool we_write, const struct account *account)
{
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0)
        return false;
    *ours = ends[we_write ? 1 : 0];
    *theirs = ends[we_write ? 0 : 1];
    /* A process may open /dev/stdout again: that asks for the rights to the pipe's inode. */
    if (account->uid != geteuid() && fchown(*theirs, account->uid, account->gid) != 0)
        return false;
    return true;
}

static bool make_terminal(struct proc_ends *ends, struct job *job, const struct spawn_request *request)
{
    int unlock = 0;
    int master = agent.host_mode ? open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC)
                                 : open_in_root("/dev/pts/ptmx", O_RDWR | O_NOCTTY, 0);
    if (master < 0)
        return false;
    ends->out = master;
    ends->pty = true;
    ends->in = fcntl(master, F_DUPFD_CLOEXEC, 4);
    if (ends->in < 0 || ioctl(master, HW_TIOCSPTLCK, &unlock) != 0)
        return false;
    job->in = ioctl(master, HW_TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (job->in < 0)
        return false;
    job->out = job->err = job->in;
    struct winsize size = {.ws_row = (unsigned short)request->rows, .ws_col = (unsigned short)request->cols};
    ioctl(master, TIOCSWINSZ, &size);
    return job->account.uid == geteuid() || fchown(job->in, job->account.uid, (gid_t)-1) == 0;
}

static bool make_ends(struct proc_ends *ends, struct job *job, const struct spawn_request *request)
{
    if (request->flags & SPAWN_PTY)
        return make_terminal(ends, job, request);
    if (request->flags & SPAWN_STDIN) {
        if (!make_pipe(&ends->in, &job->in, true, &job->account))
            return false;
    } else {
        job->in = agent.null_fd;
    }
    if (!make_pipe(&ends->out, &job->out, false, &job->account))
        return false;
    if (request->flags & SPAWN_MERGE) {
        job->err = job->out;
        return true;
    }
    return make_pipe(&ends->err, &job->err, false, &job->account);
}

static void report_ready(struct watch *watch, uint32_t events)
{
    (void)events;
    spawn_check(watch->owner);
}

static long start_child(struct job *job, struct tree *tree)
{
    long pid = -EINVAL;
    streams_fork();
    for (int attempt = 0; attempt < 2; attempt++) {
        struct hw_clone_args args = {
            /* No handler of ours may run in the child: it would run on the agent's memory, at the wish of whoever may signal it. */
            .flags = HW_CLONE_VM | HW_CLONE_CLEAR_SIGHAND | (tree->cgroup_fd >= 0 ? HW_CLONE_INTO_CGROUP : 0),
            .exit_signal = SIGCHLD,
            .stack = (uint64_t)(uintptr_t)job->stack,
            .stack_size = sizeof job->stack,
            .cgroup = (uint64_t)(tree->cgroup_fd >= 0 ? tree->cgroup_fd : 0),
        };
        pid = hw_clone3(&args, sizeof args, child_main, job);
        /* Whatever else than a bound it is, it may be the cgroup: removed by guest root, or left by a container manager that ran
           in it with controllers on, so that no process may be in it. The next start gets a new one. */
        if (pid >= 0 || tree->cgroup_fd < 0 || pid == -EAGAIN || pid == -ENOMEM)
            break;
        if (tree_renew(tree) < 0)
            break;
    }
    return pid;
}

/* Everything that can fail before a child exists; false with proc->message. */
static bool launch(struct proc *proc, struct job *job, const struct spawn_request *request)
{
    struct proc_ends ends = {-1, -1, -1, false};
    int report[2] = {-1, -1};
    int error = 0;
    if (request->flags & SPAWN_BUILTIN && !builtin_fills(job->argv))
        tree_share(&proc->tree);
    else
        error = tree_take(&proc->tree, &request->limits);
    const char *what = "cgroup";
    if (error == 0 && !make_ends(&ends, job, request)) {
        error = -errno;
        what = "streams";
    }
    if (error != 0) {
        explain(proc, "the agent cannot make the process's %s: %s", what, strerror(-error));
        close_one(ends.in);
        close_one(ends.out);
        close_one(ends.err);
    } else if (!proc_connect(proc, &ends) || pipe2(report, O_CLOEXEC | O_NONBLOCK) != 0) {
        error = -errno;
        explain(proc, "the agent cannot watch the process: %s", strerror(errno));
    } else {
        job->report_end = report[1];
        job->report = (struct watch){.fd = report[0], .ready = report_ready, .owner = job};
        long pid = start_child(job, &proc->tree);
        if (pid > 0) {
            proc->pid = (pid_t)pid;
        } else if (pid == -EAGAIN) {
            error = -EAGAIN;
            explain(proc, "the sandbox has as many processes as it may have");
        } else {
            error = (int)pid;
            explain(proc, "the process cannot be made: %s", strerror((int)-pid));
        }
    }
    /* The child has a table of its own with the same numbers: the job keeps them for it. */
    close_one(job->in);
    if (job->out != job->in)
        close_one(job->out);
    if (job->err != job->out)
        close_one(job->err);
    if (report[1] >= 0)
        close(report[1]);
    return error == 0;
}

int spawn_start(struct proc *proc, const struct spawn_request *request)
{
    struct account account;
    char own[16];
    snprintf(own, sizeof own, "%u", (unsigned)geteuid());
    int found = account_lookup(request->has_user ? request->user : own, &account);
    if (found == -ENOENT) {
        explain(proc, "no such user: %s", request->user);
    } else if (found < 0) {
        explain(proc, "the sandbox's /etc/passwd cannot be read: %s", strerror(-found));
    }
    if (found < 0) {
        proc_failed(proc, proc->message);
        return 0;
    }
    struct job *job = prepare(request, &account);
    if (!job) {
        explain(proc, "too many large starts at once; try again");
        return -EAGAIN;
    }
    if (!launch(proc, job, request)) {
        release(job);
        proc_failed(proc, proc->message);
        return 0;
    }
    job->proc = proc;
    proc->job = job;
    proc->timeout_leader = request->flags & SPAWN_TIMEOUT_LEADER;
    if (request->timeout_ms)
        proc_set_deadline(proc, now_ns() + request->timeout_ms * 1000000u);
    if (request->cpu_ms)
        proc_set_cpu_limit(proc, request->cpu_ms * 1000u);
    if (!watch_set(&job->report, EPOLLIN)) /* without it nothing would tell how the start went */
        say("a start cannot be watched: %s", strerror(errno));
    return 0;
}

bool spawn_wait(struct proc *proc, uint32_t request_id)
{
    struct job *job = proc->job;
    if (!job || job->waiting >= MAX_WAITERS)
        return false;
    job->waiters[job->waiting++] = request_id;
    return true;
}

void spawn_forget_waiters(void)
{
    for (struct job *job = jobs; job; job = job->next)
        job->waiting = 0;
}

unsigned spawns_waiting(void)
{
    unsigned count = 0;
    for (struct job *job = jobs; job; job = job->next)
        count += job->waiting;
    return count;
}

static void fail(struct proc *proc, const struct job *job)
{
    const char *why = strerror(job->said.error);
    const char *command = job->argv[0];
    switch (job->said.stage) {
    case STAGE_CWD:
        explain(proc, "cwd %.300s: %s", job->cwd, why);
        break;
    case STAGE_USER:
        explain(proc, "cannot become user %s: %s", job->account.name, why);
        break;
    case STAGE_LIMITS:
        explain(proc, "the limits of the process cannot be set: %s", why);
        break;
    case STAGE_EXEC:
        if (job->said.error == ENOENT && !strchr(command, '/'))
            explain(proc, "command not found: %.300s", command);
        else
            explain(proc, "%.300s: %s", command, why);
        break;
    default:
        explain(proc, "the process cannot enter the sandbox: %s", why);
    }
    proc_failed(proc, proc->message);
}

void spawn_check(struct job *job)
{
    ssize_t n;
    while (job->said_octets < sizeof job->said) {
        n = read(job->report.fd, (uint8_t *)&job->said + job->said_octets, sizeof job->said - job->said_octets);
        if (n <= 0)
            break;
        job->said_octets += (size_t)n;
    }
    uint8_t more;
    n = read(job->report.fd, &more, 1); /* the end of file is what counts: the child is done with our memory */
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    struct proc *proc = job->proc;
    if (proc) {
        if (job->said_octets == sizeof job->said)
            fail(proc, job);
        else
            proc_running(proc);
        for (unsigned i = 0; i < job->waiting; i++) {
            struct field_writer writer = response_begin(0);
            if (proc->pid > 0)
                write_u32(&writer, F_PID, (uint32_t)proc->pid);
            response_end(job->waiters[i], &writer);
        }
    }
    release(job);
}

void spawn_detach(struct job *job)
{
    job->proc = NULL;
    for (unsigned i = 0; i < job->waiting; i++)
        respond(job->waiters[i], ECANCELED, "the process was closed before it started");
    job->waiting = 0;
}
