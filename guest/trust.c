#include "trust.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agent.h"
#include "proto.h"

/* The files lie on a small tmpfs of root's: the template's own authorities, then the gateway's. Where programs look for the system's there is
   a link to it (not a mount: who installs certificates puts a new file in its place, and may). A SETUP writes memory only, as
   for the other files of the identity, and in place: programs that run read the new authority with the next connection. */

#define FOLDER "/run/hatchway"
static const char BUNDLE[] = FOLDER "/ca-certificates.crt", AUTHORITY[] = FOLDER "/ca.crt", JAVA[] = FOLDER "/java.jks";
/* What the template had at the place of the system's. */
static const char TEMPLATES[] = "/etc/ssl/ca-certificates.template";

enum { MAX_BUNDLE = 1 << 20, MAX_DER = 12 << 10, STEP = 2048 };
static const char BEGIN[] = "-----BEGIN CERTIFICATE-----", END[] = "-----END CERTIFICATE-----";

static struct {
    int bundle_fd, authority_fd, java_fd;
    size_t bundle_length, java_length; /* without the gateway's */
    uint32_t java_count;
    bool given;
    bool written; /* there may be something of an authority in the files */
} trust = {.bundle_fd = -1, .authority_fd = -1, .java_fd = -1};

static const char *const variables[] = {
    "SSL_CERT_FILE=/run/hatchway/ca-certificates.crt",
    "REQUESTS_CA_BUNDLE=/run/hatchway/ca-certificates.crt",
    "CURL_CA_BUNDLE=/run/hatchway/ca-certificates.crt",
    "GIT_SSL_CAINFO=/run/hatchway/ca-certificates.crt",
    "PIP_CERT=/run/hatchway/ca-certificates.crt",
    "CARGO_HTTP_CAINFO=/run/hatchway/ca-certificates.crt",
    "AWS_CA_BUNDLE=/run/hatchway/ca-certificates.crt",
    "NODE_EXTRA_CA_CERTS=/run/hatchway/ca.crt",
    "DENO_CERT=/run/hatchway/ca.crt",
    NULL, /* here the next where Java is */
    NULL,
};
static const char *all_variables[sizeof variables / sizeof variables[0]];
static const char java_options[] = "JAVA_TOOL_OPTIONS=-Djavax.net.ssl.trustStore=/run/hatchway/java.jks -Djavax.net.ssl.trustStoreType=JKS";

const char *const *trust_environment(void)
{
    static const char *const none[] = {NULL};
    return trust.given ? all_variables : none;
}

/* ---- the files of the sandbox ---- */

/* Makes what is missing of a folder; a descriptor of it, or -1. */
static int folder_in_root(const char *path)
{
    char part[128];
    int fd = -1;
    for (size_t at = 1; at <= strlen(path) && at < sizeof part; at++) {
        if (path[at] != '/' && path[at] != 0)
            continue;
        memcpy(part, path, at);
        part[at] = 0;
        if (fd >= 0)
            close(fd);
        fd = open_in_root(part, O_PATH | O_DIRECTORY, 0);
        if (fd != -ENOENT)
            continue;
        char *name = strrchr(part, '/');
        *name = 0;
        int above = open_in_root(part[0] ? part : "/", O_PATH | O_DIRECTORY, 0);
        *name = '/';
        if (above >= 0 && mkdirat(above, name + 1, 0755) == 0)
            fd = open_in_root(part, O_PATH | O_DIRECTORY, 0);
        if (above >= 0)
            close(above);
    }
    return fd < 0 ? -1 : fd;
}

/* A link in the place of whatever file is there, whole at any instant. */
static void put_link(const char *folder, const char *name, const char *target)
{
    char there[64], new[64];
    int fd = folder_in_root(folder);
    ssize_t n = fd < 0 ? -1 : readlinkat(fd, name, there, sizeof there);
    if (n != (ssize_t)strlen(target) || memcmp(there, target, (size_t)n) != 0) {
        snprintf(new, sizeof new, ".%s.new", name);
        if (fd >= 0)
            unlinkat(fd, new, 0);
        if (fd < 0 || symlinkat(target, fd, new) != 0 || renameat(fd, new, fd, name) != 0)
            say("%s/%s: %s", folder, name, strerror(errno));
    }
    if (fd >= 0)
        close(fd);
}

static bool is_link_to(const char *path, const char *target)
{
    char there[64];
    int fd = open_in_root(path, O_PATH | O_NOFOLLOW, 0);
    ssize_t n = fd < 0 ? -1 : readlinkat(fd, "", there, sizeof there);
    if (fd >= 0)
        close(fd);
    return n == (ssize_t)strlen(target) && memcmp(there, target, (size_t)n) == 0;
}

static size_t read_file(const char *path, char *to, size_t room)
{
    struct stat st;
    size_t used = 0;
    int fd = open_in_root(path, O_RDONLY | O_NONBLOCK, 0);
    if (fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode))
        for (ssize_t n; used < room && (n = read(fd, to + used, room - used)) > 0;)
            used += (size_t)n;
    if (fd >= 0)
        close(fd);
    return used;
}

static bool write_file(int fd, const char *data, size_t length)
{
    for (size_t done = 0; done < length;) {
        ssize_t n = pwrite(fd, data + done, length - done, (off_t)done);
        if (n <= 0)
            return false;
        done += (size_t)n;
    }
    return true;
}

/* Keeps what the template, or whoever replaced the link since, had at the system's place. Gives it in `to`. */
static size_t keep_system(char *to)
{
    static const char system[] = "/etc/ssl/certs/ca-certificates.crt";
    if (is_link_to(system, BUNDLE))
        return read_file(TEMPLATES, to, MAX_BUNDLE);
    size_t length = read_file(system, to, MAX_BUNDLE);
    int folder = folder_in_root("/etc/ssl");
    int fd = folder < 0 ? -1 : openat(folder, ".ca-certificates.new", O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0644);
    if (fd < 0 || !write_file(fd, to, length) || renameat(folder, ".ca-certificates.new", folder, "ca-certificates.template") != 0)
        say("%s: %s", TEMPLATES, strerror(errno));
    else
        put_link("/etc/ssl/certs", "ca-certificates.crt", BUNDLE);
    if (fd >= 0)
        close(fd);
    if (folder >= 0)
        close(folder);
    return length;
}

/* ---- Java: its own format ("JKS"), which it reads without a password: the digest behind the certificates is then not looked at ---- */

static int digit(char c)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const char *at = c ? strchr(digits, c) : NULL;
    return at ? (int)(at - digits) : -1;
}

/* The next certificate of a PEM text, and how long it is; 0 when there is none. */
static size_t next_certificate(const char **at, const char *end, uint8_t *der)
{
    const char *begin = memmem(*at, (size_t)(end - *at), BEGIN, sizeof BEGIN - 1);
    const char *stop = begin ? memmem(begin, (size_t)(end - begin), END, sizeof END - 1) : NULL;
    size_t length = 0;
    uint32_t bits = 0;
    unsigned count = 0;
    if (!stop)
        return 0;
    for (const char *c = begin + sizeof BEGIN - 1; c < stop; c++) {
        int value = digit(*c);
        if (value < 0)
            continue;
        bits = bits << 6 | (uint32_t)value;
        if (++count % 4 != 1 && length < MAX_DER)
            der[length++] = (uint8_t)(bits >> (6 - 2 * ((count - 1) % 4)));
    }
    *at = stop + sizeof END - 1;
    return length < MAX_DER ? length : 0;
}

static uint8_t *number(uint8_t *to, uint64_t value, unsigned octets)
{
    for (unsigned i = 0; i < octets; i++)
        to[i] = (uint8_t)(value >> 8 * (octets - 1 - i));
    return to + octets;
}

enum { JAVA_HEAD = 12, JAVA_ENTRY = 48, JAVA_DIGEST = 20 };

/* Every certificate of a PEM text as an entry; gives the octets and counts them. `room` holds what a text of that length can be. */
static size_t java_entries(const char *pem, size_t length, uint8_t *to, size_t room, uint32_t *count)
{
    static uint8_t der[MAX_DER];
    const char *at = pem;
    uint8_t *start = to;
    for (size_t size; (size = next_certificate(&at, pem + length, der)) > 0;) {
        if (room - (size_t)(to - start) < size + JAVA_ENTRY)
            break;
        char alias[16];
        int name = snprintf(alias, sizeof alias, "ca%u", ++*count);
        to = number(to, 2, 4);
        to = number(to, (uint64_t)name, 2);
        memcpy(to, alias, (size_t)name);
        to = number(to + name, 0, 8);
        to = number(to, 5, 2);
        memcpy(to, "X.509", 5);
        to = number(to + 5, size, 4);
        memcpy(to, der, size);
        to += size;
    }
    return (size_t)(to - start);
}

static bool has_java(void)
{
    static const char *const places[] = {"/usr/bin/java", "/usr/lib/jvm", "/opt/java/openjdk"};
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        int fd = open_in_root(places[i], O_PATH, 0);
        if (fd >= 0) {
            close(fd);
            return true;
        }
    }
    return false;
}

static int put_java(const char *pem, size_t length)
{
    static uint8_t entries[MAX_CA + JAVA_DIGEST + 1024];
    uint8_t head[JAVA_HEAD];
    uint32_t count = trust.java_count;
    size_t used = java_entries(pem, length, entries, sizeof entries - JAVA_DIGEST, &count);
    memset(entries + used, 0, JAVA_DIGEST);
    used += JAVA_DIGEST;
    number(number(number(head, 0xfeedfeed, 4), 2, 4), count, 4);
    if (pwrite(trust.java_fd, entries, used, (off_t)trust.java_length) != (ssize_t)used ||
        ftruncate(trust.java_fd, (off_t)(trust.java_length + used)) != 0 ||
        pwrite(trust.java_fd, head, sizeof head, 0) != (ssize_t)sizeof head)
        return errno;
    return 0;
}

static void lay_out_java(int folder, const char *pem, size_t length)
{
    if (!has_java())
        return;
    uint8_t *entries = malloc(length + 1024);
    trust.java_fd = openat(folder, "java.jks", O_RDWR | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0644);
    trust.java_count = 0;
    size_t used = entries ? java_entries(pem, length, entries, length + 1024, &trust.java_count) : 0;
    trust.java_length = JAVA_HEAD + used;
    if (trust.java_fd < 0 || !entries || pwrite(trust.java_fd, entries, used, JAVA_HEAD) != (ssize_t)used || put_java("", 0) != 0) {
        say("%s: %s", JAVA, strerror(errno));
        if (trust.java_fd >= 0)
            close(trust.java_fd);
        trust.java_fd = -1;
    }
    free(entries);
}

/* ---- what is called ---- */

void trust_lay_out(void)
{
    char *text = malloc(MAX_BUNDLE + 1);
    int folder = folder_in_root(FOLDER);
    if (!text || folder < 0) {
        say("%s: %s", FOLDER, strerror(errno));
        free(text);
        return;
    }
    size_t length = keep_system(text);
    if (length == MAX_BUNDLE) {
        say("%s: longer than %d octets, left out", TEMPLATES, MAX_BUNDLE);
        length = 0;
    }
    if (length > 0 && text[length - 1] != '\n')
        text[length++] = '\n';
    trust.bundle_fd = openat(folder, "ca-certificates.crt", O_RDWR | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0644);
    trust.authority_fd = openat(folder, "ca.crt", O_RDWR | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0644);
    trust.bundle_length = length;
    if (trust.bundle_fd < 0 || trust.authority_fd < 0 || !write_file(trust.bundle_fd, text, length))
        say("%s: %s", BUNDLE, strerror(errno));
    lay_out_java(folder, text, length);
    memcpy(all_variables, variables, sizeof variables);
    if (trust.java_fd >= 0)
        all_variables[sizeof variables / sizeof variables[0] - 2] = java_options;
    /* What update-ca-certificates adds to a file that it makes, and what OpenSSL reads beside its folder. */
    put_link("/usr/local/share/ca-certificates", "hatchway.crt", AUTHORITY);
    put_link("/usr/lib/ssl", "cert.pem", AUTHORITY);
    close(folder);
    free(text);
}

bool trust_valid(const char *pem, size_t length)
{
    if (length == 0)
        return true;
    if (length > MAX_CA || length < sizeof BEGIN + sizeof END || memcmp(pem, BEGIN, sizeof BEGIN - 1) != 0 ||
        !memmem(pem, length, END, sizeof END - 1))
        return false;
    for (size_t i = 0; i < length; i++)
        if (!isprint((unsigned char)pem[i]) && pem[i] != '\n' && pem[i] != '\r')
            return false;
    return true;
}

int trust_set(const char *pem, size_t length)
{
    /* Always whole steps of octets: another authority has the place of the one before, and a reader sees one or the other. */
    static char padded[MAX_CA + STEP];
    size_t whole = (length + 1 + STEP - 1) / STEP * STEP;
    if (trust.bundle_fd < 0 || trust.authority_fd < 0)
        return ENOENT;
    if (length == 0 && !trust.written)
        return 0; /* four system calls, each of which is translated first in what was restored */
    trust.written = true;
    memset(padded, '\n', whole);
    memcpy(padded, pem, length);
    if (pwrite(trust.bundle_fd, padded, whole, (off_t)trust.bundle_length) != (ssize_t)whole ||
        ftruncate(trust.bundle_fd, (off_t)(trust.bundle_length + whole)) != 0 ||
        pwrite(trust.authority_fd, padded, whole, 0) != (ssize_t)whole || ftruncate(trust.authority_fd, (off_t)whole) != 0)
        return errno ? errno : ENOSPC;
    int error = trust.java_fd < 0 ? 0 : put_java(pem, length);
    if (error == 0)
        trust.given = trust.written = length > 0;
    return error;
}
