/* Fabrics, domains and registrations. */
#define _GNU_SOURCE
#include "nic.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static int fabric_close(struct fid *fid) {
    struct fabric *fabric = container(fid, struct fabric, fid.fid);
    if (atomic_load(&fabric->domains) > 0) {
        broken("a fabric is closed before %u of its domains", atomic_load(&fabric->domains));
    }
    free(fabric);
    return 0;
}

static struct fi_ops fabric_fid = {.size = sizeof(struct fi_ops), .close = fabric_close};
static struct fi_ops_fabric fabric_ops = {
    .size = sizeof(struct fi_ops_fabric), .domain = domain_open, .trywait = fabric_trywait};

__attribute__((visibility("default"))) int fi_fabric(
    struct fi_fabric_attr *attr, struct fid_fabric **out, void *context) {
    (void)attr;
    struct fabric *fabric = calloc(1, sizeof *fabric);
    if (fabric == NULL) {
        return -FI_ENOMEM;
    }
    fabric->fid.fid = (struct fid){.fclass = FI_CLASS_FABRIC, .context = context, .ops = &fabric_fid};
    fabric->fid.ops = &fabric_ops;
    *out = &fabric->fid;
    return 0;
}

int fabric_trywait(struct fid_fabric *fabric, struct fid **fids, int count) {
    (void)fabric;
    (void)fids;
    (void)count;
    /* No queue has anything to wait for. */
    return -FI_ENOSYS;
}

static int region_close(struct fid *fid) {
    struct region *region = container(fid, struct region, fid.fid);
    struct domain *domain = region->domain;
    enter(&domain->gate, "fi_close of memory");
    if (region->users > 0) {
        broken("memory of key %llu is deregistered while %u own operations use it",
            (unsigned long long)region->fid.key, region->users);
    }
    region_remove(region);
    struct request request = {.kind = DEREGISTER, .device = domain->device, .a = region->fid.key};
    struct reply reply;
    int error = ask(&request, -1, &reply);
    domain->regions--;
    if (region->mapped != NULL) {
        munmap(region->mapped, region->mapped_len);
    }
    free(region);
    leave(&domain->gate);
    return -error;
}

static struct fi_ops region_fid = {.size = sizeof(struct fi_ops), .close = region_close};

/* Registers memory whose bytes are at `place`, by the address `at`. */
static int region_open(struct domain *domain, uint64_t at, uint64_t place, size_t len, uint64_t access,
    void *context, struct region **out) {
    struct region *region = calloc(1, sizeof *region);
    if (region == NULL) {
        return FI_ENOMEM;
    }
    struct request request = {.kind = REGISTER, .device = domain->device, .domain = domain->number};
    request.a = at;
    request.b = len;
    request.c = access & FI_REMOTE_READ ? ACCESS_READ : 0;
    request.c |= access & FI_REMOTE_WRITE ? ACCESS_WRITE : 0;
    request.d = place;
    struct reply reply;
    int error = ask(&request, -1, &reply);
    if (error != 0) {
        free(region);
        return error;
    }
    region->fid.fid = (struct fid){.fclass = FI_CLASS_MR, .context = context, .ops = &region_fid};
    region->fid.key = reply.value;
    region->fid.mem_desc = region;
    region->domain = domain;
    region->at = at;
    region->place = place;
    region->len = len;
    region->access = request.c;
    region_add(region);
    domain->regions++;
    *out = region;
    return 0;
}

static int region_register(struct fid *fid, const void *at, size_t len, uint64_t access, uint64_t offset,
    uint64_t wanted, uint64_t flags, struct fid_mr **out, void *context) {
    (void)wanted;
    if (fid->fclass != FI_CLASS_DOMAIN || offset != 0 || flags != 0 || len == 0) {
        return -FI_EINVAL;
    }
    struct domain *domain = container(fid, struct domain, fid.fid);
    struct region *region = NULL;
    enter(&domain->gate, "fi_mr_reg");
    uint64_t from = (uintptr_t)at;
    int error = region_open(domain, from, from, len, access, context, &region);
    leave(&domain->gate);
    *out = region != NULL ? &region->fid : NULL;
    return -error;
}

/* A range of a dma-buf, as libfabric has it since 1.20: its first byte has the address `base + offset`. */
struct dmabuf {
    int fd;
    uint64_t offset;
    size_t len;
    void *base;
};

/* Maps the range: where its bytes are, or an errno. The file position of a dma-buf of the stand-in for CUDA
 * says where it begins; others begin at 0. */
static int map(const struct dmabuf *of, unsigned char **mapped, size_t *mapped_len, uint64_t *place) {
    off_t begin = lseek(of->fd, 0, SEEK_CUR);
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), from = (uint64_t)(begin < 0 ? 0 : begin) + of->offset;
    size_t skip = from % page;
    *mapped_len = of->len + skip;
    *mapped = mmap(NULL, *mapped_len, PROT_READ | PROT_WRITE, MAP_SHARED, of->fd, (off_t)(from - skip));
    *place = (uintptr_t)*mapped + skip;
    return *mapped == MAP_FAILED ? FI_EOPNOTSUPP : 0;
}

/* Why a domain takes no dma-buf of this kind, or 0. */
static int dmabuf_refusal(const struct domain *domain, const struct fi_mr_attr *attr, uint64_t flags) {
    if (flags != MR_DMABUF || domain->version < KNOWS_DMABUF) {
        return FI_EBADFLAGS;
    }
    const struct dmabuf *of = (const void *)attr->mr_iov;
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    if (domain->hmem == HMEM_NONE || attr->iface != FI_HMEM_CUDA || attr->iov_count != 1 ||
        attr->offset != 0 || of == NULL || of->len == 0 || (uintptr_t)of->base % page != 0) {
        return FI_EINVAL;
    }
    return domain->hmem == HMEM_MAPPED ? FI_EOPNOTSUPP : 0;
}

static int region_register_attr(
    struct fid *fid, const struct fi_mr_attr *attr, uint64_t flags, struct fid_mr **out) {
    if (fid->fclass != FI_CLASS_DOMAIN) {
        return -FI_EINVAL;
    }
    struct domain *domain = container(fid, struct domain, fid.fid);
    const struct dmabuf *of = (const void *)attr->mr_iov;
    struct region *region = NULL;
    unsigned char *mapped = NULL;
    size_t mapped_len = 0;
    uint64_t place = 0;
    enter(&domain->gate, "fi_mr_regattr");
    int error = dmabuf_refusal(domain, attr, flags);
    error = error == 0 ? map(of, &mapped, &mapped_len, &place) : error;
    if (error == 0) {
        uint64_t at = (uintptr_t)of->base + of->offset;
        error = region_open(domain, at, place, of->len, attr->access, attr->context, &region);
        if (error != 0) {
            munmap(mapped, mapped_len);
        } else {
            region->mapped = mapped;
            region->mapped_len = mapped_len;
        }
    }
    leave(&domain->gate);
    *out = region != NULL ? &region->fid : NULL;
    return -error;
}

static int domain_close(struct fid *fid) {
    struct domain *domain = container(fid, struct domain, fid.fid);
    enter(&domain->gate, "fi_close of a domain");
    if (domain->vectors + domain->queues + domain->endpoints + domain->regions > 0) {
        broken("a domain is closed before %u address vectors, %u completion queues, %u endpoints and %u "
               "registrations of it",
            domain->vectors, domain->queues, domain->endpoints, domain->regions);
    }
    atomic_fetch_sub(&domain->fabric->domains, 1);
    free(domain);
    return 0;
}

static struct fi_ops domain_fid = {.size = sizeof(struct fi_ops), .close = domain_close};
static struct fi_ops_domain domain_ops = {.size = sizeof(struct fi_ops_domain),
    .av_open = vector_open,
    .cq_open = queue_open,
    .endpoint = endpoint_open};
static struct fi_ops_mr region_ops = {
    .size = sizeof(struct fi_ops_mr), .reg = region_register, .regattr = region_register_attr};

int domain_open(struct fid_fabric *fid, struct fi_info *info, struct fid_domain **out, void *context) {
    struct options options;
    struct domain *domain = calloc(1, sizeof *domain);
    if (domain == NULL) {
        return -FI_ENOMEM;
    }
    if (!options_read(&options) || !device_of(info, &domain->device)) {
        free(domain);
        return -FI_EINVAL;
    }
    int error = link_open(&domain->link);
    if (error != 0) {
        free(domain);
        return -error;
    }
    domain->fid.fid = (struct fid){.fclass = FI_CLASS_DOMAIN, .context = context, .ops = &domain_fid};
    domain->fid.ops = &domain_ops;
    domain->fid.mr = &region_ops;
    domain->fabric = container(fid, struct fabric, fid);
    static _Atomic uint32_t numbers;
    domain->number = atomic_fetch_add(&numbers, 1);
    domain->software = options.software;
    domain->hmem = info->caps & FI_HMEM ? options.hmem : HMEM_NONE;
    domain->version = info->fabric_attr->api_version;
    atomic_fetch_add(&domain->fabric->domains, 1);
    *out = &domain->fid;
    return 0;
}
