/* The daemon of a folder: `standin-nic FOLDER [stay]`. It serves this one, and ends when its last
 * user has gone. It leaves whoever starts it, unless it is to stay: then it says when it is ready. */
#define _GNU_SOURCE
#include "daemon.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

/* A daemon that nobody ever used ends after so long. */
enum { FIRST_USER_SECONDS = 120, MAX_TESTS = 64, LINE = 1024 };

/* What an event is of: the place of a client or a test is added. */
enum {
    NICS = 0,
    CONTROLS = 1,
    CLIENT = 0x1000,
    ALIVE = 0x2000,
    BELL = 0x3000,
    TEST = 0x4000,
    KINDS = 0xF000
};

struct board *board;
struct counts counts;
uint64_t seed;
int board_fd;

static int epoll, nics, controls;
/* Connections of tests, -1 for none. */
static int tests[MAX_TESTS];
static int used;
/* Closed when the daemon listens. */
static int ready;

static _Noreturn void fail(const char *what) {
    fprintf(stderr, "standin-nic: %s: %s\n", what, strerror(errno));
    exit(1);
}

static int watch(int fd, uint32_t name) {
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = name};
    return epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event);
}

static int listening(const char *folder, const char *name, int kind) {
    struct sockaddr_un at;
    if (!socket_address(&at, folder, name)) {
        errno = ENAMETOOLONG;
        fail(folder);
    }
    int fd = socket(AF_UNIX, kind | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    unlink(at.sun_path);
    if (fd < 0 || bind(fd, (struct sockaddr *)&at, sizeof at) < 0 || listen(fd, 128) < 0) {
        fail(at.sun_path);
    }
    return fd;
}

/* Leaves the session and its descriptors; errors go to the log. */
static void settle(const char *folder, int staying) {
    char path[4096];
    close_range(3, ~0U, 0);
    snprintf(path, sizeof path, "%s/%s", folder, LOG_FILE);
    int log = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    int nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (log < 0 || nothing < 0) {
        fail(path);
    }
    ready = staying ? fcntl(1, F_DUPFD_CLOEXEC, 3) : -1;
    dup2(nothing, 0);
    dup2(nothing, 1);
    dup2(log, 2);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, SIG_IGN);
    if (chdir("/") < 0) {
        fail("/");
    }
}

/* The parent's program ends when the daemon listens, or is not there. */
static void leave_parent(void) {
    int pipes[2];
    if (pipe2(pipes, O_CLOEXEC) < 0) {
        fail("a pipe");
    }
    pid_t child = fork();
    if (child != 0) {
        char byte;
        close(pipes[1]);
        ssize_t got = child > 0 ? read(pipes[0], &byte, 1) : -1;
        _exit(got < 0);
    }
    close(pipes[0]);
    ready = pipes[1];
    setsid();
}

static void say_ready(void) {
    ssize_t said = write(ready, "ready\n", 6);
    /* Who does not listen does not wait. */
    (void)said;
    close(ready);
}

/* One daemon a folder: who comes second has nothing to do. */
static void be_the_only_one(const char *folder) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, LOCK_FILE);
    int lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (lock < 0) {
        fail(path);
    }
    if (flock(lock, LOCK_EX | LOCK_NB) < 0) {
        exit(0);
    }
}

static void begin(const char *folder) {
    void *shared = NULL;
    board_fd = shared_memory("standin-board", sizeof *board, &shared);
    board = shared;
    prctl(PR_SET_TIMERSLACK, 1000);
    epoll = epoll_create1(EPOLL_CLOEXEC);
    if (board_fd < 0 || epoll < 0) {
        fail("memory");
    }
    const char *given = getenv("KVIK_STANDIN_SEED");
    if (given != NULL) {
        seed = strtoull(given, NULL, 10);
    } else if (getrandom(&seed, sizeof seed, 0) != sizeof seed) {
        fail("a seed");
    }
    fprintf(stderr, "standin-nic: process %d, KVIK_STANDIN_SEED=%lu\n", getpid(), seed);
    memset(tests, -1, sizeof tests);
    controls = listening(folder, CONTROL_SOCKET, SOCK_STREAM);
    nics = listening(folder, NIC_SOCKET, SOCK_SEQPACKET);
    if (watch(nics, NICS) < 0 || watch(controls, CONTROLS) < 0) {
        fail("epoll");
    }
    const char *wanted = getenv("KVIK_STANDIN_FAULTS");
    char given_faults[LINE], answer[LINE], *rest = NULL;
    snprintf(given_faults, sizeof given_faults, "%s", wanted != NULL ? wanted : "");
    for (char *line = strtok_r(given_faults, ";", &rest); line != NULL; line = strtok_r(NULL, ";", &rest)) {
        obey(line, answer, sizeof answer);
        fprintf(stderr, "standin-nic: %s: %s\n", line, answer);
    }
}

static void accept_client(void) {
    int fd = accept4(nics, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    struct client *client = fd >= 0 ? client_new(fd) : NULL;
    if (client == NULL) {
        close(fd);
        return;
    }
    used = 1;
    uint32_t place = (uint32_t)(client - clients);
    if (watch(fd, CLIENT + place) < 0 || watch(client->alive, ALIVE + place) < 0) {
        client_gone(client);
    }
}

static void accept_test(void) {
    int fd = accept4(controls, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    for (uint32_t place = 0; fd >= 0 && place < MAX_TESTS; place++) {
        if (tests[place] < 0) {
            tests[place] = fd;
            used = 1;
            if (watch(fd, TEST + place) == 0) {
                return;
            }
            tests[place] = -1;
            break;
        }
    }
    close(fd);
}

static void serve_test(uint32_t place) {
    char line[LINE], answer[LINE];
    ssize_t got = recv(tests[place], line, sizeof line - 1, 0);
    if (got > 0) {
        /* A test writes a line at once, and waits for its answer. */
        line[got] = '\0';
        line[strcspn(line, "\n")] = '\0';
        obey(line, answer, sizeof answer - 1);
        strcat(answer, "\n");
        got = send(tests[place], answer, strlen(answer), MSG_NOSIGNAL);
    }
    if (got == 0 || (got < 0 && errno != EINTR && errno != EAGAIN)) {
        close(tests[place]);
        tests[place] = -1;
    }
}

static void handle(uint32_t name) {
    uint32_t kind = name & KINDS, place = name & ~(uint32_t)KINDS;
    if (name == NICS) {
        accept_client();
    } else if (name == CONTROLS) {
        accept_test();
    } else if (kind == TEST) {
        if (tests[place] >= 0) {
            serve_test(place);
        }
    } else if (clients[place].used && kind == ALIVE) {
        client_gone(&clients[place]);
    } else if (clients[place].used && kind == BELL) {
        uint64_t rung;
        ssize_t got = read(clients[place].doorbell, &rung, sizeof rung);
        (void)got;
    } else if (clients[place].used) {
        int had = clients[place].doorbell;
        serve(&clients[place]);
        if (had < 0 && clients[place].used && clients[place].doorbell >= 0) {
            watch(clients[place].doorbell, BELL + place);
        }
    }
}

static int has_users(void) {
    int users = 0;
    for (uint32_t place = 0; place < MAX_CLIENTS; place++) {
        users += clients[place].used;
    }
    for (uint32_t place = 0; place < MAX_TESTS; place++) {
        users += tests[place] >= 0;
    }
    return users > 0;
}

/* Waits until somebody wants something, or an operation is due. */
static int wait_for_events(struct epoll_event *events, int most, uint64_t nanos) {
    if (nanos == 0) {
        return epoll_wait(epoll, events, most, 0);
    }
    const uint64_t second = 1000000000;
    /* Said before the last look: who posts looks at it after posting. */
    atomic_store(&board->asleep, 1);
    atomic_thread_fence(memory_order_seq_cst);
    begin_posted();
    uint64_t wait = move_some();
    wait = wait < nanos ? wait : nanos;
    wait = used ? wait : FIRST_USER_SECONDS * second;
    struct timespec until = {.tv_sec = (time_t)(wait / second), .tv_nsec = (long)(wait % second)};
    int count = epoll_pwait2(epoll, events, most, wait == UINT64_MAX ? NULL : &until, NULL);
    atomic_store(&board->asleep, 0);
    return count;
}

int main(int count, char **arguments) {
    int staying = count == 3 && strcmp(arguments[2], "stay") == 0;
    if ((count != 2 && !staying) || arguments[1][0] != '/') {
        fprintf(stderr, "usage: standin-nic FOLDER [stay] (a whole path)\n");
        return 2;
    }
    settle(arguments[1], staying);
    if (!staying) {
        leave_parent();
    }
    be_the_only_one(arguments[1]);
    begin(arguments[1]);
    say_ready();
    for (;;) {
        struct epoll_event events[64];
        begin_posted();
        int got = wait_for_events(events, 64, move_some());
        if (got < 0 && errno != EINTR) {
            fail("epoll");
        }
        /* Who comes in is looked at last: nobody takes a place that an event is still of. */
        for (int turn = 0; turn < 2; turn++) {
            for (int at = 0; at < got; at++) {
                uint32_t name = events[at].data.u32;
                if ((name == NICS || name == CONTROLS) == (turn == 1)) {
                    handle(name);
                }
            }
        }
        if (!has_users() && (used || got == 0)) {
            return 0;
        }
    }
}
