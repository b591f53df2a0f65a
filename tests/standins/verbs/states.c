/* The states of queue pairs, as InfiniBand's specification has them for reliable connections: which change is
 * possible, what it must bring along, and what it may. */
#include "device.h"

#include <errno.h>
#include <string.h>

struct change {
    enum ibv_qp_state from, to;
    uint32_t must, may;
};

static const struct change changes[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, 0},
    {IBV_QPS_INIT, IBV_QPS_INIT, 0, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS},
    {IBV_QPS_INIT, IBV_QPS_RTR,
        IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
            IBV_QP_MIN_RNR_TIMER,
        IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS},
    {IBV_QPS_RTR, IBV_QPS_RTS,
        IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
        IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER},
    {IBV_QPS_RTS, IBV_QPS_RTS, 0, IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER},
};

int is_down(uint32_t device) {
    return atomic_load(&board->devices[device].down) != 0;
}

/* The device that packets to a GID of this kind come to, or -1. */
static int device_at(const union ibv_gid *gid, uint32_t type) {
    for (uint32_t device = 0; device < MAX_DEVICES; device++) {
        for (uint32_t index = 0; index < GIDS; index++) {
            union ibv_gid other;
            uint32_t kind;
            gid_at(device, devices[device].turn, index, &other, &kind);
            if (kind == type && memcmp(&other, gid, sizeof other) == 0) {
                return (int)device;
            }
        }
    }
    return -1;
}

/* Addresses of IPv4 are mapped; there is no way from those to others. */
static int is_mapped(const union ibv_gid *gid) {
    static const uint8_t prefix[12] = {[10] = 0xFF, [11] = 0xFF};
    return memcmp(gid->raw, prefix, sizeof prefix) == 0;
}

static int check_path(struct queue *next, const struct ibv_qp_attr *attr) {
    const struct ibv_ah_attr *path = &attr->ah_attr;
    if (!path->is_global || path->port_num != PORT || path->sl > 15 ||
        !gid_at(next->object.device, devices[next->object.device].turn, path->grh.sgid_index, &next->gid,
            &next->gid_type) ||
        is_mapped(&next->gid) != is_mapped(&path->grh.dgid)) {
        return EINVAL;
    }
    return device_at(&path->grh.dgid, next->gid_type) >= 0 ? 0 : EHOSTUNREACH;
}

/* Why values cannot be set, or 0. */
static int check_values(struct queue *next, const struct ibv_qp_attr *attr, uint32_t mask) {
    int good = ((mask & IBV_QP_PORT) == 0 || attr->port_num == PORT) &&
               ((mask & IBV_QP_PKEY_INDEX) == 0 || attr->pkey_index == 0) &&
               ((mask & IBV_QP_PATH_MTU) == 0 ||
                   (attr->path_mtu >= IBV_MTU_256 && attr->path_mtu <= IBV_MTU_4096)) &&
               ((mask & IBV_QP_RQ_PSN) == 0 || attr->rq_psn < 1 << 24) &&
               ((mask & IBV_QP_SQ_PSN) == 0 || attr->sq_psn < 1 << 24) &&
               ((mask & IBV_QP_DEST_QPN) == 0 || attr->dest_qp_num < 1 << 24) &&
               ((mask & IBV_QP_MAX_DEST_RD_ATOMIC) == 0 || attr->max_dest_rd_atomic <= MAX_READS) &&
               ((mask & IBV_QP_MAX_QP_RD_ATOMIC) == 0 || attr->max_rd_atomic <= MAX_READS) &&
               ((mask & IBV_QP_TIMEOUT) == 0 || attr->timeout < 32) &&
               ((mask & IBV_QP_RETRY_CNT) == 0 || attr->retry_cnt < 8) &&
               ((mask & IBV_QP_RNR_RETRY) == 0 || attr->rnr_retry < 8) &&
               ((mask & IBV_QP_MIN_RNR_TIMER) == 0 || attr->min_rnr_timer < 32) &&
               ((mask & IBV_QP_CUR_STATE) == 0 || attr->cur_qp_state == next->state);
    return !good ? EINVAL : (mask & IBV_QP_AV) != 0 ? check_path(next, attr) : 0;
}

static void set_values(struct ibv_qp_attr *own, const struct ibv_qp_attr *attr, uint32_t mask) {
#define SET(bit, field) own->field = (mask & (bit)) != 0 ? attr->field : own->field
    SET(IBV_QP_ACCESS_FLAGS, qp_access_flags);
    SET(IBV_QP_AV, ah_attr);
    SET(IBV_QP_PATH_MTU, path_mtu);
    SET(IBV_QP_DEST_QPN, dest_qp_num);
    SET(IBV_QP_RQ_PSN, rq_psn);
    SET(IBV_QP_MAX_DEST_RD_ATOMIC, max_dest_rd_atomic);
    SET(IBV_QP_MIN_RNR_TIMER, min_rnr_timer);
    SET(IBV_QP_TIMEOUT, timeout);
    SET(IBV_QP_RETRY_CNT, retry_cnt);
    SET(IBV_QP_RNR_RETRY, rnr_retry);
    SET(IBV_QP_SQ_PSN, sq_psn);
    SET(IBV_QP_MAX_QP_RD_ATOMIC, max_rd_atomic);
#undef SET
}

int modify(struct queue *queue, const struct ibv_qp_attr *attr, uint32_t mask) {
    enum ibv_qp_state to = (mask & IBV_QP_STATE) != 0 ? attr->qp_state : queue->state;
    uint32_t rest = mask & ~(uint32_t)IBV_QP_STATE;
    if (to == IBV_QPS_RESET || (to == IBV_QPS_ERR && queue->state != IBV_QPS_RESET)) {
        if (rest != 0) {
            return EINVAL;
        }
        if (to == IBV_QPS_ERR) {
            fail_queue(queue);
        } else {
            silence(queue);
            queue->state = IBV_QPS_RESET;
        }
        return 0;
    }
    for (size_t at = 0; at < sizeof changes / sizeof *changes; at++) {
        const struct change *change = &changes[at];
        if (change->from != queue->state || change->to != to) {
            continue;
        }
        struct queue next = *queue;
        int allowed = (rest & change->must) == change->must && (rest & ~(change->must | change->may)) == 0;
        int error = allowed ? check_values(&next, attr, rest) : EINVAL;
        if (error == 0) {
            set_values(&next.attr, attr, rest);
            next.state = to;
            *queue = next;
        }
        return error;
    }
    return EINVAL;
}

void silence(struct queue *queue) {
    late_stop(queue->object.name);
    queue->ended = queue->posted;
    queue->receives_ended = queue->receives_posted;
    queue->begun = queue->stuck = 0;
}

void fail_queue(struct queue *queue) {
    queue->state = IBV_QPS_ERR;
    late_stop(queue->object.name);
    while (queue->ended != queue->posted) {
        end_order(queue, IBV_WC_WR_FLUSH_ERR);
    }
    while (queue->receives_ended != queue->receives_posted) {
        end_receive(queue, IBV_WC_WR_FLUSH_ERR, 0, 0);
    }
}

struct queue *peer_of(const struct queue *queue) {
    const struct ibv_qp_attr *attr = &queue->attr;
    int device = device_at(&attr->ah_attr.grh.dgid, queue->gid_type);
    struct queue *peer = (struct queue *)object_named(QUEUE, attr->dest_qp_num);
    /* Packets that it does not expect are not answered, nor those that do not come through. */
    int answers = device >= 0 && peer != NULL && peer->object.device == (uint32_t)device &&
                  !is_down((uint32_t)device) && !is_down(queue->object.device) &&
                  (peer->state == IBV_QPS_RTR || peer->state == IBV_QPS_RTS) &&
                  peer->attr.dest_qp_num == queue->object.name && peer->attr.rq_psn == attr->sq_psn &&
                  peer->attr.path_mtu == attr->path_mtu && peer->gid_type == queue->gid_type &&
                  memcmp(&peer->gid, &attr->ah_attr.grh.dgid, sizeof peer->gid) == 0 &&
                  memcmp(&peer->attr.ah_attr.grh.dgid, &queue->gid, sizeof queue->gid) == 0;
    return answers ? peer : NULL;
}
