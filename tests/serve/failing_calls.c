/* Makes one system call of one process fail once: LD_PRELOAD this, with WEFT_FAILING_CALLS naming a file of four ints.
 *
 * The file: process id, number of the call below (0: none), errno, calls until it fails. It is set to 0 once it has.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

static volatile int *plan;

__attribute__((constructor)) static void map_plan(void) {
    const char *path = getenv("WEFT_FAILING_CALLS");
    int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
    int file = path ? real(path, O_RDWR) : -1;
    if (file < 0) return;
    void *at = mmap(0, 16, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (at != MAP_FAILED) plan = at;
}

static int fails(int call) {
    if (!plan || plan[1] != call || plan[0] != getpid()) return 0;
    if (__sync_sub_and_fetch(&plan[3], 1) != 0) return 0;
    errno = plan[2];
    plan[1] = 0;
    return 1;
}

#define WRAP(number, type, name, arguments, ...)              \
    type name arguments {                                     \
        static type (*real) arguments;                        \
        if (!real) real = dlsym(RTLD_NEXT, #name);            \
        return fails(number) ? (type)-1 : real(__VA_ARGS__);  \
    }
#define FCNTL(name)                                           \
    int name(int f, int command, ...) {                       \
        static int (*real)(int, int, ...);                    \
        va_list rest;                                         \
        va_start(rest, command);                              \
        void *argument = va_arg(rest, void *);                \
        va_end(rest);                                         \
        if (!real) real = dlsym(RTLD_NEXT, #name);            \
        int locks = command == F_SETLK || command == F_GETLK; \
        return locks && fails(13) ? -1 : real(f, command, argument); \
    }
#define OPEN(name)                                            \
    int name(const char *path, int flags, ...) {              \
        static int (*real)(const char *, int, ...);           \
        va_list rest;                                         \
        va_start(rest, flags);                                \
        int mode = va_arg(rest, int);                         \
        va_end(rest);                                         \
        if (!real) real = dlsym(RTLD_NEXT, #name);            \
        return fails(5) ? -1 : real(path, flags, mode);       \
    }

WRAP(1, ssize_t, write, (int f, const void *b, size_t n), f, b, n)
WRAP(2, ssize_t, pwrite64, (int f, const void *b, size_t n, off64_t o), f, b, n, o)
WRAP(2, ssize_t, pwrite, (int f, const void *b, size_t n, off_t o), f, b, n, o)
WRAP(3, int, fsync, (int f), f)
WRAP(4, int, rename, (const char *a, const char *b), a, b)
OPEN(open)
OPEN(open64)
WRAP(6, ssize_t, send, (int f, const void *b, size_t n, int g), f, b, n, g)
WRAP(6, ssize_t, sendmsg, (int f, const struct msghdr *m, int g), f, m, g)
WRAP(7, ssize_t, recv, (int f, void *b, size_t n, int g), f, b, n, g)
WRAP(7, ssize_t, recvmsg, (int f, struct msghdr *m, int g), f, m, g)
WRAP(8, int, accept4, (int f, struct sockaddr *a, socklen_t *n, int g), f, a, n, g)
WRAP(9, ssize_t, read, (int f, void *b, size_t n), f, b, n)
WRAP(10, ssize_t, pread64, (int f, void *b, size_t n, off64_t o), f, b, n, o)
WRAP(11, int, fdatasync, (int f), f)
WRAP(12, int, ftruncate64, (int f, off64_t n), f, n)
FCNTL(fcntl)
FCNTL(fcntl64)
WRAP(14, int, unlink, (const char *p), p)
WRAP(15, int, fstat64, (int f, struct stat64 *s), f, s)
WRAP(15, int, stat64, (const char *p, struct stat64 *s), p, s)
WRAP(16, int, pipe2, (int *f, int g), f, g)
WRAP(16, int, pipe, (int *f), f)

void *mmap64(void *at, size_t n, int use, int flags, int f, off64_t o) {
    static void *(*real)(void *, size_t, int, int, int, off64_t);
    if (!real) real = dlsym(RTLD_NEXT, "mmap64");
    return f >= 0 && fails(17) ? MAP_FAILED : real(at, n, use, flags, f, o); /* of files: others are Python's memory */
}
