/* The little that our C tests need: assertions that say where, and a list of tests to run. */
#ifndef HW_CHECK_H
#define HW_CHECK_H

#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                             \
    do {                                                                             \
        if (!(condition)) {                                                          \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
            abort();                                                                 \
        }                                                                            \
    } while (0)

#define CHECK_EQUAL(actual, wanted)                                                                       \
    do {                                                                                                  \
        unsigned long long actual_ = (unsigned long long)(actual), wanted_ = (unsigned long long)(wanted); \
        if (actual_ != wanted_) {                                                                         \
            fprintf(stderr, "%s:%d: %s is %llu, not %llu\n", __FILE__, __LINE__, #actual, actual_, wanted_); \
            abort();                                                                                      \
        }                                                                                                 \
    } while (0)

#define RUN(test)                    \
    do {                             \
        test();                      \
        printf("ok %s\n", #test);    \
        fflush(stdout);              \
    } while (0)

#endif
