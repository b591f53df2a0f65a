/* Endpoints, and the operations that are posted on them. */
#define _GNU_SOURCE
#include "nic.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static int enabled(const struct endpoint *ep) {
    return ep->queues != NULL;
}

int endpoint_peek(struct endpoint *ep, struct done *done) {
    if (!enabled(ep)) {
        return 0;
    }
    if (software_peek(ep, done)) {
        return 1;
    }
    uint32_t taken = atomic_load_explicit(&ep->queues->taken, memory_order_relaxed);
    if (taken == atomic_load_explicit(&ep->queues->ended, memory_order_acquire)) {
        return 0;
    }
    *done = dones_of(ep->queues)[taken % ep->queues->size];
    return 1;
}

/* The operation is over: nothing that it used is used by it any more. */
static void release(struct endpoint *ep, uint32_t id) {
    struct pending *pending = &ep->pending[id];
    if (!pending->taken) {
        broken("the device ended operation %u twice", id);
    }
    pending->taken = 0;
    pending->region->users--;
    if (pending->slot != NO_SLOT) {
        ep->vector->slots[pending->slot].users--;
    }
    ep->in_flight--;
    ep->free[ep->in_flight] = id;
}

void endpoint_take(struct endpoint *ep) {
    struct done done;
    if (software_peek(ep, &done)) {
        software_take(ep);
    } else {
        uint32_t taken = atomic_load_explicit(&ep->queues->taken, memory_order_relaxed);
        done = dones_of(ep->queues)[taken % ep->queues->size];
        atomic_store_explicit(&ep->queues->taken, taken + 1, memory_order_release);
    }
    release(ep, done.id);
}

static void unbind(struct endpoint *ep) {
    if (ep->vector != NULL) {
        ep->vector->bound--;
    }
    if (ep->queue == NULL) {
        return;
    }
    struct endpoint **at = &ep->queue->first;
    while (*at != ep) {
        at = &(*at)->next_of_queue;
    }
    *at = ep->next_of_queue;
    if (ep->queue->failed == ep) {
        ep->queue->failed = NULL;
    }
}

static int endpoint_close(struct fid *fid) {
    struct endpoint *ep = container(fid, struct endpoint, fid.fid);
    struct domain *domain = ep->domain;
    int error = 0;
    enter(&domain->gate, "fi_close of an endpoint");
    if (enabled(ep)) {
        struct request request = {.kind = CLOSE_ENDPOINT, .device = domain->device, .a = ep->name};
        struct reply reply;
        /* The answer comes when the device has let go of it: this is the fence. */
        error = ask(&request, -1, &reply);
        if (error == EBUSY) {
            leave(&domain->gate);
            return -error;
        }
        software_remove(ep);
        for (uint32_t id = 0; id < ep->depth; id++) {
            if (ep->pending[id].taken) {
                release(ep, id);
            }
        }
        munmap(ep->queues, bytes_of_queues(ep->queues->size));
    }
    unbind(ep);
    domain->endpoints--;
    free(ep->pending);
    free(ep->free);
    free(ep);
    leave(&domain->gate);
    return -error;
}

static int bind_to(struct endpoint *ep, struct fid *other) {
    if (other->fclass == FI_CLASS_AV && ep->vector == NULL) {
        ep->vector = container(other, struct vector, fid.fid);
        ep->vector->bound++;
        return 0;
    }
    if (other->fclass == FI_CLASS_CQ && ep->queue == NULL) {
        ep->queue = container(other, struct queue, fid.fid);
        ep->next_of_queue = ep->queue->first;
        ep->queue->first = ep;
        return 0;
    }
    return FI_EINVAL;
}

static int endpoint_bind(struct fid *fid, struct fid *other, uint64_t flags) {
    struct endpoint *ep = container(fid, struct endpoint, fid.fid);
    enter(&ep->domain->gate, "fi_ep_bind");
    int error = enabled(ep) || (flags & FI_SELECTIVE_COMPLETION) != 0 ? FI_EOPBADSTATE : bind_to(ep, other);
    leave(&ep->domain->gate);
    return -error;
}

/* Makes the queues, and tells the device of them. */
static int enable(struct endpoint *ep) {
    uint32_t size = 1;
    while (size < ep->depth) {
        size *= 2;
    }
    uint64_t bytes = bytes_of_queues(size);
    int fd = memfd_create("standin-queues", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) < 0) {
        return FI_ENOMEM;
    }
    struct queues *queues = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    int error = FI_ENOMEM;
    if (queues != MAP_FAILED) {
        queues->size = size;
        struct request request = {.kind = OPEN_ENDPOINT, .device = ep->domain->device, .a = size};
        request.domain = ep->domain->number;
        struct reply reply;
        error = ask(&request, fd, &reply);
        ep->queues = error == 0 ? queues : NULL;
        ep->name = reply.value;
        ep->address = reply.address;
        if (error != 0) {
            munmap(queues, bytes);
        }
    }
    close(fd);
    return error;
}

static int endpoint_control(struct fid *fid, int command, void *argument) {
    struct endpoint *ep = container(fid, struct endpoint, fid.fid);
    (void)argument;
    if (command != FI_ENABLE) {
        return -FI_ENOSYS;
    }
    enter(&ep->domain->gate, "fi_enable");
    int error = ep->vector == NULL ? FI_ENOAV : ep->queue == NULL ? FI_ENOCQ : 0;
    error = error == 0 && enabled(ep) ? FI_EOPBADSTATE : error;
    if (error == 0 && !ep->by_device) {
        broken("an endpoint may move bytes by shared memory, which closing it does not stop");
    }
    if (error == 0 && ep->domain->hmem != HMEM_NONE && !ep->copies_forbidden) {
        broken("an endpoint may copy memory of GPUs by CUDA, and wait for a GPU that stands still");
    }
    error = error == 0 ? enable(ep) : error;
    if (error == 0) {
        software_add(ep);
    }
    leave(&ep->domain->gate);
    return -error;
}

static int endpoint_getname(struct fid *fid, void *address, size_t *len) {
    struct endpoint *ep = container(fid, struct endpoint, fid.fid);
    enter(&ep->domain->gate, "fi_getname");
    int error = enabled(ep) ? 0 : FI_EOPBADSTATE;
    error = error == 0 && *len < ADDRESS_BYTES ? FI_ETOOSMALL : error;
    *len = ADDRESS_BYTES;
    if (error == 0) {
        memcpy(address, &ep->address, ADDRESS_BYTES);
    }
    leave(&ep->domain->gate);
    return -error;
}

/* Why a message cannot be posted at all, or 0. */
static int refusal(const struct endpoint *ep, const struct fi_msg_rma *message, uint64_t flags) {
    uint64_t known = FI_COMPLETION | FI_DELIVERY_COMPLETE | FI_TRANSMIT_COMPLETE | FI_MORE;
    if (!enabled(ep)) {
        return FI_EOPBADSTATE;
    }
    if ((flags & ~known) != 0) {
        return FI_EBADFLAGS;
    }
    if (message->iov_count != 1 || message->rma_iov_count != 1 || message->desc == NULL ||
        message->desc[0] == NULL || message->msg_iov[0].iov_len != message->rma_iov[0].len ||
        message->rma_iov[0].len > LONGEST) {
        return FI_EINVAL;
    }
    return 0;
}

/* Whether the device takes no post now. */
static int busy(const struct endpoint *ep) {
    struct board *board = ep->domain->link.board;
    uint32_t device = ep->domain->device;
    if (atomic_load(&board->devices[device].down)) {
        return FI_ENETDOWN;
    }
    uint32_t again = atomic_load(&board->devices[device].again);
    while (again > 0) {
        if (atomic_compare_exchange_weak(&board->devices[device].again, &again, again - 1)) {
            return FI_EAGAIN;
        }
    }
    return ep->in_flight >= ep->depth ? FI_EAGAIN : 0;
}

static void submit(struct endpoint *ep, const struct order *order) {
    uint32_t posted = atomic_load_explicit(&ep->queues->posted, memory_order_relaxed);
    orders_of(ep->queues)[posted % ep->queues->size] = *order;
    atomic_store_explicit(&ep->queues->posted, posted + 1, memory_order_release);
    link_ring();
}

static void post(struct endpoint *ep, const struct fi_msg_rma *message, uint64_t flags, uint32_t kind) {
    struct region *region = message->desc[0];
    uint64_t at = (uintptr_t)message->msg_iov[0].iov_base, len = message->msg_iov[0].iov_len;
    uint64_t place = region->place + (at - region->at);
    uint32_t id = ep->free[ep->in_flight++];
    int known = message->addr < ep->vector->size && ep->vector->slots[message->addr].taken;
    uint32_t slot = known ? (uint32_t)message->addr : NO_SLOT;
    ep->pending[id] =
        (struct pending){.context = message->context, .region = region, .slot = slot, .taken = 1, .len = len};
    ep->pending[id].flags = FI_RMA | (kind & OP_WRITE ? FI_WRITE : FI_READ);
    region->users++;
    struct order order = {
        .local = place, .remote = message->rma_iov[0].addr, .len = len, .id = id, .flags = kind};
    order.flags |= flags & FI_DELIVERY_COMPLETE ? OP_DELIVERY : 0;
    if (region->domain != ep->domain || at < region->at || at + len > region->at + region->len) {
        order.flags |= OP_BAD_LOCAL;
    }
    /* A key that is too large is nobody's, as no key is 0. */
    order.key = message->rma_iov[0].key <= UINT32_MAX ? (uint32_t)message->rma_iov[0].key : 0;
    if (known) {
        ep->vector->slots[slot].users++;
        order.peer = ep->vector->slots[slot].address;
    }
    if (!ep->domain->software || !software_post(ep, &order)) {
        submit(ep, &order);
    }
}

static ssize_t post_message(
    struct fid_ep *fid, const struct fi_msg_rma *message, uint64_t flags, uint32_t kind) {
    struct endpoint *ep = container(fid, struct endpoint, fid);
    enter(&ep->domain->gate, kind & OP_WRITE ? "fi_writemsg" : "fi_readmsg");
    int error = refusal(ep, message, flags);
    error = error == 0 ? busy(ep) : error;
    if (error == 0) {
        post(ep, message, flags, kind);
    }
    leave(&ep->domain->gate);
    return -error;
}

static ssize_t read_message(struct fid_ep *fid, const struct fi_msg_rma *message, uint64_t flags) {
    return post_message(fid, message, flags, 0);
}

static ssize_t write_message(struct fid_ep *fid, const struct fi_msg_rma *message, uint64_t flags) {
    return post_message(fid, message, flags, OP_WRITE);
}

/* Whether it can do without copies by CUDA depends on the device. */
static int forbid_copies(struct endpoint *ep, int forbidden) {
    if (ep->domain->hmem == HMEM_NONE) {
        return FI_EINVAL;
    }
    if (forbidden && ep->domain->hmem == HMEM_COPIES) {
        return FI_EOPNOTSUPP;
    }
    ep->copies_forbidden = forbidden;
    return 0;
}

static int endpoint_setopt(fid_t fid, int level, int option, const void *value, size_t len) {
    struct endpoint *ep = container(fid, struct endpoint, fid.fid);
    int known = option == SHARED_MEMORY_PERMITTED || option == CUDA_API_PERMITTED;
    if (level != FI_OPT_ENDPOINT || !known || getenv("KVIK_STANDIN_OLD") != NULL) {
        return -FI_ENOPROTOOPT;
    }
    enter(&ep->domain->gate, "fi_setopt");
    int error = enabled(ep) || len != sizeof(bool) ? FI_EINVAL : 0;
    if (error == 0 && option == SHARED_MEMORY_PERMITTED) {
        ep->by_device = !*(const bool *)value;
    } else if (error == 0) {
        error = forbid_copies(ep, !*(const bool *)value);
    }
    leave(&ep->domain->gate);
    return -error;
}

static struct fi_ops endpoint_fid = {.size = sizeof(struct fi_ops),
    .close = endpoint_close,
    .bind = endpoint_bind,
    .control = endpoint_control};
static struct fi_ops_ep options = {.size = sizeof(struct fi_ops_ep), .setopt = endpoint_setopt};
static struct fi_ops_cm names = {.size = sizeof(struct fi_ops_cm), .getname = endpoint_getname};
static struct fi_ops_rma operations = {
    .size = sizeof(struct fi_ops_rma), .readmsg = read_message, .writemsg = write_message};

int endpoint_open(struct fid_domain *fid, struct fi_info *info, struct fid_ep **out, void *context) {
    struct domain *domain = container(fid, struct domain, fid);
    uint32_t depth = (uint32_t)info->tx_attr->size;
    if (depth == 0 || info->tx_attr->size > MAX_DEPTH) {
        return -FI_EINVAL;
    }
    struct endpoint *ep = calloc(1, sizeof *ep);
    struct pending *pending = calloc(depth, sizeof *pending);
    uint32_t *ids = calloc(depth, sizeof *ids);
    if (ep == NULL || pending == NULL || ids == NULL) {
        free(ep);
        free(pending);
        free(ids);
        return -FI_ENOMEM;
    }
    ep->fid.fid = (struct fid){.fclass = FI_CLASS_EP, .context = context, .ops = &endpoint_fid};
    ep->fid.ops = &options;
    ep->fid.cm = &names;
    const char *shared = getenv("FI_EFA_ENABLE_SHM_TRANSFER");
    ep->by_device = shared != NULL && strcmp(shared, "0") == 0;
    ep->fid.rma = &operations;
    ep->domain = domain;
    ep->depth = depth;
    ep->pending = pending;
    ep->free = ids;
    for (uint32_t id = 0; id < depth; id++) {
        ids[id] = id;
    }
    enter(&domain->gate, "fi_endpoint");
    domain->endpoints++;
    leave(&domain->gate);
    *out = &ep->fid;
    return 0;
}
