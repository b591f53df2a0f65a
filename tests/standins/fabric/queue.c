/* Completion queues. They have no descriptor to wait for, as EFA's had none for long: who waits polls. */
#define _GNU_SOURCE
#include "nic.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *status_text(int status) {
    switch (status) {
    case STATUS_FLUSHED:
        return "the operation was flushed";
    case STATUS_BAD_LKEY:
        return "the local memory is not registered";
    case STATUS_BAD_REMOTE_ADDRESS:
        return "the remote key, range or right is wrong";
    case STATUS_REMOTE_ABORT:
        return "the remote device gave the operation up";
    case STATUS_BAD_DESTINATION:
        return "the remote endpoint is closed";
    case STATUS_UNRESPONSIVE:
        return "the remote device does not answer";
    case STATUS_UNKNOWN_PEER:
        return "no endpoint has this address";
    case STATUS_UNREACHABLE:
        return "the device is down";
    default:
        return "an error of the device";
    }
}

static int status_errno(int status) {
    switch (status) {
    case STATUS_FLUSHED:
        return FI_ECANCELED;
    case STATUS_BAD_LKEY:
        return FI_EINVAL;
    case STATUS_BAD_REMOTE_ADDRESS:
        return FI_EACCES;
    case STATUS_REMOTE_ABORT:
        return FI_ECONNABORTED;
    case STATUS_BAD_DESTINATION:
        return FI_ECONNREFUSED;
    case STATUS_UNKNOWN_PEER:
        return FI_ENOTCONN;
    case STATUS_UNREACHABLE:
        return FI_ENETDOWN;
    default:
        return FI_EHOSTUNREACH;
    }
}

static int queue_close(struct fid *fid) {
    struct queue *queue = container(fid, struct queue, fid.fid);
    struct domain *domain = queue->domain;
    enter(&domain->gate, "fi_close of a completion queue");
    if (queue->first != NULL) {
        broken("a completion queue is closed before an endpoint that is bound to it");
    }
    domain->queues--;
    free(queue);
    leave(&domain->gate);
    return 0;
}

static size_t write_entry(enum fi_cq_format format, void *buffer, size_t at, const struct pending *pending) {
    if (format == FI_CQ_FORMAT_CONTEXT) {
        ((struct fi_cq_entry *)buffer)[at].op_context = pending->context;
    } else if (format == FI_CQ_FORMAT_MSG) {
        ((struct fi_cq_msg_entry *)buffer)[at] = (struct fi_cq_msg_entry){
            .op_context = pending->context, .flags = pending->flags, .len = pending->len};
    } else {
        ((struct fi_cq_data_entry *)buffer)[at] = (struct fi_cq_data_entry){
            .op_context = pending->context, .flags = pending->flags, .len = pending->len};
    }
    return at + 1;
}

static ssize_t queue_read(struct fid_cq *fid, void *buffer, size_t count) {
    struct queue *queue = container(fid, struct queue, fid);
    struct board *board = queue->domain->link.board;
    size_t got = 0;
    enter(&queue->domain->gate, "fi_cq_read");
    uint32_t blind = atomic_load(&board->devices[queue->domain->device].blind);
    uint32_t mute = atomic_load(&board->devices[queue->domain->device].mute);
    if (blind || mute) {
        leave(&queue->domain->gate);
        return blind ? -FI_EIO : -FI_EAVAIL;
    }
    for (struct endpoint *ep = queue->first; ep != NULL; ep = ep->next_of_queue) {
        struct done done;
        software_progress(ep);
        while (queue->failed == NULL && got < count && endpoint_peek(ep, &done)) {
            if (done.status != STATUS_OK) {
                queue->failed = ep;
                break;
            }
            got = write_entry(queue->format, buffer, got, &ep->pending[done.id]);
            endpoint_take(ep);
        }
    }
    ssize_t answer = got > 0 ? (ssize_t)got : queue->failed != NULL ? -FI_EAVAIL : -FI_EAGAIN;
    leave(&queue->domain->gate);
    return answer;
}

static ssize_t queue_readerr(struct fid_cq *fid, struct fi_cq_err_entry *entry, uint64_t flags) {
    struct queue *queue = container(fid, struct queue, fid);
    ssize_t answer = -FI_EAGAIN;
    struct done done;
    (void)flags;
    enter(&queue->domain->gate, "fi_cq_readerr");
    _Atomic uint32_t *mute = &queue->domain->link.board->devices[queue->domain->device].mute;
    if (atomic_load(mute) > 0) {
        atomic_fetch_sub(mute, 1);
    } else if (queue->failed != NULL && endpoint_peek(queue->failed, &done)) {
        struct pending *pending = &queue->failed->pending[done.id];
        /* Who gives no room for data gets the queue's own, good until it is read again. */
        void *room = entry->err_data_size > 0 ? entry->err_data : queue->text;
        size_t most = entry->err_data_size > 0 ? entry->err_data_size : sizeof queue->text;
        int len = snprintf(room, most, "%s: operation %u of endpoint %u on rdmap%us0-rdm",
            status_text(done.status), done.id, queue->failed->address.endpoint, queue->domain->device);
        *entry = (struct fi_cq_err_entry){.op_context = pending->context,
            .flags = pending->flags,
            .err = status_errno(done.status),
            .prov_errno = done.status,
            .err_data = room};
        entry->err_data_size = (size_t)len < most ? (size_t)len + 1 : most;
        endpoint_take(queue->failed);
        queue->failed = NULL;
        answer = 1;
    }
    leave(&queue->domain->gate);
    return answer;
}

static const char *queue_strerror(
    struct fid_cq *fid, int status, const void *data, char *buffer, size_t len) {
    (void)fid;
    const char *text = data != NULL ? data : status_text(status);
    if (buffer != NULL && len > 0) {
        snprintf(buffer, len, "%s", text);
    }
    return text;
}

static struct fi_ops queue_fid = {.size = sizeof(struct fi_ops), .close = queue_close};
static struct fi_ops_cq queue_ops = {.size = sizeof(struct fi_ops_cq),
    .read = queue_read,
    .readerr = queue_readerr,
    .strerror = queue_strerror};

int queue_open(struct fid_domain *fid, struct fi_cq_attr *attr, struct fid_cq **out, void *context) {
    struct domain *domain = container(fid, struct domain, fid);
    if (attr->wait_obj != FI_WAIT_NONE || attr->format == FI_CQ_FORMAT_TAGGED || attr->size > MAX_DEPTH) {
        return -FI_ENOSYS;
    }
    struct queue *queue = calloc(1, sizeof *queue);
    if (queue == NULL) {
        return -FI_ENOMEM;
    }
    queue->fid.fid = (struct fid){.fclass = FI_CLASS_CQ, .context = context, .ops = &queue_fid};
    queue->fid.ops = &queue_ops;
    queue->domain = domain;
    queue->format = attr->format != FI_CQ_FORMAT_UNSPEC ? attr->format : FI_CQ_FORMAT_CONTEXT;
    enter(&domain->gate, "fi_cq_open");
    domain->queues++;
    leave(&domain->gate);
    *out = &queue->fid;
    return 0;
}
