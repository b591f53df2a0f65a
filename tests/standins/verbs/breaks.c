/* Breaks a rule of libibverbs, which the stand-in must answer by ending the process, or asks for what must be
 * refused: `standin-breaks RULE`. It goes through the functions of libibverbs' own header, so the stand-in's
 * tables are tested against those, too. */
#define _GNU_SOURCE
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DEPTH = 4, PLACES = 16 };

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_comp_channel *channel;
static struct ibv_cq *cq;
static struct ibv_mr *mr;
static struct ibv_qp *qps[2];
static union ibv_gid gid;
static char bytes[1 << 16];
/* What requests name: the own memory's key, the first byte at the peer, and what the peer allows. */
static uint32_t lkey;
static uint64_t remote;
static unsigned allowed = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;

static void good(int so, const char *what) {
    if (!so) {
        fprintf(stderr, "standin-breaks: not so: %s (errno %d)\n", what, errno);
        exit(3);
    }
}
#define GOOD(so) good(so, #so)

static struct ibv_qp *make(struct ibv_cq *of, uint32_t depth) {
    struct ibv_qp_init_attr init = {.send_cq = of, .recv_cq = of, .qp_type = IBV_QPT_RC};
    init.cap = (struct ibv_qp_cap){.max_send_wr = depth, .max_recv_wr = 1, .max_send_sge = 2};
    return ibv_create_qp(pd, &init);
}

static void open_all(void) {
    int count;
    struct ibv_device **list = ibv_get_device_list(&count);
    GOOD(list != NULL && count == 2 && list[2] == NULL);
    GOOD(strcmp(ibv_get_device_name(list[1]), "roce1") == 0);
    context = ibv_open_device(list[0]);
    GOOD(context != NULL);
    ibv_free_device_list(list);
    struct ibv_port_attr port;
    GOOD(ibv_query_port(context, 1, &port) == 0 && port.state == IBV_PORT_ACTIVE && port.gid_tbl_len == 6);
    GOOD(ibv_query_port(context, 2, &port) == EINVAL);
    GOOD(ibv_query_gid(context, 1, 3, &gid) == 0 && ibv_query_gid(context, 1, 6, &gid) == -1);
    GOOD(ibv_query_gid(context, 1, 3, &gid) == 0);
    struct ibv_gid_entry entries[8];
    GOOD(ibv_query_gid_table(context, entries, 8, 0) == 6 && entries[3].gid_type == IBV_GID_TYPE_ROCE_V2);
    GOOD(memcmp(&entries[3].gid, &gid, sizeof gid) == 0);
    pd = ibv_alloc_pd(context);
    channel = ibv_create_comp_channel(context);
    cq = ibv_create_cq(context, PLACES, NULL, channel, 0);
    int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    mr = ibv_reg_mr(pd, bytes, sizeof bytes, access);
    GOOD(pd != NULL && channel != NULL && cq != NULL && mr != NULL);
    lkey = mr->lkey;
    remote = (uintptr_t)bytes + 4096;
    for (int side = 0; side < 2; side++) {
        qps[side] = make(cq, DEPTH);
        GOOD(qps[side] != NULL);
    }
}

static const int INIT = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
static const int RTR = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                       IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
static const int RTS = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                       IBV_QP_MAX_QP_RD_ATOMIC;

static struct ibv_qp_attr attributes(enum ibv_qp_state state, uint32_t peer) {
    struct ibv_qp_attr attr = {.qp_state = state,
        .qp_access_flags = allowed,
        .port_num = 1,
        .path_mtu = IBV_MTU_1024,
        .dest_qp_num = peer,
        .max_dest_rd_atomic = 1,
        .max_rd_atomic = 1,
        .min_rnr_timer = 1,
        .timeout = 12,
        .retry_cnt = 1,
        .rnr_retry = 1};
    attr.ah_attr = (struct ibv_ah_attr){
        .is_global = 1, .port_num = 1, .grh = {.dgid = gid, .sgid_index = 3, .hop_limit = 64}};
    return attr;
}

static int change(struct ibv_qp *qp, struct ibv_qp_attr attr, int mask) {
    return ibv_modify_qp(qp, &attr, mask);
}

static void connect_with(uint8_t reads) {
    for (int side = 0; side < 2; side++) {
        uint32_t peer = qps[1 - side]->qp_num;
        struct ibv_qp_attr rts = attributes(IBV_QPS_RTS, peer);
        rts.max_rd_atomic = reads;
        GOOD(change(qps[side], attributes(IBV_QPS_INIT, peer), INIT) == 0);
        GOOD(change(qps[side], attributes(IBV_QPS_RTR, peer), RTR) == 0);
        GOOD(change(qps[side], rts, RTS) == 0 && qps[side]->state == IBV_QPS_RTS);
    }
}

static int post(enum ibv_wr_opcode opcode, unsigned flags, int pieces, uint32_t key) {
    struct ibv_sge sges[3];
    for (int at = 0; at < 3; at++) {
        sges[at] = (struct ibv_sge){.addr = (uintptr_t)bytes, .length = 64, .lkey = lkey};
    }
    struct ibv_send_wr wr = {
        .wr_id = 7, .sg_list = sges, .num_sge = pieces, .opcode = opcode, .send_flags = flags}, *bad = NULL;
    wr.wr.rdma.remote_addr = remote;
    wr.wr.rdma.rkey = key;
    int error = ibv_post_send(qps[0], &wr, &bad);
    GOOD(error == 0 || bad == &wr);
    return error;
}

static int write_one(unsigned flags) {
    return post(IBV_WR_RDMA_WRITE, flags, 1, mr->rkey);
}

static struct ibv_wc completion(void) {
    struct ibv_wc wc;
    int got = 0;
    while (got == 0) {
        got = ibv_poll_cq(cq, 1, &wc);
    }
    GOOD(got == 1);
    return wc;
}

static void states(void) {
    uint32_t peer = qps[1]->qp_num;
    struct ibv_qp_attr wrong = attributes(IBV_QPS_INIT, peer);
    GOOD(write_one(IBV_SEND_SIGNALED) == EINVAL);
    GOOD(change(qps[0], attributes(IBV_QPS_RTR, peer), RTR) == EINVAL);
    GOOD(change(qps[0], wrong, INIT & ~IBV_QP_PORT) == EINVAL);
    GOOD(change(qps[0], wrong, INIT | IBV_QP_TIMEOUT) == EINVAL);
    wrong.port_num = 2;
    GOOD(change(qps[0], wrong, INIT) == EINVAL);
    GOOD(change(qps[0], attributes(IBV_QPS_ERR, peer), IBV_QP_STATE) == EINVAL);
    GOOD(change(qps[0], attributes(IBV_QPS_INIT, peer), INIT) == 0);
    GOOD(write_one(IBV_SEND_SIGNALED) == EINVAL);
    for (int bit = 0; bit < 25; bit++) {
        if ((RTR & 1 << bit) != 0 && 1 << bit != IBV_QP_STATE) {
            GOOD(change(qps[0], attributes(IBV_QPS_RTR, peer), RTR & ~(1 << bit)) == EINVAL);
        }
    }
    wrong = attributes(IBV_QPS_RTR, peer);
    wrong.ah_attr.is_global = 0;
    GOOD(change(qps[0], wrong, RTR) == EINVAL);
    wrong = attributes(IBV_QPS_RTR, peer);
    wrong.ah_attr.grh.sgid_index = 6;
    GOOD(change(qps[0], wrong, RTR) == EINVAL);
    wrong = attributes(IBV_QPS_RTR, peer);
    wrong.ah_attr.grh.dgid.raw[14] ^= 1;
    GOOD(change(qps[0], wrong, RTR) == EHOSTUNREACH);
    wrong = attributes(IBV_QPS_RTR, peer);
    wrong.max_dest_rd_atomic = 17;
    GOOD(change(qps[0], wrong, RTR) == EINVAL);
    GOOD(change(qps[0], attributes(IBV_QPS_RTR, peer), RTR) == 0);
    GOOD(write_one(IBV_SEND_SIGNALED) == EINVAL);
    GOOD(change(qps[0], attributes(IBV_QPS_RTS, peer), RTS & ~IBV_QP_SQ_PSN) == EINVAL);
    GOOD(change(qps[0], attributes(IBV_QPS_RTS, peer), RTS) == 0);
    /* The peer is not there yet: two tries of 17 ms. */
    GOOD(write_one(0) == 0 && completion().status == IBV_WC_RETRY_EXC_ERR);
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    GOOD(ibv_query_qp(qps[0], &attr, IBV_QP_STATE, &init) == 0 && attr.qp_state == IBV_QPS_ERR);
    GOOD(write_one(0) == 0 && completion().status == IBV_WC_WR_FLUSH_ERR);
    GOOD(change(qps[0], attributes(IBV_QPS_RTS, peer), RTS) == EINVAL);
    GOOD(change(qps[0], attributes(IBV_QPS_RESET, peer), IBV_QP_STATE) == 0);
    connect_with(1);
    GOOD(write_one(IBV_SEND_SIGNALED) == 0 && completion().status == IBV_WC_SUCCESS);
}

static void bounds(void) {
    struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC};
    init.cap = (struct ibv_qp_cap){.max_send_wr = 257, .max_send_sge = 1};
    GOOD(ibv_create_qp(pd, &init) == NULL && errno == EINVAL);
    init.cap = (struct ibv_qp_cap){.max_send_wr = 1, .max_send_sge = 17};
    GOOD(ibv_create_qp(pd, &init) == NULL && errno == EINVAL);
    init.cap = (struct ibv_qp_cap){.max_send_wr = 1, .max_send_sge = 1, .max_inline_data = 1};
    GOOD(ibv_create_qp(pd, &init) == NULL && errno == EINVAL);
    GOOD(ibv_reg_mr(pd, bytes, 0, 0) == NULL && errno == EINVAL);
    GOOD(ibv_reg_mr(pd, bytes, 1, IBV_ACCESS_REMOTE_WRITE) == NULL && errno == EINVAL);
    GOOD(ibv_reg_mr(pd, (void *)4096, 1, 0) == NULL && errno == EFAULT);
    GOOD(ibv_reg_mr(pd, (void *)(uintptr_t)"constant", 1, IBV_ACCESS_LOCAL_WRITE) == NULL && errno == EFAULT);
    connect_with(1);
    GOOD(post(IBV_WR_RDMA_WRITE, 0, 3, mr->rkey) == EINVAL);
    GOOD(post(IBV_WR_RDMA_WRITE, IBV_SEND_INLINE, 1, mr->rkey) == EINVAL);
    GOOD(post(IBV_WR_SEND, 0, 1, mr->rkey) == EINVAL);
    for (int turn = 0; turn < 3; turn++) {
        /* Places come back with a completion only, though the device has long been done. */
        GOOD(ibv_req_notify_cq(cq, 0) == 0);
        for (int at = 0; at < DEPTH - 1; at++) {
            GOOD(write_one(0) == 0);
        }
        GOOD(write_one(IBV_SEND_SIGNALED) == 0 && write_one(IBV_SEND_SIGNALED) == ENOMEM);
        struct ibv_cq *of;
        void *user;
        GOOD(ibv_get_cq_event(channel, &of, &user) == 0 && of == cq);
        ibv_ack_cq_events(cq, 1);
        GOOD(write_one(IBV_SEND_SIGNALED) == ENOMEM);
        GOOD(completion().status == IBV_WC_SUCCESS);
    }
    struct ibv_recv_wr receive = {.wr_id = 1}, *bad;
    GOOD(ibv_post_recv(qps[1], &receive, &bad) == 0 && ibv_post_recv(qps[1], &receive, &bad) == ENOMEM);
    GOOD(ibv_dealloc_pd(pd) == EBUSY && ibv_destroy_cq(cq) == EBUSY);
    GOOD(ibv_destroy_comp_channel(channel) == EBUSY);
    GOOD(ibv_resize_cq(cq, PLACES * 2) == 0 && cq->cqe == PLACES * 2);
}

/* The peer's queue pair has failed with the request, and says so. */
static void told(enum ibv_event_type type) {
    struct ibv_async_event event;
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    GOOD(ibv_get_async_event(context, &event) == 0 && event.event_type == type);
    GOOD(event.element.qp == qps[1]);
    ibv_ack_async_event(&event);
    GOOD(ibv_query_qp(qps[1], &attr, IBV_QP_STATE, &init) == 0 && attr.qp_state == IBV_QPS_ERR);
}

static void reads(void) {
    connect_with(2);
    /* Two at a time, where the peer answers one. */
    struct ibv_sge sge = {.addr = (uintptr_t)bytes, .length = 64, .lkey = mr->lkey};
    struct ibv_send_wr wrs[2] = {{.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_READ}}, *bad;
    wrs[0].wr.rdma.remote_addr = (uintptr_t)bytes + 4096;
    wrs[0].wr.rdma.rkey = mr->rkey;
    wrs[1] = wrs[0];
    wrs[0].next = &wrs[1];
    GOOD(ibv_post_send(qps[0], wrs, &bad) == 0 && completion().status == IBV_WC_REM_INV_REQ_ERR);
    told(IBV_EVENT_QP_REQ_ERR);
}

/* A write of its own on queue pairs that were connected anew, and how it ends. */
static enum ibv_wc_status ends(enum ibv_wr_opcode opcode, uint32_t key) {
    for (int side = 0; side < 2; side++) {
        GOOD(change(qps[side], attributes(IBV_QPS_RESET, 0), IBV_QP_STATE) == 0);
    }
    connect_with(1);
    GOOD(post(opcode, 0, 1, key) == 0);
    return completion().status;
}

static void errors(void) {
    GOOD(ends(IBV_WR_RDMA_WRITE_WITH_IMM, mr->rkey) == IBV_WC_RNR_RETRY_EXC_ERR);
    lkey ^= 1;
    GOOD(ends(IBV_WR_RDMA_WRITE, mr->rkey) == IBV_WC_LOC_PROT_ERR);
    lkey ^= 1;
    GOOD(ends(IBV_WR_RDMA_WRITE, mr->rkey ^ 1) == IBV_WC_REM_ACCESS_ERR);
    told(IBV_EVENT_QP_ACCESS_ERR);
    remote = (uintptr_t)bytes + sizeof bytes - 63;
    GOOD(ends(IBV_WR_RDMA_READ, mr->rkey) == IBV_WC_REM_ACCESS_ERR);
    told(IBV_EVENT_QP_ACCESS_ERR);
    remote = (uintptr_t)bytes + 4096;
    struct ibv_mr *to_read = ibv_reg_mr(pd, bytes, sizeof bytes, IBV_ACCESS_REMOTE_READ);
    GOOD(ends(IBV_WR_RDMA_WRITE, to_read->rkey) == IBV_WC_REM_ACCESS_ERR);
    told(IBV_EVENT_QP_ACCESS_ERR);
    struct ibv_pd *other = ibv_alloc_pd(context);
    struct ibv_mr *others = ibv_reg_mr(other, bytes, sizeof bytes, IBV_ACCESS_REMOTE_READ);
    GOOD(ends(IBV_WR_RDMA_READ, others->rkey) == IBV_WC_REM_ACCESS_ERR);
    told(IBV_EVENT_QP_ACCESS_ERR);
    GOOD(ibv_dealloc_pd(other) == EBUSY && ibv_dereg_mr(others) == 0 && ibv_dealloc_pd(other) == 0);
    GOOD(ibv_dereg_mr(to_read) == 0);
    allowed = IBV_ACCESS_REMOTE_WRITE;
    GOOD(ends(IBV_WR_RDMA_READ, mr->rkey) == IBV_WC_REM_INV_REQ_ERR);
    told(IBV_EVENT_QP_REQ_ERR);
    struct ibv_recv_wr receive = {.wr_id = 9}, *bad;
    for (int side = 0; side < 2; side++) {
        GOOD(change(qps[side], attributes(IBV_QPS_RESET, 0), IBV_QP_STATE) == 0);
    }
    connect_with(1);
    GOOD(ibv_post_recv(qps[1], &receive, &bad) == 0);
    GOOD(change(qps[1], attributes(IBV_QPS_ERR, 0), IBV_QP_STATE) == 0);
    struct ibv_wc wc = completion();
    GOOD(wc.wr_id == 9 && wc.status == IBV_WC_WR_FLUSH_ERR && wc.qp_num == qps[1]->qp_num);
}

static void overflow(void) {
    connect_with(1);
    struct ibv_cq *small = ibv_create_cq(context, 1, NULL, NULL, 0);
    struct ibv_qp *both[2] = {make(small, DEPTH), make(small, DEPTH)};
    struct ibv_qp *before[2] = {qps[0], qps[1]};
    memcpy(qps, both, sizeof qps);
    connect_with(1);
    GOOD(write_one(IBV_SEND_SIGNALED) == 0 && write_one(IBV_SEND_SIGNALED) == 0);
    struct ibv_async_event event;
    GOOD(ibv_get_async_event(context, &event) == 0 && event.event_type == IBV_EVENT_CQ_ERR);
    GOOD(event.element.cq == small);
    ibv_ack_async_event(&event);
    GOOD(ibv_destroy_qp(qps[0]) == 0 && ibv_destroy_qp(qps[1]) == 0 && ibv_destroy_cq(small) == 0);
    memcpy(qps, before, sizeof qps);
}

static void close_all(void) {
    GOOD(ibv_destroy_qp(qps[0]) == 0 && ibv_destroy_qp(qps[1]) == 0 && ibv_dereg_mr(mr) == 0);
    GOOD(ibv_destroy_cq(cq) == 0 && ibv_destroy_comp_channel(channel) == 0 && ibv_dealloc_pd(pd) == 0);
    GOOD(ibv_close_device(context) == 0);
}

int main(int count, char **arguments) {
    const char *rule = count == 2 ? arguments[1] : "";
    open_all();
    if (strcmp(rule, "states") == 0) {
        states();
    } else if (strcmp(rule, "bounds") == 0) {
        bounds();
    } else if (strcmp(rule, "reads") == 0) {
        reads();
    } else if (strcmp(rule, "errors") == 0) {
        errors();
    } else if (strcmp(rule, "overflow") == 0) {
        overflow();
    } else if (strcmp(rule, "memory") == 0) {
        connect_with(1);
        GOOD(write_one(IBV_SEND_SIGNALED) == 0);
        ibv_dereg_mr(mr);
    } else if (strcmp(rule, "event") == 0) {
        struct ibv_cq *of;
        void *user;
        connect_with(1);
        GOOD(ibv_req_notify_cq(cq, 0) == 0 && write_one(IBV_SEND_SIGNALED) == 0);
        GOOD(ibv_get_cq_event(channel, &of, &user) == 0 && of == cq && completion().wr_id == 7);
        GOOD(ibv_destroy_qp(qps[0]) == 0 && ibv_destroy_qp(qps[1]) == 0);
        ibv_destroy_cq(cq);
    } else if (strcmp(rule, "device") == 0) {
        ibv_close_device(context);
    } else if (strcmp(rule, "list") == 0) {
        ibv_open_device(context->device);
    } else {
        return 4;
    }
    close_all();
    return 0;
}
