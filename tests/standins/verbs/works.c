/* Requests: those of a queue pair in order, those of several at a time, by the kernel's copies between
 * processes. */
#include "device.h"

#include <stdlib.h>
#include <unistd.h>

enum {
    PIECES_A_TURN = 64,
    /* A request begins after up to so many nanoseconds. */
    JITTER = 30000,
    /* How often it is looked whether a peer answers again. */
    RETRY = 2000000,
};

struct device devices[MAX_DEVICES];

static unsigned char bounce[PIECE];

/* A place in the completion queue; one that has none left has failed, with all that use it. */
static void tell(struct completions *queue, struct done done) {
    struct ring *ring = queue->ring;
    uint32_t produced = atomic_load(&ring->produced);
    if (queue->overrun) {
        return;
    }
    if (produced - atomic_load(&ring->consumed) >= ring->size) {
        queue->overrun = 1;
        tell_event(queue->context, queue->object.name, IBV_EVENT_CQ_ERR);
        for (struct object *object = objects; object != NULL; object = object->next) {
            struct queue *user = (struct queue *)object;
            if (object->kind == QUEUE && (user->sends == queue || user->receives == queue)) {
                user->state = IBV_QPS_ERR;
                silence(user);
            }
        }
        return;
    }
    dones_of(ring)[produced % ring->size] = done;
    atomic_store(&ring->produced, produced + 1);
    if (atomic_exchange(&ring->armed, 0) && queue->channel != NULL) {
        ssize_t wrote = write(queue->channel->events, &queue->object.name, sizeof queue->object.name);
        /* A channel that is full tells already. */
        (void)wrote;
    }
}

void end_order(struct queue *queue, uint32_t status) {
    const struct order *order = &queue->orders[queue->ended % queue->cap.max_send_wr];
    struct done done = {.id = order->id,
        .status = status,
        .opcode = order->opcode == IBV_WR_RDMA_READ ? IBV_WC_RDMA_READ : IBV_WC_RDMA_WRITE,
        .queue = queue->object.name,
        .number = order->number};
    int told = status != IBV_WC_SUCCESS || queue->signals_all || (order->flags & IBV_SEND_SIGNALED) != 0;
    told = told && !queue->lost;
    *(status == IBV_WC_SUCCESS ? &counts.completed : &counts.failed) += 1;
    queue->ended++;
    queue->begun = queue->stuck = queue->lost = 0;
    if (told) {
        tell(queue->sends, done);
    }
    if (status != IBV_WC_SUCCESS && queue->state != IBV_QPS_ERR) {
        fail_queue(queue);
    }
}

void end_receive(struct queue *queue, uint32_t status, uint32_t bytes, uint32_t immediate) {
    struct done done = {.id = queue->ids[queue->receives_ended++ % (queue->cap.max_recv_wr + 1)],
        .status = status,
        .opcode = IBV_WC_RECV_RDMA_WITH_IMM,
        .bytes = bytes,
        .immediate = immediate,
        .flags = IBV_WC_WITH_IMM,
        .queue = queue->object.name,
        .receives = 1};
    tell(queue->receives, done);
}

void take_orders(struct queue *queue, const struct order *orders, uint32_t count) {
    for (uint32_t at = 0; at < count; at++) {
        if (queue->posted - queue->ended < queue->cap.max_send_wr) {
            queue->orders[queue->posted++ % queue->cap.max_send_wr] = orders[at];
        }
        if (queue->state == IBV_QPS_ERR) {
            end_order(queue, IBV_WC_WR_FLUSH_ERR);
        }
    }
}

void take_receives(struct queue *queue, const uint64_t *ids, uint32_t count) {
    for (uint32_t at = 0; at < count; at++) {
        queue->ids[queue->receives_posted++ % (queue->cap.max_recv_wr + 1)] = ids[at];
        if (queue->state == IBV_QPS_ERR) {
            end_receive(queue, IBV_WC_WR_FLUSH_ERR, 0, 0);
        }
    }
}

/* Whether the queue pair may do this with the memory of this key. */
static int is_open(const struct queue *queue, uint32_t key, uint64_t at, uint64_t len, uint32_t right) {
    const struct region *region = (struct region *)object_named(REGION, key);
    return region != NULL && region->object.client == queue->object.client &&
           region->object.device == queue->object.device && region->domain == queue->domain &&
           (region->access & right) == right && at >= region->at && len <= region->len &&
           at - region->at <= region->len - len;
}

/* Where the bytes of an address are in the process that has registered them. */
static uint64_t place_of(uint32_t key, uint64_t at) {
    const struct region *region = (struct region *)object_named(REGION, key);
    return region == NULL ? at : region->place + (at - region->at);
}

/* What is wrong with a request on this side: IBV_WC_SUCCESS for nothing. */
static uint32_t wrong_here(struct queue *queue, const struct order *order) {
    int reads = order->opcode == IBV_WR_RDMA_READ;
    queue->len = 0;
    for (uint32_t at = 0; at < order->count; at++) {
        const struct piece *piece = &order->pieces[at];
        queue->len += piece->len;
        if (!is_open(queue, piece->key, piece->at, piece->len, reads ? IBV_ACCESS_LOCAL_WRITE : 0)) {
            return IBV_WC_LOC_PROT_ERR;
        }
    }
    if (reads && queue->attr.max_rd_atomic == 0) {
        return IBV_WC_LOC_QP_OP_ERR;
    }
    return queue->len <= LONGEST ? IBV_WC_SUCCESS : IBV_WC_LOC_LEN_ERR;
}

/* Which faults the first request has. */
static void doom(struct queue *queue, const struct order *order) {
    struct faults *of = &faults[queue->object.device];
    queue->fails = fails_next(of);
    queue->status = of->fail_status;
    /* Some of its bytes land all the same. */
    queue->fails_at = queue->fails && queue->len > 0 ? chance((uint32_t)queue->len) : 0;
    queue->stuck = takes_one(&of->stick);
    queue->lost = takes_one(&of->lose);
    queue->late = order->opcode != IBV_WR_RDMA_READ && takes_one(&of->late);
    if (queue->late) {
        queue->status = of->late_status;
    }
}

static void begin(struct queue *queue, const struct order *order) {
    counts.begun++;
    queue->begun = 1;
    queue->at = queue->retried_until = 0;
    queue->not_ready = 0;
    uint32_t status = wrong_here(queue, order);
    if (status != IBV_WC_SUCCESS) {
        end_order(queue, status);
        return;
    }
    queue->due = now() + chance(JITTER) + faults[queue->object.device].delay;
    doom(queue, order);
}

/* The local bytes that are next: less than a piece at the end of a run. */
static struct piece next_piece(const struct queue *queue, const struct order *order) {
    uint64_t skip = queue->at;
    uint32_t at = 0;
    while (skip >= order->pieces[at].len) {
        skip -= order->pieces[at++].len;
    }
    uint32_t left = order->pieces[at].len - (uint32_t)skip;
    return (struct piece){
        .at = place_of(order->pieces[at].key, order->pieces[at].at) + skip, .len = left < PIECE ? left : PIECE};
}

/* Ends a write with its error; its bytes are on the wire. */
static void leave_late(struct queue *queue, const struct order *order, const struct queue *peer) {
    unsigned char *bytes = malloc(queue->len);
    int whole = bytes != NULL;
    for (queue->at = 0; whole && queue->at < queue->len;) {
        struct piece piece = next_piece(queue, order);
        whole = fetch(queue->object.client->process, piece.at, bytes + queue->at, piece.len) == piece.len;
        queue->at += piece.len;
    }
    if (whole) {
        late_add(queue->object.device, peer->object.name, peer->object.client->process,
            place_of(order->key, order->remote), bytes, queue->len);
    } else {
        free(bytes);
    }
    end_order(queue, queue->status);
}

/* Nobody answers: it is sent again for as long as was set. */
static void retry(struct queue *queue) {
    uint64_t time = now();
    if (queue->retried_until == 0) {
        uint64_t once = UINT64_C(4096) << queue->attr.timeout;
        queue->retried_until =
            queue->attr.timeout == 0 ? UINT64_MAX : time + once * (queue->attr.retry_cnt + 1u);
    }
    if (time >= queue->retried_until) {
        end_order(queue, IBV_WC_RETRY_EXC_ERR);
        return;
    }
    queue->due = time + RETRY < queue->retried_until ? time + RETRY : queue->retried_until;
}

/* Nanoseconds of a code of the specification (9.7.5.2.8). */
static uint64_t not_ready_nanos(uint32_t code) {
    static const uint32_t hundredths[32] = {65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192,
        256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152};
    return hundredths[code & 31] * UINT64_C(10000);
}

/* The peer's place for an immediate, or another try later. */
static void give_immediate(struct queue *queue, const struct order *order, struct queue *peer) {
    if (peer->receives_ended != peer->receives_posted) {
        end_receive(peer, IBV_WC_SUCCESS, (uint32_t)queue->len, order->immediate);
        end_order(queue, IBV_WC_SUCCESS);
    } else if (queue->attr.rnr_retry < 7 && queue->not_ready++ >= queue->attr.rnr_retry) {
        end_order(queue, IBV_WC_RNR_RETRY_EXC_ERR);
    } else {
        queue->due = now() + not_ready_nanos(peer->attr.min_rnr_timer);
    }
}

/* Reads that are in flight now: one behind the other, as many as was set. */
static uint32_t reads_under_way(const struct queue *queue) {
    uint32_t count = 0;
    while (count < queue->attr.max_rd_atomic && queue->ended + count != queue->posted &&
           queue->orders[(queue->ended + count) % queue->cap.max_send_wr].opcode == IBV_WR_RDMA_READ) {
        count++;
    }
    return count;
}

/* What the peer refuses: IBV_WC_SUCCESS for nothing. Its queue pair fails with the request, and it is
 * told. */
static uint32_t wrong_there(struct queue *queue, const struct order *order, struct queue *peer) {
    int reads = order->opcode == IBV_WR_RDMA_READ;
    uint32_t right = reads ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;
    if ((peer->attr.qp_access_flags & right) == 0 ||
        (reads && reads_under_way(queue) > peer->attr.max_dest_rd_atomic)) {
        tell_event(peer->context, peer->object.name, IBV_EVENT_QP_REQ_ERR);
        fail_queue(peer);
        return IBV_WC_REM_INV_REQ_ERR;
    }
    if (queue->len > 0 && !is_open(peer, order->key, order->remote, queue->len, right)) {
        tell_event(peer->context, peer->object.name, IBV_EVENT_QP_ACCESS_ERR);
        fail_queue(peer);
        return IBV_WC_REM_ACCESS_ERR;
    }
    return IBV_WC_SUCCESS;
}

/* Moves the next bytes. */
static void move_piece(struct queue *queue, const struct order *order, struct queue *peer) {
    struct piece piece = next_piece(queue, order);
    pid_t here = queue->object.client->process, there = peer->object.client->process;
    int writes = order->opcode != IBV_WR_RDMA_READ;
    uint64_t remote = place_of(order->key, order->remote) + queue->at;
    if (fetch(writes ? here : there, writes ? piece.at : remote, bounce, piece.len) != piece.len) {
        end_order(queue, writes ? IBV_WC_LOC_PROT_ERR : IBV_WC_REM_OP_ERR);
        return;
    }
    if (put(writes ? there : here, writes ? remote : piece.at, bounce, piece.len) != piece.len) {
        counts.orphans++;
    }
    counts.pieces++;
    counts.bytes += piece.len;
    queue->at += piece.len;
    uint64_t delay = faults[queue->object.device].delay;
    queue->due = delay > 0 ? now() + delay : 0;
}

/* The next thing that the first request of a queue pair does. */
static void step(struct queue *queue) {
    const struct order *order = &queue->orders[queue->ended % queue->cap.max_send_wr];
    if (!queue->begun) {
        begin(queue, order);
        return;
    }
    struct queue *peer = peer_of(queue);
    if (peer == NULL) {
        retry(queue);
        return;
    }
    queue->retried_until = 0;
    uint32_t status = wrong_there(queue, order, peer);
    if (status != IBV_WC_SUCCESS) {
        end_order(queue, status);
    } else if (queue->fails && queue->at >= queue->fails_at) {
        end_order(queue, queue->status);
    } else if (queue->late) {
        leave_late(queue, order, peer);
    } else if (queue->at < queue->len) {
        move_piece(queue, order, peer);
    } else if (order->opcode == IBV_WR_RDMA_WRITE_WITH_IMM) {
        give_immediate(queue, order, peer);
    } else {
        end_order(queue, IBV_WC_SUCCESS);
    }
}

/* The time until a queue pair has something to do. */
static uint64_t waits(const struct queue *queue, uint64_t time) {
    if (queue->state != IBV_QPS_RTS || queue->ended == queue->posted || (queue->begun && queue->stuck)) {
        return UINT64_MAX;
    }
    return queue->begun && queue->due > time ? queue->due - time : 0;
}

/* One step of one queue pair, which chance finds: the time until one is due, 0 if there was one. */
static uint64_t move_one(void) {
    uint64_t time = now(), first = UINT64_MAX;
    struct queue *chosen = NULL;
    uint32_t ready = 0;
    for (struct object *object = objects; object != NULL; object = object->next) {
        struct queue *queue = (struct queue *)object;
        uint64_t wait = object->kind == QUEUE ? waits(queue, time) : UINT64_MAX;
        first = wait < first ? wait : first;
        if (wait == 0 && chance(++ready) == 0) {
            chosen = queue;
        }
    }
    if (chosen != NULL) {
        step(chosen);
    }
    return first;
}

uint64_t move_some(void) {
    uint64_t wait = 0;
    for (int piece = 0; piece < PIECES_A_TURN && wait == 0; piece++) {
        wait = move_one();
    }
    return wait;
}

void begin_posted(void) {
    /* Posts are messages: they have been taken. */
}

void clear_faults(uint32_t number) {
    faults[number] = (struct faults){0};
    for (struct object *object = objects; object != NULL; object = object->next) {
        if (object->kind == QUEUE && object->device == number) {
            ((struct queue *)object)->due = 0;
        }
    }
}
