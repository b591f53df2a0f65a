/* Protection domains, and registered memory. */
#include "nic.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#undef ibv_reg_mr

static struct region *regions;

EXPORT struct ibv_pd *ibv_alloc_pd(struct ibv_context *context) {
    static uint32_t numbers;
    struct domain *domain = calloc(1, sizeof *domain);
    if (domain == NULL) {
        return NULL;
    }
    pthread_mutex_lock(&lock);
    domain->ibv.context = context;
    domain->number = ++numbers;
    context_of(context)->objects++;
    pthread_mutex_unlock(&lock);
    return &domain->ibv;
}

EXPORT int ibv_dealloc_pd(struct ibv_pd *pd) {
    struct domain *domain = container(pd, struct domain, ibv);
    pthread_mutex_lock(&lock);
    int busy = domain->objects > 0;
    if (!busy) {
        context_of(pd->context)->objects--;
        free(domain);
    }
    pthread_mutex_unlock(&lock);
    return busy ? EBUSY : 0;
}

struct region *region_of(uint32_t key) {
    struct region *region = regions;
    while (region != NULL && region->ibv.lkey != key) {
        region = region->next;
    }
    return region;
}

/* Whether all of it is mapped, to be read and, if so wanted, written. */
static int is_mapped(uintptr_t at, size_t len, int writable) {
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[512], rights[8];
    unsigned long from, to;
    uintptr_t end = at + len;
    while (maps != NULL && at < end && fgets(line, sizeof line, maps) != NULL) {
        if (sscanf(line, "%lx-%lx %7s", &from, &to, rights) == 3 && from <= at && at < to) {
            if (rights[0] != 'r' || (writable && rights[1] != 'w')) {
                break;
            }
            at = to;
        }
    }
    if (maps != NULL) {
        fclose(maps);
    }
    return at >= end;
}

/* Why it cannot be registered, or 0. */
static int refusal(uintptr_t at, size_t len, int access) {
    int known = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    if ((access & IBV_ACCESS_ON_DEMAND) != 0) {
        return EOPNOTSUPP;
    }
    if ((access & ~known) != 0 || len == 0 || at + len < at ||
        (access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_LOCAL_WRITE)) == IBV_ACCESS_REMOTE_WRITE) {
        return EINVAL;
    }
    return is_mapped(at, len, access & IBV_ACCESS_LOCAL_WRITE) ? 0 : EFAULT;
}

/* Registers memory whose bytes are at `place`, by the address `at`. A mapping goes with it. */
static struct ibv_mr *reg(struct ibv_pd *pd, uint64_t at, uintptr_t place, size_t len, int access, void *mapped,
    size_t mapped_len) {
    struct domain *domain = container(pd, struct domain, ibv);
    struct context *context = context_of(pd->context);
    struct region *region = calloc(1, sizeof *region);
    int error = region == NULL ? ENOMEM : refusal(place, len, access);
    struct request request = {.kind = REGISTER,
        .device = context->device,
        .context = context->name,
        .domain = domain->number,
        .access = (uint32_t)access,
        .at = at,
        .len = len,
        .place = place};
    struct reply reply;
    error = error != 0 ? error : ask(&request, -1, &reply);
    if (error != 0) {
        free(region);
        errno = error;
        return NULL;
    }
    region->ibv = (struct ibv_mr){.context = pd->context,
        .pd = pd,
        .addr = (void *)(uintptr_t)at,
        .length = len,
        .lkey = reply.name,
        .rkey = reply.name};
    region->mapped = mapped;
    region->mapped_len = mapped_len;
    pthread_mutex_lock(&lock);
    region->next = regions;
    regions = region;
    domain->objects++;
    pthread_mutex_unlock(&lock);
    return &region->ibv;
}

EXPORT struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *at, size_t len, int access) {
    return reg(pd, (uintptr_t)at, (uintptr_t)at, len, access, NULL, 0);
}

EXPORT struct ibv_mr *ibv_reg_dmabuf_mr(
    struct ibv_pd *pd, uint64_t offset, size_t len, uint64_t iova, int fd, int access) {
    /* The file position of a dma-buf of the stand-in for CUDA says where it begins; others begin at 0. */
    off_t begin = lseek(fd, 0, SEEK_CUR);
    uint64_t from = (uint64_t)(begin < 0 ? 0 : begin) + offset;
    size_t skip = from % (uint64_t)sysconf(_SC_PAGESIZE), mapped_len = len + skip;
    unsigned char *mapped = mmap(NULL, mapped_len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)(from - skip));
    if (mapped == MAP_FAILED) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    struct ibv_mr *mr = reg(pd, iova, (uintptr_t)(mapped + skip), len, access, mapped, mapped_len);
    if (mr == NULL) {
        int error = errno;
        munmap(mapped, mapped_len);
        errno = error;
    }
    return mr;
}

EXPORT int ibv_dereg_mr(struct ibv_mr *mr) {
    struct region *region = container(mr, struct region, ibv);
    struct reply reply;
    pthread_mutex_lock(&lock);
    if (region->users > 0) {
        broken("memory of key %#x is deregistered while %u own requests use it", mr->lkey, region->users);
    }
    struct region **at = &regions;
    while (*at != region) {
        at = &(*at)->next;
    }
    *at = region->next;
    container(mr->pd, struct domain, ibv)->objects--;
    pthread_mutex_unlock(&lock);
    int error = ask_about(CLOSE, mr->lkey, &reply);
    if (region->mapped != NULL) {
        munmap(region->mapped, region->mapped_len);
    }
    free(region);
    return error;
}
