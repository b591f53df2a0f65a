/* Work requests, as they are posted. */
#include "nic.h"

#include <errno.h>
#include <string.h>

/* Whether the device refuses posts now, as a test has told it. */
static int refuses(struct ibv_context *context) {
    _Atomic uint32_t *again = &board->devices[context_of(context)->device].again;
    uint32_t left = atomic_load(again);
    while (left > 0) {
        if (atomic_compare_exchange_weak(again, &left, left - 1)) {
            return 1;
        }
    }
    return 0;
}

/* Why a request cannot be posted, or 0. */
static int refusal(const struct queue *queue, const struct ibv_send_wr *wr) {
    int known = wr->opcode == IBV_WR_RDMA_WRITE || wr->opcode == IBV_WR_RDMA_WRITE_WITH_IMM ||
                wr->opcode == IBV_WR_RDMA_READ;
    if (queue->ibv.state != IBV_QPS_RTS && queue->ibv.state != IBV_QPS_ERR) {
        return EINVAL;
    }
    /* No queue pair has room for bytes in its requests. */
    unsigned flags = IBV_SEND_SIGNALED | IBV_SEND_FENCE;
    if (!known || (wr->send_flags & ~flags) != 0 || wr->num_sge < 0 ||
        (uint32_t)wr->num_sge > queue->cap.max_send_sge) {
        return EINVAL;
    }
    return queue->posted - queue->retired < queue->cap.max_send_wr ? 0 : ENOMEM;
}

static void take(struct queue *queue, const struct ibv_send_wr *wr, struct order *order) {
    struct region **uses = queue->places[queue->posted % queue->cap.max_send_wr];
    *order = (struct order){.id = wr->wr_id,
        .remote = wr->wr.rdma.remote_addr,
        .key = wr->wr.rdma.rkey,
        .immediate = wr->imm_data,
        .opcode = wr->opcode,
        .flags = wr->send_flags,
        .number = queue->posted++,
        .count = (uint32_t)wr->num_sge};
    for (int at = 0; at < wr->num_sge; at++) {
        const struct ibv_sge *sge = &wr->sg_list[at];
        order->pieces[at] = (struct piece){.at = sge->addr, .len = sge->length, .key = sge->lkey};
        uses[at] = region_of(sge->lkey);
        if (uses[at] != NULL) {
            uses[at]->users++;
        }
    }
}

static int tell(struct told *told, uint64_t each) {
    if (told->count == 0) {
        return 0;
    }
    int error = link_tell(told, offsetof(struct told, orders) + told->count * each);
    told->count = 0;
    return error;
}

int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad) {
    struct queue *queue = container(qp, struct queue, ibv);
    struct told told = {.kind = SEND, .name = qp->handle};
    int error = refuses(qp->context) ? ENOMEM : 0;
    pthread_mutex_lock(&lock);
    for (; wr != NULL && error == 0; wr = error == 0 ? wr->next : wr) {
        error = refusal(queue, wr);
        if (error == 0) {
            take(queue, wr, &told.orders[told.count++]);
        }
        if (error == 0 && told.count == ORDERS) {
            error = tell(&told, sizeof *told.orders);
        }
    }
    int lost = tell(&told, sizeof *told.orders);
    pthread_mutex_unlock(&lock);
    *bad = wr;
    return error != 0 ? error : lost;
}

int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad) {
    struct queue *queue = container(qp, struct queue, ibv);
    struct told told = {.kind = RECEIVE, .name = qp->handle};
    int error = qp->state == IBV_QPS_RESET ? EINVAL : 0;
    pthread_mutex_lock(&lock);
    for (; wr != NULL && error == 0; wr = error == 0 ? wr->next : wr) {
        /* Writes bring no bytes to a receive, and nothing else is taken. */
        error = wr->num_sge != 0 ? EINVAL : 0;
        error = error == 0 && queue->receives - queue->received >= queue->cap.max_recv_wr ? ENOMEM : error;
        if (error == 0) {
            queue->receives++;
            told.ids[told.count++] = wr->wr_id;
        }
        if (error == 0 && told.count == ORDERS) {
            error = tell(&told, sizeof *told.ids);
        }
    }
    int lost = tell(&told, sizeof *told.ids);
    pthread_mutex_unlock(&lock);
    *bad = wr;
    return error != 0 ? error : lost;
}
