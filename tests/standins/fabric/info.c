/* What the stand-in says of its devices: those of EFA, as far as a user of one-sided operations sees them. */
#define _GNU_SOURCE
#include "nic.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MR_MODE (FI_MR_VIRT_ADDR | FI_MR_LOCAL | FI_MR_ALLOCATED | FI_MR_PROV_KEY)
#define CAPS (FI_MSG | FI_RMA | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE | FI_SEND | FI_RECV)

static int number(const char *name, uint32_t low, uint32_t high, uint32_t *value) {
    const char *text = getenv(name);
    if (text == NULL) {
        return 1;
    }
    char *end = NULL;
    unsigned long long given = strtoull(text, &end, 10);
    if (end == text || *end != '\0' || given < low || given > high) {
        fprintf(stderr, "libfabric stand-in: %s=%s is no number from %u to %u\n", name, text, low, high);
        return 0;
    }
    *value = (uint32_t)given;
    return 1;
}

/* It knows memory of GPUs where the process has CUDA, unless the environment says how. */
static int read_hmem(enum hmem *hmem) {
    static const char *const names[] = {"none", "copies", "mapped", "dmabuf"};
    const char *text = getenv("KVIK_STANDIN_HMEM");
    if (text == NULL) {
        *hmem = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL) != NULL ? HMEM_DMABUF : HMEM_NONE;
        return 1;
    }
    for (uint32_t at = 0; at < sizeof names / sizeof *names; at++) {
        if (strcmp(text, names[at]) == 0) {
            *hmem = (enum hmem)at;
            return 1;
        }
    }
    fprintf(stderr, "libfabric stand-in: KVIK_STANDIN_HMEM is none, copies, mapped or dmabuf\n");
    return 0;
}

int options_read(struct options *options) {
    *options = (struct options){.devices = 2, .depth = 256, .software = 1};
    const char *loopback = getenv("KVIK_STANDIN_LOOPBACK");
    if (loopback != NULL && strcmp(loopback, "software") != 0 && strcmp(loopback, "device") != 0) {
        fprintf(stderr, "libfabric stand-in: KVIK_STANDIN_LOOPBACK is software or device\n");
        return 0;
    }
    options->software = loopback == NULL || strcmp(loopback, "software") == 0;
    return read_hmem(&options->hmem) &&
           number("KVIK_STANDIN_DEVICES", 0, MAX_DEVICES, &options->devices) &&
           number("KVIK_STANDIN_DEPTH", 1, MAX_DEPTH, &options->depth);
}

int device_of(const struct fi_info *info, uint32_t *device) {
    const char *name = info->domain_attr != NULL ? info->domain_attr->name : NULL;
    return name != NULL && sscanf(name, "rdmap%us0-rdm", device) == 1 && *device < MAX_DEVICES;
}

__attribute__((visibility("default"))) uint32_t fi_version(void) {
    return getenv("KVIK_STANDIN_OLD") != NULL ? FI_VERSION(1, 17) : FI_VERSION(1, 21);
}

__attribute__((visibility("default"))) const char *fi_strerror(int error) {
    switch (error) {
    case FI_EAVAIL:
        return "Error available";
    case FI_ENOKEY:
        return "Required key not available";
    case FI_ENOAV:
        return "Missing or unavailable address vector";
    case FI_EBADFLAGS:
        return "Flags not supported";
    case FI_EOPBADSTATE:
        return "Operation not permitted in current state";
    default: {
        const char *text = error < FI_ERRNO_OFFSET ? strerrordesc_np(error) : NULL;
        return text != NULL ? text : "Unspecified error";
    }
    }
}

__attribute__((visibility("default"))) void fi_freeinfo(struct fi_info *info) {
    while (info != NULL) {
        struct fi_info *next = info->next;
        if (info->domain_attr != NULL) {
            free(info->domain_attr->name);
        }
        if (info->fabric_attr != NULL) {
            free(info->fabric_attr->name);
            free(info->fabric_attr->prov_name);
        }
        free(info->tx_attr);
        free(info->rx_attr);
        free(info->ep_attr);
        free(info->domain_attr);
        free(info->fabric_attr);
        free(info);
        info = next;
    }
}

static struct fi_info *empty(void) {
    struct fi_info *info = calloc(1, sizeof *info);
    if (info == NULL) {
        return NULL;
    }
    info->tx_attr = calloc(1, sizeof *info->tx_attr);
    info->rx_attr = calloc(1, sizeof *info->rx_attr);
    info->ep_attr = calloc(1, sizeof *info->ep_attr);
    info->domain_attr = calloc(1, sizeof *info->domain_attr);
    info->fabric_attr = calloc(1, sizeof *info->fabric_attr);
    if (!info->tx_attr || !info->rx_attr || !info->ep_attr || !info->domain_attr || !info->fabric_attr) {
        fi_freeinfo(info);
        return NULL;
    }
    return info;
}

static char *copied(const char *text) {
    return text != NULL ? strdup(text) : NULL;
}

__attribute__((visibility("default"))) struct fi_info *fi_dupinfo(const struct fi_info *from) {
    struct fi_info *info = empty();
    if (info == NULL || from == NULL) {
        return info;
    }
    info->caps = from->caps;
    info->mode = from->mode;
    info->addr_format = from->addr_format;
    *info->tx_attr = *from->tx_attr;
    *info->rx_attr = *from->rx_attr;
    *info->ep_attr = *from->ep_attr;
    *info->domain_attr = *from->domain_attr;
    *info->fabric_attr = *from->fabric_attr;
    info->domain_attr->name = copied(from->domain_attr->name);
    info->fabric_attr->name = copied(from->fabric_attr->name);
    info->fabric_attr->prov_name = copied(from->fabric_attr->prov_name);
    return info;
}

/* Whether one of the devices can be what is asked for. */
static int fits(const struct fi_info *hints, uint32_t device, enum hmem hmem) {
    char name[32];
    snprintf(name, sizeof name, "rdmap%us0-rdm", device);
    if (hints == NULL) {
        return 1;
    }
    const char *provider = hints->fabric_attr != NULL ? hints->fabric_attr->prov_name : NULL;
    const struct fi_domain_attr *domain = hints->domain_attr;
    const struct fi_ep_attr *ep = hints->ep_attr;
    if ((provider != NULL && strcasecmp(provider, "efa") != 0) || (hints->caps & ~(uint64_t)(hmem != HMEM_NONE ? CAPS | FI_HMEM : CAPS)) != 0) {
        return 0;
    }
    if (ep != NULL && ((ep->type != FI_EP_UNSPEC && ep->type != FI_EP_RDM) || ep->max_msg_size > LONGEST)) {
        return 0;
    }
    if (domain == NULL) {
        return 1;
    }
    /* Who does not keep these modes cannot use the device. */
    int wanted = hints->caps & FI_HMEM ? MR_MODE | FI_MR_HMEM : MR_MODE;
    int modes = (domain->mr_mode & wanted) == wanted && domain->cq_data_size <= 4;
    return modes && (domain->name == NULL || strcmp(domain->name, name) == 0);
}

static struct fi_info *describe(uint32_t device, uint32_t depth, uint32_t version, uint64_t hmem) {
    struct fi_info *info = empty();
    char name[32];
    if (info == NULL) {
        return NULL;
    }
    snprintf(name, sizeof name, "rdmap%us0-rdm", device);
    info->caps = CAPS | hmem;
    info->addr_format = FI_ADDR_EFA;
    info->src_addrlen = info->dest_addrlen = 0;
    info->tx_attr->caps = info->rx_attr->caps = CAPS;
    info->tx_attr->op_flags = FI_DELIVERY_COMPLETE;
    info->tx_attr->size = info->rx_attr->size = depth;
    info->tx_attr->iov_limit = info->tx_attr->rma_iov_limit = 1;
    info->ep_attr->type = FI_EP_RDM;
    info->ep_attr->max_msg_size = LONGEST;
    info->ep_attr->tx_ctx_cnt = info->ep_attr->rx_ctx_cnt = 1;
    info->domain_attr->name = strdup(name);
    info->domain_attr->threading = FI_THREAD_DOMAIN;
    info->domain_attr->control_progress = info->domain_attr->data_progress = FI_PROGRESS_MANUAL;
    info->domain_attr->resource_mgmt = FI_RM_ENABLED;
    info->domain_attr->av_type = FI_AV_TABLE;
    info->domain_attr->mr_mode = hmem ? MR_MODE | FI_MR_HMEM : MR_MODE;
    info->domain_attr->mr_key_size = 4;
    info->domain_attr->cq_data_size = 4;
    info->domain_attr->ep_cnt = info->domain_attr->cq_cnt = MAX_ENDPOINTS;
    info->domain_attr->mr_cnt = MAX_REGIONS;
    info->domain_attr->mr_iov_limit = 1;
    info->domain_attr->max_err_data = sizeof((struct queue *)NULL)->text;
    info->fabric_attr->name = strdup("efa");
    info->fabric_attr->prov_name = strdup("efa");
    info->fabric_attr->prov_version = fi_version();
    info->fabric_attr->api_version = version;
    return info;
}

__attribute__((visibility("default"))) int fi_getinfo(uint32_t version, const char *node, const char *service,
    uint64_t flags, const struct fi_info *hints, struct fi_info **out) {
    struct options options;
    struct fi_info *first = NULL, **last = &first;
    (void)service;
    (void)flags;
    *out = NULL;
    if (version > fi_version()) {
        return -FI_ENOSYS;
    }
    /* EFA's addresses are no addresses of the internet, so no node is one. */
    if (node != NULL || !options_read(&options)) {
        return -FI_ENODATA;
    }
    for (uint32_t device = 0; device < options.devices; device++) {
        if (!fits(hints, device, options.hmem)) {
            continue;
        }
        /* Memory of GPUs is offered only to who asks for it. */
        *last = describe(device, options.depth, version, hints != NULL ? hints->caps & FI_HMEM : 0);
        if (*last == NULL) {
            fi_freeinfo(first);
            return -FI_ENOMEM;
        }
        last = &(*last)->next;
    }
    *out = first;
    return first != NULL ? 0 : -FI_ENODATA;
}
