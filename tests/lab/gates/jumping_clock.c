/* A wall clock that somebody sets forward by a second when the file $JUMP_WHEN comes to be: for LD_PRELOAD.
 * The monotonic clocks go on, as they do when the time is set. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

typedef int clock_gettime_fn(clockid_t, struct timespec *);

int clock_gettime(clockid_t clock, struct timespec *now) {
    static clock_gettime_fn *real;
    if (!real)
        real = (clock_gettime_fn *)dlsym(RTLD_NEXT, "clock_gettime");
    int done = real(clock, now);
    if (done == 0 && clock == CLOCK_REALTIME && access(getenv("JUMP_WHEN"), F_OK) == 0)
        now->tv_sec += 1;
    return done;
}
