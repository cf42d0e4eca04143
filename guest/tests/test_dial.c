/* Connections to ports inside, through the whole agent in host mode; the servers are here. */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "check.h"
#include "client.h"

static uint32_t number; /* of the last connection: each test uses new ones */

static int listen_on(bool v6, uint16_t *port, int backlog)
{
    struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    struct sockaddr_in four = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = v6 ? sizeof six : sizeof four;
    struct sockaddr *address = v6 ? (struct sockaddr *)&six : (struct sockaddr *)&four;
    int fd = socket(v6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0 && bind(fd, address, length) == 0 && listen(fd, backlog) == 0);
    CHECK(getsockname(fd, address, &length) == 0);
    *port = ntohs(v6 ? six.sin6_port : four.sin_port);
    return fd;
}

static int accept_one(int listening)
{
    struct pollfd pollfd = {.fd = listening, .events = POLLIN};
    CHECK(poll(&pollfd, 1, 60000) == 1);
    int fd = accept4(listening, NULL, NULL, SOCK_CLOEXEC);
    CHECK(fd >= 0);
    return fd;
}

/* Reads exactly so much, or (0 octets wanted) the end. */
static void expect(int fd, const void *wanted, size_t count)
{
    static char got[1 << 20];
    struct pollfd pollfd = {.fd = fd, .events = POLLIN};
    CHECK(poll(&pollfd, 1, 60000) == 1);
    ssize_t n = recv(fd, got, count ? count : 1, count ? MSG_WAITALL : 0);
    CHECK(n == (ssize_t)count);
    CHECK(memcmp(got, wanted, count) == 0);
}

static bool stored(uint32_t n, const char *text)
{
    return seen[n].stored[0] == strlen(text) && memcmp(seen[n].output[0], text, strlen(text)) == 0;
}

static void both_directions_and_half_closes(void)
{
    uint16_t port;
    int listening = listen_on(false, &port, 8);
    CHECK_EQUAL(dial(++number, port, NULL, 1 << 16).status, 0);
    CHECK_EQUAL(seen[number].pid, 0);
    int fd = accept_one(listening);
    UNTIL(seen[number].stdin_limit > 0);
    input(number, 0, "question", 8, false);
    expect(fd, "question", 8);
    CHECK_EQUAL(write(fd, "answer", 6), 6);
    UNTIL(stored(number, "answer"));
    CHECK_EQUAL(seen[number].state, STATE_RUNNING);
    input(number, 8, "", 0, true);
    expect(fd, "", 0); /* the end came, and only of this direction */
    CHECK_EQUAL(write(fd, " and more", 9), 9);
    UNTIL(stored(number, "answer and more"));
    CHECK_EQUAL(seen[number].state, STATE_RUNNING);
    close(fd);
    UNTIL(seen[number].state == STATE_CLOSED);
    CHECK(seen[number].was_exited && seen[number].reason == REASON_EXITED && seen[number].exit_code == 0);
    CHECK_EQUAL(on_process(T_CLOSE, number).status, 0);

    CHECK_EQUAL(dial(++number, port, "127.0.0.1", 1 << 16).status, 0); /* the other side ends first */
    fd = accept_one(listening);
    CHECK_EQUAL(write(fd, "hello", 5), 5);
    CHECK_EQUAL(shutdown(fd, SHUT_WR), 0);
    UNTIL(stored(number, "hello") && seen[number].state == STATE_EXITED && seen[number].stdin_limit > 0);
    input(number, 0, "still heard", 11, true);
    expect(fd, "still heard", 11);
    expect(fd, "", 0);
    UNTIL(seen[number].state == STATE_CLOSED);
    CHECK_EQUAL(seen[number].exit_code, 0);
    close(fd);
    close(listening);
}

static void the_loopback_is_both_families(void)
{
    uint16_t port;
    int listening = listen_on(true, &port, 8);
    CHECK_EQUAL(dial(++number, port, NULL, 1 << 16).status, 0);
    close(accept_one(listening));
    UNTIL(seen[number].state == STATE_EXITED);
    CHECK_EQUAL(dial(++number, port, "::1", 1 << 16).status, 0);
    close(accept_one(listening));
    CHECK_EQUAL(dial(++number, port, "127.0.0.1", 0).status, ECONNREFUSED);
    close(listening);
    CHECK_EQUAL(dial(++number, port, NULL, 0).status, ECONNREFUSED);
}

static void only_the_sandbox_itself_is_dialled(void)
{
    struct {
        const char *host;
        int error;
    } cases[] = {
        {"192.0.2.1", EADDRNOTAVAIL}, {"0.0.0.0", EADDRNOTAVAIL}, {"255.255.255.255", EADDRNOTAVAIL}, {"224.0.0.1", EADDRNOTAVAIL},
        {"::", EADDRNOTAVAIL},        {"2001:db8::1", EADDRNOTAVAIL}, {"::ffff:192.0.2.1", EINVAL},   {"localhost", EINVAL},
        {"127.1", EINVAL},            {"", EINVAL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        CHECK_EQUAL(dial(++number, 80, cases[i].host, 0).status, cases[i].error);
    struct field_writer *fields = payload();
    write_text(fields, F_KEY, "no port");
    write_u64(fields, F_SIZE, ++number);
    CHECK_EQUAL(request(T_DIAL, fields).status, EINVAL);
    fields = payload();
    write_text(fields, F_KEY, "large port");
    write_u64(fields, F_SIZE, number);
    write_u32(fields, F_PORT, 65536);
    CHECK_EQUAL(request(T_DIAL, fields).status, EINVAL);
}

static void a_known_key_connects_once(void)
{
    uint16_t port;
    int listening = listen_on(false, &port, 8);
    CHECK_EQUAL(dial(++number, port, NULL, 1 << 16).status, 0);
    CHECK_EQUAL(dial(number, port, NULL, 1 << 16).status, 0);
    int fd = accept_one(listening);
    struct pollfd pollfd = {.fd = listening, .events = POLLIN};
    CHECK_EQUAL(poll(&pollfd, 1, 0), 0);
    CHECK_EQUAL(on_process(T_RESIZE, number).status, EINVAL);
    struct field_writer *fields = payload();
    write_u64(fields, F_SIZE, number);
    write_u32(fields, F_SIGNAL, 15);
    CHECK_EQUAL(request(T_SIGNAL, fields).status, ESRCH);
    close(fd);
    close(listening);
}

static void a_reset_is_told_and_close_resets(void)
{
    struct linger reset = {.l_onoff = 1};
    uint16_t port;
    int listening = listen_on(false, &port, 8);
    CHECK_EQUAL(dial(++number, port, NULL, 1 << 16).status, 0);
    int fd = accept_one(listening);
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
    close(fd);
    UNTIL(seen[number].state == STATE_CLOSED);
    CHECK(seen[number].exit_code == 1 && seen[number].reason == REASON_EXITED);
    CHECK(strcmp(seen[number].message, "Connection reset by peer") == 0);

    CHECK_EQUAL(dial(++number, port, NULL, 1 << 16).status, 0);
    fd = accept_one(listening);
    CHECK_EQUAL(on_process(T_CLOSE, number).status, 0);
    char octet;
    struct pollfd pollfd = {.fd = fd, .events = POLLIN};
    CHECK(poll(&pollfd, 1, 60000) == 1);
    CHECK(recv(fd, &octet, 1, 0) < 0 && errno == ECONNRESET);
    close(fd);
    close(listening);
}

static void much_flows_under_credit_both_ways(void)
{
    static char data[60000], back[1 << 18];
    uint64_t total = 3000000, sent = 0, answered = 0;
    uint16_t port;
    int listening = listen_on(false, &port, 8);
    auto_limit = 0;
    CHECK_EQUAL(dial(++number, port, NULL, 0).status, 0);
    int fd = accept_one(listening);
    memset(data, 'd', sizeof data);
    memset(back, 'b', sizeof back);
    for (uint64_t put = 0; put < 4 * sizeof back; put += sizeof back) /* nobody takes it: this side is held up, the agent is not */
        CHECK(send(fd, back, sizeof back, MSG_DONTWAIT) != 0);
    take_what_is_there();
    CHECK_EQUAL(seen[number].stored[0], 0);
    acknowledge(number, 1000);
    UNTIL(seen[number].stored[0] == 1000);
    auto_limit = 1 << 18;
    acknowledge(number, auto_limit);
    UNTIL(seen[number].stored[0] > 200000);
    UNTIL(seen[number].stdin_limit > 0);
    while (answered < total) {
        struct pollfd pollfd = {.fd = fd, .events = POLLIN};
        while (poll(&pollfd, 1, 0) == 1 && answered < total)
            answered += (uint64_t)recv(fd, back, sizeof back, 0);
        take_what_is_there();
        uint64_t room = seen[number].stdin_taken + seen[number].stdin_limit - sent;
        size_t part = room < sizeof data ? (size_t)room : sizeof data;
        if (part > total - sent)
            part = (size_t)(total - sent);
        if (part > 0)
            input(number, sent, data, part, sent + part == total);
        sent += part;
    }
    CHECK_EQUAL(answered, total);
    expect(fd, "", 0);
    close(fd);
    close(listening);
    UNTIL(seen[number].state == STATE_CLOSED);
}

static void connections_outlive_the_link(void)
{
    uint16_t port;
    int listening = listen_on(false, &port, 8);
    CHECK_EQUAL(dial(++number, port, NULL, 0).status, 0);
    int fd = accept_one(listening);
    CHECK_EQUAL(write(fd, "kept", 4), 4);
    link_down();
    link_up(false);
    CHECK_EQUAL(seen[number].state, STATE_RUNNING); /* it is in the list */
    acknowledge(number, 1 << 16);
    UNTIL(stored(number, "kept") && seen[number].stdin_limit > 0);
    input(number, 0, "on", 2, true);
    expect(fd, "on", 2);
    expect(fd, "", 0);
    close(fd);
    close(listening);
    UNTIL(seen[number].state == STATE_CLOSED);
}

/* A listener whose queue is full answers nobody: such a connection is listed, can be closed, and holds up no other request. */
static void one_that_never_answers_can_be_closed(void)
{
    uint16_t port;
    int listening = listen_on(false, &port, 0);
    struct field_writer *fields;
    CHECK_EQUAL(dial(++number, port, NULL, 0).status, 0); /* the one that the queue has room for */
    uint32_t first = number + 1;
    for (int i = 0; i < MAX_REQUESTS + 8; i++) {
        char key[32];
        fields = payload();
        snprintf(key, sizeof key, "key-%u", ++number);
        write_text(fields, F_KEY, key);
        write_u64(fields, F_SIZE, number);
        write_u32(fields, F_PORT, port);
        send_frame(T_DIAL, 0, 7000000 + number, fields);
    }
    CHECK_EQUAL(request(T_PING, NULL).status, 0);
    CHECK_EQUAL(dial(number + 1, port, NULL, 0).status, EAGAIN);
    CHECK_EQUAL(spawn_shell(number + 2, "exit 3", 0, 1 << 16).status, 0);
    number += 2;
    UNTIL(seen[number].state == STATE_CLOSED);
    input(first + 15, 0, "", 0, true); /* an end needs no credit, also before the connection is there */
    link_down();
    link_up(false);
    CHECK_EQUAL(seen[first + 15].state, STATE_RUNNING);
    for (uint32_t i = first; i <= number; i++)
        CHECK_EQUAL(on_process(T_CLOSE, i).status, 0);
    close(listening);
    CHECK_EQUAL(dial(++number, port, NULL, 0).status, ECONNREFUSED);
}

static void as_many_as_there_may_be(void)
{
    uint16_t port;
    int listening = listen_on(false, &port, MAX_CONNECTIONS), fds[MAX_CONNECTIONS];
    link_down();
    link_up(false);
    for (uint32_t i = 1; i <= number; i++)
        CHECK_EQUAL(on_process(T_CLOSE, i).status, 0);
    uint32_t first = 1; /* what was closed is free again; seen[] is empty but for what was stored */
    for (uint32_t i = 0; i < MAX_CONNECTIONS; i++) {
        seen[first + i].stored[0] = seen[first + i].stored[1] = 0;
        CHECK_EQUAL(dial(first + i, port, NULL, 1 << 12).status, 0);
        fds[i] = accept_one(listening);
    }
    CHECK_EQUAL(dial(first + MAX_CONNECTIONS, port, NULL, 0).status, EAGAIN);
    seen[first + MAX_CONNECTIONS].stored[0] = 0;
    CHECK_EQUAL(spawn_shell(first + MAX_CONNECTIONS, "echo room", 0, 1 << 12).status, 0); /* processes have places of their own */
    UNTIL(stored(first + MAX_CONNECTIONS, "room\n"));
    for (uint32_t i = 0; i < MAX_CONNECTIONS; i++)
        CHECK_EQUAL(write(fds[i], &i, sizeof i), sizeof i);
    for (uint32_t i = 0; i < MAX_CONNECTIONS; i++) {
        UNTIL(seen[first + i].stored[0] == sizeof i);
        CHECK(memcmp(seen[first + i].output[0], &i, sizeof i) == 0);
        close(fds[i]);
    }
    for (uint32_t i = 0; i <= MAX_CONNECTIONS; i++)
        CHECK_EQUAL(on_process(T_CLOSE, first + i).status, 0);
    close(listening);
}

int main(int argc, char **argv)
{
    CHECK_EQUAL(argc, 2);
    agent_start(argv[1]);
    link_up(false);
    RUN(both_directions_and_half_closes);
    RUN(the_loopback_is_both_families);
    RUN(only_the_sandbox_itself_is_dialled);
    RUN(a_known_key_connects_once);
    RUN(a_reset_is_told_and_close_resets);
    RUN(much_flows_under_credit_both_ways);
    RUN(connections_outlive_the_link);
    RUN(one_that_never_answers_can_be_closed);
    RUN(as_many_as_there_may_be);
    agent_stop();
    return 0;
}
