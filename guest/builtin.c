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
