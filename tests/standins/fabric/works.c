/* Operations: their bytes land in pieces, in any order, by the kernel's copies between processes. */
#include "device.h"

#include <stdlib.h>

/* Pieces between two looks at who else wants something. */
enum { PIECES_A_TURN = 64 };

/* An operation begins after up to so many nanoseconds, so that none knows which is first. */
enum { JITTER = 40000 };

struct device devices[MAX_DEVICES];

static unsigned char bounce[PIECE];

static void tell(struct endpoint *endpoint, uint32_t id, uint32_t status) {
    struct queues *queues = endpoint->queues;
    uint32_t ended = atomic_load_explicit(&queues->ended, memory_order_relaxed);
    dones_of(queues)[ended % endpoint->size] = (struct done){.id = id, .status = status};
    atomic_store_explicit(&queues->ended, ended + 1, memory_order_release);
    *(status == STATUS_OK ? &counts.completed : &counts.failed) += 1;
}

/* Takes the operation out of hand; who posted it may have been told before. */
static void drop(struct work *work) {
    struct device *device = &devices[work->from->device];
    device->works[work->place] = device->works[--device->count];
    device->works[work->place]->place = work->place;
    free(work->early);
    work->early = NULL;
    work->from->free[--work->from->in_flight] = (uint32_t)(work - work->from->works);
}

void end(struct work *work, uint32_t status) {
    if (!work->told) {
        tell(work->from, work->order.id, status);
    }
    drop(work);
}

static struct region *region_of(const struct order *order, const struct endpoint *target) {
    struct region *region = &regions[order->key & 0xFFFF];
    uint64_t right = order->flags & OP_WRITE ? ACCESS_WRITE : ACCESS_READ;
    int fits = region->used && region->turn == order->key >> 16 && region->device == target->device &&
               region->client == target->client && region->domain == target->domain &&
               (region->access & right) != 0;
    fits = fits && order->remote >= region->at && order->len <= region->len &&
           order->remote - region->at <= region->len - order->len;
    return fits ? region : NULL;
}

/* What is wrong with an order that was just taken: STATUS_OK for nothing. */
static uint32_t wrong(const struct endpoint *from, const struct order *order) {
    const struct address *peer = &order->peer;
    if (atomic_load(&board->devices[from->device].down)) {
        return STATUS_UNREACHABLE;
    }
    if (order->flags & OP_BAD_LOCAL || order->len > LONGEST) {
        return STATUS_BAD_LKEY;
    }
    struct endpoint *target = peer->endpoint < MAX_ENDPOINTS ? &endpoints[peer->endpoint] : NULL;
    if (target == NULL || !target->used || target->token != peer->token || target->device != peer->gid[15]) {
        return STATUS_UNKNOWN_PEER;
    }
    if (atomic_load(&board->devices[target->device].down)) {
        return STATUS_UNRESPONSIVE;
    }
    return region_of(order, target) != NULL ? STATUS_OK : STATUS_BAD_REMOTE_ADDRESS;
}

static uint32_t common_divisor(uint32_t a, uint32_t b) {
    while (b != 0) {
        uint32_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* Which faults it has. */
static void doom(struct work *work, struct faults *of) {
    int fails = fails_next(of);
    work->status = of->fail_status;
    /* Some of its bytes land all the same. */
    work->fails_at = fails ? 1 + chance(work->pieces) : 0;
    work->stuck = takes_one(&of->stick);
    work->late = (work->order.flags & OP_WRITE) != 0 && takes_one(&of->late);
    if (work->late) {
        work->status = of->late_status;
    }
}

static int remember(struct device *device, struct work *work) {
    if (device->count == device->room) {
        uint32_t room = device->room == 0 ? 1024 : device->room * 2;
        struct work **works = realloc(device->works, room * sizeof(struct work *));
        if (works == NULL) {
            return 0;
        }
        device->works = works;
        device->room = room;
    }
    work->place = device->count;
    device->works[device->count++] = work;
    return 1;
}

static void begin(struct endpoint *from, const struct order *order) {
    struct device *device = &devices[from->device];
    counts.begun++;
    uint32_t status = wrong(from, order);
    struct work *work = &from->works[from->free[from->in_flight]];
    if (status != STATUS_OK || !remember(device, work)) {
        tell(from, order->id, status != STATUS_OK ? status : STATUS_FLUSHED);
        return;
    }
    from->in_flight++;
    uint32_t place = work->place, pieces = (uint32_t)((order->len + PIECE - 1) / PIECE);
    struct endpoint *target = &endpoints[order->peer.endpoint];
    struct region *region = region_of(order, target);
    *work = (struct work){.from = from,
        .order = *order,
        .target = target->name,
        .token = target->token,
        .target_process = target->client->process,
        .pieces = pieces > 0 ? pieces : 1,
        .place = place};
    work->order.remote = region->place + (order->remote - region->at);
    work->left = work->pieces;
    work->at = chance(work->pieces);
    do {
        work->stride = 1 + chance(work->pieces);
    } while (common_divisor(work->stride, work->pieces) != 1);
    work->due = now() + chance(JITTER) + faults[from->device].delay;
    doom(work, &faults[from->device]);
}

void begin_posted(void) {
    for (uint32_t at = 0; at < live_count; at++) {
        struct endpoint *endpoint = live[at];
        uint32_t begun = atomic_load_explicit(&endpoint->queues->begun, memory_order_relaxed);
        uint32_t posted = atomic_load_explicit(&endpoint->queues->posted, memory_order_acquire);
        while (begun != posted && endpoint->in_flight < endpoint->size) {
            struct order order = orders_of(endpoint->queues)[begun % endpoint->size];
            atomic_store_explicit(&endpoint->queues->begun, ++begun, memory_order_release);
            begin(endpoint, &order);
        }
    }
}

/* A small write may be told of as soon as its source is free again, where delivery was not asked for. */
static void tell_early(struct work *work) {
    const struct order *order = &work->order;
    int may = (order->flags & (OP_WRITE | OP_DELIVERY)) == OP_WRITE && order->len > 0 && order->len <= EARLY;
    if (!may || work->told || work->fails_at > 0 || work->stuck || chance(4) == 0) {
        return;
    }
    work->early = malloc(order->len);
    if (work->early != NULL &&
        fetch(work->from->client->process, order->local, work->early, order->len) == order->len) {
        tell(work->from, order->id, STATUS_OK);
        work->told = 1;
        return;
    }
    free(work->early);
    work->early = NULL;
}

/* Moves the next piece of an operation. A registration that was closed meanwhile stops nothing: the device
 * has the memory's address since the first piece. Where the memory itself is gone the bytes land nowhere. */
static void move_piece(struct work *work) {
    const struct order *order = &work->order;
    if (work->left == work->pieces && !work->told) {
        tell_early(work);
        if (work->told) {
            return;
        }
    }
    uint64_t offset = (uint64_t)work->at * PIECE;
    uint64_t len = order->len - offset < PIECE ? order->len - offset : PIECE;
    pid_t own = work->from->client->process;
    int writes = (order->flags & OP_WRITE) != 0;
    unsigned char *bytes = work->early != NULL ? work->early + offset : bounce;
    if (work->early == NULL && fetch(writes ? own : work->target_process,
                                   (writes ? order->local : order->remote) + offset, bytes, len) != len) {
        end(work, writes ? STATUS_BAD_LKEY : STATUS_REMOTE_ABORT);
        return;
    }
    if (put(writes ? work->target_process : own, (writes ? order->remote : order->local) + offset, bytes,
            len) != len) {
        counts.orphans++;
    }
    counts.pieces++;
    counts.bytes += len;
    work->at = (work->at + work->stride) % work->pieces;
    uint64_t delay = faults[work->from->device].delay;
    work->due = delay > 0 ? now() + delay : 0;
    if (--work->left == 0) {
        end(work, STATUS_OK);
    }
}

/* The name of an endpoint, which no later one in its place has. */
static uint64_t name_of(uint32_t name, uint32_t token) {
    return (uint64_t)name << 32 | token;
}

/* Ends a write with its error; its bytes are on the wire. */
static void leave_late(struct work *work) {
    const struct order *order = &work->order;
    unsigned char *bytes = malloc(order->len);
    if (bytes != NULL && fetch(work->from->client->process, order->local, bytes, order->len) == order->len) {
        late_add(work->from->device, name_of(work->target, work->token), work->target_process, order->remote,
            bytes, order->len);
    } else {
        free(bytes);
    }
    end(work, work->status);
}

/* One piece of one of the device's operations: the time until one is due, 0 if one was moved. */
static uint64_t move_one(struct device *device) {
    uint64_t time = 0, first = UINT64_MAX;
    uint32_t start = chance(device->count);
    for (uint32_t step = 0; step < device->count; step++) {
        struct work *work = device->works[(start + step) % device->count];
        if (work->fails_at > 0 && work->left <= work->fails_at) {
            end(work, work->status);
            return 0;
        }
        if (work->stuck) {
            continue;
        }
        if (work->due > 0 && time == 0) {
            time = now();
        }
        if (work->due <= time) {
            if (work->late) {
                leave_late(work);
            } else {
                move_piece(work);
            }
            return 0;
        }
        first = work->due - time < first ? work->due - time : first;
    }
    return first;
}

uint64_t move_some(void) {
    uint64_t first = UINT64_MAX;
    for (uint32_t number = 0; number < MAX_DEVICES; number++) {
        uint64_t wait = UINT64_MAX;
        for (int piece = 0; piece < PIECES_A_TURN && devices[number].count > 0; piece++) {
            wait = move_one(&devices[number]);
            if (wait > 0) {
                break;
            }
        }
        first = wait < first && devices[number].count > 0 ? wait : first;
    }
    return first;
}

void end_all(uint32_t number, uint32_t status) {
    struct device *device = &devices[number];
    while (device->count > 0) {
        end(device->works[device->count - 1], status);
    }
    for (uint32_t other = 0; other < MAX_DEVICES; other++) {
        for (uint32_t at = devices[other].count; at-- > 0;) {
            struct work *work = devices[other].works[at];
            if (endpoints[work->target].device == number) {
                end(work, STATUS_UNRESPONSIVE);
            }
        }
    }
}

void let_go(struct endpoint *endpoint) {
    late_stop(name_of(endpoint->name, endpoint->token));
    for (uint32_t number = 0; number < MAX_DEVICES; number++) {
        for (uint32_t at = devices[number].count; at-- > 0;) {
            struct work *work = devices[number].works[at];
            if (work->from == endpoint) {
                counts.dropped++;
                drop(work);
            } else if (work->target == endpoint->name && work->token == endpoint->token) {
                end(work, STATUS_BAD_DESTINATION);
            }
        }
    }
}
