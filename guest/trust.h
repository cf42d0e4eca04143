/* The sandbox's trust in its gateway: one more authority beside those of the template. */
#ifndef HW_TRUST_H
#define HW_TRUST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* At start-up, when the root of the processes is there: puts the files where programs look for them. */
void trust_lay_out(void);
/* The authority from now on, certificates in PEM; none at all (length 0) takes it away. 0 or errno. */
int trust_set(const char *pem, size_t length);
bool trust_valid(const char *pem, size_t length);
/* The variables that lead programs there, NULL-ended; none while there is no authority. */
const char *const *trust_environment(void);

#endif
