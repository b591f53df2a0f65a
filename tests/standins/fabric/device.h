/* The devices of a fabric. */
#ifndef STANDIN_DEVICE_H
#define STANDIN_DEVICE_H

#include "daemon.h"
#include "wire.h"

/* An operation in flight. */
struct work {
    struct endpoint *from;
    struct order order;
    /* Where it goes: by name and token, since an endpoint's place is used again. */
    uint32_t target, token;
    pid_t target_process;
    uint32_t pieces, left, at, stride;
    /* A fault: it ends with an error when so many pieces are left, or never. */
    uint32_t fails_at, status;
    int stuck, told;
    /* A fault of a write: it is told of as failed before its bytes land. */
    int late;
    uint64_t due;
    /* A small write's bytes, once it has completed before they land. */
    unsigned char *early;
    /* Its place among the device's works. */
    uint32_t place;
};

struct endpoint {
    int used;
    uint32_t device, domain, token, name;
    struct client *client;
    struct queues *queues;
    uint32_t size;
    struct work *works;
    uint32_t *free, in_flight;
    /* Its place in `live`. */
    uint32_t place;
    /* One that was closed had its address. */
    int same;
};

struct region {
    int used;
    uint16_t turn;
    uint32_t device, domain;
    struct client *client;
    uint64_t at, len, access;
    /* Where its process has the bytes. */
    uint64_t place;
};

struct device {
    struct work **works;
    uint32_t count, room;
};

extern struct device devices[MAX_DEVICES];
extern struct endpoint endpoints[MAX_ENDPOINTS];
/* Those that are used. */
extern struct endpoint *live[MAX_ENDPOINTS];
extern uint32_t live_count;
extern struct region regions[MAX_REGIONS + 1];

/* works.c */
void end_all(uint32_t device, uint32_t status);
/* Nothing of the endpoint's is moved any more, and nothing into it. */
void let_go(struct endpoint *endpoint);
/* Takes the operation out of hand, and tells who posted it. */
void end(struct work *work, uint32_t status);

#endif
