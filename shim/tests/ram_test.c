/* Runs itself with the preload library given as argument 1 and checks which descriptor an open of /hatchway/ram yields. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

int open64(const char *, int, ...);
int openat64(int, const char *, int, ...);
int __open_2(const char *, int);
int __open64_2(const char *, int);
int __openat_2(int, const char *, int);
int __openat64_2(int, const char *, int);

#define CHECK(what) \
	do { \
		if (!(what)) { \
			fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #what, strerror(errno)); \
			exit(1); \
		} \
	} while (0)

static void is_ram(int fd, ino_t inode, int close_on_exec)
{
	struct stat stat;
	CHECK(fd >= 0 && fstat(fd, &stat) == 0 && stat.st_ino == inode);
	CHECK((fcntl(fd, F_GETFD) & FD_CLOEXEC ? 1 : 0) == close_on_exec);
	CHECK(write(fd, "x", 1) < 0 && errno == EBADF); /* it was opened read-only, whatever was asked for */
	CHECK(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED);
	CHECK(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0) != MAP_FAILED);
	CHECK(close(fd) == 0);
}

int main(int argc, char **argv)
{
	if (argc == 2) {
		char path[] = "/tmp/hatchway-ram-XXXXXX", number[16];
		int fd = mkstemp(path);
		CHECK(fd >= 0 && ftruncate(fd, 8192) == 0);
		int ram = open(path, O_RDONLY);
		unlink(path);
		close(fd);
		snprintf(number, sizeof number, "%d", ram);
		setenv("HATCHWAY_RAM_FD", number, 1);
		setenv("LD_PRELOAD", argv[1], 1);
		execl("/proc/self/exe", argv[0], argv[1], "inside", NULL);
		return 1;
	}
	struct stat stat;
	CHECK(fstat(atoi(getenv("HATCHWAY_RAM_FD")), &stat) == 0);
	const char *ram = "/hatchway/ram";
	volatile int flags = O_RDWR; /* not known to the compiler: no builtin takes it away */
	is_ram(open(ram, flags), stat.st_ino, 0);
	is_ram(open(ram, flags | O_CLOEXEC), stat.st_ino, 1);
	is_ram(open64(ram, flags | O_CLOEXEC | O_CREAT, 0600), stat.st_ino, 1);
	is_ram(openat(AT_FDCWD, ram, flags), stat.st_ino, 0);
	is_ram(openat64(AT_FDCWD, ram, flags), stat.st_ino, 0);
	is_ram(__open_2(ram, flags), stat.st_ino, 0);
	is_ram(__open64_2(ram, flags | O_CLOEXEC), stat.st_ino, 1);
	is_ram(__openat_2(AT_FDCWD, ram, flags), stat.st_ino, 0);
	is_ram(__openat64_2(AT_FDCWD, ram, flags), stat.st_ino, 0);
	/* Others pass through untouched, modes too. */
	CHECK(open("/hatchway/ram2", flags) < 0 && errno == ENOENT);
	CHECK(open("/hatchway//ram", flags) < 0 && errno == ENOENT);
	char path[64];
	snprintf(path, sizeof path, "/tmp/hatchway-ram-%d", getpid());
	umask(0);
	int fd = open(path, O_RDWR | O_CREAT | O_EXCL, 0640);
	CHECK(fd >= 0 && fstat(fd, &stat) == 0 && (stat.st_mode & 07777) == 0640 && unlink(path) == 0);
	setenv("HATCHWAY_RAM_FD", "7x", 1);
	CHECK(open(ram, flags) < 0 && errno == ENOENT);
	unsetenv("HATCHWAY_RAM_FD");
	CHECK(open(ram, flags) < 0 && errno == ENOENT);
	puts("preload library tests passed");
	return 0;
}
