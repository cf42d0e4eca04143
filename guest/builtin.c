#include "builtin.h"

#include <string.h>

#include "files/files.h"

static const struct {
    const char *name;
    builtin_main *main;
} builtins[] = {
    {"files", files_main},
};

builtin_main *builtin_find(const char *name, size_t length)
{
    for (size_t i = 0; i < sizeof builtins / sizeof builtins[0]; i++)
        if (strlen(builtins[i].name) == length && memcmp(builtins[i].name, name, length) == 0)
            return builtins[i].main;
    return NULL;
}

bool builtin_fills(char *const *argv)
{
    return argv[0] && argv[1] && (strcmp(argv[1], "write") == 0 || strcmp(argv[1], "unpack") == 0);
}
