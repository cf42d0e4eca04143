/* The whole agent, in host mode, as its host sees it. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "client.h"

static uint32_t number; /* of the last process: each test uses new ones */

static bool ended(uint32_t n)
{
    return seen[n].state == STATE_CLOSED && seen[n].stored[0] >= seen[n].total[0] && seen[n].stored[1] >= seen[n].total[1];
}

static bool output_is(uint32_t n, int which, const char *text)
{
    return seen[n].stored[which] == strlen(text) && memcmp(seen[n].output[which], text, strlen(text)) == 0;
}

static bool output_has(uint32_t n, const char *text)
{
    return seen[n].output[0] && memmem(seen[n].output[0], seen[n].stored[0], text, strlen(text));
}

static bool process_gone(pid_t pid)
{
    return kill(pid, 0) != 0 && errno == ESRCH;
}

/* The pid that a process printed first. */
static pid_t printed_pid(uint32_t n)
{
    UNTIL(seen[n].stored[0] > 0 && memchr(seen[n].output[0], '\n', seen[n].stored[0]));
    return (pid_t)strtol((char *)seen[n].output[0], NULL, 10);
}

static void wait_gone(pid_t pid)
{
    struct timespec pause = {0, 5000000};
    for (int i = 0; i < 6000 && !process_gone(pid); i++)
        nanosleep(&pause, NULL);
    CHECK(process_gone(pid));
}

static void output_and_exit_code(void)
{
    struct answer answer = spawn_shell(++number, "echo out; echo err >&2; exit 3", 0, 1 << 16);
    CHECK_EQUAL(answer.status, 0);
    CHECK(answer.pid > 1);
    UNTIL(ended(number));
    CHECK(output_is(number, 0, "out\n") && output_is(number, 1, "err\n"));
    CHECK(seen[number].reason == REASON_EXITED && seen[number].exit_code == 3 && seen[number].pid == answer.pid);
    CHECK(seen[number].was_exited); /* state 2 is told before state 3 */
}

static void a_known_key_starts_nothing_again(void)
{
    struct answer first = spawn_shell(++number, "echo once", 0, 1 << 16);
    struct answer again = spawn_shell(number, "echo once", 0, 1 << 16);
    CHECK(again.status == 0 && again.pid == first.pid);
    UNTIL(ended(number));
    CHECK(output_is(number, 0, "once\n"));
}

static void a_number_in_use_is_refused(void)
{
    struct field_writer *fields = payload();
    write_text(fields, F_KEY, "another key");
    write_u64(fields, F_SIZE, number);
    write_text(fields, F_ARG, "true");
    CHECK_EQUAL(request(T_SPAWN, fields).status, EEXIST);
}

static struct answer spawn_with(uint16_t tag, const char *value, const char *command)
{
    struct field_writer *fields = payload();
    char key[32];
    snprintf(key, sizeof key, "key-%u", ++number);
    write_text(fields, F_KEY, key);
    write_u64(fields, F_SIZE, number);
    write_text(fields, F_ARG, command);
    if (tag)
        write_text(fields, tag, value);
    struct answer answer = request(T_SPAWN, fields);
    acknowledge(number, 1 << 16);
    return answer;
}

static void failed_starts_say_why(void)
{
    struct {
        uint16_t tag;
        const char *value, *command, *message;
    } cases[] = {
        {0, "", "no-such-command", "command not found: no-such-command"},
        {0, "", "/no/such/command", "/no/such/command: No such file or directory"},
        {0, "", "/etc/passwd", "/etc/passwd: Permission denied"},
        {F_CWD, "/no/such/folder", "true", "cwd /no/such/folder: No such file or directory"},
        {F_USER, "no-such-user", "true", "no such user: no-such-user"},
        {F_ENV, "PATH=/nowhere", "true", "command not found: true"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct answer answer = spawn_with(cases[i].tag, cases[i].value, cases[i].command);
        CHECK(answer.status == 0 && answer.pid == 0);
        UNTIL(ended(number));
        CHECK_EQUAL(seen[number].reason, REASON_SPAWN_FAILED);
        if (strcmp(seen[number].message, cases[i].message) != 0) {
            fprintf(stderr, "message: %s\n", seen[number].message);
            abort();
        }
        CHECK(seen[number].was_exited);
    }
}

static void malformed_starts_are_refused(void)
{
    struct field_writer *fields = payload();
    CHECK_EQUAL(request(T_SPAWN, fields).status, EINVAL);
    fields = payload();
    write_text(fields, F_KEY, "k");
    write_u64(fields, F_SIZE, 1ull << 31);
    write_text(fields, F_ARG, "true");
    CHECK_EQUAL(request(T_SPAWN, fields).status, EINVAL);
    fields = payload();
    write_text(fields, F_KEY, "k");
    write_u64(fields, F_SIZE, 699);
    write_bytes(fields, F_ARG, "tr\0ue", 5);
    CHECK_EQUAL(request(T_SPAWN, fields).status, EINVAL);
    fields = payload();
    write_text(fields, F_KEY, "k");
    write_u64(fields, F_SIZE, 699);
    for (int i = 0; i < 1025; i++)
        write_text(fields, F_ARG, "a");
    CHECK_EQUAL(request(T_SPAWN, fields).status, EINVAL);
}

static void a_spawn_in_several_frames(void)
{
    static char large[60001];
    uint32_t id = 1000000;
    memset(large, 'x', sizeof large - 1);
    struct field_writer *fields = payload();
    write_text(fields, F_KEY, "several");
    write_u64(fields, F_SIZE, ++number);
    write_text(fields, F_ARG, "/bin/sh");
    write_text(fields, F_ARG, "-c");
    write_text(fields, F_ARG, "echo ${#A} ${#B} ${#C}");
    send_frame(T_SPAWN, FRAME_MORE, id, fields);
    for (char name = 'A'; name <= 'C'; name++) {
        static char setting[60004];
        snprintf(setting, sizeof setting, "%c=%s", name, large);
        fields = payload();
        write_text(fields, F_ENV, setting);
        send_frame(T_SPAWN, name == 'C' ? 0 : FRAME_MORE, id, fields);
    }
    acknowledge(number, 1 << 16);
    UNTIL(ended(number));
    CHECK(output_is(number, 0, "60000 60000 60000\n"));
    for (int i = 0; i < 20; i++) { /* without end: refused, and forgotten */
        fields = payload();
        write_text(fields, F_ENV, "A=b");
        send_frame(T_SPAWN, FRAME_MORE, id + 1, fields);
    }
    fields = payload(); /* the rest of a refused one is nothing by itself, whatever it looks like */
    write_text(fields, F_KEY, "smuggled");
    write_u64(fields, F_SIZE, ++number);
    write_text(fields, F_ARG, "true");
    send_frame(T_SPAWN, 0, id + 1, fields);
    CHECK_EQUAL(request(T_PING, NULL).status, 0);
    CHECK_EQUAL(seen[number].frames, 0);
    CHECK_EQUAL(spawn_shell(number, "echo own", 0, 1 << 16).status, 0);
    UNTIL(ended(number));
    CHECK(output_is(number, 0, "own\n"));
}

static void environment_of_the_sandbox_and_of_the_process(void)
{
    struct field_writer *fields = payload();
    write_text(fields, F_ENV, "COLOUR=red");
    write_text(fields, F_ENV, "SHAPE=round");
    CHECK_EQUAL(request(T_SETUP, fields).status, 0);
    fields = payload();
    write_text(fields, F_ENV, "COLOUR=blue");
    CHECK_EQUAL(request(T_SETUP, fields).status, 0);
    CHECK_EQUAL(spawn_with(F_ENV, "SHAPE=square", "env").status, 0);
    UNTIL(ended(number));
    CHECK(output_has(number, "COLOUR=blue\n") && output_has(number, "SHAPE=square\n"));
    CHECK(!output_has(number, "SHAPE=round") && output_has(number, "PATH=") && output_has(number, "HOME="));
    fields = payload();
    write_u32(fields, F_FLAGS, SETUP_REPLACE_ENV);
    CHECK_EQUAL(request(T_SETUP, fields).status, 0);
    CHECK_EQUAL(spawn_with(0, "", "env").status, 0);
    UNTIL(ended(number));
    CHECK(!output_has(number, "COLOUR"));
}

static void setup_checks_what_it_is_given(void)
{
    struct {
        uint16_t tag;
        const char *value;
    } bad[] = {{F_HOSTNAME, "-x"}, {F_HOSTNAME, "a b"}, {F_HOSTNAME, ""}, {F_MACHINE_ID, "xyz"}, {F_ENV, "novalue"}, {F_TIME_NS, "1"}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct field_writer *fields = payload();
        write_text(fields, bad[i].tag, bad[i].value);
        CHECK_EQUAL(request(T_SETUP, fields).status, EINVAL);
    }
}

static void standard_input_to_its_end(void)
{
    CHECK_EQUAL(spawn_shell(++number, "cat; echo end", SPAWN_STDIN, 1 << 16).status, 0);
    UNTIL(seen[number].stdin_limit > 0);
    input(number, 0, "binary\0\377", 8, false);
    input(number, 4, "ry\0\377more", 8, false); /* half of it known */
    UNTIL(seen[number].stdin_taken == 12);
    seen[number].stdin_limit = 0;
    input(number, 1, "in", 2, false);           /* all of it known: nothing new, and it is acknowledged again */
    UNTIL(seen[number].stdin_limit > 0);
    input(number, 100, "a hole", 6, false);     /* ignored */
    input(number, 12, "", 0, true);
    input(number, 12, "late", 4, false);        /* after the end: thrown away, and acknowledged */
    UNTIL(ended(number));
    CHECK_EQUAL(seen[number].stored[0], 16);
    CHECK(memcmp(seen[number].output[0], "binary\0\377moreend\n", 16) == 0);
    CHECK_EQUAL(seen[number].stdin_taken, 16);
}

static void input_beyond_the_credit_is_taken_in_part(void)
{
    static char data[60000];
    uint64_t total = 20 * sizeof data;
    CHECK_EQUAL(spawn_shell(++number, "trap 'exec wc -c' USR1; echo set; while :; do sleep 0.02; done", SPAWN_STDIN, 1 << 16).status, 0);
    UNTIL(seen[number].stdin_limit > 0 && seen[number].stored[0] > 0);
    for (uint64_t at = 0; at < total; at += sizeof data) /* nobody reads: the pipe and the agent's buffer fill up */
        input(number, at, data, sizeof data, false);
    CHECK_EQUAL(request(T_PING, NULL).status, 0);
    CHECK(seen[number].stdin_taken < 600000);
    struct field_writer *fields = payload();
    write_u64(fields, F_SIZE, number);
    write_u32(fields, F_SIGNAL, SIGUSR1);
    write_u32(fields, F_SCOPE, SCOPE_LEADER);
    CHECK_EQUAL(request(T_SIGNAL, fields).status, 0);
    while (seen[number].stdin_taken < total) { /* what was too much is sent again, from what was taken on */
        uint64_t at = seen[number].stdin_taken;
        size_t part = total - at < 50000 ? (size_t)(total - at) : 50000;
        input(number, at, data, part, at + part == total);
        UNTIL(seen[number].stdin_taken > at);
    }
    UNTIL(ended(number));
    CHECK(output_is(number, 0, "set\n1200000\n"));
}

static void input_flows_under_credit(void)
{
    static char data[50000];
    uint64_t total = 3000000, sent = 0;
    CHECK_EQUAL(spawn_shell(++number, "wc -c", SPAWN_STDIN, 1 << 16).status, 0);
    UNTIL(seen[number].stdin_limit > 0);
    memset(data, 'z', sizeof data);
    while (sent < total) {
        UNTIL(sent < seen[number].stdin_taken + seen[number].stdin_limit);
        uint64_t room = seen[number].stdin_taken + seen[number].stdin_limit - sent;
        size_t part = room < sizeof data ? (size_t)room : sizeof data;
        if (part > total - sent)
            part = (size_t)(total - sent);
        input(number, sent, data, part, sent + part == total);
        sent += part;
    }
    UNTIL(ended(number));
    CHECK(output_is(number, 0, "3000000\n"));
}

static void a_process_that_does_not_read_its_input(void)
{
    static char data[60000];
    CHECK_EQUAL(spawn_shell(++number, "exec <&-; echo closed; sleep 1000", SPAWN_STDIN, 1 << 16).status, 0);
    UNTIL(seen[number].stored[0] > 0);
    input(number, 0, data, sizeof data, false); /* the write fails: thrown away and acknowledged */
    UNTIL(seen[number].stdin_taken == sizeof data);
    CHECK_EQUAL(on_process(T_CLOSE, number).status, 0);
}

static void full_output_blocks_that_process_only(void)
{
    uint32_t flood = ++number;
    auto_limit = 0;
    CHECK_EQUAL(spawn_shell(flood, "exec cat /dev/zero", 0, 0).status, 0);
    acknowledge(flood, 100000);
    UNTIL(seen[flood].stored[0] == 100000); /* the limit, to the octet */
    auto_limit = 1 << 18;
    CHECK_EQUAL(spawn_shell(++number, "head -c 500000 /dev/zero; echo done >&2", 0, 1 << 16).status, 0);
    UNTIL(ended(number));
    CHECK_EQUAL(seen[number].stored[0], 500000);
    take_what_is_there();
    CHECK_EQUAL(seen[flood].stored[0], 100000);
    auto_limit = 0;
    acknowledge(flood, 1 << 30); /* goes on where it stood */
    UNTIL(seen[flood].stored[0] >= 100000 + 200000);
    CHECK_EQUAL(on_process(T_CLOSE, flood).status, 0);
    auto_limit = 1 << 18;
}

static void answers_overtake_a_flood(void)
{
    uint32_t flood = ++number;
    CHECK_EQUAL(spawn_shell(flood, "exec cat /dev/zero", 0, 1 << 18).status, 0);
    UNTIL(seen[flood].stored[0] > 1 << 20);
    for (int i = 0; i < 20; i++) {
        uint64_t before = seen[flood].stored[0];
        CHECK_EQUAL(request(T_PING, NULL).status, 0);
        CHECK(seen[flood].stored[0] - before < 8u << 20);
    }
    CHECK_EQUAL(on_process(T_CLOSE, flood).status, 0);
}

static void signals_reach_the_tree_or_the_leader(void)
{
    CHECK_EQUAL(spawn_shell(++number, "trap 'echo got it; exit 5' TERM; sleep 1000 & echo $!; wait", 0, 1 << 16).status, 0);
    pid_t child = printed_pid(number);
    struct field_writer *fields = payload();
    write_u64(fields, F_SIZE, number);
    write_u32(fields, F_SIGNAL, SIGTERM);
    write_u32(fields, F_SCOPE, SCOPE_LEADER);
    CHECK_EQUAL(request(T_SIGNAL, fields).status, 0);
    UNTIL(seen[number].state == STATE_EXITED); /* the child still holds the pipes */
    UNTIL(output_has(number, "got it")); /* states overtake output */
    CHECK(seen[number].exit_code == 5 && !process_gone(child));
    fields = payload();
    write_u64(fields, F_SIZE, number);
    write_u32(fields, F_SIGNAL, SIGKILL);
    CHECK_EQUAL(request(T_SIGNAL, fields).status, 0);
    UNTIL(ended(number)); /* with the last writer the streams end */
    wait_gone(child);
    fields = payload();
    write_u64(fields, F_SIZE, number);
    write_u32(fields, F_SIGNAL, SIGTERM);
    write_u32(fields, F_SCOPE, SCOPE_LEADER);
    CHECK_EQUAL(request(T_SIGNAL, fields).status, ESRCH);
    fields = payload();
    write_u64(fields, F_SIZE, number);
    write_u32(fields, F_SIGNAL, 65);
    CHECK_EQUAL(request(T_SIGNAL, fields).status, EINVAL);
}

static void close_kills_the_tree(void)
{
    CHECK_EQUAL(spawn_shell(++number, "sleep 1000 & echo $!; trap '' TERM; wait", 0, 1 << 16).status, 0);
    pid_t child = printed_pid(number);
    CHECK_EQUAL(on_process(T_CLOSE, number).status, 0);
    wait_gone(child);
    wait_gone((pid_t)seen[number].pid);
    CHECK_EQUAL(on_process(T_CLOSE, number).status, 0); /* again: nothing to do */
    link_down();
    link_up(false);
    CHECK_EQUAL(seen[number].state, 0); /* not in the list any more */
}

static int close_if_over(unsigned process)
{
    struct field_writer *fields = payload();
    write_u64(fields, F_SIZE, process);
    write_u32(fields, F_FLAGS, CLOSE_IF_OVER);
    return (int)request(T_CLOSE, fields).status;
}

static void what_outlives_its_leader_is_left_alone_where_that_is_asked(void)
{
    CHECK_EQUAL(spawn_shell(++number, "sleep 1000 >/dev/null 2>&1 </dev/null & echo $!", 0, 1 << 16).status, 0);
    pid_t child = printed_pid(number);
    UNTIL(ended(number)); /* nobody holds the pipes */
    CHECK_EQUAL(close_if_over(number), EBUSY);
    CHECK(!process_gone(child));
    CHECK_EQUAL(kill(child, SIGKILL), 0);
    wait_gone(child);
    CHECK_EQUAL(close_if_over(number), 0);
    CHECK_EQUAL(on_process(T_SIGNAL, number).status, ESRCH);
    CHECK_EQUAL(close_if_over(number), 0);
}

static void timeouts_kill_the_tree(void)
{
    struct field_writer *fields = payload();
    char key[32];
    snprintf(key, sizeof key, "key-%u", ++number);
    write_text(fields, F_KEY, key);
    write_u64(fields, F_SIZE, number);
    write_u64(fields, F_TIMEOUT_MS, 200);
    write_text(fields, F_ARG, "/bin/sh");
    write_text(fields, F_ARG, "-c");
    write_text(fields, F_ARG, "sleep 1000 & echo $!; wait");
    CHECK_EQUAL(request(T_SPAWN, fields).status, 0);
    acknowledge(number, 1 << 16);
    pid_t child = printed_pid(number);
    UNTIL(ended(number));
    CHECK(seen[number].reason == REASON_TIMEOUT && seen[number].exit_signal == SIGKILL);
    wait_gone(child);
}

/* Whoever opens a leased file waits until the lease is given back: so does an exec. */
static void timeouts_end_a_start_that_hangs(void)
{
    char program[] = "/tmp/hatchway-agent-test-XXXXXX";
    int fd = mkstemp(program);
    CHECK(fd >= 0 && fchmod(fd, 0755) == 0);
    CHECK_EQUAL(write(fd, "#!/bin/sh\n", 10), 10);
    CHECK(signal(SIGIO, SIG_IGN) != SIG_ERR);
    CHECK_EQUAL(fcntl(fd, F_SETLEASE, F_WRLCK), 0);
    struct field_writer *fields = payload();
    char key[32];
    snprintf(key, sizeof key, "key-%u", ++number);
    write_text(fields, F_KEY, key);
    write_u64(fields, F_SIZE, number);
    write_u64(fields, F_TIMEOUT_MS, 200);
    write_text(fields, F_ARG, program);
    struct answer answer = request(T_SPAWN, fields);
    CHECK(answer.status == 0 && answer.pid > 1);
    UNTIL(ended(number));
    CHECK(seen[number].reason == REASON_TIMEOUT && seen[number].exit_signal == SIGKILL);
    wait_gone((pid_t)answer.pid);
    close(fd);
    unlink(program);
}

static void a_terminal(void)
{
    struct field_writer *fields = payload();
    char key[32];
    snprintf(key, sizeof key, "key-%u", ++number);
    write_text(fields, F_KEY, key);
    write_u64(fields, F_SIZE, number);
    write_u32(fields, F_FLAGS, SPAWN_PTY);
    write_u32(fields, F_ROWS, 33);
    write_u32(fields, F_COLS, 111);
    write_text(fields, F_ARG, "/bin/sh");
    write_text(fields, F_ARG, "-c");
    write_text(fields, F_ARG, "stty -echo; stty size; tty; echo >/dev/tty ctty; trap 'stty size; exit 7' WINCH; while read l; do echo \"<$l>\"; done; echo eof; read l");
    CHECK_EQUAL(request(T_SPAWN, fields).status, 0);
    acknowledge(number, 1 << 16);
    UNTIL(output_has(number, "ctty"));
    CHECK(output_has(number, "33 111") && output_has(number, "/dev/pts/"));
    input(number, 0, "word\n", 5, false);
    UNTIL(output_has(number, "<word>"));
    input(number, 5, "\004", 1, false);
    UNTIL(output_has(number, "eof"));
    fields = payload();
    write_u64(fields, F_SIZE, number);
    write_u32(fields, F_ROWS, 44);
    write_u32(fields, F_COLS, 55);
    CHECK_EQUAL(request(T_RESIZE, fields).status, 0);
    UNTIL(output_has(number, "44 55"));
    input(number, 6, "\n", 1, false);
    UNTIL(ended(number));
    CHECK_EQUAL(seen[number].exit_code, 7);
    CHECK_EQUAL(seen[number].total[1], 0);
}

static void the_end_of_a_terminals_input(void)
{
    CHECK_EQUAL(spawn_shell(++number, "cat >/dev/null; echo over", SPAWN_PTY, 1 << 16).status, 0);
    UNTIL(seen[number].state == STATE_RUNNING);
    input(number, 0, "line\n", 5, true);
    UNTIL(ended(number));
    CHECK(output_has(number, "over"));
    /* Also where the last line has no end. */
    CHECK_EQUAL(spawn_shell(++number, "stty -echo; echo ready; cat; echo; echo over", SPAWN_PTY, 1 << 16).status, 0);
    UNTIL(output_has(number, "ready"));
    input(number, 0, "half a line", 11, true);
    UNTIL(ended(number));
    CHECK(output_has(number, "half a line\r\nover"));
}

static void merged_streams_keep_their_order(void)
{
    CHECK_EQUAL(spawn_shell(++number, "echo 1; echo 2 >&2; echo 3; echo 4 >&2", SPAWN_MERGE, 1 << 16).status, 0);
    UNTIL(ended(number));
    CHECK(output_is(number, 0, "1\n2\n3\n4\n"));
}

static void a_reconnection_loses_nothing(void)
{
    auto_limit = 1 << 17;
    CHECK_EQUAL(spawn_shell(++number, "i=0; while [ $i -lt 30000 ]; do echo line $i; i=$((i+1)); done", 0, 1 << 17).status, 0);
    for (int round = 0; round < 6; round++) {
        uint64_t before = seen[number].stored[0];
        UNTIL(seen[number].stored[0] > before + 20000 || ended(number));
        /* Half of a frame is under way when the connection goes: the zeros of the next one end it. */
        static uint8_t half[FRAME_MAX];
        frame_finish(half, T_INPUT, 0, number, 50000);
        send_raw(half, 16 + (size_t)round * 7001);
        link_down();
        link_up(false);
        CHECK(seen[number].state >= STATE_RUNNING); /* it is in the list */
        CHECK(frames_before_ready > 0);
        acknowledge(number, 1 << 17);
    }
    UNTIL(ended(number));
    char line[32];
    uint64_t at = 0;
    for (int i = 0; i < 30000; i++) {
        int n = snprintf(line, sizeof line, "line %d\n", i);
        CHECK(memcmp(seen[number].output[0] + at, line, (size_t)n) == 0);
        at += (uint64_t)n;
    }
    CHECK_EQUAL(at, seen[number].stored[0]);
    auto_limit = 1 << 18;
}

static void processes_outlive_the_connection(void)
{
    CHECK_EQUAL(spawn_shell(++number, "echo before; read l; echo after", SPAWN_STDIN, 0).status, 0);
    link_down();
    link_up(false);
    CHECK_EQUAL(seen[number].state, STATE_RUNNING);
    take_what_is_there();
    CHECK_EQUAL(seen[number].stored[0], 0); /* no credit in this connection yet */
    acknowledge(number, 1 << 16);
    UNTIL(seen[number].stdin_limit > 0 && output_is(number, 0, "before\n"));
    input(number, 0, "\n", 1, false);
    UNTIL(ended(number));
    CHECK(output_is(number, 0, "before\nafter\n"));
}

static void an_ack_behind_what_was_freed_starts_at_the_oldest_octet(void)
{
    CHECK_EQUAL(spawn_shell(++number, "echo 0123456789; read l; echo rest", SPAWN_STDIN, 1 << 16).status, 0);
    UNTIL(seen[number].stored[0] == 11);
    CHECK_EQUAL(request(T_PING, NULL).status, 0);
    link_down();
    link_up(false);
    uint64_t stored = seen[number].stored[0];
    seen[number].stored[0] = 3;
    acknowledge(number, 1 << 16);
    seen[number].stored[0] = stored; /* the output that comes now must be at 11 */
    input(number, 0, "\n", 1, false);
    UNTIL(ended(number));
    CHECK_EQUAL(seen[number].stored[0], 16);
}

static void noise_before_and_after_the_handshake(void)
{
    static uint8_t noise[200000];
    unsigned state = 12345;
    for (size_t i = 0; i < sizeof noise; i++)
        noise[i] = (uint8_t)((state = state * 1103515245 + 12345) >> 16);
    link_down();
    link_up(true);
    send_raw(noise, sizeof noise);
    send_frame(T_PING, 0, 1, payload()); /* before a HELLO nothing is answered */
    handshake();
    CHECK_EQUAL(request(T_PING, NULL).status, 0);
    send_raw(noise, sizeof noise);
    handshake();
    CHECK_EQUAL(request(T_PING, NULL).status, 0);
    send_frame(200, 0, 1, payload()); /* a type of a later version */
    CHECK_EQUAL(request(T_PING, NULL).status, 0);
}

static void disk_requests(void)
{
    CHECK_EQUAL(request(T_SYNC, NULL).status, 0);
    CHECK_EQUAL(request(T_FREEZE, payload()).status, EINVAL);
    struct field_writer *fields = payload();
    write_u64(fields, F_TIMEOUT_MS, 60001);
    CHECK_EQUAL(request(T_FREEZE, fields).status, EINVAL);
    fields = payload();
    write_u64(fields, F_TIMEOUT_MS, 100);
    CHECK_EQUAL(request(T_FREEZE, fields).status, 0);
    CHECK_EQUAL(request(T_RESIZE_DISK, NULL).status, EBUSY);
    fields = payload();
    write_text(fields, F_HOSTNAME, "name");
    CHECK_EQUAL(request(T_SETUP, fields).status, 0); /* identity is not on the disk */
    while (request(T_RESIZE_DISK, NULL).status != 0) /* thaws by itself */
        ;
    CHECK_EQUAL(request(T_THAW, NULL).status, 0);
    CHECK(request(T_RESIZE_DISK, NULL).size > 0);
    struct answer metrics = request(T_METRICS, NULL);
    CHECK(metrics.status == 0 && metrics.cpus == (uint32_t)sysconf(_SC_NPROCESSORS_ONLN) && metrics.tasks > 1);
}

static void bursts_of_starts(void)
{
    enum { BURST = 32 };
    for (int round = 0; round < 6; round++) {
        uint32_t first = number + 1;
        for (int i = 0; i < BURST; i++) {
            char key[32], command[64];
            struct field_writer *fields = payload();
            snprintf(key, sizeof key, "key-%u", ++number);
            snprintf(command, sizeof command, "printf %u; printf %u >&2", number, number);
            write_text(fields, F_KEY, key);
            write_u64(fields, F_SIZE, number);
            write_text(fields, F_ARG, i % 8 == 5 ? "no-such-command" : "sh");
            write_text(fields, F_ARG, "-c");
            write_text(fields, F_ARG, command);
            send_frame(T_SPAWN, 0, 5000000 + number, fields);
            acknowledge(number, 1 << 16);
        }
        if (round == 4) { /* forgotten while they start */
            for (uint32_t i = first; i <= number; i++)
                CHECK_EQUAL(on_process(T_CLOSE, i).status, 0);
            continue;
        }
        if (round == 5) { /* a HELLO while they start: they are in the list */
            handshake();
            CHECK(frames_before_ready >= BURST);
            for (uint32_t i = first; i <= number; i++)
                acknowledge(i, 1 << 16);
        }
        for (uint32_t i = first; i <= number; i++) {
            char text[16];
            UNTIL(ended(i));
            snprintf(text, sizeof text, "%u", i);
            if ((i - first) % 8 == 5)
                CHECK_EQUAL(seen[i].reason, REASON_SPAWN_FAILED);
            else
                CHECK(output_is(i, 0, text) && output_is(i, 1, text));
            CHECK_EQUAL(on_process(T_CLOSE, i).status, 0);
        }
    }
}

static struct answer spawn_builtin(const char *name, const char *operation)
{
    struct field_writer *fields = payload();
    char key[32];
    snprintf(key, sizeof key, "key-%u", ++number);
    write_text(fields, F_KEY, key);
    write_u64(fields, F_SIZE, number);
    write_u32(fields, F_FLAGS, SPAWN_BUILTIN);
    write_text(fields, F_ARG, name);
    write_text(fields, F_ARG, operation);
    struct answer answer = request(T_SPAWN, fields);
    if (answer.status == 0)
        acknowledge(number, 1 << 16);
    return answer;
}

static void programs_of_the_agents_own(void)
{
    CHECK_EQUAL(spawn_builtin("no-such-program", "x").status, ENOENT);
    CHECK_EQUAL(spawn_builtin("files", "no-such-operation").status, 0);
    UNTIL(ended(number));
    CHECK_EQUAL(seen[number].reason, REASON_EXITED);
    CHECK(seen[number].stored[1] > 0 && memmem(seen[number].output[1], seen[number].stored[1], "{\"errno\":", 9));
    CHECK_EQUAL(on_process(T_CLOSE, number).status, 0);
}

static void a_program_of_the_agents_own_has_bounds_of_its_own(void)
{
    uint32_t first = number + 1;
    for (int i = 0; i < MAX_BUILTINS; i++)
        CHECK_EQUAL(spawn_builtin("files", "no-such-operation").status, 0);
    CHECK_EQUAL(spawn_builtin("files", "no-such-operation").status, EAGAIN);
    CHECK_EQUAL(spawn_shell(++number, "exit 0", 0, 1 << 16).status, 0); /* they take no process's place */
    for (uint32_t i = first; i <= number; i++)
        CHECK_EQUAL(on_process(T_CLOSE, i).status, 0);
    static const struct {
        uint16_t tag;
        uint32_t flags;
    } refused[] = {{F_LIMIT_MEMORY, SPAWN_BUILTIN}, {F_LIMIT_PIDS, SPAWN_BUILTIN}, {F_LIMIT_CPU_MS, SPAWN_BUILTIN}, {0, SPAWN_BUILTIN | SPAWN_PTY}};
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        struct field_writer *fields = payload();
        write_text(fields, F_KEY, "refused");
        write_u64(fields, F_SIZE, 699);
        write_u32(fields, F_FLAGS, refused[i].flags);
        write_text(fields, F_ARG, "files");
        if (refused[i].tag)
            write_u64(fields, refused[i].tag, 1 << 24);
        CHECK_EQUAL(request(T_SPAWN, fields).status, EINVAL);
    }
}

static void spawn_limited(uint16_t tag, uint64_t limit, const char *command)
{
    struct field_writer *fields = payload();
    char key[32];
    snprintf(key, sizeof key, "key-%u", ++number);
    write_text(fields, F_KEY, key);
    write_u64(fields, F_SIZE, number);
    write_u64(fields, tag, limit);
    write_text(fields, F_ARG, "/bin/sh");
    write_text(fields, F_ARG, "-c");
    write_text(fields, F_ARG, command);
    CHECK_EQUAL(request(T_SPAWN, fields).status, 0);
    acknowledge(number, 1 << 16);
    UNTIL(ended(number));
}

static void limits_of_one_process(void)
{
    /* Each half of the tree stays below it. */
    spawn_limited(F_LIMIT_CPU_MS, 300, "while :; do :; done & while :; do :; done");
    CHECK(seen[number].reason == REASON_TIMEOUT && seen[number].exit_signal == SIGKILL);
    CHECK(strcmp(seen[number].message, "cpu time") == 0);
    spawn_limited(F_LIMIT_CPU_MS, 3600000, "sleep 0.3; exit 4"); /* time that passes is not taken */
    CHECK(seen[number].reason == REASON_EXITED && seen[number].exit_code == 4);
    spawn_limited(F_LIMIT_NOFILE, 17, "ulimit -n; ulimit -Hn");
    CHECK(output_is(number, 0, "17\n17\n"));
    spawn_limited(F_LIMIT_FSIZE, 8192, "f=$(mktemp); dd if=/dev/zero of=$f bs=1024 count=9 2>/dev/null; stat -c %s $f; rm $f");
    CHECK(output_is(number, 0, "8192\n"));
    spawn_limited(F_LIMIT_FSIZE, 8192, "f=$(mktemp); (sleep 0.5; rm $f) >/dev/null 2>&1 & exec dd if=/dev/zero of=$f bs=1024 count=9");
    CHECK(seen[number].reason == REASON_SIGNALED && seen[number].exit_signal == SIGXFSZ);
    static const uint16_t tags[] = {F_LIMIT_MEMORY, F_LIMIT_CPU_MS, F_LIMIT_NOFILE, F_LIMIT_PIDS, F_LIMIT_FSIZE};
    for (size_t i = 0; i < sizeof tags / sizeof tags[0]; i++) {
        struct field_writer *fields = payload();
        write_text(fields, F_KEY, "no limit");
        write_u64(fields, F_SIZE, 699);
        write_u64(fields, tags[i], 0);
        write_text(fields, F_ARG, "true");
        CHECK_EQUAL(request(T_SPAWN, fields).status, EINVAL);
    }
}

static void as_many_processes_as_there_may_be(void)
{
    uint32_t first = ++number;
    uint32_t known = 0;
    link_down();
    link_up(false);
    for (uint32_t i = 1; i < first; i++)
        CHECK_EQUAL(on_process(T_CLOSE, i).status, 0);
    for (; known < MAX_PROCS; known++)
        CHECK_EQUAL(spawn_shell(first + known, "echo x; exec sleep 1000", SPAWN_STDIN, 1 << 12).status, 0);
    struct answer answer = spawn_shell(first + known, "true", 0, 0);
    CHECK_EQUAL(answer.status, EAGAIN);
    for (uint32_t i = 0; i < known; i++)
        UNTIL(seen[first + i].stored[0] == 2);
    link_down();
    link_up(false);
    CHECK_EQUAL(frames_before_ready, MAX_PROCS);
    CHECK_EQUAL(on_process(T_CLOSE, first).status, 0);
    CHECK_EQUAL(spawn_shell(first + known, "true", 0, 1 << 12).status, 0);
    UNTIL(ended(first + known));
    for (uint32_t i = 1; i <= known; i++)
        CHECK_EQUAL(on_process(T_CLOSE, first + i).status, 0);
    wait_gone((pid_t)seen[first + 1].pid);
    number = first + known;
}

static void many_unread_floods_leave_room_for_others(void)
{
    uint32_t first = ++number;
    auto_limit = 0;
    for (uint32_t i = 0; i < 60; i++, number++) /* 60 × 2 × 256 KiB is more than the pool has */
        CHECK_EQUAL(spawn_shell(first + i, "head -c 400000 /dev/zero & exec head -c 400000 /dev/zero >&2", 0, 0).status, 0);
    auto_limit = 1 << 18;
    CHECK_EQUAL(spawn_shell(number, "head -c 100000 /dev/zero; echo done >&2", 0, 1 << 16).status, 0);
    UNTIL(ended(number));
    CHECK_EQUAL(seen[number].stored[0], 100000);
    for (uint32_t i = 0; i < 60; i++)
        acknowledge(first + i, 1 << 18);
    for (uint32_t i = 0; i < 60; i++) {
        UNTIL(ended(first + i));
        CHECK(seen[first + i].stored[0] == 400000 && seen[first + i].stored[1] == 400000);
        CHECK_EQUAL(on_process(T_CLOSE, first + i).status, 0);
    }
}

int main(int argc, char **argv)
{
    CHECK_EQUAL(argc, 2);
    agent_start(argv[1]);
    link_up(false);
    RUN(output_and_exit_code);
    RUN(a_known_key_starts_nothing_again);
    RUN(a_number_in_use_is_refused);
    RUN(failed_starts_say_why);
    RUN(malformed_starts_are_refused);
    RUN(a_spawn_in_several_frames);
    RUN(environment_of_the_sandbox_and_of_the_process);
    RUN(setup_checks_what_it_is_given);
    RUN(standard_input_to_its_end);
    RUN(input_beyond_the_credit_is_taken_in_part);
    RUN(input_flows_under_credit);
    RUN(a_process_that_does_not_read_its_input);
    RUN(full_output_blocks_that_process_only);
    RUN(answers_overtake_a_flood);
    RUN(signals_reach_the_tree_or_the_leader);
    RUN(what_outlives_its_leader_is_left_alone_where_that_is_asked);
    RUN(close_kills_the_tree);
    RUN(timeouts_kill_the_tree);
    RUN(timeouts_end_a_start_that_hangs);
    RUN(a_terminal);
    RUN(the_end_of_a_terminals_input);
    RUN(programs_of_the_agents_own);
    RUN(a_program_of_the_agents_own_has_bounds_of_its_own);
    RUN(limits_of_one_process);
    RUN(merged_streams_keep_their_order);
    RUN(a_reconnection_loses_nothing);
    RUN(processes_outlive_the_connection);
    RUN(an_ack_behind_what_was_freed_starts_at_the_oldest_octet);
    RUN(noise_before_and_after_the_handshake);
    RUN(disk_requests);
    RUN(many_unread_floods_leave_room_for_others);
    RUN(bursts_of_starts);
    RUN(as_many_processes_as_there_may_be);
    agent_stop();
    return 0;
}
