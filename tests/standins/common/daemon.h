/* The daemon: the devices of a folder. One thread, so that what is closed is let go of at once. */
#ifndef STANDIN_DAEMON_H
#define STANDIN_DAEMON_H

#include "shared.h"

#include <sys/types.h>

/* A process that uses the devices. */
struct client {
    int socket, alive;
    /* Woken by, where the library has such a thing. */
    int doorbell;
    pid_t process;
    struct tally *tally;
    uint64_t number;
    int used;
};

struct counts {
    uint64_t begun, completed, failed, dropped, pieces, bytes, orphans, landed;
};

/* A command of a test. */
struct fault {
    char kind[16];
    /* One device, or all of them. */
    uint32_t first, last;
    uint64_t nth, one_in, status, count, micros;
};

/* What is still to go wrong with a device's operations: which one fails, or one in how many, and how; how many
 * never end, end with nobody told, or end with their bytes on the wire; what each piece waits; how many of the
 * objects that operations go through, and of registrations, will not be closed; how many take the address of one
 * that was; and for how many there is no room. */
struct faults {
    uint32_t fail_nth, fail_one_in, fail_status, stick, lose, late, late_status, busy, keep, same, full;
    uint64_t delay;
};

extern struct faults faults[MAX_DEVICES];
extern struct board *board;
extern struct client clients[MAX_CLIENTS];
extern struct counts counts;
extern uint64_t seed;
extern int board_fd;

/* clients.c */
struct client *client_new(int socket);
void client_gone(struct client *client);

/* tools.c */
uint32_t chance(uint32_t limit);
uint64_t now(void);
/* Copies from a process, or to it: the bytes, or less if memory is not there. */
uint64_t fetch(pid_t process, uint64_t at, void *into, uint64_t len);
uint64_t put(pid_t process, uint64_t at, void *from, uint64_t len);

/* late.c */
/* Bytes, which are its own from now on, are on the wire to a process. `target` names what they go through. */
void late_add(
    uint32_t device, uint64_t target, pid_t process, uint64_t at, unsigned char *bytes, uint64_t len);
/* What a device has on the wire lands now. */
void late_land(uint32_t device);
/* Nothing that is on the wire lands through the target any more. */
void late_stop(uint64_t target);
/* Writes whose bytes are on the wire. */
uint64_t late_count(void);

/* control.c */
void obey(const char *command, char *answer, uint64_t room);
/* Whether the next operation fails. */
int fails_next(struct faults *of);
/* Whether it is one of these, of which so many are left. */
int takes_one(uint32_t *left);

/* What each kind of device brings. */

/* Takes a message of the client's. */
void serve(struct client *client);
/* What the client had is no more. */
void objects_gone(struct client *client);
/* Takes what was posted in memory that is shared. */
void begin_posted(void);
/* Moves some pieces: the nanoseconds until there is more to do, 0 for at once, UINT64_MAX for nothing. */
uint64_t move_some(void);
/* Does as a command says that only this kind has, for one device: false for a kind that is none. */
int apply(const struct fault *fault, uint32_t device);
/* `name=value` of what this kind counts, behind which stand the counts of all. */
void tell_objects(char *answer, uint64_t room);
/* The status of operations that fail where a command names none. */
extern const uint32_t usual_status;

#endif
