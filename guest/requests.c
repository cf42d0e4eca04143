#include "requests.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "agent.h"
#include "builtin.h"
#include "channel.h"
#include "dial.h"
#include "disk.h"
#include "fields.h"
#include "loop.h"
#include "metrics.h"
#include "power.h"
#include "proc.h"
#include "setup.h"
#include "spawn.h"

/* A SPAWN that comes in several frames. */
struct assembly {
    uint8_t *data; /* NULL: free */
    size_t length, room;
    uint32_t request;
    unsigned frames;
};

static struct assembly assemblies[MAX_ASSEMBLIES];
static size_t assembly_octets;
/* A SPAWN that was refused before its last frame: what still comes of it begins anywhere, also in the middle of an argument that
   somebody chose, and must not be taken for one of its own. */
static bool refusing;
static uint32_t refused;

static void assembly_drop(struct assembly *assembly)
{
    assembly_octets -= assembly->room;
    free(assembly->data);
    *assembly = (struct assembly){0};
}

void requests_forget(void)
{
    for (int i = 0; i < MAX_ASSEMBLIES; i++)
        if (assemblies[i].data)
            assembly_drop(&assemblies[i]);
    refusing = false;
    spawn_forget_waiters();
    dials_forget_waiters();
    disk_forget_requests();
}

/* ---- the fields that several requests share ---- */

struct arguments {
    uint64_t size, timeout_ms;
    uint32_t signal, scope, rows, cols, flags;
    bool has_size, has_signal, has_rows, has_cols;
};

/* Reads them; answers EINVAL and gives false when one is malformed. */
static bool read_arguments(const struct frame *frame, struct arguments *to)
{
    struct field_reader reader = fields_of(frame->payload, frame->length);
    struct field field;
    bool fine = true;
    *to = (struct arguments){0};
    while (fine && field_next(&reader, &field)) {
        switch (field.tag) {
        case F_SIZE: fine = to->has_size = field_u64(&field, &to->size); break;
        case F_TIMEOUT_MS: fine = field_u64(&field, &to->timeout_ms); break;
        case F_SIGNAL: fine = to->has_signal = field_u32(&field, &to->signal); break;
        case F_SCOPE: fine = field_u32(&field, &to->scope); break;
        case F_ROWS: fine = to->has_rows = field_u32(&field, &to->rows); break;
        case F_COLS: fine = to->has_cols = field_u32(&field, &to->cols); break;
        case F_FLAGS: fine = field_u32(&field, &to->flags); break;
        default: break;
        }
    }
    if (!fine || reader.bad) {
        respond(frame->stream, EINVAL, "the fields of the request are malformed");
        return false;
    }
    return true;
}

static struct proc *named_process(const struct frame *frame, const struct arguments *arguments)
{
    struct proc *proc = NULL;
    if (arguments->has_size && arguments->size > 0 && arguments->size < 1u << 31)
        proc = proc_by_number((uint32_t)arguments->size);
    if (!proc)
        respond(frame->stream, ESRCH, "no process %llu", (unsigned long long)arguments->size);
    return proc;
}

static void answer(const struct frame *frame, int error, const char *what)
{
    respond(frame->stream, -error, "%s: %s", what, strerror(-error));
}

/* ---- SPAWN ---- */

/* Reads the fields of a SPAWN into request, key and number; NULL, or what is wrong with them. */
static const char *read_spawn(struct spawn_request *request, char key[MAX_KEY + 1], uint64_t *number)
{
    struct field_reader reader = fields_of(request->payload, request->length);
    struct field field;
    while (field_next(&reader, &field)) {
        bool fine = true;
        switch (field.tag) {
        case F_KEY: fine = field_text(&field, key, MAX_KEY + 1); break;
        case F_SIZE: fine = field_u64(&field, number); break;
        case F_ENV:
            fine = field.length > 0 && memchr(field.value, '=', field.length) && field.value[0] != '=';
            /* fall through */
        case F_ARG:
            fine &= !field.length || !memchr(field.value, 0, field.length);
            if (field.tag == F_ARG && request->args == 0)
                request->name = field;
            request->args += field.tag == F_ARG;
            request->envs += field.tag == F_ENV;
            request->string_bytes += field.length;
            break;
        case F_CWD: fine = request->has_cwd = field_text(&field, request->cwd, sizeof request->cwd) && field.length; break;
        case F_USER: fine = request->has_user = field_text(&field, request->user, sizeof request->user) && field.length; break;
        case F_FLAGS: fine = field_u32(&field, &request->flags); break;
        case F_ROWS: fine = field_u32(&field, &request->rows) && request->rows > 0 && request->rows < 65536; break;
        case F_COLS: fine = field_u32(&field, &request->cols) && request->cols > 0 && request->cols < 65536; break;
        case F_TIMEOUT_MS: fine = field_u64(&field, &request->timeout_ms); break;
        case F_LIMIT_MEMORY: fine = field_u64(&field, &request->limits.memory) && request->limits.memory >= MIN_LIMIT_MEMORY; break;
        case F_LIMIT_PIDS: fine = field_u64(&field, &request->limits.pids) && request->limits.pids > 0; break;
        case F_LIMIT_CPU_MS: fine = field_u64(&field, &request->cpu_ms) && request->cpu_ms > 0; break;
        case F_LIMIT_NOFILE:
            fine = field_u64(&field, &request->nofile) && request->nofile > 0 && request->nofile <= MAX_LIMIT_NOFILE;
            break;
        case F_LIMIT_FSIZE: fine = field_u64(&field, &request->fsize) && request->fsize > 0; break;
        default: break;
        }
        if (!fine)
            return "a field of SPAWN is malformed or out of bounds";
        if (request->args + request->envs > MAX_STRINGS)
            return "more than 1,024 arguments and environment settings";
        if (request->string_bytes > MAX_STRING_BYTES)
            return "arguments and environment are larger than 1 MiB";
    }
    if (reader.bad)
        return "the fields of SPAWN are malformed";
    if (!key[0])
        return "SPAWN needs a KEY";
    if (*number < 1 || *number >= 1u << 31)
        return "SPAWN needs a process number (SIZE) from 1 to 2^31 - 1";
    if (request->args == 0)
        return "SPAWN needs an ARG";
    if (request->flags & SPAWN_BUILTIN && request->flags & SPAWN_PTY)
        return "a builtin program has no terminal";
    if (request->flags & SPAWN_BUILTIN && (request->limits.memory || request->limits.pids || request->cpu_ms))
        return "builtin programs have bounds of their own";
    if (request->timeout_ms > UINT64_MAX / 4000000u || request->cpu_ms > UINT64_MAX / 4000000u)
        return "TIMEOUT_MS or LIMIT_CPU_MS is out of bounds";
    return NULL;
}

static void answer_known(uint32_t stream, struct proc *proc)
{
    if (proc->state == STATE_STARTING) {
        if (!spawn_wait(proc, stream))
            respond(stream, EAGAIN, "process %u is starting and too many wait for it", proc->number);
        return;
    }
    struct field_writer writer = response_begin(0);
    if (proc->pid > 0)
        write_u32(&writer, F_PID, (uint32_t)proc->pid);
    response_end(stream, &writer);
}

static void spawn(uint32_t stream, const uint8_t *payload, size_t length)
{
    static struct spawn_request request; /* 4 KiB of path: not on the stack */
    char key[MAX_KEY + 1] = "";
    uint64_t number = 0;
    request = (struct spawn_request){.payload = payload, .length = length, .rows = 24, .cols = 80};
    request.env_base = setup_environment();
    const char *wrong = read_spawn(&request, key, &number);
    if (wrong) {
        respond(stream, EINVAL, "%s", wrong);
        return;
    }
    if (request.flags & SPAWN_BUILTIN && !builtin_find((const char *)request.name.value, request.name.length)) {
        respond(stream, ENOENT, "no builtin program %.*s", request.name.length < 64 ? (int)request.name.length : 64,
                (const char *)request.name.value);
        return;
    }
    struct proc *proc = proc_by_key(key);
    if (proc && proc->kind == KIND_CONNECTION) {
        respond(stream, EEXIST, "the key is a connection's");
        return;
    }
    if (proc) {
        answer_known(stream, proc);
        return;
    }
    if (proc_by_number((uint32_t)number)) {
        respond(stream, EEXIST, "process %llu is there with another key", (unsigned long long)number);
        return;
    }
    if (spawns_waiting() >= MAX_REQUESTS) {
        respond(stream, EAGAIN, "%d starts are in progress", MAX_REQUESTS);
        return;
    }
    bool builtin = request.flags & SPAWN_BUILTIN;
    proc = proc_new((uint32_t)number, key, builtin ? KIND_BUILTIN : KIND_PROCESS);
    if (!proc) {
        respond(stream, EAGAIN, "too many %s: %d are known; close some", builtin ? "builtin programs" : "processes",
                builtin ? MAX_BUILTINS : MAX_PROCS);
        return;
    }
    int error = spawn_start(proc, &request);
    if (error < 0) {
        respond(stream, -error, "%s", proc->message);
        proc_forget(proc);
        return;
    }
    answer_known(stream, proc);
}

static struct assembly *find_assembly(uint32_t request)
{
    for (int i = 0; i < MAX_ASSEMBLIES; i++)
        if (assemblies[i].data && assemblies[i].request == request)
            return &assemblies[i];
    return NULL;
}

static bool append(struct assembly *assembly, const struct frame *frame)
{
    size_t need = assembly->length + frame->length;
    if (!assembly->data || need > assembly->room) {
        size_t room = need + FRAME_MAX_PAYLOAD;
        if (assembly_octets - assembly->room + room > MAX_SPAWN_BYTES)
            return false;
        uint8_t *data = realloc(assembly->data, room);
        if (!data)
            return false;
        assembly_octets += room - assembly->room;
        assembly->data = data;
        assembly->room = room;
    }
    if (frame->length)
        memcpy(assembly->data + assembly->length, frame->payload, frame->length);
    assembly->length = need;
    assembly->frames++;
    return true;
}

static void refuse_rest(uint32_t request, bool more)
{
    refusing = more;
    refused = request;
}

static void spawn_frame(const struct frame *frame)
{
    bool more = frame->flags & FRAME_MORE;
    if (refusing && frame->stream == refused) {
        refusing = more;
        return;
    }
    struct assembly *assembly = find_assembly(frame->stream);
    if (!assembly && !more) {
        spawn(frame->stream, frame->payload, frame->length);
        return;
    }
    if (!assembly) {
        for (int i = 0; i < MAX_ASSEMBLIES && !assembly; i++)
            if (!assemblies[i].data)
                assembly = &assemblies[i];
        if (!assembly) {
            respond(frame->stream, EAGAIN, "%d SPAWNs of several frames are in progress", MAX_ASSEMBLIES);
            refuse_rest(frame->stream, more);
            return;
        }
        assembly->request = frame->stream;
    }
    if (assembly->frames + 1 > MAX_SPAWN_FRAMES || (more && assembly->frames + 1 == MAX_SPAWN_FRAMES)) {
        respond(frame->stream, E2BIG, "a SPAWN has at most %d frames", MAX_SPAWN_FRAMES);
        assembly_drop(assembly);
        refuse_rest(frame->stream, more);
        return;
    }
    if (!append(assembly, frame)) {
        respond(frame->stream, EAGAIN, "too many large SPAWNs at once; try again");
        assembly_drop(assembly);
        refuse_rest(frame->stream, more);
        return;
    }
    if (!more) {
        spawn(frame->stream, assembly->data, assembly->length);
        assembly_drop(assembly);
    }
}

/* ---- the others ---- */

static void ping(const struct frame *frame)
{
    struct field_writer writer = response_begin(0);
    write_u64(&writer, F_UPTIME_NS, boot_ns());
    write_u64(&writer, F_TIME_NS, wall_ns());
    response_end(frame->stream, &writer);
}

static void signal_process(const struct frame *frame, const struct arguments *arguments)
{
    struct proc *proc = named_process(frame, arguments);
    if (!proc)
        return;
    if (!arguments->has_signal || arguments->signal == 0 || arguments->signal > (uint32_t)SIGRTMAX ||
        arguments->scope > SCOPE_LEADER) {
        respond(frame->stream, EINVAL, "no such signal or scope");
        return;
    }
    int error = proc_signal(proc, (int)arguments->signal, arguments->scope);
    if (error == -ESRCH)
        respond(frame->stream, ESRCH, "process %u has ended", proc->number);
    else
        answer(frame, error, "the signal");
}

static void close_process(const struct frame *frame, const struct arguments *arguments)
{
    if (!arguments->has_size || arguments->size < 1 || arguments->size >= 1u << 31) {
        respond(frame->stream, EINVAL, "CLOSE needs a process number (SIZE)");
        return;
    }
    struct proc *proc = proc_by_number((uint32_t)arguments->size);
    if (proc && arguments->flags & CLOSE_IF_OVER && proc_lives(proc)) {
        respond(frame->stream, EBUSY, "something of process %u lives", proc->number);
        return;
    }
    if (proc)
        proc_forget(proc);
    respond_done(frame->stream); /* one that is not known was closed before: the request may be a repeated one */
}

static void resize(const struct frame *frame, const struct arguments *arguments)
{
    struct proc *proc = named_process(frame, arguments);
    if (!proc)
        return;
    int error = arguments->has_rows && arguments->has_cols ? proc_resize(proc, arguments->rows, arguments->cols) : -EINVAL;
    answer(frame, error, "the terminal's size");
}

static void output_ack(const struct frame *frame)
{
    struct field_reader reader = fields_of(frame->payload, frame->length);
    struct field field;
    uint64_t acks[2], limit;
    bool has[3] = {false, false, false};
    struct proc *proc = frame->stream ? proc_by_number(frame->stream) : NULL;
    while (field_next(&reader, &field)) {
        if (field.tag == F_STDOUT_ACK)
            has[0] = field_u64(&field, &acks[0]);
        else if (field.tag == F_STDERR_ACK)
            has[1] = field_u64(&field, &acks[1]);
        else if (field.tag == F_LIMIT)
            has[2] = field_u64(&field, &limit);
    }
    if (proc && !reader.bad)
        proc_output_ack(proc, has[0] ? &acks[0] : NULL, has[1] ? &acks[1] : NULL, has[2] ? &limit : NULL);
}

static void input(const struct frame *frame)
{
    struct proc *proc = frame->stream ? proc_by_number(frame->stream) : NULL;
    if (proc && frame->length >= 16)
        proc_input(proc, get_u64(frame->payload + 8), frame->payload + 16, frame->length - 16, frame->payload[0] & 1);
}

void request_frame(const struct frame *frame)
{
    struct arguments arguments;
    switch (frame->type) {
    case T_OUTPUT_ACK: output_ack(frame); return;
    case T_INPUT: input(frame); return;
    case T_SPAWN: spawn_frame(frame); return;
    case T_DIAL: dial_request(frame->stream, frame->payload, frame->length); return;
    case T_SETUP: setup_request(frame->stream, frame->payload, frame->length); return;
    case T_PING: ping(frame); return;
    case T_METRICS: metrics_request(frame->stream); return;
    default: break;
    }
    if (frame->type < T_PING || frame->type > T_METRICS)
        return; /* not a request: nobody waits for an answer */
    if (!read_arguments(frame, &arguments))
        return;
    switch (frame->type) {
    case T_SIGNAL: signal_process(frame, &arguments); break;
    case T_CLOSE: close_process(frame, &arguments); break;
    case T_RESIZE: resize(frame, &arguments); break;
    case T_SYNC: disk_sync(frame->stream); break;
    case T_FREEZE: disk_freeze(frame->stream, arguments.timeout_ms); break;
    case T_THAW: disk_thaw(frame->stream); break;
    case T_RESIZE_DISK: disk_resize(frame->stream, arguments.size); break;
    case T_SHUTDOWN:
        respond_done(frame->stream);
        power_down(arguments.flags & SHUTDOWN_REBOOT);
        break;
    default: break;
    }
}
