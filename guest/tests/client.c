#include "client.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

struct seen seen[SEEN_PROCS];
unsigned frames_before_ready;
uint64_t auto_limit = 1 << 18;

static char folder[] = "/tmp/hatchway-agent-test-XXXXXX", path[64];
static pid_t agent_pid;
static int sock = -1;
static struct frame_parser parser;
static bool ready;
static uint32_t request_id, answered;
static struct answer last_answer;
static uint8_t payload_octets[FRAME_MAX_PAYLOAD];
static struct field_writer payload_writer;
static time_t give_up;

static int try_connect(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strcpy(address.sun_path, path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0);
    if (connect(fd, (struct sockaddr *)&address, sizeof address) == 0)
        return fd;
    close(fd);
    return -1;
}

static void clean_up(void)
{
    if (agent_pid > 0)
        kill(agent_pid, SIGKILL);
    unlink(path);
    rmdir(folder);
}

static void on_abort(int signal)
{
    clean_up();
    _exit(128 + signal);
}

void agent_start(const char *binary)
{
    CHECK(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/agent.sock", folder);
    signal(SIGABRT, on_abort);
    signal(SIGTERM, on_abort);
    pid_t parent = getpid();
    agent_pid = fork();
    if (agent_pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() == parent)
            execl(binary, binary, "--host-mode", path, (char *)NULL);
        _exit(127);
    }
    start_waiting();
    while ((sock = try_connect()) < 0) {
        CHECK(time(NULL) < give_up);
        CHECK(waitpid(agent_pid, NULL, WNOHANG) == 0);
        struct timespec pause = {0, 2000000};
        nanosleep(&pause, NULL);
    }
    close(sock);
    sock = -1;
}

void agent_stop(void)
{
    int status = -1;
    link_down();
    kill(agent_pid, SIGTERM);
    CHECK(waitpid(agent_pid, &status, 0) == agent_pid);
    agent_pid = 0;
    CHECK(WIFEXITED(status));
    CHECK_EQUAL(WEXITSTATUS(status), 0); /* sanitizers end it otherwise */
    clean_up();
}

void start_waiting(void)
{
    give_up = time(NULL) + 60;
}

static void on_proc(const struct frame *frame)
{
    struct field_reader reader = fields_of(frame->payload, frame->length);
    struct field field;
    CHECK(frame->stream > 0 && frame->stream < SEEN_PROCS);
    struct seen *proc = &seen[frame->stream];
    proc->frames++;
    frames_before_ready += !ready;
    proc->exit_code = proc->exit_signal = proc->reason = 0;
    while (field_next(&reader, &field)) {
        switch (field.tag) {
        case F_STATE: CHECK(field_u32(&field, &proc->state)); break;
        case F_REASON: CHECK(field_u32(&field, &proc->reason)); break;
        case F_EXIT_CODE: CHECK(field_u32(&field, &proc->exit_code)); break;
        case F_EXIT_SIGNAL: CHECK(field_u32(&field, &proc->exit_signal)); break;
        case F_PID: CHECK(field_u32(&field, &proc->pid)); break;
        case F_STDOUT_TOTAL: CHECK(field_u64(&field, &proc->total[0])); break;
        case F_STDERR_TOTAL: CHECK(field_u64(&field, &proc->total[1])); break;
        case F_STDIN_OFFSET: CHECK(field_u64(&field, &proc->stdin_taken)); break;
        case F_MESSAGE: CHECK(field_text(&field, proc->message, sizeof proc->message)); break;
        default: break;
        }
    }
    CHECK(!reader.bad);
    proc->was_exited |= proc->state == STATE_EXITED;
}

static void on_output(const struct frame *frame)
{
    struct seen *proc = &seen[frame->stream];
    CHECK(frame->length > 16 && (frame->payload[0] == 1 || frame->payload[0] == 2));
    int which = frame->payload[0] - 1;
    size_t count = frame->length - 16;
    CHECK_EQUAL(get_u64(frame->payload + 8), proc->stored[which]); /* nothing twice, nothing left out */
    if (!proc->output[which])
        CHECK((proc->output[which] = malloc(KEEP_OUTPUT)));
    if (proc->stored[which] + count <= KEEP_OUTPUT)
        memcpy(proc->output[which] + proc->stored[which], frame->payload + 16, count);
    proc->stored[which] += count;
    if (auto_limit)
        acknowledge(frame->stream, auto_limit);
}

static void on_response(const struct frame *frame)
{
    struct field_reader reader = fields_of(frame->payload, frame->length);
    struct field field;
    uint32_t status = 0;
    CHECK(ready); /* answers come after the list */
    memset(&last_answer, 0, sizeof last_answer);
    while (field_next(&reader, &field)) {
        switch (field.tag) {
        case F_STATUS: CHECK(field_u32(&field, &status)); break;
        case F_PID: CHECK(field_u32(&field, &last_answer.pid)); break;
        case F_MESSAGE: CHECK(field_text(&field, last_answer.message, sizeof last_answer.message)); break;
        case F_SIZE: CHECK(field_u64(&field, &last_answer.size)); break;
        case F_TIME_NS: CHECK(field_u64(&field, &last_answer.time_ns)); break;
        case F_CPUS: CHECK(field_u32(&field, &last_answer.cpus)); break;
        case F_PROCESSES: CHECK(field_u32(&field, &last_answer.tasks)); break;
        default: break;
        }
    }
    CHECK(!reader.bad);
    last_answer.status = (int32_t)status;
    CHECK(status == 0 || last_answer.message[0]); /* an error says what it is */
    answered = frame->stream;
}

static void act(const struct frame *frame)
{
    struct field_reader reader = fields_of(frame->payload, frame->length);
    struct field field;
    switch (frame->type) {
    case T_READY: ready = true; break;
    case T_RESPONSE: on_response(frame); break;
    case T_PROC: on_proc(frame); break;
    case T_OUTPUT: on_output(frame); break;
    case T_INPUT_ACK:
        while (field_next(&reader, &field)) {
            if (field.tag == F_STDIN_OFFSET)
                CHECK(field_u64(&field, &seen[frame->stream].stdin_taken));
            else if (field.tag == F_LIMIT)
                CHECK(field_u64(&field, &seen[frame->stream].stdin_limit));
        }
        break;
    default: CHECK(frame->type == T_HELLO_ACK);
    }
}

static void fill_parser(int timeout, const char *waiting_for)
{
    struct pollfd pollfd = {.fd = sock, .events = POLLIN};
    size_t room;
    int n = poll(&pollfd, 1, timeout);
    if (n <= 0) {
        if (time(NULL) >= give_up && waiting_for) {
            fprintf(stderr, "waited in vain for: %s\n", waiting_for);
            abort();
        }
        return;
    }
    uint8_t *to = frame_space(&parser, &room);
    ssize_t got = read(sock, to, room);
    CHECK(got > 0);
    frame_commit(&parser, (size_t)got);
}

void take_frame(const char *waiting_for)
{
    struct frame frame;
    while (!frame_next(&parser, &frame))
        fill_parser(1000, waiting_for);
    CHECK(!ready || parser.dropped == 0);
    act(&frame);
    if (time(NULL) >= give_up) {
        fprintf(stderr, "waited in vain for: %s\n", waiting_for);
        abort();
    }
}

void take_what_is_there(void)
{
    struct frame frame;
    struct pollfd pollfd = {.fd = sock, .events = POLLIN};
    for (;;) {
        while (frame_next(&parser, &frame))
            act(&frame);
        if (poll(&pollfd, 1, 0) <= 0)
            return;
        fill_parser(0, NULL);
    }
}

void send_raw(const void *data, size_t count)
{
    const uint8_t *from = data;
    while (count > 0) {
        struct pollfd pollfd = {.fd = sock, .events = POLLOUT};
        CHECK(poll(&pollfd, 1, 60000) == 1);
        ssize_t n = send(sock, from, count, MSG_NOSIGNAL);
        CHECK(n > 0);
        from += n;
        count -= (size_t)n;
    }
}

void send_frame(uint8_t type, uint8_t flags, uint32_t stream, const struct field_writer *fields)
{
    static uint8_t octets[FRAME_MAX];
    size_t length = fields ? (size_t)(fields->at - payload_octets) : 0;
    CHECK(!fields || !fields->full);
    memcpy(octets + FRAME_HEADER, payload_octets, length);
    send_raw(octets, frame_finish(octets, type, flags, stream, (uint32_t)length));
}

struct field_writer *payload(void)
{
    payload_writer = (struct field_writer){payload_octets, payload_octets + sizeof payload_octets, false};
    return &payload_writer;
}

void handshake(void)
{
    static const uint8_t zeros[FRAME_MAX];
    static uint8_t nonce[16], buffer[1 << 20];
    size_t have = 0;
    for (int i = 0; i < 16; i++)
        nonce[i] = (uint8_t)(nonce[i] * 5 + i + 1);
    struct field_writer *fields = payload();
    write_u32(fields, F_VERSION, HW_VERSION);
    write_bytes(fields, F_NONCE, nonce, sizeof nonce);
    write_u64(fields, F_EPOCH, 1);
    ready = false;
    frames_before_ready = 0;
    for (int i = 0; i < SEEN_PROCS; i++)
        seen[i].state = 0;
    send_raw(zeros, sizeof zeros);
    send_frame(T_HELLO, 0, 0, fields);
    uint8_t *found = NULL;
    start_waiting();
    while (!found) { /* what comes before the nonce is from before the resynchronisation */
        CHECK(time(NULL) < give_up && have < sizeof buffer);
        ssize_t got = read(sock, buffer + have, sizeof buffer - have);
        CHECK(got > 0);
        have += (size_t)got;
        found = memmem(buffer, have, nonce, sizeof nonce);
    }
    while (memcmp(found, "HWF1", 4) != 0)
        CHECK(--found >= buffer);
    memset(&parser, 0, sizeof parser);
    have -= (size_t)(found - buffer);
    for (struct frame frame; have > 0;) {
        size_t room;
        uint8_t *to = frame_space(&parser, &room);
        size_t part = have < room ? have : room;
        memcpy(to, found, part);
        frame_commit(&parser, part);
        found += part;
        have -= part;
        while (have > 0 && frame_next(&parser, &frame))
            act(&frame);
    }
    UNTIL(ready);
}

void link_up(bool bare)
{
    CHECK(sock < 0);
    CHECK((sock = try_connect()) >= 0);
    memset(&parser, 0, sizeof parser);
    if (!bare)
        handshake();
}

void link_down(void)
{
    if (sock >= 0)
        close(sock);
    sock = -1;
}

struct answer request(uint8_t type, const struct field_writer *fields)
{
    uint32_t id = ++request_id;
    send_frame(type, 0, id, fields);
    UNTIL(answered == id);
    return last_answer;
}

struct answer spawn_shell(uint32_t number, const char *command, uint32_t flags, uint64_t limit)
{
    char key[32];
    struct field_writer *fields = payload();
    snprintf(key, sizeof key, "key-%u", number);
    write_text(fields, F_KEY, key);
    write_u64(fields, F_SIZE, number);
    write_u32(fields, F_FLAGS, flags);
    write_text(fields, F_ARG, "/bin/sh");
    write_text(fields, F_ARG, "-c");
    write_text(fields, F_ARG, command);
    struct answer answer = request(T_SPAWN, fields);
    if (limit)
        acknowledge(number, limit);
    return answer;
}

struct answer dial(uint32_t number, uint16_t port, const char *host, uint64_t limit)
{
    char key[32];
    struct field_writer *fields = payload();
    snprintf(key, sizeof key, "key-%u", number);
    write_text(fields, F_KEY, key);
    write_u64(fields, F_SIZE, number);
    write_u32(fields, F_PORT, port);
    if (host)
        write_text(fields, F_HOST, host);
    struct answer answer = request(T_DIAL, fields);
    if (limit && answer.status == 0)
        acknowledge(number, limit);
    return answer;
}

struct answer on_process(uint8_t type, uint32_t number)
{
    struct field_writer *fields = payload();
    write_u64(fields, F_SIZE, number);
    return request(type, fields);
}

void acknowledge(uint32_t number, uint64_t limit)
{
    struct field_writer *fields = payload();
    write_u64(fields, F_STDOUT_ACK, seen[number].stored[0]);
    write_u64(fields, F_STDERR_ACK, seen[number].stored[1]);
    write_u64(fields, F_LIMIT, limit);
    send_frame(T_OUTPUT_ACK, 0, number, fields);
}

void input(uint32_t number, uint64_t offset, const char *data, size_t count, bool eof)
{
    static uint8_t octets[FRAME_MAX];
    uint8_t *at = octets + FRAME_HEADER;
    memset(at, 0, 16);
    at[0] = eof;
    put_u64(at + 8, offset);
    memcpy(at + 16, data, count);
    send_raw(octets, frame_finish(octets, T_INPUT, 0, number, (uint32_t)(16 + count)));
}
