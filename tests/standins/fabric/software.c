/* Operations between endpoints of one device in one process. EFA's device does not send to itself, so its
 * software moves them: while the initiator polls, and beside what is done to the device. */
#define _GNU_SOURCE
#include "nic.h"

#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

/* Pieces that one poll moves at most. */
enum { PIECES_A_POLL = 16 };

struct work {
    struct order order;
    uint64_t at;
};

struct software {
    struct work *works;
    uint32_t count;
    struct done *dones;
    uint32_t ended, taken;
    uint32_t random;
};

/* Endpoints and registrations of this process. Held while a piece moves, so that closing an endpoint is a
 * fence. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct endpoint *endpoints;
static struct region *regions;

void software_add(struct endpoint *ep) {
    struct software *software = calloc(1, sizeof *software);
    struct work *works = calloc(ep->depth, sizeof *works);
    struct done *dones = calloc(ep->depth, sizeof *dones);
    if (software == NULL || works == NULL || dones == NULL) {
        /* Then the device moves everything. */
        free(software);
        free(works);
        free(dones);
        return;
    }
    *software = (struct software){.works = works, .dones = dones, .random = ep->address.token | 1};
    ep->software = software;
    pthread_mutex_lock(&lock);
    ep->next_local = endpoints;
    endpoints = ep;
    pthread_mutex_unlock(&lock);
}

void software_remove(struct endpoint *ep) {
    if (ep->software == NULL) {
        return;
    }
    pthread_mutex_lock(&lock);
    struct endpoint **at = &endpoints;
    while (*at != ep) {
        at = &(*at)->next_local;
    }
    *at = ep->next_local;
    pthread_mutex_unlock(&lock);
    free(ep->software->works);
    free(ep->software->dones);
    free(ep->software);
    ep->software = NULL;
}

void region_add(struct region *region) {
    pthread_mutex_lock(&lock);
    region->next = regions;
    regions = region;
    pthread_mutex_unlock(&lock);
}

void region_remove(struct region *region) {
    pthread_mutex_lock(&lock);
    struct region **at = &regions;
    while (*at != region) {
        at = &(*at)->next;
    }
    *at = region->next;
    pthread_mutex_unlock(&lock);
}

/* The peer, if it is here. The lock is held. */
static const struct endpoint *local(const struct endpoint *ep, const struct address *peer) {
    for (struct endpoint *other = endpoints; other != NULL; other = other->next_local) {
        if (other->domain->device == ep->domain->device && memcmp(&other->address, peer, sizeof *peer) == 0) {
            return other;
        }
    }
    return NULL;
}

/* The memory, if this may be done with it. The lock is held. */
static const struct region *open_region(const struct endpoint *target, const struct order *order) {
    uint64_t right = order->flags & OP_WRITE ? ACCESS_WRITE : ACCESS_READ;
    for (struct region *region = regions; region != NULL; region = region->next) {
        if (region->domain == target->domain && region->fid.key == order->key) {
            int fits = (region->access & right) != 0 && order->remote >= region->at &&
                       order->len <= region->len && order->remote - region->at <= region->len - order->len;
            return fits ? region : NULL;
        }
    }
    return NULL;
}

int software_post(struct endpoint *ep, const struct order *order) {
    if (ep->software == NULL || order->flags & OP_BAD_LOCAL) {
        return 0;
    }
    pthread_mutex_lock(&lock);
    int here = local(ep, &order->peer) != NULL;
    pthread_mutex_unlock(&lock);
    if (here) {
        ep->software->works[ep->software->count++] = (struct work){.order = *order};
        atomic_fetch_add(&ep->domain->link.tally->software, 1);
    }
    return here;
}

/* Moves the next piece: how the operation has ended, or -1 if there is more. The lock is held. */
static int move_piece(const struct endpoint *ep, struct work *work) {
    struct order *order = &work->order;
    const struct endpoint *target = local(ep, &order->peer);
    if (target == NULL) {
        return STATUS_BAD_DESTINATION;
    }
    const struct region *region = work->at == 0 ? open_region(target, order) : NULL;
    if (work->at == 0 && region == NULL) {
        return STATUS_BAD_REMOTE_ADDRESS;
    }
    if (region != NULL) {
        order->remote = region->place + (order->remote - region->at);
    }
    uint64_t len = order->len - work->at < PIECE ? order->len - work->at : PIECE;
    struct iovec near = {.iov_base = (void *)(uintptr_t)(order->local + work->at), .iov_len = len};
    struct iovec far = {.iov_base = (void *)(uintptr_t)(order->remote + work->at), .iov_len = len};
    ssize_t moved = order->flags & OP_WRITE ? process_vm_writev(getpid(), &near, 1, &far, 1, 0)
                                            : process_vm_readv(getpid(), &near, 1, &far, 1, 0);
    if (moved < 0 || (uint64_t)moved != len) {
        return STATUS_REMOTE_ABORT;
    }
    work->at += len;
    return work->at < order->len ? -1 : STATUS_OK;
}

void software_progress(struct endpoint *ep) {
    struct software *software = ep->software;
    for (int piece = 0; software != NULL && software->count > 0 && piece < PIECES_A_POLL; piece++) {
        software->random ^= software->random << 13;
        software->random ^= software->random >> 17;
        software->random ^= software->random << 5;
        struct work *work = &software->works[software->random % software->count];
        pthread_mutex_lock(&lock);
        int status = move_piece(ep, work);
        pthread_mutex_unlock(&lock);
        if (status >= 0) {
            struct done done = {.id = work->order.id, .status = (uint32_t)status};
            software->dones[software->ended++ % ep->depth] = done;
            *work = software->works[--software->count];
        }
    }
}

int software_peek(struct endpoint *ep, struct done *done) {
    struct software *software = ep->software;
    if (software == NULL || software->taken == software->ended) {
        return 0;
    }
    *done = software->dones[software->taken % ep->depth];
    return 1;
}

void software_take(struct endpoint *ep) {
    ep->software->taken++;
}
