/* Completion queues, and the channels that tell of them. */
#define _GNU_SOURCE
#include "nic.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static struct completions *queues;

EXPORT struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *ibv) {
    struct channel *channel = calloc(1, sizeof *channel);
    int pipes[2];
    if (channel == NULL || pipe2(pipes, O_CLOEXEC) < 0) {
        free(channel);
        return NULL;
    }
    fcntl(pipes[1], F_SETFL, O_NONBLOCK);
    struct context *context = context_of(ibv);
    struct request request = {
        .kind = OPEN_CHANNEL, .device = context->device, .context = context->name};
    struct reply reply;
    int error = ask(&request, pipes[1], &reply);
    close(pipes[1]);
    if (error != 0) {
        close(pipes[0]);
        free(channel);
        errno = error;
        return NULL;
    }
    channel->name = reply.name;
    channel->ibv = (struct ibv_comp_channel){.context = ibv, .fd = pipes[0]};
    pthread_mutex_lock(&lock);
    context_of(ibv)->objects++;
    pthread_mutex_unlock(&lock);
    return &channel->ibv;
}

EXPORT int ibv_destroy_comp_channel(struct ibv_comp_channel *ibv) {
    struct channel *channel = container(ibv, struct channel, ibv);
    struct reply reply;
    if (ibv->refcnt > 0) {
        return EBUSY;
    }
    int error = ask_about(CLOSE, channel->name, &reply);
    close(ibv->fd);
    pthread_mutex_lock(&lock);
    context_of(ibv->context)->objects--;
    pthread_mutex_unlock(&lock);
    free(channel);
    return error;
}

struct completions *completions_named(uint32_t name) {
    struct completions *queue = queues;
    while (queue != NULL && queue->ibv.handle != name) {
        queue = queue->next;
    }
    return queue;
}

/* Memory for so many, told to the device: 0, or an errno. */
static int make_ring(struct request *request, struct reply *reply, struct ring **ring) {
    void *at = NULL;
    int fd = shared_memory("standin-completions", bytes_of_ring(request->size), &at);
    if (fd < 0) {
        return ENOMEM;
    }
    *ring = at;
    (*ring)->size = request->size;
    int error = ask(request, fd, reply);
    close(fd);
    if (error != 0) {
        munmap(at, bytes_of_ring(request->size));
    }
    return error;
}

EXPORT struct ibv_cq *ibv_create_cq(
    struct ibv_context *ibv, int count, void *of_user, struct ibv_comp_channel *channel, int vector) {
    struct completions *queue = calloc(1, sizeof *queue);
    struct context *context = context_of(ibv);
    struct reply reply;
    struct request request = {.kind = OPEN_COMPLETIONS,
        .device = context->device,
        .context = context->name,
        .size = (uint32_t)count,
        .receives = channel != NULL ? container(channel, struct channel, ibv)->name : 0};
    int error = count < 1 || count > MAX_COMPLETIONS || vector != 0 ? EINVAL : queue == NULL ? ENOMEM : 0;
    error = error != 0 ? error : make_ring(&request, &reply, &queue->ring);
    if (error != 0) {
        free(queue);
        errno = error;
        return NULL;
    }
    queue->ibv = (struct ibv_cq){
        .context = ibv, .channel = channel, .cq_context = of_user, .handle = reply.name, .cqe = count};
    pthread_mutex_lock(&lock);
    queue->next = queues;
    queues = queue;
    context->objects++;
    if (channel != NULL) {
        channel->refcnt++;
    }
    pthread_mutex_unlock(&lock);
    return &queue->ibv;
}

EXPORT int ibv_resize_cq(struct ibv_cq *cq, int count) {
    struct completions *queue = container(cq, struct completions, ibv);
    struct request request = {.kind = RESIZE, .name = cq->handle, .size = (uint32_t)count};
    struct reply reply;
    struct ring *ring = NULL;
    if (count < 1 || count > MAX_COMPLETIONS) {
        return EINVAL;
    }
    pthread_mutex_lock(&lock);
    /* The device moves what is there, and says so before it goes on. */
    int error = make_ring(&request, &reply, &ring);
    if (error == 0) {
        munmap(queue->ring, bytes_of_ring((uint32_t)cq->cqe));
        queue->ring = ring;
        cq->cqe = count;
    }
    pthread_mutex_unlock(&lock);
    return error;
}

EXPORT int ibv_destroy_cq(struct ibv_cq *cq) {
    struct completions *queue = container(cq, struct completions, ibv);
    struct reply reply;
    pthread_mutex_lock(&lock);
    if (queue->users > 0) {
        pthread_mutex_unlock(&lock);
        return EBUSY;
    }
    if (queue->told > 0) {
        broken("a completion queue is ended with %u events that were not acknowledged", queue->told);
    }
    struct completions **at = &queues;
    while (*at != queue) {
        at = &(*at)->next;
    }
    *at = queue->next;
    context_of(cq->context)->objects--;
    if (cq->channel != NULL) {
        cq->channel->refcnt--;
    }
    pthread_mutex_unlock(&lock);
    int error = ask_about(CLOSE, cq->handle, &reply);
    munmap(queue->ring, bytes_of_ring((uint32_t)cq->cqe));
    free(queue);
    return error;
}

EXPORT int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **of_user) {
    struct completions *queue = NULL;
    while (queue == NULL) {
        uint32_t name;
        ssize_t got = read(channel->fd, &name, sizeof name);
        if (got != sizeof name) {
            errno = got == 0 ? EIO : errno;
            return -1;
        }
        pthread_mutex_lock(&lock);
        queue = completions_named(name);
        if (queue != NULL) {
            queue->told++;
        }
        pthread_mutex_unlock(&lock);
    }
    *cq = &queue->ibv;
    *of_user = queue->ibv.cq_context;
    return 0;
}

EXPORT void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int count) {
    struct completions *queue = container(cq, struct completions, ibv);
    pthread_mutex_lock(&lock);
    if (count > queue->told) {
        broken("%u events are acknowledged, of %u", count, queue->told);
    }
    queue->told -= count;
    pthread_mutex_unlock(&lock);
}

int req_notify_cq(struct ibv_cq *cq, int solicited_only) {
    struct completions *queue = container(cq, struct completions, ibv);
    if (cq->channel == NULL || solicited_only) {
        return EINVAL;
    }
    atomic_store(&queue->ring->armed, 1);
    return 0;
}

/* What a program may read of a completion: where it is an error, all but four fields say nothing. */
static struct ibv_wc told_as(const struct done *done) {
    struct ibv_wc wc;
    if (done->status != IBV_WC_SUCCESS) {
        __builtin_memset(&wc, 0xA5, sizeof wc);
    } else {
        wc = (struct ibv_wc){.opcode = (enum ibv_wc_opcode)done->opcode,
            .byte_len = done->bytes,
            .imm_data = done->immediate,
            .wc_flags = done->flags};
    }
    wc.wr_id = done->id;
    wc.status = (enum ibv_wc_status)done->status;
    wc.vendor_err = done->status;
    wc.qp_num = done->queue;
    return wc;
}

int poll_cq(struct ibv_cq *cq, int most, struct ibv_wc *into) {
    struct completions *queue = container(cq, struct completions, ibv);
    if (atomic_load(&board->devices[context_of(cq->context)->device].blind)) {
        errno = EIO;
        return -1;
    }
    pthread_mutex_lock(&lock);
    struct ring *ring = queue->ring;
    uint32_t consumed = atomic_load_explicit(&ring->consumed, memory_order_relaxed);
    uint32_t produced = atomic_load_explicit(&ring->produced, memory_order_acquire);
    int got = 0;
    for (; got < most && consumed != produced; got++, consumed++) {
        struct done done = dones_of(ring)[consumed % ring->size];
        struct queue *of = queue_named(done.queue);
        into[got] = told_as(&done);
        if (of != NULL && done.receives) {
            of->received++;
        } else if (of != NULL) {
            queue_retire(of, done.number);
        }
    }
    atomic_store_explicit(&ring->consumed, consumed, memory_order_release);
    pthread_mutex_unlock(&lock);
    return got;
}
