#include "files.h"

#include <errno.h>
#include <stdio.h>

int files_main(int argc, char **argv)
{
    (void)argv;
    (void)argc;
    fprintf(stderr, "{\"errno\":%d,\"code\":\"ENOSYS\",\"message\":\"no such operation\"}\n", ENOSYS);
    return 1;
}
