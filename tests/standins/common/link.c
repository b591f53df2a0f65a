/* The process's connection to the daemon of its folder, which is started if it is not there. */
#define _GNU_SOURCE
#include "link.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;

/* Attempts to reach the daemon, 5 ms apart: it may just be starting, or ending. */
enum { ATTEMPTS = 12000 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int connection = -1;
static pid_t owner;

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

static int connect_to_daemon(int (*greet)(int fd)) {
    const char *folder = getenv("KVIK_STANDIN_DIR");
    if (folder == NULL || *folder != '/') {
        fprintf(stderr, STANDIN " stand-in: KVIK_STANDIN_DIR must name a folder by a whole path\n");
        return ENODEV;
    }
    struct sockaddr_un at;
    if (!socket_address(&at, folder, CONTROL_SOCKET)) {
        fprintf(stderr, STANDIN " stand-in: the path %s is too long for sockets\n", folder);
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
    fprintf(stderr, STANDIN " stand-in: no device daemon in %s; see %s there\n", folder, LOG_FILE);
    return ENODEV;
}

int link_up(int (*greet)(int fd)) {
    pthread_mutex_lock(&lock);
    int error = connection >= 0 ? 0 : connect_to_daemon(greet);
    pthread_mutex_unlock(&lock);
    return error;
}

int link_ask(const void *request, uint64_t len, int fd, void *reply, uint64_t room) {
    int fds[2], count = 0;
    /* A forked child has a copy of the connection, and none of the objects. */
    if (getpid() != owner) {
        return EPERM;
    }
    pthread_mutex_lock(&lock);
    int good = send_with(connection, request, len, &fd, fd >= 0) == (int)len;
    good = good && receive_with(connection, reply, room, fds, &count) == (int)room;
    pthread_mutex_unlock(&lock);
    return good ? 0 : EIO;
}

int link_tell(const void *message, uint64_t len) {
    if (getpid() != owner) {
        return EPERM;
    }
    pthread_mutex_lock(&lock);
    int good = send_with(connection, message, len, NULL, 0) == (int)len;
    pthread_mutex_unlock(&lock);
    return good ? 0 : EIO;
}
