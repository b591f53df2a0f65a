/* The process's connection to the daemon of its fabric directory, which is started if it is not there. */
#define _GNU_SOURCE
#include "nic.h"

#include <dlfcn.h>
#include <errno.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;

/* Attempts to reach the daemon, 5 ms apart: it may just be starting, or ending. */
enum { ATTEMPTS = 1000 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int connection = -1, doorbell = -1;
static pid_t owner;
static struct board *board;
static struct tally *tally;

static int memory(const char *name, uint64_t bytes, void **at) {
    int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) < 0) {
        return -1;
    }
    *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return *at == MAP_FAILED ? -1 : fd;
}

/* The daemon's program lies beside this library. It leaves its parent at once, so there is nobody to wait for
 * long. */
static int start_daemon(const char *folder) {
    Dl_info info;
    char program[4096];
    if (!dladdr((void *)start_daemon, &info) || strlen(info.dli_fname) + 16 > sizeof program) {
        return ENOENT;
    }
    strcpy(program, info.dli_fname);
    char *slash = strrchr(program, '/');
    strcpy(slash == NULL ? program : slash + 1, "standin-nic");
    char *arguments[] = {program, (char *)folder, NULL};
    pid_t child;
    int error = posix_spawn(&child, program, NULL, NULL, arguments, environ);
    if (error == 0) {
        while (waitpid(child, NULL, 0) < 0 && errno == EINTR) {
        }
    }
    return error;
}

static int connected(const char *folder) {
    struct sockaddr_un at;
    if (!socket_address(&at, folder, NIC_SOCKET)) {
        return -1;
    }
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&at, sizeof at) == 0) {
        return fd;
    }
    if (fd >= 0) {
        close(fd);
    }
    return -1;
}

/* Tells the daemon of this process: its doorbell and its counters go there, the board comes back. */
static int greet(int fd) {
    void *counters = NULL, *shared = NULL;
    int bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int counted = memory("standin-tally", sizeof(struct tally), &counters);
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

static int link_up(void) {
    const char *folder = getenv("KVIK_STANDIN_DIR");
    if (folder == NULL || *folder != '/') {
        fprintf(
            stderr, "libfabric stand-in: KVIK_STANDIN_DIR must name the fabric's folder by a whole path\n");
        return ENODEV;
    }
    struct sockaddr_un at;
    if (!socket_address(&at, folder, CONTROL_SOCKET)) {
        fprintf(stderr, "libfabric stand-in: the path %s is too long for sockets\n", folder);
        return ENAMETOOLONG;
    }
    for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
        int fd = connected(folder);
        if (fd >= 0 && greet(fd) == 0) {
            connection = fd;
            owner = getpid();
            return 0;
        }
        if (fd >= 0) {
            close(fd);
        }
        if (attempt % 20 == 0 && start_daemon(folder) != 0) {
            break;
        }
        nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
    }
    fprintf(stderr, "libfabric stand-in: no device daemon in %s; see %s there\n", folder, LOG_FILE);
    return ENODEV;
}

int link_open(struct link *link) {
    pthread_mutex_lock(&lock);
    int error = connection >= 0 ? 0 : link_up();
    *link = (struct link){.board = board, .tally = tally};
    pthread_mutex_unlock(&lock);
    return error;
}

int link_ask(const struct request *request, int fd, struct reply *reply) {
    int fds[2], count = 0;
    /* A forked child has a copy of the connection, and none of the objects. */
    if (getpid() != owner) {
        return EPERM;
    }
    pthread_mutex_lock(&lock);
    int good = send_with(connection, request, sizeof *request, &fd, fd >= 0) == sizeof *request;
    good = good && receive_with(connection, reply, sizeof *reply, fds, &count) == sizeof *reply;
    pthread_mutex_unlock(&lock);
    return good ? reply->error : EIO;
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
