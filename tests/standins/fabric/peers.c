/* Address vectors. A slot that is given back is the next one to be given out: the worst for a user who
 * confuses them. An address that is there is not added again: its slot is given out once more, and goes with the
 * first removal. */
#define _GNU_SOURCE
#include "nic.h"

#include <stdlib.h>
#include <string.h>

/* Peers that a vector can know. */
enum { MOST_PEERS = 65536 };

static int vector_close(struct fid *fid) {
    struct vector *vector = container(fid, struct vector, fid.fid);
    struct domain *domain = vector->domain;
    enter(&domain->gate, "fi_close of an address vector");
    if (vector->bound > 0) {
        broken("an address vector is closed before %u endpoints that are bound to it", vector->bound);
    }
    for (uint32_t slot = 0; slot < vector->size; slot++) {
        atomic_fetch_sub(&domain->link.tally->slots, vector->slots[slot].taken);
    }
    domain->vectors--;
    free(vector->slots);
    free(vector);
    leave(&domain->gate);
    return 0;
}

static uint32_t free_slot(struct vector *vector) {
    uint32_t slot = 0;
    while (slot < vector->size && vector->slots[slot].taken) {
        slot++;
    }
    if (slot < vector->size || vector->size >= MOST_PEERS) {
        return slot < vector->size ? slot : NO_SLOT;
    }
    uint32_t size = vector->size == 0 ? 16 : vector->size * 2;
    struct slot *slots = realloc(vector->slots, size * sizeof *slots);
    if (slots == NULL) {
        return NO_SLOT;
    }
    memset(slots + vector->size, 0, (size - vector->size) * sizeof *slots);
    vector->slots = slots;
    vector->size = size;
    return slot;
}

static uint32_t known_slot(const struct vector *vector, const struct address *address) {
    uint32_t slot = 0;
    while (slot < vector->size
        && !(vector->slots[slot].taken
            && memcmp(&vector->slots[slot].address, address, ADDRESS_BYTES) == 0)) {
        slot++;
    }
    return slot < vector->size ? slot : NO_SLOT;
}

static int vector_insert(
    struct fid_av *fid, const void *addresses, size_t count, fi_addr_t *out, uint64_t flags, void *context) {
    (void)context;
    struct vector *vector = container(fid, struct vector, fid);
    static const struct address nobody;
    int added = 0;
    if (flags != 0) {
        return -FI_EBADFLAGS;
    }
    enter(&vector->domain->gate, "fi_av_insert");
    for (size_t at = 0; at < count; at++) {
        struct address address;
        memcpy(&address, (const char *)addresses + at * ADDRESS_BYTES, ADDRESS_BYTES);
        int named = memcmp(address.gid, nobody.gid, sizeof nobody.gid) != 0;
        uint32_t slot = named ? known_slot(vector, &address) : NO_SLOT;
        if (named && slot == NO_SLOT && (slot = free_slot(vector)) != NO_SLOT) {
            vector->slots[slot] = (struct slot){.address = address, .taken = 1};
            atomic_fetch_add(&vector->domain->link.tally->slots, 1);
        }
        added += slot != NO_SLOT;
        if (out != NULL) {
            out[at] = slot != NO_SLOT ? slot : FI_ADDR_NOTAVAIL;
        }
    }
    leave(&vector->domain->gate);
    return added;
}

static int vector_remove(struct fid_av *fid, fi_addr_t *addresses, size_t count, uint64_t flags) {
    struct vector *vector = container(fid, struct vector, fid);
    int error = flags != 0 ? FI_EBADFLAGS : 0;
    enter(&vector->domain->gate, "fi_av_remove");
    for (size_t at = 0; at < count && error == 0; at++) {
        if (addresses[at] >= vector->size || !vector->slots[addresses[at]].taken) {
            error = FI_EINVAL;
            break;
        }
        struct slot *slot = &vector->slots[addresses[at]];
        if (slot->users > 0) {
            broken("address %llu is removed while %u own operations go there",
                (unsigned long long)addresses[at], slot->users);
        }
        slot->taken = 0;
        atomic_fetch_sub(&vector->domain->link.tally->slots, 1);
    }
    leave(&vector->domain->gate);
    return -error;
}

static struct fi_ops vector_fid = {.size = sizeof(struct fi_ops), .close = vector_close};
static struct fi_ops_av vector_ops = {
    .size = sizeof(struct fi_ops_av), .insert = vector_insert, .remove = vector_remove};

int vector_open(struct fid_domain *fid, struct fi_av_attr *attr, struct fid_av **out, void *context) {
    struct domain *domain = container(fid, struct domain, fid);
    if (attr->type == FI_AV_MAP || attr->flags != 0 || attr->name != NULL) {
        return -FI_ENOSYS;
    }
    struct vector *vector = calloc(1, sizeof *vector);
    if (vector == NULL) {
        return -FI_ENOMEM;
    }
    vector->fid.fid = (struct fid){.fclass = FI_CLASS_AV, .context = context, .ops = &vector_fid};
    vector->fid.ops = &vector_ops;
    vector->domain = domain;
    enter(&domain->gate, "fi_av_open");
    domain->vectors++;
    leave(&domain->gate);
    *out = &vector->fid;
    return 0;
}
