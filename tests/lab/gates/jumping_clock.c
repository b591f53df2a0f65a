/* A wall clock that somebody sets forward by a second when a process has sent three requests: for LD_PRELOAD.
 * The monotonic clocks go on, as they do when the time is set. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

typedef int clock_gettime_fn(clockid_t, struct timespec *);
typedef ssize_t send_fn(int, const void *, size_t, int);

static volatile int requests;

ssize_t send(int socket, const void *data, size_t size, int flags) {
    static send_fn *real;
    if (!real)
        real = (send_fn *)dlsym(RTLD_NEXT, "send");
    if (size > 5 && memcmp(data, "POST ", 5) == 0)
        requests++;
    return real(socket, data, size, flags);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static clock_gettime_fn *real;
    if (!real)
        real = (clock_gettime_fn *)dlsym(RTLD_NEXT, "clock_gettime");
    int done = real(clock, now);
    if (done == 0 && clock == CLOCK_REALTIME && requests >= 3)
        now->tv_sec += 1;
    return done;
}
