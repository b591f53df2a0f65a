/* What the process and the device's daemon share beside the connection: board, counters and doorbell. */
#define _GNU_SOURCE
#include "nic.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

static int doorbell = -1;
static struct board *board;
static struct tally *tally;

/* Tells the daemon of this process: its doorbell and its counters go there, the board comes back. */
static int greet(int fd) {
    void *counters = NULL, *shared = NULL;
    int bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int counted = shared_memory("standin-tally", sizeof(struct tally), &counters);
    int fds[2] = {bell, counted}, got[2], count = 0;
    struct request hello = {.kind = HELLO};
    struct reply reply;
    int good = bell >= 0 && counted >= 0 && send_with(fd, &hello, sizeof hello, fds, 2) == sizeof hello;
    good = good && receive_with(fd, &reply, sizeof reply, got, &count) == sizeof reply && reply.error == 0;
    if (good && count == 1) {
        shared = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED, got[0], 0);
        close(got[0]);
    }
    if (counted >= 0) {
        close(counted);
    }
    if (shared == NULL || shared == MAP_FAILED) {
        if (bell >= 0) {
            close(bell);
        }
        if (counters != NULL && counters != MAP_FAILED) {
            munmap(counters, sizeof(struct tally));
        }
        return -1;
    }
    doorbell = bell;
    tally = counters;
    board = shared;
    if (getenv("KVIK_STANDIN_SEED") == NULL) {
        fprintf(stderr, "libfabric stand-in: KVIK_STANDIN_SEED=%llu\n", (unsigned long long)reply.value);
    }
    return 0;
}

int link_open(struct link *link) {
    int error = link_up(greet);
    *link = (struct link){.board = board, .tally = tally};
    return error;
}

int ask(const struct request *request, int fd, struct reply *reply) {
    int error = link_ask(request, sizeof *request, fd, reply, sizeof *reply);
    return error != 0 ? error : reply->error;
}

void link_ring(void) {
    /* After what was posted, and before the look at whether the daemon sleeps: it does the same the other
     * way. */
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load(&board->asleep)) {
        uint64_t one = 1;
        ssize_t wrote = write(doorbell, &one, sizeof one);
        /* A full doorbell has been rung already. */
        (void)wrote;
    }
}
