#include "files.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>

#include "args.h"
#include "attributes.h"
#include "entry.h"
#include "ops.h"
#include "owner.h"
#include "say.h"

static const struct {
    const char *name, *arguments;
    void (*run)(void);
} operations[] = {
    {"stat", "path follow links attributes_of owner", op_stat},
    {"read", "path offset length tail owner", op_read},
    {"write", "path size mode parents offset append in_place attributes_of attributes owner", op_write},
    {"list", "path depth limit after links attributes_of owner", op_list},
    {"mkdir", "path mode parents owner", op_mkdir},
    {"move", "from to overwrite parents links attributes_of owner", op_move},
    {"remove", "path recursive owner", op_remove},
    {"chmod", "path mode recursive owner", op_chmod},
    {"watch", "path recursive entries local marks links attributes_of owner", op_watch},
    {"pack", "path", op_pack},
    {"unpack", "path parents owners", op_unpack},
};

int files_main(int argc, char **argv)
{
    signal(SIGPIPE, SIG_IGN); /* a reader that went away, and a bound on the size of files, are errors of calls */
    signal(SIGXFSZ, SIG_IGN);
    umask(0);
    for (size_t i = 0; argc > 1 && i < sizeof operations / sizeof operations[0]; i++) {
        if (strcmp(argv[1], operations[i].name) == 0) {
            args_parse(argc - 2, argv + 2, operations[i].arguments);
            owner_take();
            entry_take();
            attributes_take();
            operations[i].run();
            return 0;
        }
    }
    fail(ENOSYS, "no such operation");
}
