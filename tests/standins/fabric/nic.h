/* The stand-in's side in the process that uses it: objects of libfabric, and the rules that their users keep.
 *
 * It has what kvik calls; places in libfabric's tables that kvik never calls are empty. */
#ifndef STANDIN_NIC_H
#define STANDIN_NIC_H

#include "link.h"
#include "wire.h"

#include <pthread.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#define container(at, type, field) ((type *)((char *)(at) - offsetof(type, field)))

/* rules.c: a broken rule of libfabric ends the process, with a line that names it. */

/* Who is inside a domain: FI_THREAD_DOMAIN lets one thread at a time in. */
struct gate {
    _Atomic int owner;
    const char *_Atomic call;
};
void enter(struct gate *gate, const char *call);
void leave(struct gate *gate);

/* link.c: the connection to the device's daemon. All return 0, or an errno. */

struct link {
    struct board *board;
    struct tally *tally;
};
int link_open(struct link *link);
int ask(const struct request *request, int fd, struct reply *reply);
/* Wakes the daemon if it sleeps. */
void link_ring(void);

/* info.c */

struct options {
    uint32_t devices, depth;
    /* Operations within a process and device are the software's. */
    int software;
    /* How it knows memory of GPUs. */
    enum hmem {
        /* Not at all: built without CUDA, or in a process without it. */
        HMEM_NONE,
        /* By copies of CUDA's: the device does not reach a GPU. */
        HMEM_COPIES,
        /* By the device, and not by dma-bufs. */
        HMEM_MAPPED,
        HMEM_DMABUF,
    } hmem;
};
/* False, with a line on stderr, if the environment asks for what cannot be. */
int options_read(struct options *options);
int device_of(const struct fi_info *info, uint32_t *device);

/* Of libfabric 1.18, 1.20 and 1.21, whose headers may not be here. */
#define KNOWS_DMABUF FI_VERSION(1, 20)
#define CUDA_API_PERMITTED 10
#define SHARED_MEMORY_PERMITTED 11
#define MR_DMABUF (1ULL << 40)

/* domain.c */

struct fabric {
    struct fid_fabric fid;
    _Atomic uint32_t domains;
};

struct domain {
    struct fid_domain fid;
    struct gate gate;
    struct fabric *fabric;
    struct link link;
    uint32_t device, number;
    int software;
    /* Opened for memory of GPUs, by the version of the interface that was asked for. */
    enum hmem hmem;
    uint32_t version;
    uint32_t vectors, queues, endpoints, regions;
};

struct region {
    struct fid_mr fid;
    struct domain *domain;
    uint64_t at, len, access;
    /* Where the bytes are, and the mapping of a dma-buf. */
    uint64_t place;
    void *mapped;
    size_t mapped_len;
    /* Own operations that use it. */
    uint32_t users;
    struct region *next;
};

int domain_open(struct fid_fabric *fabric, struct fi_info *info, struct fid_domain **out, void *context);
int fabric_trywait(struct fid_fabric *fabric, struct fid **fids, int count);

/* peers.c */

struct vector {
    struct fid_av fid;
    struct domain *domain;
    uint32_t bound, size;
    struct slot {
        struct address address;
        uint32_t taken, users;
    } *slots;
};
int vector_open(struct fid_domain *domain, struct fi_av_attr *attr, struct fid_av **out, void *context);

/* queue.c */

struct queue {
    struct fid_cq fid;
    struct domain *domain;
    enum fi_cq_format format;
    struct endpoint *first;
    /* The error that is to be fetched, and the endpoint that it is of. */
    struct endpoint *failed;
    char text[160];
};
int queue_open(struct fid_domain *domain, struct fi_cq_attr *attr, struct fid_cq **out, void *context);
const char *status_text(int status);

/* endpoint.c */

enum { NO_SLOT = UINT32_MAX };

struct pending {
    void *context;
    struct region *region;
    /* Of the address vector, or NO_SLOT. */
    uint32_t slot, taken;
    uint64_t len, flags;
};

struct endpoint {
    struct fid_ep fid;
    struct domain *domain;
    struct vector *vector;
    struct queue *queue;
    struct endpoint *next_of_queue;
    struct address address;
    uint32_t depth, in_flight;
    /* Whether what goes to the own host goes by the device, too. */
    int by_device;
    /* Whether it makes no copies by CUDA. */
    int copies_forbidden;
    /* Ids; those from `in_flight` on are free. */
    uint32_t *free;
    struct queues *queues;
    uint64_t name;
    struct pending *pending;
    struct software *software;
    struct endpoint *next_local;
};
int endpoint_open(struct fid_domain *domain, struct fi_info *info, struct fid_ep **out, void *context);
/* The next completion, without taking it; and taking it. */
int endpoint_peek(struct endpoint *endpoint, struct done *done);
void endpoint_take(struct endpoint *endpoint);

/* software.c: operations between endpoints of one device in one process, which EFA's software moves: only
 * while the initiator polls, and beside the device and its faults. */

void software_add(struct endpoint *endpoint);
/* When it returns nothing is moved for the endpoint any more, from it or into it. */
void software_remove(struct endpoint *endpoint);
/* Takes the order if the peer is in this process and on this device. */
int software_post(struct endpoint *endpoint, const struct order *order);
void software_progress(struct endpoint *endpoint);
int software_peek(struct endpoint *endpoint, struct done *done);
void software_take(struct endpoint *endpoint);
void region_add(struct region *region);
void region_remove(struct region *region);

#endif
