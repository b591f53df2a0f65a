/* What the stand-in library and its device daemon say to each other.
 *
 * A process has one connection (SOCK_SEQPACKET) to the daemon of its fabric directory: each request is
 * answered. An endpoint's operations and completions lie in memory that both map, as a NIC's queues do, so
 * what was posted goes on whatever becomes of the thread that posted it. */
#ifndef STANDIN_WIRE_H
#define STANDIN_WIRE_H

#include "shared.h"

enum {
    MAX_ENDPOINTS = 4096,
    MAX_REGIONS = 65535,
    MAX_DEPTH = 8192,
    ADDRESS_BYTES = 32,
    /* Bytes that land at once: about what one packet of EFA carries. */
    PIECE = 8192,
    /* A write up to this long may complete before it lands, unless delivery is asked for. */
    EARLY = 8192,
};

/* Of an operation: 1 GiB, as EFA's device has it. */
#define LONGEST (UINT64_C(1) << 30)

/* How an operation ended. The numbers are those of EFA's device interface (efa_io_comp_status), which
 * libfabric hands on as prov_errno. */
enum status {
    STATUS_OK = 0,
    STATUS_FLUSHED = 1,
    STATUS_BAD_LKEY = 5,
    STATUS_BAD_REMOTE_ADDRESS = 7,
    STATUS_REMOTE_ABORT = 8,
    STATUS_BAD_DESTINATION = 9,
    STATUS_UNRESPONSIVE = 13,
    STATUS_UNKNOWN_PEER = 14,
    STATUS_UNREACHABLE = 15,
};

/* Access that a registration gives to peers. */
enum { ACCESS_READ = 1, ACCESS_WRITE = 2 };

struct address {
    uint8_t gid[16];
    uint16_t endpoint;
    uint16_t zero;
    uint32_t token;
    uint64_t zeros;
};
_Static_assert(sizeof(struct address) == ADDRESS_BYTES, "an address of EFA");

enum { OP_WRITE = 1, OP_DELIVERY = 2, OP_BAD_LOCAL = 4 };

struct order {
    uint64_t local, remote, len;
    uint32_t key;
    uint32_t id;
    uint32_t flags;
    struct address peer;
};

struct done {
    uint32_t id;
    uint32_t status;
};

/* An endpoint's queues: `size` orders follow, and then `size` completions. The library moves `posted` and
 * `taken`, the daemon `begun` and `ended`; each is a count, and its place is the remainder. */
struct queues {
    _Atomic uint32_t posted, begun, ended, taken;
    uint32_t size;
    uint32_t zero[11];
};

static inline struct order *orders_of(struct queues *queues) {
    return (struct order *)(queues + 1);
}

static inline struct done *dones_of(struct queues *queues) {
    return (struct done *)(orders_of(queues) + queues->size);
}

static inline uint64_t bytes_of_queues(uint32_t size) {
    return sizeof(struct queues) + size * (uint64_t)(sizeof(struct order) + sizeof(struct done));
}

/* What a client counts, and the daemon reads. */
struct tally {
    _Atomic uint64_t slots, software;
};

enum request_kind { HELLO = 1, OPEN_ENDPOINT, CLOSE_ENDPOINT, REGISTER, DEREGISTER };

struct request {
    /* The domain is numbered by its process: memory is known to the endpoints of its own domain. */
    uint32_t kind, device, domain, zero;
    /* OPEN_ENDPOINT: the size of its queues. REGISTER: address, bytes, access, and where its process has the
     * bytes, which for memory of a GPU is elsewhere. Else what is closed. */
    uint64_t a, b, c, d;
};

struct reply {
    /* 0, or an errno. */
    int32_t error;
    uint32_t zero;
    /* HELLO: the seed. OPEN_ENDPOINT and REGISTER: the name to close it by, which is a registration's key. */
    uint64_t value;
    struct address address;
};

#endif
