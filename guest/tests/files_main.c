/* The files program by itself, for the tests that run it on this host. */
#include "../files/files.h"

int main(int argc, char **argv)
{
    return files_main(argc, argv);
}
