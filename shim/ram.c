/* Preload library for QEMU: the file /hatchway/ram is the descriptor named in HATCHWAY_RAM_FD.
 *
 * QEMU opens its memory file read-write even where it maps it privately. With this library it gets a descriptor that was
 * opened as its launcher saw fit: read-only for a memory file that other VMs map too. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#ifndef __O_TMPFILE
#define __O_TMPFILE 020000000
#endif

static const char ram_path[] = "/hatchway/ram";

/* -2: not ours. */
static int ram(const char *path, int flags)
{
	if (path == NULL || strcmp(path, ram_path) != 0)
		return -2;
	const char *text = getenv("HATCHWAY_RAM_FD");
	char *end;
	long fd = text ? strtol(text, &end, 10) : -1;
	if (text == NULL || *text == 0 || *end != 0 || fd < 0 || fd > 65535) {
		errno = ENOENT;
		return -1;
	}
	return fcntl((int)fd, flags & O_CLOEXEC ? F_DUPFD_CLOEXEC : F_DUPFD, 3);
}

static int takes_mode(int flags)
{
	return (flags & O_CREAT) || (flags & __O_TMPFILE) == __O_TMPFILE;
}

static void *next(void **known, const char *name)
{
	void *function = __atomic_load_n(known, __ATOMIC_RELAXED);
	if (function == NULL) {
		function = dlsym(RTLD_NEXT, name);
		if (function == NULL)
			abort();
		__atomic_store_n(known, function, __ATOMIC_RELAXED);
	}
	return function;
}

#define NEXT(name, type) \
	static void *known; \
	type function = (type)next(&known, name)

#define MODE(flags) \
	mode_t mode = 0; \
	if (takes_mode(flags)) { \
		va_list list; \
		va_start(list, flags); \
		mode = va_arg(list, mode_t); \
		va_end(list); \
	}

typedef int (*open_type)(const char *, int, ...);
typedef int (*openat_type)(int, const char *, int, ...);
typedef int (*open_2_type)(const char *, int);
typedef int (*openat_2_type)(int, const char *, int);

#define OPEN(symbol) \
	int symbol(const char *path, int flags, ...) \
	{ \
		MODE(flags) \
		int fd = ram(path, flags); \
		if (fd != -2) \
			return fd; \
		NEXT(#symbol, open_type); \
		return function(path, flags, mode); \
	}

#define OPENAT(symbol) \
	int symbol(int dir, const char *path, int flags, ...) \
	{ \
		MODE(flags) \
		int fd = ram(path, flags); \
		if (fd != -2) \
			return fd; \
		NEXT(#symbol, openat_type); \
		return function(dir, path, flags, mode); \
	}

#define OPEN_2(symbol) \
	int symbol(const char *path, int flags); \
	int symbol(const char *path, int flags) \
	{ \
		int fd = ram(path, flags); \
		if (fd != -2) \
			return fd; \
		NEXT(#symbol, open_2_type); \
		return function(path, flags); \
	}

#define OPENAT_2(symbol) \
	int symbol(int dir, const char *path, int flags); \
	int symbol(int dir, const char *path, int flags) \
	{ \
		int fd = ram(path, flags); \
		if (fd != -2) \
			return fd; \
		NEXT(#symbol, openat_2_type); \
		return function(dir, path, flags); \
	}

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
OPEN_2(__open_2)
OPEN_2(__open64_2)
OPENAT_2(__openat_2)
OPENAT_2(__openat64_2)
