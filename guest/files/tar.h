/* The tar format by itself: blocks in, members out, and the other way round. No input or output. */
#ifndef HW_FILES_TAR_H
#define HW_FILES_TAR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    TAR_BLOCK = 512,
    TAR_NAME = 4096,            /* with the 0 at its end */
    TAR_MAX_EXTENSION = 65536,  /* octets of a pax header */
    TAR_HEADER_ROOM = 16 * 1024 /* of what tar_format makes */
};

enum tar_type { TAR_FILE = '0', TAR_HARD_LINK = '1', TAR_SYMLINK = '2', TAR_CHAR = '3', TAR_BLOCK_DEVICE = '4', TAR_FOLDER = '5', TAR_FIFO = '6', TAR_NOTHING = 'V' };

struct tar_member {
    enum tar_type type;
    uint64_t size; /* octets of data behind the header, without the padding to whole blocks */
    uint32_t mode, uid, gid;
    int64_t mtime;
    uint32_t mtime_ns;
    char name[TAR_NAME], target[TAR_NAME];
    char user[33], group[33]; /* for writing; empty: none */
};

/* Octets of padding behind so much data. */
static inline unsigned tar_padding(uint64_t size)
{
    return (unsigned)(-size & (TAR_BLOCK - 1));
}

enum tar_step {
    TAR_MORE,        /* give the next block */
    TAR_MEMBER,      /* `member` holds one; its data comes next, and then the next header */
    TAR_END,         /* the two blocks at the end */
    TAR_BAD,         /* `why` says it */
    TAR_UNSUPPORTED, /* likewise */
};

struct tar_reader {
    struct tar_member member;
    const char *why;
    unsigned zeros; /* blocks of zeros so far */
    /* The extension that is being read, and what those before the next member have said. */
    char extension;
    uint32_t expected, length;
    char content[TAR_MAX_EXTENSION + TAR_BLOCK];
    bool has_name, has_target, has_size, has_uid, has_gid, has_mtime, sparse;
    char name[TAR_NAME], target[TAR_NAME];
    uint64_t size;
    uint32_t uid, gid;
    int64_t mtime;
    uint32_t mtime_ns;
};

/* Takes one block where a header stands or goes on. A reader begins as zeros. */
enum tar_step tar_read(struct tar_reader *reader, const uint8_t block[TAR_BLOCK]);
/* Whether the archive may end here. */
bool tar_may_end(const struct tar_reader *reader);

/* Makes the header of a member (a pax one before it where it is needed); its octets, or 0 where the name or target is too long. */
size_t tar_format(const struct tar_member *member, uint8_t out[TAR_HEADER_ROOM]);

/* A name as it is used below a folder: no `.`, no empty part and no slash at either end; "" for the folder itself. False: it is absolute or
   goes up. */
bool tar_clean(char *name);

#endif
