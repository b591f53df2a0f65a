/* Breaks one rule of libfabric, which the stand-in must answer by ending the process: `standin-breaks RULE`.
 * It goes through the functions of libfabric's own headers, so the stand-in's tables are tested against
 * those, too. */
#define _GNU_SOURCE
#include <pthread.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_rma.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Since libfabric 1.21, whose headers may not be here. */
#define SHARED_MEMORY_PERMITTED 11

static struct fid_fabric *fabric;
static struct fid_domain *domain;
static struct fid_av *av;
static struct fid_cq *cq;
static struct fid_ep *ep;
static struct fid_mr *mr;
static char bytes[1 << 16];

static void good(int code, const char *what) {
    if (code != 0) {
        fprintf(stderr, "standin-breaks: %s: %d\n", what, code);
        exit(3);
    }
}

static void open_all(int by_device, uint64_t hmem) {
    struct fi_info *hints = fi_allocinfo(), *info = NULL;
    hints->caps = FI_RMA | hmem;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    hints->domain_attr->mr_mode |= hmem != 0 ? FI_MR_HMEM : 0;
    hints->fabric_attr->prov_name = strdup("efa");
    good(fi_getinfo(FI_VERSION(1, 14), NULL, NULL, 0, hints, &info), "fi_getinfo");
    good(fi_fabric(info->fabric_attr, &fabric, NULL), "fi_fabric");
    good(fi_domain(fabric, info, &domain, NULL), "fi_domain");
    struct fi_av_attr peers = {.type = FI_AV_TABLE};
    good(fi_av_open(domain, &peers, &av, NULL), "fi_av_open");
    struct fi_cq_attr queue = {.format = FI_CQ_FORMAT_CONTEXT, .wait_obj = FI_WAIT_NONE};
    good(fi_cq_open(domain, &queue, &cq, NULL), "fi_cq_open");
    good(fi_endpoint(domain, info, &ep, NULL), "fi_endpoint");
    good(fi_ep_bind(ep, &av->fid, 0), "fi_ep_bind");
    good(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV), "fi_ep_bind");
    bool shared = false;
    if (by_device) {
        good(fi_setopt(&ep->fid, FI_OPT_ENDPOINT, SHARED_MEMORY_PERMITTED, &shared, sizeof shared), "fi_setopt");
    }
    good(fi_enable(ep), "fi_enable");
    uint64_t access = FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
    good(fi_mr_reg(domain, bytes, sizeof bytes, access, 0, 0, 0, &mr, NULL), "fi_mr_reg");
    fi_freeinfo(hints);
    fi_freeinfo(info);
}

/* Writes to itself, and leaves the operation in flight: it has not been polled for. */
static fi_addr_t write_to_itself(void) {
    static char context[64];
    char address[64];
    size_t len = sizeof address;
    fi_addr_t peer;
    good(fi_getname(&ep->fid, address, &len), "fi_getname");
    good(fi_av_insert(av, address, 1, &peer, 0, NULL) != 1, "fi_av_insert");
    struct iovec iov = {.iov_base = bytes, .iov_len = 4096};
    struct fi_rma_iov remote = {.addr = (uintptr_t)bytes + 8192, .len = 4096, .key = fi_mr_key(mr)};
    void *desc = fi_mr_desc(mr);
    struct fi_msg_rma message = {.msg_iov = &iov,
        .desc = &desc,
        .iov_count = 1,
        .addr = peer,
        .rma_iov = &remote,
        .rma_iov_count = 1,
        .context = context};
    good((int)fi_writemsg(ep, &message, FI_DELIVERY_COMPLETE), "fi_writemsg");
    return peer;
}

static void *polls(void *argument) {
    struct fi_cq_entry entry;
    while (fi_cq_read(cq, &entry, 1) != -FI_EOTHER) {
    }
    return argument;
}

/* One thread is in the domain for as long as the device takes to answer, and another comes in. */
static void two_threads(void) {
    pthread_t thread;
    good(pthread_create(&thread, NULL, polls, NULL), "pthread_create");
    for (int turn = 0; turn < 100000; turn++) {
        struct fid_mr *more;
        good(fi_mr_reg(domain, bytes, 1, FI_READ, 0, 0, 0, &more, NULL), "fi_mr_reg");
        good(fi_close(&more->fid), "fi_close");
    }
}

int main(int count, char **arguments) {
    const char *rule = count == 2 ? arguments[1] : "";
    if (strcmp(rule, "copies") == 0) {
        setenv("KVIK_STANDIN_HMEM", "dmabuf", 1);
        open_all(1, FI_HMEM);
        return 4;
    }
    open_all(strcmp(rule, "shared") != 0, 0);
    if (strcmp(rule, "threads") == 0) {
        two_threads();
    } else if (strcmp(rule, "memory") == 0) {
        write_to_itself();
        fi_close(&mr->fid);
    } else if (strcmp(rule, "peer") == 0) {
        fi_addr_t peer = write_to_itself();
        fi_av_remove(av, &peer, 1, 0);
    } else if (strcmp(rule, "queue") == 0) {
        fi_close(&cq->fid);
    } else if (strcmp(rule, "vector") == 0) {
        fi_close(&av->fid);
    } else if (strcmp(rule, "domain") == 0) {
        fi_close(&domain->fid);
    } else if (strcmp(rule, "fabric") == 0) {
        fi_close(&fabric->fid);
    } else if (strcmp(rule, "none") == 0) {
        write_to_itself();
        good(fi_close(&ep->fid), "fi_close");
        struct fid *rest[] = {&mr->fid, &cq->fid, &av->fid, &domain->fid, &fabric->fid};
        for (size_t at = 0; at < sizeof rest / sizeof *rest; at++) {
            good(fi_close(rest[at]), "fi_close");
        }
        return 0;
    }
    return 4;
}
