/*
 * A plug-in for kvik that works: "NICs" made of TCP sockets. It is here to start from, and to be run by
 * kvik's tests.
 *
 * Nothing here is fast, and nothing is one-sided but in form: the peer's bytes are moved by the peer's own
 * thread, when it polls. What is real are the promises of include/kvik/nic.h, each kept by something
 * simple:
 *
 * - Only poll() and post() touch memory, in the one thread that makes all calls. So when cancel() has closed a
 *   connection, nothing of what was posted on it touches memory here, and when fence() has closed those of
 *   peers, nothing of theirs.
 * - An address has a pass in it, 16 random bytes that fence() changes. Whoever has the old address is
 *   turned away.
 * - A write has ended when the peer says that it has placed the last byte.
 * - Memory of a GPU is reached by its dma-buf, which is mapped for the processor. Few drivers let that be
 *   done: a real NIC gives the dma-buf to its own driver instead.
 * - Nothing waits: all sockets are non-blocking, and an epoll descriptor says when there is something to do.
 *
 * This file is what kvik calls. moves.c moves the bytes: it has nothing of kvik in it.
 *
 * Both sides must be machines of one byte order. What is on the wire is neither encrypted nor signed.
 */
#define _GNU_SOURCE
#include "sample.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

static const char MAGIC[8] = "kvikSMP1";

/* ---- devices ---- */

static int32_t device_count(void) {
    return DEVICES;
}

static int32_t device_name(uint32_t number, char *name, uint32_t room) {
    int needs = snprintf(name, room, "sample%u", (unsigned)number);
    return needs > 0 && (uint32_t)needs < room ? KVIK_NIC_OK : -ENAMETOOLONG;
}

/* Opens a socket to listen on, at an address that was never there before. */
static int listen_anew(struct line *line, struct place *place) {
    const char *named = getenv("KVIK_SAMPLE_ADDRESS");
    struct sockaddr_in at = {.sin_family = AF_INET};
    socklen_t length = sizeof at;
    int error;
    memset(place, 0, sizeof *place);
    memcpy(place->magic, MAGIC, sizeof MAGIC);
    if (inet_pton(AF_INET, named != NULL ? named : "127.0.0.1", &at.sin_addr) != 1)
        return BAD_ADDRESS;
    if (getrandom(place->pass, PASS, 0) != PASS)
        return -errno;
    *line = (struct line){LISTENER, socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), 0};
    if (line->fd < 0)
        return -errno;
    if (bind(line->fd, (struct sockaddr *)&at, sizeof at) == 0 && listen(line->fd, SOMAXCONN) == 0 &&
        getsockname(line->fd, (struct sockaddr *)&at, &length) == 0) {
        place->ip = at.sin_addr.s_addr;
        place->port = at.sin_port;
        return 0;
    }
    error = errno == EADDRNOTAVAIL ? BAD_ADDRESS : -errno;
    close(line->fd);
    line->fd = -1; /* it is somebody else's from now on */
    return error;
}

static void device_close(struct kvik_nic_device *device);

static int32_t device_open(uint32_t number, struct kvik_nic_device **opened) {
    struct kvik_nic_device *device = number < DEVICES ? calloc(1, sizeof *device) : NULL;
    int error;
    if (device == NULL)
        return number < DEVICES ? -ENOMEM : -ENODEV;
    device->listener.fd = -1;
    device->spare = open("/dev/null", O_RDONLY | O_CLOEXEC);
    device->epoll = epoll_create1(EPOLL_CLOEXEC);
    error = device->epoll < 0 ? -errno : listen_anew(&device->listener, &device->place);
    if (error == 0)
        error = line_wait(device, &device->listener, EPOLLIN);
    if (error != 0) {
        device_close(device);
        return error;
    }
    *opened = device;
    return KVIK_NIC_OK;
}

static int32_t device_limits(struct kvik_nic_device *device, struct kvik_nic_limits *limits) {
    (void)device;
    *limits = (struct kvik_nic_limits){LONGEST, KVIK_NIC_PIECES, DEPTH};
    return KVIK_NIC_OK;
}

static int32_t device_address(struct kvik_nic_device *device, uint8_t *address, uint32_t *length) {
    if (*length < sizeof device->place)
        return -ENOSPC;
    memcpy(address, &device->place, sizeof device->place);
    *length = sizeof device->place;
    return KVIK_NIC_OK;
}

static int32_t region_add(struct kvik_nic_device *device, void *start, uint64_t length,
                          struct kvik_nic_region **added, uint64_t *key, uint64_t *base) {
    struct kvik_nic_region *region = calloc(1, sizeof *region);
    if (region == NULL)
        return -ENOMEM;
    region->next = device->regions;
    region->start = start;
    region->address = (uint64_t)(uintptr_t)start;
    region->length = length;
    region->key = ++device->last_key;
    device->regions = region;
    *added = region;
    *key = region->key;
    *base = 0; /* peers say where in the region, and not at which address */
    return KVIK_NIC_OK;
}

/* KVIK_SAMPLE_MEMORY=host: as if a NIC reached no GPUs. */
static int32_t device_memories(struct kvik_nic_device *device, struct kvik_nic_memories *memories) {
    const char *named = getenv("KVIK_SAMPLE_MEMORY");
    int host = named != NULL && strcmp(named, "host") == 0;
    (void)device;
    *memories = (struct kvik_nic_memories){host ? 0 : 1u << KVIK_NIC_MEMORY_CUDA, KVIK_NIC_DMABUF_NEEDED};
    return KVIK_NIC_OK;
}

static int32_t region_add_on(struct kvik_nic_device *device, const struct kvik_nic_memory *memory,
                             struct kvik_nic_region **added, uint64_t *key, uint64_t *base) {
    uint64_t mapped = memory->offset + memory->length;
    void *map = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, memory->dmabuf, 0);
    int32_t error;
    if (map == MAP_FAILED)
        return errno == ENOMEM ? -ENOMEM : BAD_DMABUF;
    error = region_add(device, (char *)map + memory->offset, memory->length, added, key, base);
    if (error != KVIK_NIC_OK) {
        munmap(map, mapped);
        return error;
    }
    (*added)->address = memory->address;
    (*added)->map = map;
    (*added)->mapped = mapped;
    return KVIK_NIC_OK;
}

/* Guests look for their region at each step, and do not find it any more. */
static int32_t region_remove(struct kvik_nic_device *device, struct kvik_nic_region *region) {
    struct kvik_nic_region **at = &device->regions;
    while (*at != region)
        at = &(*at)->next;
    *at = region->next;
    if (region->map != NULL)
        munmap(region->map, region->mapped);
    free(region);
    return KVIK_NIC_OK;
}

static int32_t conn_open(struct kvik_nic_device *device, const uint8_t *address, uint32_t length,
                         struct kvik_nic_conn **opened) {
    struct sockaddr_in at = {.sin_family = AF_INET};
    struct kvik_nic_conn *conn;
    struct place place;
    int one = 1, fd;
    if (length != sizeof place)
        return -EINVAL;
    memcpy(&place, address, sizeof place);
    if (memcmp(place.magic, MAGIC, sizeof MAGIC) != 0)
        return -EINVAL;
    fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -errno;
    conn = calloc(1, sizeof *conn);
    if (conn == NULL) {
        close(fd);
        return -ENOMEM;
    }
    conn->line = (struct line){CONN, fd, 0};
    memcpy(conn->pass, place.pass, PASS);
    conn->next = device->conns;
    device->conns = conn;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    at.sin_addr.s_addr = place.ip;
    at.sin_port = place.port;
    if (connect(fd, (struct sockaddr *)&at, sizeof at) != 0 && errno != EINPROGRESS)
        conn_lost(device, conn, -errno);
    else
        conn_works(device, conn);
    *opened = conn;
    return KVIK_NIC_OK;
}

static void conn_close(struct kvik_nic_device *device, struct kvik_nic_conn *conn) {
    struct kvik_nic_conn **at = &device->conns;
    while (*at != conn)
        at = &(*at)->next;
    *at = conn->next;
    line_close(device, &conn->line);
    free(conn);
}

static int32_t post(struct kvik_nic_device *device, const struct kvik_nic_post *post) {
    struct kvik_nic_conn *conn = post->conn;
    struct operation *operation = &conn->ring[conn->end % CONN_DEPTH];
    uint64_t length = 0;
    if (device->held == DEPTH || conn->end - conn->first == CONN_DEPTH)
        return KVIK_NIC_FULL;
    if (post->count > KVIK_NIC_PIECES)
        return -EINVAL;
    for (uint32_t i = 0; i < post->count; i++) {
        uint64_t offset = (uint64_t)(uintptr_t)post->pieces[i].start - post->region->address;
        operation->pieces[i] = (struct iovec){post->region->start + offset, post->pieces[i].length};
        length += post->pieces[i].length;
    }
    if (length == 0 || length > LONGEST)
        return -EINVAL;
    operation->count = post->count;
    operation->token = post->token;
    operation->request = (struct request){post->op, 0, post->remote, post->key, length};
    device->held++;
    conn->end++;
    if (conn->error != 0)
        conn_lost(device, conn, conn->error);
    else
        conn_works(device, conn);
    return KVIK_NIC_OK;
}

static int32_t device_poll(struct kvik_nic_device *device, struct kvik_nic_completion *into, uint32_t room) {
    struct epoll_event events[32];
    int count = epoll_wait(device->epoll, events, 32, 0);
    uint32_t told;
    if (count < 0 && errno != EINTR)
        return -errno;
    for (int i = 0; i < count; i++) {
        struct line *line = events[i].data.ptr;
        if (line->kind == LISTENER)
            guest_comes(device);
        else if (line->kind == CONN)
            conn_works(device, (struct kvik_nic_conn *)line);
        else
            guest_works(device, (struct guest *)line);
    }
    told = device->ended_count < room ? device->ended_count : room;
    for (uint32_t i = 0; i < told; i++)
        into[i] = device->ended[i].completion;
    device->ended_count -= told;
    device->held -= told;
    memmove(device->ended, device->ended + told, device->ended_count * sizeof *device->ended);
    return (int32_t)told;
}

static int32_t device_descriptor(struct kvik_nic_device *device) {
    return device->epoll;
}

/* All else that poll() has to do makes the descriptor readable. */
static int32_t device_may_sleep(struct kvik_nic_device *device) {
    return device->ended_count == 0;
}

/* Nobody but this thread moves bytes, so what is forgotten here is not moved. */
static int32_t cancel(struct kvik_nic_device *device, struct kvik_nic_conn *conn) {
    uint32_t kept = 0;
    device->held -= conn->end - conn->first;
    for (uint32_t i = 0; i < device->ended_count; i++) {
        if (device->ended[i].conn == conn)
            device->held--;
        else
            device->ended[kept++] = device->ended[i];
    }
    device->ended_count = kept;
    conn_close(device, conn);
    return KVIK_NIC_OK;
}

static int32_t fence(struct kvik_nic_device *device, uint8_t *address, uint32_t *length) {
    struct line listener;
    struct place place;
    int error = *length < sizeof place ? -ENOSPC : listen_anew(&listener, &place);
    if (error != 0)
        return error;
    /* Waits by its own place in the device, which it takes when nothing can fail any more. */
    struct epoll_event event = {.events = EPOLLIN, .data = {.ptr = &device->listener}};
    if (epoll_ctl(device->epoll, EPOLL_CTL_ADD, listener.fd, &event) != 0) {
        error = -errno;
        close(listener.fd);
        return error;
    }
    listener.events = EPOLLIN;
    line_close(device, &device->listener);
    while (device->guests != NULL)
        guest_leaves(device, device->guests);
    device->listener = listener;
    device->place = place;
    return device_address(device, address, length);
}

static void device_close(struct kvik_nic_device *device) {
    while (device->conns != NULL)
        conn_close(device, device->conns);
    while (device->guests != NULL)
        guest_leaves(device, device->guests);
    line_close(device, &device->listener);
    if (device->spare >= 0)
        close(device->spare);
    if (device->epoll >= 0)
        close(device->epoll);
    free(device);
}

static void error_text(struct kvik_nic_device *device, int32_t error, char *text, uint32_t room) {
    (void)device;
    if (error == BAD_ADDRESS)
        snprintf(text, room, "KVIK_SAMPLE_ADDRESS is no IPv4 address of this host; leave it out?");
    else if (error == BAD_DMABUF)
        snprintf(text, room, "the processor may not map the GPU's dma-buf; this sample can do nothing else");
    else
        snprintf(text, room, "%s", strerror(-error));
}

/* ---- the table ---- */

/* is_up is left out: the address of a host has no link to lose, and what fails says so itself. */
static const struct kvik_nic_plugin TABLE = {
    .size = sizeof TABLE,
    .version = KVIK_NIC_VERSION,
    .oldest = KVIK_NIC_VERSION,
    .newest = KVIK_NIC_VERSION,
    .name = "sample",
    .device_count = device_count,
    .device_name = device_name,
    .open = device_open,
    .close = device_close,
    .limits = device_limits,
    .address = device_address,
    .region_add = region_add,
    .region_remove = region_remove,
    .conn_open = conn_open,
    .conn_close = conn_close,
    .post = post,
    .poll = device_poll,
    .descriptor = device_descriptor,
    .may_sleep = device_may_sleep,
    .cancel = cancel,
    .fence = fence,
    .error_text = error_text,
    .memories = device_memories,
    .region_add_on = region_add_on,
};

/* What is answered to a kvik that knows no version of ours: the head alone. */
static const struct kvik_nic_plugin NONE = {
    .size = sizeof NONE,
    .version = 0,
    .oldest = KVIK_NIC_VERSION,
    .newest = KVIK_NIC_VERSION,
    .name = "sample",
};

const struct kvik_nic_plugin *kvik_nic_plugin(uint32_t oldest, uint32_t newest) {
    return oldest <= KVIK_NIC_VERSION && KVIK_NIC_VERSION <= newest ? &TABLE : &NONE;
}
