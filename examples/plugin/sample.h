/*
 * What the sample's two files share. sample.c is what kvik calls: devices, memory, posts, the table;
 * moves.c moves the bytes: the connections, what is spoken on them, and in which order.
 */
#ifndef SAMPLE_H
#define SAMPLE_H

#include <kvik/nic.h>
#include <sys/uio.h>

enum {
    DEVICES = 2,
    DEPTH = 256,          /* operations of a device: in flight, or ended and not yet told */
    CONN_DEPTH = 64,       /* operations of a connection */
    GUESTS = 256,         /* connections that peers may have to a device */
    PASS = 16,
    LONGEST = 1 << 20,    /* bytes of an operation */
    SCRATCH = 64 << 10,   /* bytes that go nowhere, at once */
    STEPS = 8,            /* calls of the kernel for one connection, before others have a turn */
    /* Errors of our own, beside the negative numbers of errno. */
    BAD_DMABUF = -9999,
    BAD_ADDRESS = -10000
};

/* The address that peers are told. */
struct place {
    char magic[8];
    uint32_t ip;   /* of the network's byte order, as the port */
    uint16_t port;
    uint16_t zero;
    uint8_t pass[PASS];
};

struct request {
    uint32_t op;
    uint32_t zero;
    uint64_t offset; /* in the region */
    uint64_t key;
    uint64_t length;
};

struct answer {
    int64_t status;
    uint64_t length; /* of the bytes behind it */
};

/* What an epoll event points to: the first member of whoever has the socket. */
struct line {
    enum { LISTENER, CONN, GUEST } kind;
    int fd;
    uint32_t events; /* that are waited for */
};

struct operation {
    struct request request;
    struct iovec pieces[KVIK_NIC_PIECES];
    size_t count;
    uint64_t token;
};

struct kvik_nic_conn {
    struct line line;
    struct kvik_nic_conn *next;
    uint8_t pass[PASS];
    size_t greeted; /* bytes of the pass that were sent */
    /* Operations by number, modulo CONN_DEPTH: from `first` to `unsent` they wait for answers, then up to
     * `end` they wait to be sent. */
    struct operation ring[CONN_DEPTH];
    uint32_t first, unsent, end;
    uint64_t sent; /* bytes of the operation `unsent` */
    struct answer answer;
    uint64_t got; /* bytes of the answer to the operation `first` */
    int error;    /* why the connection is lost; 0 while it is not */
};

struct guest {
    struct line line;
    struct guest *next;
    enum { PASSING, ASKING, GIVING, ANSWERING } phase;
    uint64_t at; /* bytes of this phase that are through */
    uint8_t pass[PASS];
    struct request request;
    struct answer answer;
};

struct kvik_nic_region {
    struct kvik_nic_region *next;
    char *start;      /* where the processor reaches its first byte */
    uint64_t address; /* of its first byte in posts: the same, but for memory of a device */
    uint64_t length;
    uint64_t key;
    void *map; /* of a dma-buf; else NULL */
    uint64_t mapped;
};

struct ended {
    struct kvik_nic_conn *conn;
    struct kvik_nic_completion completion;
};

struct kvik_nic_device {
    int epoll;
    int spare; /* a descriptor to close when there are no others, so that a peer can be turned away */
    struct line listener;
    struct place place;
    struct kvik_nic_region *regions;
    struct kvik_nic_conn *conns;
    struct guest *guests;
    uint32_t guest_count;
    uint64_t last_key;
    uint32_t held; /* operations that were posted, and whose completions were not taken */
    struct ended ended[DEPTH];
    uint32_t ended_count;
    char scratch[SCRATCH];
};

/* Waits for these events of a line, by the device's epoll descriptor: 0, or a negative errno. */
int line_wait(struct kvik_nic_device *device, struct line *line, uint32_t events);
/* Closes a line, if it is open. */
void line_close(struct kvik_nic_device *device, struct line *line);
/* Moves what there is to move on a connection. */
void conn_works(struct kvik_nic_device *device, struct kvik_nic_conn *conn);
/* The connection is lost: what was posted on the connection has failed. */
void conn_lost(struct kvik_nic_device *device, struct kvik_nic_conn *conn, int error);
/* Takes a connection of a peer. */
void guest_comes(struct kvik_nic_device *device);
/* Moves what there is to move for a guest, which may be gone afterwards. */
void guest_works(struct kvik_nic_device *device, struct guest *guest);
/* Ends a guest. */
void guest_leaves(struct kvik_nic_device *device, struct guest *guest);

#endif
