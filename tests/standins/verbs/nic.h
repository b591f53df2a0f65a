/* The stand-in's side in the process that uses it: objects of libibverbs, and the rules that users keep.
 *
 * It has what kvik calls. Contexts are of the old kind, without the table of extended verbs: the header's
 * own inline functions take the symbols then, as kvik does. */
#ifndef STANDIN_NIC_H
#define STANDIN_NIC_H

#include "link.h"
#include "wire.h"

#include <pthread.h>
#include <stddef.h>

#define EXPORT __attribute__((visibility("default")))
#define container(at, type, field) ((type *)((char *)(at) - offsetof(type, field)))

/* Held wherever objects are looked at: the library may be called by any thread. */
extern pthread_mutex_t lock;

/* devices.c */

struct options {
    uint32_t devices, depth, pieces;
};
struct options options_read(void);

struct context {
    struct ibv_context ibv;
    uint32_t name, device;
    /* What was made of it. */
    uint32_t objects;
};

static inline struct context *context_of(struct ibv_context *context) {
    return container(context, struct context, ibv);
}

/* Asks the device: 0, or an errno. */
int ask(const struct request *request, int fd, struct reply *reply);
int ask_about(uint32_t kind, uint32_t name, struct reply *reply);
extern struct board *board;

/* memory.c */

struct domain {
    struct ibv_pd ibv;
    uint32_t number, objects;
};

struct region {
    struct ibv_mr ibv;
    /* Own requests that have not come back. */
    uint32_t users;
    /* A dma-buf's mapping, where the device finds its bytes. */
    void *mapped;
    size_t mapped_len;
    struct region *next;
};

/* The registration of this key, or NULL. The lock is held. */
struct region *region_of(uint32_t key);

/* completions.c */

struct channel {
    struct ibv_comp_channel ibv;
    uint32_t name;
};

struct completions {
    struct ibv_cq ibv;
    struct ring *ring;
    /* Queue pairs, and events that were read and not acknowledged. */
    uint32_t users, told;
    struct completions *next;
};

/* By the device's name, or NULL. The lock is held. */
struct completions *completions_named(uint32_t name);
int poll_cq(struct ibv_cq *cq, int most, struct ibv_wc *into);
int req_notify_cq(struct ibv_cq *cq, int solicited_only);

/* queues.c */

struct queue {
    struct ibv_qp ibv;
    struct ibv_qp_cap cap;
    int signals_all;
    /* Requests that were posted, and those whose places are free again. */
    uint32_t posted, retired, receives, received;
    uint32_t told;
    /* For each place, the memory that its request uses. */
    struct region *(*places)[MAX_PIECES];
    struct queue *next;
};

struct queue *queue_named(uint32_t number);
/* The requests up to this one have come back: their places and memory are free. The lock is held. */
void queue_retire(struct queue *queue, uint32_t number);

/* posts.c */
int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);

#endif
