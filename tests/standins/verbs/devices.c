/* Devices, their ports, and what they tell of themselves. */
#define _GNU_SOURCE
#include "nic.h"

#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#undef ibv_get_device_list
#undef ibv_query_port

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
struct board *board;

static struct ibv_device devices[MAX_DEVICES];
static uint32_t lists;

static uint32_t option(const char *name, uint32_t usual, uint32_t least, uint32_t most) {
    const char *text = getenv(name);
    if (text == NULL) {
        return usual;
    }
    char *end = NULL;
    unsigned long value = strtoul(text, &end, 10);
    if (end == text || *end != '\0' || value < least || value > most) {
        broken("%s=%s, and not %u to %u", name, text, least, most);
    }
    return (uint32_t)value;
}

struct options options_read(void) {
    return (struct options){.devices = option("KVIK_STANDIN_DEVICES", 2, 0, MAX_DEVICES),
        .depth = option("KVIK_STANDIN_DEPTH", 256, 2, MAX_DEPTH),
        .pieces = option("KVIK_STANDIN_PIECES", MAX_PIECES, 1, MAX_PIECES)};
}

int ask(const struct request *request, int fd, struct reply *reply) {
    int error = link_ask(request, sizeof *request, fd, reply, sizeof *reply);
    return error != 0 ? error : reply->error;
}

int ask_about(uint32_t kind, uint32_t name, struct reply *reply) {
    struct request request = {.kind = kind, .name = name};
    return ask(&request, -1, reply);
}

/* The board comes back. */
static int greet(int fd) {
    struct request hello = {.kind = HELLO};
    struct reply reply;
    int fds[2], count = 0;
    if (send_with(fd, &hello, sizeof hello, NULL, 0) != sizeof hello ||
        receive_with(fd, &reply, sizeof reply, fds, &count) != sizeof reply || count != 1) {
        return -1;
    }
    board = shared_mapped(fds[0], sizeof *board);
    close(fds[0]);
    if (getenv("KVIK_STANDIN_SEED") == NULL) {
        fprintf(stderr, "libibverbs stand-in: KVIK_STANDIN_SEED=%llu\n", (unsigned long long)reply.seed);
    }
    return board != NULL ? 0 : -1;
}

EXPORT struct ibv_device **ibv_get_device_list(int *count) {
    struct options options = options_read();
    struct ibv_device **list = calloc(options.devices + 1, sizeof *list);
    if (list == NULL) {
        return NULL;
    }
    pthread_mutex_lock(&lock);
    for (uint32_t at = 0; at < options.devices; at++) {
        devices[at].node_type = IBV_NODE_CA;
        devices[at].transport_type = IBV_TRANSPORT_IB;
        snprintf(devices[at].name, sizeof devices[at].name, "roce%u", at);
        list[at] = &devices[at];
    }
    lists++;
    pthread_mutex_unlock(&lock);
    if (count != NULL) {
        *count = (int)options.devices;
    }
    return list;
}

EXPORT void ibv_free_device_list(struct ibv_device **list) {
    pthread_mutex_lock(&lock);
    lists--;
    pthread_mutex_unlock(&lock);
    free(list);
}

EXPORT const char *ibv_get_device_name(struct ibv_device *device) {
    return device->name;
}

EXPORT struct ibv_context *ibv_open_device(struct ibv_device *device) {
    struct context *context = calloc(1, sizeof *context);
    int pipes[2];
    int error = link_up(greet);
    if (lists == 0) {
        broken("a device is opened when the list that it was in is freed");
    }
    if (context == NULL || error != 0 || pipe2(pipes, O_CLOEXEC) < 0) {
        free(context);
        errno = error != 0 ? error : ENOMEM;
        return NULL;
    }
    fcntl(pipes[1], F_SETFL, O_NONBLOCK);
    context->device = (uint32_t)(device - devices);
    struct request request = {.kind = OPEN_CONTEXT, .device = context->device};
    struct reply reply;
    error = ask(&request, pipes[1], &reply);
    close(pipes[1]);
    if (error != 0) {
        close(pipes[0]);
        free(context);
        errno = error;
        return NULL;
    }
    context->name = reply.name;
    context->ibv.device = device;
    context->ibv.async_fd = pipes[0];
    context->ibv.cmd_fd = -1;
    context->ibv.num_comp_vectors = 1;
    context->ibv.ops.poll_cq = poll_cq;
    context->ibv.ops.req_notify_cq = req_notify_cq;
    context->ibv.ops.post_send = post_send;
    context->ibv.ops.post_recv = post_recv;
    return &context->ibv;
}

EXPORT int ibv_close_device(struct ibv_context *ibv) {
    struct context *context = context_of(ibv);
    if (context->objects > 0) {
        broken("a device is closed before %u things that were made of it", context->objects);
    }
    struct reply reply;
    int error = ask_about(CLOSE, context->name, &reply);
    close(ibv->async_fd);
    free(context);
    return error;
}

EXPORT int ibv_query_device(struct ibv_context *ibv, struct ibv_device_attr *attr) {
    struct options options = options_read();
    memset(attr, 0, sizeof *attr);
    snprintf(attr->fw_ver, sizeof attr->fw_ver, "stand-in");
    attr->node_guid = attr->sys_image_guid = context_of(ibv)->device + 1;
    attr->max_mr_size = UINT64_MAX;
    attr->page_size_cap = 4096;
    attr->max_qp = 4096;
    attr->max_qp_wr = (int)options.depth;
    attr->max_sge = attr->max_sge_rd = (int)options.pieces;
    attr->max_cq = 4096;
    attr->max_cqe = MAX_COMPLETIONS;
    attr->max_mr = 65535;
    attr->max_pd = 4096;
    attr->max_qp_rd_atom = attr->max_qp_init_rd_atom = MAX_READS;
    attr->max_pkeys = 1;
    attr->phys_port_cnt = PORT;
    return 0;
}

static int ask_port(struct ibv_context *ibv, uint32_t port, struct reply *reply) {
    struct request request = {.kind = ASK_PORT, .device = context_of(ibv)->device};
    return port == PORT ? ask(&request, -1, reply) : EINVAL;
}

/* The symbol's structure ends before the last field of the header's. */
EXPORT int ibv_query_port(struct ibv_context *ibv, uint8_t port, struct _compat_ibv_port_attr *into) {
    struct ibv_port_attr *attr = (struct ibv_port_attr *)into;
    struct reply reply;
    int error = ask_port(ibv, port, &reply);
    if (error != 0) {
        return error;
    }
    memset(attr, 0, offsetof(struct ibv_port_attr, port_cap_flags2));
    attr->state = reply.down ? IBV_PORT_DOWN : IBV_PORT_ACTIVE;
    attr->max_mtu = attr->active_mtu = IBV_MTU_4096;
    attr->gid_tbl_len = GIDS;
    attr->max_msg_sz = LONGEST;
    attr->pkey_tbl_len = 1;
    attr->active_width = 2;
    attr->active_speed = 32;
    attr->phys_state = reply.down ? 3 : 5;
    attr->link_layer = IBV_LINK_LAYER_ETHERNET;
    /* As a subnet's manager would. No packet of RoCE has it. */
    attr->lid = (uint16_t)reply.name;
    return 0;
}

EXPORT int ibv_query_gid(struct ibv_context *ibv, uint8_t port, int index, union ibv_gid *gid) {
    struct reply reply;
    uint32_t type;
    int error = ask_port(ibv, port, &reply);
    if (error == 0 && !gid_at(context_of(ibv)->device, reply.name, (uint32_t)index, gid, &type)) {
        error = EINVAL;
    }
    errno = error;
    return error == 0 ? 0 : -1;
}

EXPORT ssize_t _ibv_query_gid_table(
    struct ibv_context *ibv, struct ibv_gid_entry *entries, size_t most, uint32_t flags, size_t size) {
    struct reply reply;
    int error = flags != 0 || size != sizeof *entries ? EINVAL : ask_port(ibv, PORT, &reply);
    uint32_t count = 0;
    for (; error == 0 && count < GIDS && count < most; count++) {
        struct ibv_gid_entry *entry = &entries[count];
        *entry = (struct ibv_gid_entry){.gid_index = count, .port_num = PORT};
        gid_at(context_of(ibv)->device, reply.name, count, &entry->gid, &entry->gid_type);
        entry->ndev_ifindex = if_nametoindex("lo");
    }
    return error == 0 ? (ssize_t)count : -error;
}

/* Whether the event is still of something, which is counted then. */
static int hand_out(const struct happening *happening, struct ibv_async_event *event) {
    event->event_type = (enum ibv_event_type)happening->type;
    event->element.port_num = PORT;
    if (happening->type == IBV_EVENT_CQ_ERR) {
        struct completions *of = completions_named(happening->name);
        event->element.cq = of != NULL ? &of->ibv : NULL;
        return of != NULL && ++of->told;
    }
    if (happening->type <= IBV_EVENT_QP_ACCESS_ERR) {
        struct queue *of = queue_named(happening->name);
        event->element.qp = of != NULL ? &of->ibv : NULL;
        return of != NULL && ++of->told;
    }
    return 1;
}

EXPORT int ibv_get_async_event(struct ibv_context *ibv, struct ibv_async_event *event) {
    for (;;) {
        struct happening happening;
        ssize_t got = read(ibv->async_fd, &happening, sizeof happening);
        if (got != sizeof happening) {
            errno = got == 0 ? EIO : errno;
            return -1;
        }
        pthread_mutex_lock(&lock);
        int there = hand_out(&happening, event);
        pthread_mutex_unlock(&lock);
        if (there) {
            return 0;
        }
    }
}

EXPORT void ibv_ack_async_event(struct ibv_async_event *event) {
    pthread_mutex_lock(&lock);
    if (event->event_type == IBV_EVENT_CQ_ERR) {
        container(event->element.cq, struct completions, ibv)->told--;
    } else if (event->event_type <= IBV_EVENT_QP_ACCESS_ERR) {
        container(event->element.qp, struct queue, ibv)->told--;
    }
    pthread_mutex_unlock(&lock);
}

EXPORT const char *ibv_wc_status_str(enum ibv_wc_status status) {
    switch (status) {
    case IBV_WC_SUCCESS:
        return "success";
    case IBV_WC_LOC_LEN_ERR:
        return "local length error";
    case IBV_WC_LOC_QP_OP_ERR:
        return "local QP operation error";
    case IBV_WC_LOC_PROT_ERR:
        return "local protection error";
    case IBV_WC_WR_FLUSH_ERR:
        return "Work Request Flushed Error";
    case IBV_WC_REM_INV_REQ_ERR:
        return "remote invalid request error";
    case IBV_WC_REM_ACCESS_ERR:
        return "remote access error";
    case IBV_WC_REM_OP_ERR:
        return "remote operation error";
    case IBV_WC_RETRY_EXC_ERR:
        return "transport retry counter exceeded";
    case IBV_WC_RNR_RETRY_EXC_ERR:
        return "RNR retry counter exceeded";
    default:
        return "another error of the device";
    }
}

EXPORT const char *ibv_event_type_str(enum ibv_event_type type) {
    switch (type) {
    case IBV_EVENT_CQ_ERR:
        return "CQ error";
    case IBV_EVENT_QP_FATAL:
        return "local work queue catastrophic error";
    case IBV_EVENT_QP_REQ_ERR:
        return "invalid request local work queue error";
    case IBV_EVENT_QP_ACCESS_ERR:
        return "local access violation work queue error";
    case IBV_EVENT_DEVICE_FATAL:
        return "local catastrophic error";
    case IBV_EVENT_PORT_ACTIVE:
        return "port active";
    case IBV_EVENT_PORT_ERR:
        return "port error";
    case IBV_EVENT_GID_CHANGE:
        return "GID table change";
    default:
        return "another event";
    }
}
