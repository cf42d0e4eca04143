#include "files.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>

#include "args.h"
#include "ops.h"
#include "say.h"

static const struct {
    const char *name, *arguments;
    void (*run)(void);
} operations[] = {
    {"stat", "path follow", op_stat},
    {"read", "path offset length tail", op_read},
    {"write", "path size mode parents offset append in_place", op_write},
    {"list", "path depth limit after", op_list},
    {"mkdir", "path mode parents", op_mkdir},
    {"move", "from to overwrite", op_move},
    {"remove", "path recursive", op_remove},
    {"chmod", "path mode recursive", op_chmod},
    {"watch", "path recursive", op_watch},
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
            operations[i].run();
            return 0;
        }
    }
    fail(ENOSYS, "no such operation");
}
