/* What the stand-in for libibverbs and its devices say to each other.
 *
 * Requests are asked; work is told, since a doorbell has no answer. Completions lie in memory that both map,
 * and events come through pipes, of which the device has the writing ends. */
#ifndef STANDIN_WIRE_H
#define STANDIN_WIRE_H

#include "shared.h"

#include <infiniband/verbs.h>

enum {
    MAX_DEPTH = 8192,
    MAX_COMPLETIONS = 65536,
    MAX_PIECES = 16,
    /* Reads that a queue pair has in flight, or answers. */
    MAX_READS = 16,
    /* Bytes that land at once. */
    PIECE = 16384,
    /* Work requests of a message. */
    ORDERS = 32,
    GIDS = 6,
    PORT = 1,
};

/* Of a request: 1 GiB. */
#define LONGEST (UINT32_C(1) << 30)

struct piece {
    uint64_t at;
    uint32_t len, key;
};

/* A request to send. */
struct order {
    uint64_t id, remote;
    uint32_t key, immediate;
    uint32_t opcode, flags;
    /* Which one of its queue pair it is: counts from 0. */
    uint32_t number;
    uint32_t count;
    struct piece pieces[MAX_PIECES];
};

struct done {
    uint64_t id;
    uint32_t status, opcode, immediate, bytes;
    uint32_t queue, number;
    uint32_t receives, flags;
};

/* A completion queue: `size` completions follow. The device moves `produced`, the library `consumed`; each is
 * a count, and its place is the remainder. */
struct ring {
    _Atomic uint32_t produced, consumed;
    /* The next completion is an event, too. */
    _Atomic uint32_t armed;
    uint32_t size;
};

static inline struct done *dones_of(struct ring *ring) {
    return (struct done *)(ring + 1);
}

static inline uint64_t bytes_of_ring(uint32_t size) {
    return sizeof(struct ring) + size * (uint64_t)sizeof(struct done);
}

/* An event of a device: what it is of is named as the device names it, or is the port. */
struct happening {
    uint32_t name, type;
};

enum request_kind {
    HELLO = 1,
    /* With the writing end of a pipe. */
    OPEN_CONTEXT,
    OPEN_CHANNEL,
    /* With the memory of the ring. */
    OPEN_COMPLETIONS,
    RESIZE,
    REGISTER,
    OPEN_QUEUE,
    MODIFY,
    QUERY,
    CLOSE,
    ASK_PORT,
};

/* Told. */
enum { SEND = 0x100, RECEIVE };

struct request {
    /* `name` is what the request is about; `context` whose it is. */
    uint32_t kind, device, name, context;
    /* A domain is numbered by its process: queue pairs know the memory of their own. */
    uint32_t domain, size, mask, access;
    uint64_t at, len;
    /* Of memory: where its bytes are in its process, whatever address it goes by. */
    uint64_t place;
    /* Of a queue pair: names of its completion queues. Of a completion queue: its channel, or 0. */
    uint32_t sends, receives;
    uint32_t signals_all, zero;
    struct ibv_qp_cap cap;
    struct ibv_qp_attr attr;
};

struct reply {
    /* 0, or an errno. */
    int32_t error;
    /* Of what was opened: a queue pair's number, a registration's key. ASK_PORT: how often it came up. */
    uint32_t name;
    uint32_t down;
    enum ibv_qp_state state;
    /* HELLO. */
    uint64_t seed;
};

struct told {
    uint32_t kind, name, count, zero;
    union {
        struct order orders[ORDERS];
        uint64_t ids[ORDERS];
    };
};

/* An entry of a device's table, which has another order after each time that its port came up: false for
 * none. */
int gid_at(uint32_t device, uint32_t turn, uint32_t index, union ibv_gid *gid, uint32_t *type);

#endif
