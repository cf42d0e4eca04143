#include "proc.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "dial.h"
#include "fields.h"
#include "helper.h"
#include "spawn.h"
#include "stream.h"

enum { REAP_AT_ONCE = 256 }; /* orphans of a fork bomb come without end */

/* Waits at least so long before it looks again at the CPU time of a tree: as much is the bound's grain. */
static const uint64_t CPU_CHECK_NS = 100000000u;

static struct proc table[MAX_PLACES];
static const unsigned places[KINDS] = {MAX_PROCS, MAX_BUILTINS, MAX_CONNECTIONS};
static unsigned taken[KINDS];
static unsigned used; /* slots below it may be in use: few processes touch few pages */
static unsigned deadlines;
static bool reap_more;

bool procs_open(void)
{
    return streams_open();
}

struct proc *proc_each(unsigned *cursor)
{
    while (*cursor < used) {
        struct proc *proc = &table[(*cursor)++];
        if (proc->number != 0)
            return proc;
    }
    return NULL;
}

struct proc *proc_by_number(uint32_t number)
{
    struct proc *proc;
    for (unsigned i = 0; (proc = proc_each(&i));)
        if (proc->number == number)
            return proc;
    return NULL;
}

struct proc *proc_by_key(const char *key)
{
    struct proc *proc;
    for (unsigned i = 0; (proc = proc_each(&i));)
        if (strcmp(proc->key, key) == 0)
            return proc;
    return NULL;
}

struct proc *proc_new(uint32_t number, const char *key, enum proc_kind kind)
{
    struct proc *proc = NULL;
    for (unsigned i = 0; i < MAX_PLACES && taken[kind] < places[kind]; i++) {
        if (table[i].number == 0) {
            proc = &table[i];
            if (i >= used)
                used = i + 1;
            break;
        }
    }
    if (!proc)
        return NULL;
    memset(proc, 0, sizeof *proc);
    taken[kind]++;
    proc->number = number;
    proc->kind = (uint8_t)kind;
    proc->started_ns = now_ns();
    proc->tree.cgroup_fd = -1;
    snprintf(proc->key, sizeof proc->key, "%s", key);
    streams_prepare(proc);
    return proc;
}

bool proc_connect(struct proc *proc, const struct proc_ends *ends)
{
    return streams_connect(proc, ends);
}

void proc_set_deadline(struct proc *proc, uint64_t deadline)
{
    deadlines -= proc->deadline_ns != 0;
    proc->deadline_ns = deadline;
    deadlines += deadline != 0;
}

static void set_cpu_check(struct proc *proc, uint64_t when)
{
    deadlines -= proc->cpu_check_ns != 0;
    proc->cpu_check_ns = when;
    deadlines += when != 0;
}

/* The soonest that a tree which took `used` can have come to its limit, with all processors for itself. */
static uint64_t next_cpu_check(const struct proc *proc, uint64_t took)
{
    static long processors;
    if (processors == 0 && (processors = sysconf(_SC_NPROCESSORS_ONLN)) < 1)
        processors = 1;
    uint64_t left = (proc->cpu_limit_us - took) / (uint64_t)processors;
    uint64_t wait = left > UINT64_MAX / 2000 ? UINT64_MAX / 2 : left * 1000;
    return now_ns() + (wait > CPU_CHECK_NS ? wait : CPU_CHECK_NS);
}

void proc_set_cpu_limit(struct proc *proc, uint64_t microseconds)
{
    uint64_t took = tree_cpu_us(&proc->tree, 0);
    proc->cpu_limit_us = took > UINT64_MAX - microseconds ? UINT64_MAX : took + microseconds;
    set_cpu_check(proc, next_cpu_check(proc, took));
}

/* The record's state follows from what is known: the leader reaped, the streams at their end. */
static void settle(struct proc *proc)
{
    uint8_t state = proc->state;
    if (state == STATE_RUNNING && proc->wait_pending)
        state = STATE_EXITED;
    if (state == STATE_EXITED && streams_at_end(proc))
        state = STATE_CLOSED;
    if (state == STATE_CLOSED)
        input_close(proc);
    if (state != proc->state) {
        proc->state = state;
        proc->dirty = true;
        if (state >= STATE_EXITED)
            proc_set_deadline(proc, 0);
    }
}

void proc_stream_ended(struct proc *proc)
{
    settle(proc);
}

void proc_running(struct proc *proc)
{
    proc->job = NULL;
    proc->state = STATE_RUNNING;
    proc->dirty = true;
    settle(proc);
}

void proc_failed(struct proc *proc, const char *message)
{
    proc->job = NULL;
    if (message != proc->message)
        snprintf(proc->message, sizeof proc->message, "%s", message);
    proc->reason = REASON_SPAWN_FAILED;
    proc->pid = 0;
    proc_set_deadline(proc, 0);
    set_cpu_check(proc, 0);
    proc->ended_ns = now_ns();
    proc->exit_code = proc->exit_signal = 0;
    proc->wait_pending = true;
    streams_close(proc);
    tree_release(&proc->tree, 0);
    proc->state = STATE_RUNNING;
    settle(proc);
}

/* Whom a signal to the tree's leader may reach: a number that was given back may be another's by now. */
static pid_t leader_of(const struct proc *proc)
{
    return proc->tree.shared && proc->wait_pending ? 0 : proc->pid;
}

void proc_connection_ended(struct proc *proc, int error)
{
    proc->wait_pending = true;
    proc->ended_ns = now_ns();
    proc->reason = REASON_EXITED;
    proc->exit_code = error != 0;
    if (error != 0) {
        snprintf(proc->message, sizeof proc->message, "%s", strerror(error));
        input_close(proc);
    }
    settle(proc);
}

bool proc_lives(const struct proc *proc)
{
    return proc->job || (proc->kind != KIND_CONNECTION && proc->reason != REASON_SPAWN_FAILED &&
                         tree_lives(&proc->tree, leader_of(proc)));
}

void proc_forget(struct proc *proc)
{
    if (proc->kind == KIND_CONNECTION)
        dial_drop(proc);
    if (proc->job) {
        if (proc->pid > 1)
            kill(proc->pid, SIGKILL);
        spawn_detach(proc->job);
        proc->job = NULL;
    }
    proc_set_deadline(proc, 0);
    if (proc->reason != REASON_SPAWN_FAILED)
        tree_release(&proc->tree, leader_of(proc));
    set_cpu_check(proc, 0);
    streams_close(proc);
    streams_drop(proc);
    proc->number = 0;
    taken[proc->kind]--;
    while (used > 0 && table[used - 1].number == 0)
        used--;
}

void procs_kill_all(int signal)
{
    struct proc *proc;
    for (unsigned i = 0; (proc = proc_each(&i));)
        if (proc->reason != REASON_SPAWN_FAILED)
            tree_signal(&proc->tree, leader_of(proc), signal);
}

unsigned procs_alive(void)
{
    unsigned alive = 0;
    struct proc *proc;
    for (unsigned i = 0; (proc = proc_each(&i));)
        alive += proc->pid > 1 && !proc->wait_pending;
    return alive;
}

int proc_signal(struct proc *proc, int signal, uint32_t scope)
{
    if (proc->reason == REASON_SPAWN_FAILED)
        return -ESRCH;
    proc->killed_by_us |= signal == SIGKILL;
    if (scope == SCOPE_LEADER) {
        if (proc->wait_pending || proc->pid <= 1)
            return -ESRCH;
        return kill(proc->pid, signal) == 0 ? 0 : -errno;
    }
    return tree_signal(&proc->tree, leader_of(proc), signal);
}

static uint64_t micros(struct timeval t)
{
    return (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_usec;
}

static void leader_ended(struct proc *proc, int status, const struct rusage *usage)
{
    proc->wait_pending = true;
    proc->ended_ns = now_ns();
    proc->utime_us = micros(usage->ru_utime);
    proc->stime_us = micros(usage->ru_stime);
    proc->maxrss_kib = (uint64_t)usage->ru_maxrss;
    if (WIFSIGNALED(status)) {
        proc->exit_signal = WTERMSIG(status);
        proc->reason = REASON_SIGNALED;
        if (proc->exit_signal == SIGKILL && !proc->killed_by_timeout && !proc->killed_by_us &&
            (proc->killed_by_memory || tree_oom(&proc->tree)))
            proc->reason = REASON_OOM;
    } else {
        proc->exit_code = WEXITSTATUS(status);
        proc->reason = REASON_EXITED;
    }
    if (proc->killed_by_timeout)
        proc->reason = REASON_TIMEOUT;
    if (proc->state == STATE_STARTING)
        spawn_check(proc->job); /* it ended before its exec was seen: now it is decided which of the two it was */
    else
        settle(proc);
}

static void leader_reaped(pid_t pid, int status, const struct rusage *usage)
{
    struct proc *proc;
    for (unsigned i = 0; (proc = proc_each(&i));) {
        if (proc->pid == pid && !proc->wait_pending) {
            leader_ended(proc, status, usage);
            return;
        }
    }
}

void procs_reap(void)
{
    int status;
    struct rusage usage;
    pid_t pid;
    unsigned count = 0;
    while (count < REAP_AT_ONCE && (pid = wait4(-1, &status, WNOHANG, &usage)) > 0) {
        count++;
        if (!helper_reaped(pid, status))
            leader_reaped(pid, status, &usage);
    }
    reap_more = count == REAP_AT_ONCE;
    trees_drain();
}

bool procs_reap_pending(void)
{
    if (reap_more)
        procs_reap();
    return reap_more;
}

uint64_t procs_deadline(void)
{
    uint64_t soonest = 0;
    struct proc *proc;
    if (deadlines == 0)
        return 0;
    for (unsigned i = 0; (proc = proc_each(&i));) {
        if (proc->deadline_ns && (soonest == 0 || proc->deadline_ns < soonest))
            soonest = proc->deadline_ns;
        if (proc->cpu_check_ns && (soonest == 0 || proc->cpu_check_ns < soonest))
            soonest = proc->cpu_check_ns;
    }
    return soonest;
}

static void expire(struct proc *proc, const char *what)
{
    if (!proc->wait_pending) {
        proc->killed_by_timeout = true;
        snprintf(proc->message, sizeof proc->message, "%s", what);
    }
    tree_signal(&proc->tree, leader_of(proc), SIGKILL);
}

static void deadline_passed(struct proc *proc)
{
    if (!proc->timeout_leader) {
        expire(proc, "");
        return;
    }
    if (!proc->wait_pending && proc->pid > 1) {
        proc->killed_by_timeout = true;
        kill(proc->pid, SIGKILL);
    }
}

/* The leader may have ended: what it left behind counts on. */
static void check_cpu_time(struct proc *proc)
{
    uint64_t took = tree_cpu_us(&proc->tree, proc->pid);
    bool over = took >= proc->cpu_limit_us;
    set_cpu_check(proc, over ? 0 : next_cpu_check(proc, took));
    if (over)
        expire(proc, "cpu time");
}

void procs_expire(void)
{
    uint64_t now = now_ns();
    struct proc *proc;
    for (unsigned i = 0; (proc = proc_each(&i));) {
        if (proc->deadline_ns && proc->deadline_ns <= now) {
            proc_set_deadline(proc, 0);
            if (proc->kind == KIND_CONNECTION)
                dial_expire(proc);
            else
                deadline_passed(proc);
        }
        if (proc->number != 0 && proc->cpu_check_ns && proc->cpu_check_ns <= now)
            check_cpu_time(proc);
    }
}

size_t proc_describe(const struct proc *proc, uint8_t state, uint8_t *to, size_t room)
{
    struct field_writer writer = {.at = to, .end = to + room};
    uint64_t until = proc->ended_ns ? proc->ended_ns : now_ns();
    write_text(&writer, F_KEY, proc->key);
    write_u32(&writer, F_STATE, state);
    if (proc->pid > 0)
        write_u32(&writer, F_PID, (uint32_t)proc->pid);
    if (state >= STATE_EXITED) {
        if (proc->reason != REASON_SPAWN_FAILED) {
            if (proc->exit_signal)
                write_u32(&writer, F_EXIT_SIGNAL, (uint32_t)proc->exit_signal);
            else
                write_u32(&writer, F_EXIT_CODE, (uint32_t)proc->exit_code);
        }
        write_u32(&writer, F_REASON, proc->reason);
        if (proc->message[0])
            write_text(&writer, F_MESSAGE, proc->message);
    }
    write_u64(&writer, F_UTIME_US, proc->utime_us);
    write_u64(&writer, F_STIME_US, proc->stime_us);
    write_u64(&writer, F_MAXRSS_KIB, proc->maxrss_kib);
    write_u64(&writer, F_WALL_US, (until - proc->started_ns) / 1000);
    write_u64(&writer, F_STDOUT_TOTAL, proc->out[0].ring.end);
    write_u64(&writer, F_STDERR_TOTAL, proc->out[1].ring.end);
    write_u64(&writer, F_STDIN_OFFSET, input_taken(proc));
    return (size_t)(writer.at - to);
}

void procs_resync(void)
{
    struct proc *proc;
    for (unsigned i = 0; (proc = proc_each(&i));) {
        proc->dirty = false;
        proc->resync = true;
        streams_resync(proc);
    }
}

struct proc *procs_next_resync(void)
{
    struct proc *proc;
    for (unsigned i = 0; (proc = proc_each(&i));)
        if (proc->resync)
            return proc;
    return NULL;
}

struct proc *procs_next_dirty(void)
{
    struct proc *proc;
    for (unsigned i = 0; (proc = proc_each(&i));)
        if (proc->dirty)
            return proc;
    return NULL;
}

struct proc *procs_next_input_ack(void)
{
    struct proc *proc;
    for (unsigned i = 0; (proc = proc_each(&i));)
        if (proc->in.ack_due && proc->state != STATE_STARTING)
            return proc;
    return NULL;
}

struct output *procs_next_output(struct proc **found, int *fd)
{
    static unsigned turn; /* streams take turns: one that floods does not hold up the others */
    unsigned streams = used * 2;
    for (unsigned i = 0; i < streams; i++) {
        unsigned at = (turn + i) % streams;
        struct proc *proc = &table[at / 2];
        struct output *output = &proc->out[at % 2];
        if (proc->number != 0 && proc->state != STATE_STARTING && output_sendable(output) > 0) {
            turn = at + 1;
            *found = proc;
            *fd = (int)(at % 2) + 1;
            return output;
        }
    }
    return NULL;
}
