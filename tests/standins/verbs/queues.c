/* Queue pairs: how they are made, connected and ended. The device knows their states. */
#include "nic.h"

#include <errno.h>
#include <stdlib.h>

static struct queue *queues;

struct queue *queue_named(uint32_t number) {
    struct queue *queue = queues;
    while (queue != NULL && queue->ibv.qp_num != number) {
        queue = queue->next;
    }
    return queue;
}

/* The first place is free again. */
static void release(struct queue *queue) {
    struct region **uses = queue->places[queue->retired++ % queue->cap.max_send_wr];
    for (int at = 0; at < MAX_PIECES; at++) {
        if (uses[at] != NULL) {
            uses[at]->users--;
        }
        uses[at] = NULL;
    }
}

void queue_retire(struct queue *queue, uint32_t number) {
    /* One of before the queue pair was reset frees nothing. */
    while (number - queue->retired < queue->posted - queue->retired) {
        release(queue);
    }
}

/* All places are free. */
static void empty(struct queue *queue) {
    pthread_mutex_lock(&lock);
    while (queue->retired != queue->posted) {
        release(queue);
    }
    queue->received = queue->receives;
    pthread_mutex_unlock(&lock);
}

/* Why there can be no such queue pair, or 0. */
static int refusal(const struct ibv_qp_init_attr *init) {
    struct options options = options_read();
    const struct ibv_qp_cap *cap = &init->cap;
    if (init->qp_type != IBV_QPT_RC || init->srq != NULL) {
        return EOPNOTSUPP;
    }
    int fits = init->send_cq != NULL && init->recv_cq != NULL && cap->max_send_wr > 0 &&
               cap->max_send_wr <= options.depth && cap->max_recv_wr <= options.depth &&
               cap->max_send_sge <= options.pieces && cap->max_recv_sge <= options.pieces &&
               cap->max_inline_data == 0;
    return fits ? 0 : EINVAL;
}

static int make(struct queue *queue, struct ibv_pd *pd, const struct ibv_qp_init_attr *init) {
    struct context *context = context_of(pd->context);
    struct request request = {.kind = OPEN_QUEUE,
        .device = context->device,
        .context = context->name,
        .domain = container(pd, struct domain, ibv)->number,
        .sends = init->send_cq->handle,
        .receives = init->recv_cq->handle,
        .signals_all = init->sq_sig_all != 0,
        .cap = init->cap};
    struct reply reply;
    queue->places = calloc(init->cap.max_send_wr, sizeof *queue->places);
    int error = queue->places == NULL ? ENOMEM : ask(&request, -1, &reply);
    if (error != 0) {
        free(queue->places);
        return error;
    }
    queue->ibv = (struct ibv_qp){.context = pd->context,
        .qp_context = init->qp_context,
        .pd = pd,
        .send_cq = init->send_cq,
        .recv_cq = init->recv_cq,
        .handle = reply.name,
        .qp_num = reply.name,
        .state = IBV_QPS_RESET,
        .qp_type = IBV_QPT_RC};
    queue->cap = init->cap;
    return 0;
}

EXPORT struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *init) {
    struct queue *queue = calloc(1, sizeof *queue);
    int error = queue == NULL ? ENOMEM : refusal(init);
    error = error != 0 ? error : make(queue, pd, init);
    if (error != 0) {
        free(queue);
        errno = error;
        return NULL;
    }
    pthread_mutex_lock(&lock);
    queue->next = queues;
    queues = queue;
    container(pd, struct domain, ibv)->objects++;
    container(init->send_cq, struct completions, ibv)->users++;
    container(init->recv_cq, struct completions, ibv)->users++;
    pthread_mutex_unlock(&lock);
    return &queue->ibv;
}

EXPORT int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask) {
    struct request request = {.kind = MODIFY, .name = qp->handle, .mask = (uint32_t)mask, .attr = *attr};
    struct reply reply;
    int error = ask(&request, -1, &reply);
    if (error == 0) {
        qp->state = reply.state;
    }
    if (error == 0 && reply.state == IBV_QPS_RESET) {
        empty(container(qp, struct queue, ibv));
    }
    return error;
}

EXPORT int ibv_query_qp(
    struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init) {
    struct reply reply;
    (void)mask;
    int error = ask_about(QUERY, qp->handle, &reply);
    if (error == 0) {
        qp->state = reply.state;
        *attr = (struct ibv_qp_attr){.qp_state = reply.state, .cur_qp_state = reply.state};
        attr->cap = container(qp, struct queue, ibv)->cap;
        *init = (struct ibv_qp_init_attr){.qp_context = qp->qp_context,
            .send_cq = qp->send_cq,
            .recv_cq = qp->recv_cq,
            .cap = attr->cap,
            .qp_type = qp->qp_type};
    }
    return error;
}

EXPORT int ibv_destroy_qp(struct ibv_qp *qp) {
    struct queue *queue = container(qp, struct queue, ibv);
    struct reply reply;
    if (queue->told > 0) {
        broken("queue pair %u is ended with %u events that were not acknowledged", qp->qp_num, queue->told);
    }
    /* When the answer comes, nothing of it is moved any more: this is the fence. */
    int error = ask_about(CLOSE, qp->handle, &reply);
    if (error == EBUSY) {
        return error;
    }
    empty(queue);
    pthread_mutex_lock(&lock);
    struct queue **at = &queues;
    while (*at != queue) {
        at = &(*at)->next;
    }
    *at = queue->next;
    container(qp->pd, struct domain, ibv)->objects--;
    container(qp->send_cq, struct completions, ibv)->users--;
    container(qp->recv_cq, struct completions, ibv)->users--;
    pthread_mutex_unlock(&lock);
    free(queue->places);
    free(queue);
    return error;
}
