/*
 * The sample's connections. On one there are requests one way, with the bytes behind them for a write, and
 * answers the other way, in the same order, with the bytes behind them for a read. Before the first request
 * comes the pass.
 */
#define _GNU_SOURCE
#include "sample.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

/* ---- sockets ---- */

/* Waits for these events of a line, by the device's epoll descriptor. */
int line_wait(struct kvik_nic_device *device, struct line *line, uint32_t events) {
    struct epoll_event event = {.events = events, .data = {.ptr = line}};
    int what = line->events == 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD;
    if (line->events == events)
        return 0;
    if (epoll_ctl(device->epoll, what, line->fd, &event) != 0)
        return -errno;
    line->events = events;
    return 0;
}

/* Closes a line. A child that was forked may have the socket too: so it is shut down, and taken off the
 * waiting. */
void line_close(struct kvik_nic_device *device, struct line *line) {
    if (line->fd < 0)
        return;
    if (line->events != 0)
        epoll_ctl(device->epoll, EPOLL_CTL_DEL, line->fd, NULL);
    shutdown(line->fd, SHUT_RDWR);
    close(line->fd);
    line->fd = -1;
    line->events = 0;
}

/* What is left of the runs behind `skip` bytes: how many runs. */
static size_t rest(struct iovec *left, const struct iovec *runs, size_t count, uint64_t skip) {
    size_t many = 0;
    for (size_t i = 0; i < count; i++) {
        if (skip >= runs[i].iov_len) {
            skip -= runs[i].iov_len;
            continue;
        }
        left[many].iov_base = (char *)runs[i].iov_base + skip;
        left[many].iov_len = runs[i].iov_len - skip;
        skip = 0;
        many++;
    }
    return many;
}

/* Moves what can be moved now: bytes, 0 for none, or a negative errno when the connection is at its end. */
static ssize_t move(int fd, int out, struct iovec *runs, size_t count) {
    struct msghdr message = {.msg_iov = runs, .msg_iovlen = count};
    ssize_t moved = out ? sendmsg(fd, &message, MSG_NOSIGNAL) : recvmsg(fd, &message, 0);
    if (moved > 0)
        return moved;
    if (moved == 0)
        return -ECONNRESET;
    return errno == EAGAIN || errno == EINTR ? 0 : -errno;
}

/* ---- what was posted here ---- */

static void operation_ends(struct kvik_nic_device *device, struct kvik_nic_conn *conn, uint64_t token,
                           int status) {
    struct ended *ended = &device->ended[device->ended_count++];
    ended->conn = conn;
    ended->completion.token = token;
    ended->completion.status = status;
    ended->completion.zero = 0;
}

/* The connection is lost: what was posted on the connection has failed. Whatever is posted on it later fails too. */
void conn_lost(struct kvik_nic_device *device, struct kvik_nic_conn *conn, int error) {
    line_close(device, &conn->line);
    conn->error = error;
    for (; conn->first != conn->end; conn->first++)
        operation_ends(device, conn, conn->ring[conn->first % CONN_DEPTH].token, error);
    conn->unsent = conn->end;
}

static int conn_has_to_send(const struct kvik_nic_conn *conn) {
    return conn->greeted < PASS || conn->unsent != conn->end;
}

/* One step of sending: 1 when something went, 0 when nothing can, or an error. */
static int conn_sends(struct kvik_nic_conn *conn) {
    struct operation *operation = &conn->ring[conn->unsent % CONN_DEPTH];
    struct iovec runs[1 + KVIK_NIC_PIECES], left[1 + KVIK_NIC_PIECES];
    uint64_t length = sizeof operation->request;
    size_t count = 1;
    ssize_t sent;
    if (conn->greeted < PASS) {
        left[0].iov_base = conn->pass + conn->greeted;
        left[0].iov_len = PASS - conn->greeted;
        sent = move(conn->line.fd, 1, left, 1);
        conn->greeted += sent > 0 ? (size_t)sent : 0;
        return sent > 0 ? 1 : (int)sent;
    }
    runs[0].iov_base = &operation->request;
    runs[0].iov_len = sizeof operation->request;
    if (operation->request.op == KVIK_NIC_WRITE) {
        memcpy(runs + 1, operation->pieces, operation->count * sizeof *runs);
        count += operation->count;
        length += operation->request.length;
    }
    sent = move(conn->line.fd, 1, left, rest(left, runs, count, conn->sent));
    if (sent <= 0)
        return (int)sent;
    conn->sent += (uint64_t)sent;
    if (conn->sent == length) {
        conn->unsent++;
        conn->sent = 0;
    }
    return 1;
}

/* One step of receiving, as above. */
static int conn_receives(struct kvik_nic_device *device, struct kvik_nic_conn *conn) {
    struct operation *operation = &conn->ring[conn->first % CONN_DEPTH];
    struct iovec head = {&conn->answer, sizeof conn->answer}, left[KVIK_NIC_PIECES];
    int has_head = conn->got >= sizeof conn->answer;
    size_t count;
    ssize_t got;
    uint64_t expected = operation->request.op == KVIK_NIC_READ ? operation->request.length : 0;
    if (conn->first == conn->unsent) {
        /* Nothing was asked: all that can come is the connection's end. */
        got = move(conn->line.fd, 0, &head, 1);
        return got > 0 ? -EPROTO : (int)got;
    }
    count = has_head ? rest(left, operation->pieces, operation->count, conn->got - sizeof conn->answer)
                     : rest(left, &head, 1, conn->got);
    got = move(conn->line.fd, 0, left, count);
    if (got <= 0)
        return (int)got;
    conn->got += (uint64_t)got;
    if (conn->got < sizeof conn->answer)
        return 1;
    if (conn->answer.status != 0)
        expected = 0;
    if (conn->answer.length != expected || conn->answer.status > 0 || conn->answer.status < BAD_ADDRESS)
        return -EPROTO;
    if (conn->got < sizeof conn->answer + expected)
        return 1;
    operation_ends(device, conn, operation->token, (int)conn->answer.status);
    conn->first++;
    conn->got = 0;
    return 1;
}

/* Moves what there is to move on a connection, and says what to wait for. */
void conn_works(struct kvik_nic_device *device, struct kvik_nic_conn *conn) {
    int moved = 1;
    for (int step = 0; step < STEPS && moved > 0 && conn_has_to_send(conn); step++)
        moved = conn_sends(conn);
    if (moved >= 0)
        moved = 1;
    for (int step = 0; step < STEPS && moved > 0; step++)
        moved = conn_receives(device, conn);
    if (moved >= 0)
        moved = line_wait(device, &conn->line, EPOLLIN | (conn_has_to_send(conn) ? EPOLLOUT : 0u));
    if (moved < 0)
        conn_lost(device, conn, moved);
}

/* ---- what peers do ---- */

/* Where a request's bytes lie, which are looked for at each step: NULL when they are in no region (any
 * more). */
static char *reached(struct kvik_nic_device *device, const struct request *request) {
    for (struct kvik_nic_region *region = device->regions; region != NULL; region = region->next) {
        if (region->key != request->key)
            continue;
        if (request->offset > region->length || request->length > region->length - request->offset)
            return NULL;
        return region->start + request->offset;
    }
    return NULL;
}

/* The phase has ended: what comes next. */
static int guest_turns(struct kvik_nic_device *device, struct guest *guest) {
    const struct request *request = &guest->request;
    guest->at = 0;
    switch (guest->phase) {
    case PASSING:
        guest->phase = ASKING;
        return memcmp(guest->pass, device->place.pass, PASS) == 0 ? 1 : -EACCES;
    case ASKING:
        if (request->op != KVIK_NIC_READ && request->op != KVIK_NIC_WRITE)
            return -EPROTO;
        if (request->length == 0 || request->length > LONGEST)
            return -EPROTO;
        guest->answer.status = reached(device, request) != NULL ? 0 : -EACCES;
        guest->answer.length =
            request->op == KVIK_NIC_READ && guest->answer.status == 0 ? request->length : 0;
        guest->phase = request->op == KVIK_NIC_WRITE ? GIVING : ANSWERING;
        return 1;
    case GIVING:
        guest->phase = ANSWERING;
        return 1;
    default:
        guest->phase = ASKING;
        return 1;
    }
}

/* One step for a guest: 1 when something moved, 0 when nothing can, or an error. */
static int guest_steps(struct kvik_nic_device *device, struct guest *guest) {
    struct iovec runs[2] = {{NULL, 0}, {NULL, 0}}, left[2];
    uint64_t length = 0, skip = guest->at;
    ssize_t moved;
    char *memory = guest->phase >= GIVING ? reached(device, &guest->request) : NULL;
    switch (guest->phase) {
    case PASSING:
        runs[0] = (struct iovec){guest->pass, length = PASS};
        break;
    case ASKING:
        runs[0] = (struct iovec){&guest->request, length = sizeof guest->request};
        break;
    case GIVING:
        length = guest->request.length;
        if (memory != NULL) {
            runs[0] = (struct iovec){memory, length};
            break;
        }
        /* It may not write there: its bytes are taken off the wire, so that the answer can say so. */
        guest->answer.status = -EACCES;
        runs[0] = (struct iovec){device->scratch, length - skip < SCRATCH ? length - skip : SCRATCH};
        skip = 0;
        break;
    case ANSWERING:
        if (guest->answer.length > 0 && memory == NULL)
            return -EACCES;
        runs[0] = (struct iovec){&guest->answer, sizeof guest->answer};
        runs[1] = (struct iovec){memory, guest->answer.length};
        length = sizeof guest->answer + guest->answer.length;
        break;
    }
    moved = move(guest->line.fd, guest->phase == ANSWERING, left, rest(left, runs, 2, skip));
    if (moved <= 0)
        return (int)moved;
    guest->at += (uint64_t)moved;
    return guest->at < length ? 1 : guest_turns(device, guest);
}

void guest_leaves(struct kvik_nic_device *device, struct guest *guest) {
    struct guest **at = &device->guests;
    while (*at != guest)
        at = &(*at)->next;
    *at = guest->next;
    device->guest_count--;
    line_close(device, &guest->line);
    free(guest);
}

void guest_works(struct kvik_nic_device *device, struct guest *guest) {
    int moved = 1;
    for (int step = 0; step < STEPS && moved > 0; step++)
        moved = guest_steps(device, guest);
    if (moved >= 0)
        moved = line_wait(device, &guest->line, guest->phase == ANSWERING ? EPOLLOUT : EPOLLIN);
    if (moved < 0)
        guest_leaves(device, guest);
}

/* Takes a connection of a peer. One that there is no room for is closed at once. */
void guest_comes(struct kvik_nic_device *device) {
    int one = 1, fd = accept4(device->listener.fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    struct guest *guest;
    if (fd < 0 && (errno == EMFILE || errno == ENFILE) && device->spare >= 0) {
        close(device->spare);
        fd = accept4(device->listener.fd, NULL, NULL, SOCK_CLOEXEC);
        if (fd >= 0)
            close(fd);
        device->spare = open("/dev/null", O_RDONLY | O_CLOEXEC);
        return;
    }
    if (fd < 0)
        return;
    guest = device->guest_count < GUESTS ? calloc(1, sizeof *guest) : NULL;
    if (guest == NULL) {
        close(fd);
        return;
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    guest->line = (struct line){GUEST, fd, 0};
    guest->next = device->guests;
    device->guests = guest;
    device->guest_count++;
    guest_works(device, guest);
}
