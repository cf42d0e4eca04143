/* The trust store, laid out in a folder that is taken for the sandbox's root. */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../abi.h"
#include "../agent.h"
#include "../proto.h"
#include "../trust.h"
#include "check.h"

struct agent agent = {.root_fd = -1};

void say(const char *format, ...)
{
    (void)format;
}

int open_in_root(const char *path, int flags, unsigned mode)
{
    struct hw_open_how how = {
        .flags = (uint64_t)(unsigned)(flags | O_CLOEXEC),
        .mode = mode,
        .resolve = HW_RESOLVE_IN_ROOT | HW_RESOLVE_NO_MAGICLINKS,
    };
    return (int)raw6(SYS_openat2, agent.root_fd, (long)path, (long)&how, sizeof how, 0, 0);
}

#define PEM(text) "-----BEGIN CERTIFICATE-----\n" text "\n-----END CERTIFICATE-----\n"
static const char TEMPLATE[] = PEM("AAECAw==") "# a comment\n" PEM("BAUG");
static const char FIRST[] = PEM("Zmlyc3Q="), SECOND[] = PEM("c2Vjb25kIGFuZCBsb25nZXI=");

static char root[] = "/tmp/hatchway-trust-XXXXXX";
static char text[1 << 20];

static const char *at(const char *path)
{
    static char whole[256];
    snprintf(whole, sizeof whole, "%s%s", root, path);
    return whole;
}

static void put(const char *path, const char *content)
{
    FILE *file = fopen(at(path), "w");
    CHECK(file);
    CHECK(fputs(content, file) >= 0);
    CHECK_EQUAL(fclose(file), 0);
}

/* What a program of the sandbox reads: its links stay in its root. */
static size_t reads(const char *path)
{
    int fd = open_in_root(path, O_RDONLY, 0);
    CHECK(fd >= 0);
    ssize_t n = read(fd, text, sizeof text - 1);
    CHECK(n >= 0);
    text[n] = 0;
    close(fd);
    return (size_t)n;
}

/* The template's, the gateway's, and nothing but line ends behind. */
static void holds(const char *path, const char *before, const char *authority)
{
    size_t length = reads(path), first = strlen(before), second = strlen(authority);
    CHECK(length >= first + second);
    CHECK(memcmp(text, before, first) == 0);
    CHECK(memcmp(text + first, authority, second) == 0);
    CHECK_EQUAL(strspn(text + first + second, "\n"), length - first - second);
}

static unsigned variables(const char *name)
{
    unsigned count = 0, found = 0;
    for (const char *const *one = trust_environment(); *one; one++, count++)
        found += strncmp(*one, name, strlen(name)) == 0;
    CHECK(count == 0 || count >= 9);
    return found;
}

static void remove_root(void)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", root);
    CHECK_EQUAL(system(command), 0);
}

static void new_root(bool with_files)
{
    strcpy(root, "/tmp/hatchway-trust-XXXXXX");
    CHECK(mkdtemp(root));
    if (agent.root_fd >= 0)
        close(agent.root_fd);
    agent.root_fd = open(root, O_PATH | O_DIRECTORY | O_CLOEXEC);
    CHECK(agent.root_fd >= 0);
    if (!with_files)
        return;
    char command[256];
    snprintf(command, sizeof command, "mkdir -p '%s/etc/ssl/certs' '%s/usr/lib/ssl' '%s/usr/lib/jvm'", root, root, root);
    CHECK_EQUAL(system(command), 0);
    put("/etc/ssl/certs/ca-certificates.crt", TEMPLATE);
}

static void an_authority_stands_beside_the_templates(void)
{
    new_root(true);
    trust_lay_out();
    CHECK_EQUAL(variables(""), 0);
    holds("/etc/ssl/certs/ca-certificates.crt", TEMPLATE, "");
    CHECK_EQUAL(trust_set(FIRST, strlen(FIRST)), 0);
    CHECK_EQUAL(variables("SSL_CERT_FILE="), 1);
    CHECK_EQUAL(variables("JAVA_TOOL_OPTIONS="), 1);
    holds("/etc/ssl/certs/ca-certificates.crt", TEMPLATE, FIRST);
    holds("/usr/lib/ssl/cert.pem", "", FIRST);
    holds("/usr/local/share/ca-certificates/hatchway.crt", "", FIRST);
    /* Another, while a program has the file open, in its place. */
    int fd = open_in_root("/etc/ssl/certs/ca-certificates.crt", O_RDONLY, 0);
    CHECK_EQUAL(trust_set(SECOND, strlen(SECOND)), 0);
    CHECK(pread(fd, text, sizeof text, 0) > (ssize_t)strlen(TEMPLATE));
    CHECK(memcmp(text + strlen(TEMPLATE), SECOND, strlen(SECOND)) == 0);
    close(fd);
    holds("/run/hatchway/ca.crt", "", SECOND);
    CHECK_EQUAL(trust_set("", 0), 0);
    holds("/run/hatchway/ca-certificates.crt", TEMPLATE, "");
    CHECK_EQUAL(variables(""), 0);
    struct stat st;
    CHECK(stat(at("/run/hatchway/ca-certificates.crt"), &st) == 0 && (st.st_mode & 07777) == 0644);
    remove_root();
}

static void what_a_program_put_in_place_is_kept_at_the_next_start(void)
{
    new_root(true);
    static const char own[] = PEM("b3du");
    trust_lay_out();
    holds("/etc/ssl/certs/ca-certificates.crt", TEMPLATE, "");
    CHECK_EQUAL(unlink(at("/etc/ssl/certs/ca-certificates.crt")), 0);
    put("/etc/ssl/certs/ca-certificates.crt", own);
    trust_lay_out();
    CHECK_EQUAL(trust_set(FIRST, strlen(FIRST)), 0);
    holds("/etc/ssl/certs/ca-certificates.crt", own, FIRST);
    holds("/etc/ssl/ca-certificates.template", own, "");
    CHECK_EQUAL(trust_set("", 0), 0);
    remove_root();
}

static void a_template_without_certificates_gets_them_too(void)
{
    new_root(false);
    trust_lay_out();
    CHECK_EQUAL(trust_set(FIRST, strlen(FIRST)), 0);
    holds("/etc/ssl/certs/ca-certificates.crt", "", FIRST);
    holds("/usr/lib/ssl/cert.pem", "", FIRST);
    CHECK_EQUAL(variables("JAVA_TOOL_OPTIONS="), 0);
    CHECK_EQUAL(trust_set("", 0), 0);
    remove_root();
}

static void links_of_a_template_do_not_lead_out_of_it(void)
{
    new_root(false);
    CHECK_EQUAL(mkdir(at("/etc"), 0755), 0);
    CHECK_EQUAL(symlink("/tmp", at("/etc/ssl")), 0); /* of the sandbox's root, where it is not */
    CHECK_EQUAL(symlink("/tmp", at("/run")), 0);
    trust_lay_out();
    CHECK(trust_set(FIRST, strlen(FIRST)) != 0 || access(at("/tmp/hatchway/ca.crt"), F_OK) == 0);
    CHECK(access("/tmp/hatchway", F_OK) != 0 && access("/tmp/certs", F_OK) != 0);
    trust_set("", 0);
    remove_root();
}

static uint64_t take(const uint8_t **from, unsigned octets)
{
    uint64_t value = 0;
    for (unsigned i = 0; i < octets; i++)
        value = value << 8 | *(*from)++;
    return value;
}

static void java_reads_all_of_them(void)
{
    new_root(true);
    trust_lay_out();
    CHECK_EQUAL(trust_set(FIRST, strlen(FIRST)), 0);
    static const char *const wanted[] = {"\0\1\2\3", "\4\5\6", "first"};
    static const size_t sizes[] = {4, 3, 5};
    size_t length = reads("/run/hatchway/java.jks");
    const uint8_t *from = (const uint8_t *)text;
    CHECK_EQUAL(take(&from, 4), 0xfeedfeed);
    CHECK_EQUAL(take(&from, 4), 2);
    CHECK_EQUAL(take(&from, 4), 3);
    for (unsigned i = 0; i < 3; i++) {
        CHECK_EQUAL(take(&from, 4), 2);
        from += take(&from, 2) + 8;
        CHECK_EQUAL(take(&from, 2), 5);
        CHECK(memcmp(from, "X.509", 5) == 0);
        from += 5;
        CHECK_EQUAL(take(&from, 4), sizes[i]);
        CHECK(memcmp(from, wanted[i], sizes[i]) == 0);
        from += sizes[i];
    }
    CHECK_EQUAL((size_t)(from - (const uint8_t *)text) + 20, length);
    CHECK_EQUAL(trust_set("", 0), 0);
    remove_root();
}

static void only_certificates_are_taken(void)
{
    static char large[MAX_CA + 1];
    CHECK(trust_valid("", 0));
    CHECK(trust_valid(FIRST, strlen(FIRST)));
    CHECK(!trust_valid("x", 1));
    CHECK(!trust_valid("-----BEGIN CERTIFICATE-----\n", 28));
    CHECK(!trust_valid("\n" PEM("AA=="), strlen(PEM("AA==")) + 1));
    CHECK(!trust_valid(PEM("A\0=="), strlen(FIRST) - 4));
    memset(large, '\n', sizeof large);
    memcpy(large, FIRST, strlen(FIRST));
    CHECK(!trust_valid(large, sizeof large));
    CHECK(trust_valid(large, MAX_CA));
    new_root(true);
    trust_lay_out();
    CHECK_EQUAL(trust_set(large, MAX_CA), 0);
    holds("/etc/ssl/certs/ca-certificates.crt", TEMPLATE, FIRST);
    CHECK_EQUAL(trust_set("", 0), 0);
    remove_root();
}

/* Whatever is taken for certificates: nothing is read or written beyond its bounds (the sanitizers see to it), and what is refused changes nothing. */
static void any_text_is_borne(void)
{
    static const char *const pieces[] = {"-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----", "\n", "AAAA", "/+9=", "-----", " ", "x"};
    static char pem[MAX_CA];
    new_root(true);
    trust_lay_out();
    srandom(7);
    for (int turn = 0; turn < 3000; turn++) {
        size_t length = (size_t)snprintf(pem, sizeof pem, "%s", pieces[0]);
        size_t wanted = (size_t)random() % (turn % 10 ? 400 : MAX_CA - 64);
        while (length < wanted)
            length += (size_t)snprintf(pem + length, sizeof pem - length, "%s", pieces[(size_t)random() % (turn % 7 == 0 ? 8 : 5)]);
        if (trust_valid(pem, length))
            CHECK_EQUAL(trust_set(pem, length), 0);
    }
    CHECK_EQUAL(trust_set(FIRST, strlen(FIRST)), 0);
    holds("/etc/ssl/certs/ca-certificates.crt", TEMPLATE, FIRST);
    remove_root();
}

/* An agent lays out once: each test is one. */
#define APART(test)                                                    \
    do {                                                               \
        int status = 0;                                                \
        pid_t pid = fork();                                            \
        if (pid == 0) {                                                \
            RUN(test);                                                 \
            exit(0);                                                   \
        }                                                              \
        CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && status == 0); \
    } while (0)

int main(void)
{
    APART(an_authority_stands_beside_the_templates);
    APART(what_a_program_put_in_place_is_kept_at_the_next_start);
    APART(a_template_without_certificates_gets_them_too);
    APART(links_of_a_template_do_not_lead_out_of_it);
    APART(java_reads_all_of_them);
    APART(only_certificates_are_taken);
    APART(any_text_is_borne);
    return 0;
}
