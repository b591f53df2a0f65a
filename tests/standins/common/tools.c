#define _GNU_SOURCE
#include "daemon.h"

#include <sys/uio.h>
#include <time.h>

static uint64_t random_state;

uint32_t chance(uint32_t limit) {
    if (random_state == 0) {
        random_state = seed | 1;
    }
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)((random_state >> 32) % limit);
}

uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

uint64_t fetch(pid_t process, uint64_t at, void *into, uint64_t len) {
    struct iovec near = {.iov_base = into, .iov_len = len};
    struct iovec far = {.iov_base = (void *)(uintptr_t)at, .iov_len = len};
    ssize_t got = process_vm_readv(process, &near, 1, &far, 1, 0);
    return got < 0 ? 0 : (uint64_t)got;
}

uint64_t put(pid_t process, uint64_t at, void *from, uint64_t len) {
    struct iovec near = {.iov_base = from, .iov_len = len};
    struct iovec far = {.iov_base = (void *)(uintptr_t)at, .iov_len = len};
    ssize_t landed = process_vm_writev(process, &near, 1, &far, 1, 0);
    return landed < 0 ? 0 : (uint64_t)landed;
}
