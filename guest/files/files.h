/* The `files` program: one operation on the sandbox's files for each run, as the user that it runs as. See
   docs/protocols/guest-files.md. */
#ifndef HW_FILES_H
#define HW_FILES_H

/* `files OP key=value…`: upload on descriptor 0, data on 1, JSON lines on 2. Gives the exit code. */
int files_main(int argc, char **argv);

#endif
