/* What a run says: lines of JSON on descriptor 2, and on descriptor 1 where data is lines. */
#ifndef HW_FILES_SAY_H
#define HW_FILES_SAY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { LINE_ROOM = 98304, TEXT_ROOM = 6144 };

/* One line in the making; what does not fit is left out, and by the bounds of its parts everything fits. */
struct line {
    char text[LINE_ROOM];
    size_t length;
};

void line_raw(struct line *line, const char *text);
void line_key(struct line *line, const char *key); /* with the comma that it needs */
void line_unsigned(struct line *line, const char *key, uint64_t value);
void line_signed(struct line *line, const char *key, int64_t value);
void line_bool(struct line *line, const char *key, bool value);
/* Octets that should be UTF-8: readable under the key and, where that is not exact, again under KEY_base64. */
void line_octets(struct line *line, const char *key, const char *octets, size_t length);
void line_text(struct line *line, const char *key, const char *text);
/* A member whose key is any text. */
void line_pair(struct line *line, const char *key, const char *text);
/* Whether octets are whole characters of UTF-8. */
bool utf8_whole(const char *octets, size_t length);

/* A counter that the last line tells: how far it came, in an error too. The place must live as long as the program. */
void say_count(const char *key, const uint64_t *value);

/* The line for descriptor 2: begin, add fields, end. `say_end` of an "ok" adds the counters; of a head it does not. */
struct line *say_head(void);
struct line *say_ok(void);
void say_end(struct line *line);
/* The line that says an error, and the end of the program. */
_Noreturn void fail(int error, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The same, naming an entry by its path (any octets). */
_Noreturn void fail_at(int error, const char *path);

/* Lines on descriptor 1, gathered until they are many or `out_flush`. */
void out_line(const struct line *line);
void out_flush(void);

#endif
