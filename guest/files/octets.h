/* Moving octets between descriptors. Whoever reads our output being gone ends the program without a word. */
#ifndef HW_FILES_OCTETS_H
#define HW_FILES_OCTETS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { PIECE = 1 << 18 };

/* Makes the pipe behind a descriptor as large as it may be; any other descriptor is left as it is. */
void pipe_widen(int fd);

/* Writes all; false with errno where it goes to a file. */
bool write_whole(int fd, const void *data, size_t length);
/* Writes all to one of our outputs. */
void write_all(int fd, const void *data, size_t length);
/* As read(), through interruptions and for descriptors that do not block. */
ssize_t read_some(int fd, void *data, size_t room);

/* What move_octets came to. */
enum moved { MOVED_ALL, MOVED_END, MOVED_READ_FAILED, MOVED_WRITE_FAILED };
/* Moves up to `limit` octets, without copying them where the kernel can, and counts them in *count as they go. MOVED_END: the input ended
   before; the failures leave errno. */
enum moved move_octets(int in, int out, uint64_t limit, uint64_t *count);

/* Moves the first PIECE octets, or all where there are fewer, and writes them as one. */
enum moved receive_piece(int in, int out, uint64_t limit, uint64_t *count);

/* The same for a large file from a pipe, past the cache of the kernel: a page of it costs there more than the copy. What the file system refuses
   goes the usual way; so does the end that fills no block. */
enum moved receive_octets(int in, int out, uint64_t limit, uint64_t *count);

/* PIECE octets that any operation may use. */
extern uint8_t piece[PIECE];

#endif
