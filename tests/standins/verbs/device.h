/* The devices, as the daemon has them. */
#ifndef STANDIN_DEVICE_H
#define STANDIN_DEVICE_H

#include "daemon.h"
#include "wire.h"

/* What a client has opened: by a name that nothing later has. */
struct object {
    struct object *next;
    enum { CONTEXT = 1, CHANNEL, COMPLETIONS, REGION, QUEUE } kind;
    uint32_t name, device;
    struct client *client;
};

struct context {
    struct object object;
    /* The writing end of its events. */
    int events;
};

struct channel {
    struct object object;
    int events;
};

struct completions {
    struct object object;
    struct context *context;
    struct channel *channel;
    struct ring *ring;
    int overrun;
};

struct region {
    struct object object;
    uint32_t domain, access;
    uint64_t at, len, place;
};

struct queue {
    struct object object;
    struct context *context;
    struct completions *sends, *receives;
    uint32_t domain;
    int signals_all;
    struct ibv_qp_cap cap;
    enum ibv_qp_state state;
    /* What modifying it has set. */
    struct ibv_qp_attr attr;
    union ibv_gid gid;
    uint32_t gid_type;
    /* Requests: counts, whose places are the remainders. */
    struct order *orders;
    uint64_t *ids;
    uint32_t posted, ended, receives_posted, receives_ended;
    /* Of the first one: whether it was looked at, bytes that were moved, and when there is more to do. */
    int begun;
    uint64_t at, len, due;
    /* Until when it is sent again, and how often the peer had no place for its immediate. */
    uint64_t retried_until;
    uint32_t not_ready;
    /* Faults of the first one: it ends with this status when so many bytes are moved, or never, or nobody is
     * told. */
    uint32_t status;
    uint64_t fails_at;
    int fails, stuck, lost, late;
};

struct device {
    /* How often its port came up again. */
    uint32_t turn;
};

extern struct device devices[MAX_DEVICES];
extern struct object *objects;

/* objects.c */
struct object *object_named(uint32_t kind, uint32_t name);
/* An event of one context, or of all that are open on a device. */
void tell_event(const struct context *context, uint32_t name, enum ibv_event_type type);
void tell_all(uint32_t device, enum ibv_event_type type);

/* states.c */
int is_down(uint32_t device);
/* 0, or an errno; then nothing was changed. */
int modify(struct queue *queue, const struct ibv_qp_attr *attr, uint32_t mask);
/* Its requests come back as flushed, and nothing goes through it any more. */
void fail_queue(struct queue *queue);
/* Nothing goes through it any more, and nobody is told. */
void silence(struct queue *queue);
/* The queue pair that answers, or NULL. */
struct queue *peer_of(const struct queue *queue);

/* works.c */
void take_orders(struct queue *queue, const struct order *orders, uint32_t count);
void take_receives(struct queue *queue, const uint64_t *ids, uint32_t count);
/* The first request, or the first receive, is over. */
void end_order(struct queue *queue, uint32_t status);
void end_receive(struct queue *queue, uint32_t status, uint32_t bytes, uint32_t immediate);
void clear_faults(uint32_t device);

#endif
