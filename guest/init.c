#include "init.h"
int init_sandbox(void) { return -1; }
