#include "args.h"

#include <errno.h>
#include <string.h>

#include "path.h"
#include "say.h"

enum { MAX_ARGS = 12 };

static struct {
    const char *key; /* without its _base64 */
    size_t key_length;
    char *value;
} args[MAX_ARGS];
static int count;

static bool named_in(const char *list, const char *key, size_t length)
{
    for (const char *at = list; *at;) {
        size_t n = strcspn(at, " ");
        if (n == length && memcmp(at, key, n) == 0)
            return true;
        at += n + (at[n] == ' ');
    }
    return false;
}

static int digit_of(char c)
{
    return c >= 'A' && c <= 'Z' ? c - 'A' : c >= 'a' && c <= 'z' ? c - 'a' + 26 : c >= '0' && c <= '9' ? c - '0' + 52 : c == '+' ? 62 : c == '/' ? 63 : -1;
}

/* In place: what it stands for is shorter. False: no base64, or it holds a NUL. */
static bool decode_base64(char *text)
{
    size_t length = strlen(text), end = length, written = 0;
    if (length % 4 != 0)
        return false;
    while (end > 0 && length - end < 2 && text[end - 1] == '=')
        end--;
    uint32_t bits = 0;
    for (size_t i = 0; i < end; i++) {
        int digit = digit_of(text[i]);
        if (digit < 0)
            return false;
        bits = bits << 6 | (uint32_t)digit;
        if (i % 4 != 0) {
            char octet = (char)(bits >> (6 - 2 * (i % 4)) & 0xff);
            if (octet == 0)
                return false;
            text[written++] = octet;
        }
    }
    text[written] = 0;
    return true;
}

static int find(const char *key, size_t length)
{
    for (int i = 0; i < count; i++)
        if (args[i].key_length == length && memcmp(args[i].key, key, length) == 0)
            return i;
    return -1;
}

void args_parse(int argc, char **argv, const char *known)
{
    static const char suffix[] = "_base64";
    for (int i = 0; i < argc; i++) {
        char *equals = strchr(argv[i], '=');
        if (!equals || count == MAX_ARGS)
            fail(EINVAL, equals ? "too many arguments" : "an argument that is no KEY=VALUE");
        size_t length = (size_t)(equals - argv[i]), plain = length;
        if (length > strlen(suffix) && memcmp(equals - strlen(suffix), suffix, strlen(suffix)) == 0) {
            plain = length - strlen(suffix);
            if (!named_in("path from to after attributes", argv[i], plain))
                plain = length;
        }
        if (!named_in(known, argv[i], plain))
            fail(EINVAL, "an argument that this operation does not have");
        if (find(argv[i], plain) >= 0)
            fail(EINVAL, "%.*s stands twice", (int)plain, argv[i]);
        if (plain != length && !decode_base64(equals + 1))
            fail(EINVAL, "%.*s is not in base64", (int)length, argv[i]);
        args[count].key = argv[i];
        args[count].key_length = plain;
        args[count++].value = equals + 1;
    }
}

const char *args_text(const char *key)
{
    int i = find(key, strlen(key));
    return i < 0 ? NULL : args[i].value;
}

bool args_has(const char *key)
{
    return args_text(key) != NULL;
}

const char *args_path(const char *key)
{
    static char whole[PATH_ROOM];
    const char *path = args_text(key);
    if (!path || !*path)
        fail(EINVAL, "%s is missing or empty", key);
    if (!path_absolute(path, whole))
        fail(ENAMETOOLONG, "%s is longer than %d octets", key, PATH_ROOM - 1);
    return path;
}

static bool parse(const char *text, uint64_t base, uint64_t *number)
{
    *number = 0;
    if (!*text)
        return false;
    for (; *text; text++) {
        uint64_t digit = (uint64_t)(unsigned char)*text - '0';
        if (digit >= base || *number > (INT64_MAX - digit) / base)
            return false;
        *number = *number * base + digit;
    }
    return true;
}

uint64_t args_number(const char *key, uint64_t otherwise, uint64_t least, uint64_t most)
{
    const char *text = args_text(key);
    uint64_t number;
    if (!text)
        return otherwise;
    if (!parse(text, 10, &number) || number < least || number > most)
        fail(EINVAL, "%s is not a number from %llu to %llu", key, (unsigned long long)least, (unsigned long long)most);
    return number;
}

bool args_flag(const char *key)
{
    return args_number(key, 0, 0, 1) == 1;
}

mode_t args_mode(const char *key, mode_t otherwise)
{
    const char *text = args_text(key);
    uint64_t number;
    if (!text)
        return otherwise;
    if (!parse(text, 8, &number) || number > 07777)
        fail(EINVAL, "%s is not a mode in octal digits", key);
    return (mode_t)number;
}
