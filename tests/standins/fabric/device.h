/* The daemon: the devices of a fabric directory. One thread, so that what is closed is let go of at once. */
#ifndef STANDIN_DEVICE_H
#define STANDIN_DEVICE_H

#include "wire.h"

#include <sys/types.h>

struct client {
    int socket, alive, doorbell;
    pid_t process;
    struct tally *tally;
    uint64_t number;
    int used;
};

/* An operation in hand. */
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
    uint32_t *free, under_way;
    /* Its place in `live`. */
    uint32_t place;
};

struct region {
    int used;
    uint16_t turn;
    uint32_t device, domain;
    struct client *client;
    uint64_t at, len, access;
};

struct device {
    struct work **works;
    uint32_t count, room;
    /* Faults, as `control.c` has them. */
    uint32_t fail_nth, fail_one_in, fail_status, stick, late, late_status;
    uint64_t delay;
};

struct counts {
    uint64_t begun, completed, failed, dropped, pieces, bytes, orphans, landed;
};

extern struct board *board;
extern struct device devices[MAX_DEVICES];
extern struct endpoint endpoints[MAX_ENDPOINTS];
/* Those that are used. */
extern struct endpoint *live[MAX_ENDPOINTS];
extern uint32_t live_count;
extern struct region regions[MAX_REGIONS + 1];
extern struct client clients[MAX_CLIENTS];
extern struct counts counts;
extern uint64_t seed;
extern int board_fd;

/* works.c */
uint32_t chance(uint32_t limit);
uint64_t now(void);
/* Takes what was posted. */
void begin_posted(void);
/* Moves some pieces: the nanoseconds until there is more to do, 0 for at once, UINT64_MAX for nothing. */
uint64_t move_some(void);
void end_all(uint32_t device, uint32_t status);
/* Nothing of the endpoint's is moved any more, and nothing into it. */
void let_go(struct endpoint *endpoint);
/* Takes the operation out of hand, and tells who posted it. */
void end(struct work *work, uint32_t status);
/* Copies from a process, or to it: the bytes, or less if memory is not there. */
uint64_t fetch(pid_t process, uint64_t at, void *into, uint64_t len);
uint64_t put(pid_t process, uint64_t at, void *from, uint64_t len);

/* late.c */
/* Ends a write with its error; its bytes are on the wire. */
void late_leave(struct work *work);
/* What a device has on the wire lands now. */
void late_land(uint32_t device);
/* Nothing that is on the wire lands in the endpoint. */
void late_stop(const struct endpoint *target);
/* Writes whose bytes are on the wire. */
uint64_t late_count(void);

/* clients.c */
void serve(struct client *client);
void client_gone(struct client *client);
struct client *client_new(int socket);

/* control.c */
void obey(const char *command, char *answer, uint64_t room);

#endif
