/* The same memory for a NIC, and for another process. */
#define _GNU_SOURCE
#include "driver.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* What a handle says: whose descriptor has the bytes. */
struct name {
    char begin[8];
    int32_t process, fd, device;
    uint64_t serial, size;
};
static const char BEGIN[8] = "kvikcuda";

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr at) {
    ENTER(CURRENT);
    CUresult code = INVALID_VALUE;
    pthread_mutex_lock(&big);
    struct piece *piece = piece_at(at);
    if (piece != NULL && piece->kind == ALLOCATED) {
        struct name name = {.process = getpid(), .fd = piece->fd, .device = piece->device,
                            .serial = piece->serial, .size = piece->size};
        memcpy(name.begin, BEGIN, sizeof BEGIN);
        memset(handle, 0, sizeof *handle);
        memcpy(handle, &name, sizeof name);
        code = SUCCESS;
    }
    pthread_mutex_unlock(&big);
    return code;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *at, CUipcMemHandle handle, unsigned flags) {
    ENTER(CURRENT);
    struct name name;
    char path[64], link[128] = "", wanted[64];
    memcpy(&name, &handle, sizeof name);
    if (memcmp(name.begin, BEGIN, sizeof BEGIN) != 0 || flags != 1) {
        return INVALID_VALUE;
    }
    if (name.process == getpid() || name.device != current()->device) {
        return INVALID_CONTEXT;
    }
    snprintf(path, sizeof path, "/proc/%d/fd/%d", name.process, name.fd);
    snprintf(wanted, sizeof wanted, "/memfd:standin-cuda-%llu ", (unsigned long long)name.serial);
    if (readlink(path, link, sizeof link - 1) < 0 || strncmp(link, wanted, strlen(wanted)) != 0) {
        return INVALID_VALUE;
    }
    int fd = open(path, O_RDWR | O_CLOEXEC);
    struct stat facts;
    if (fd < 0 || fstat(fd, &facts) != 0 || (uint64_t)facts.st_size < name.size) {
        return MAP_FAILED;
    }
    pthread_mutex_lock(&big);
    struct piece *piece = piece_new(PEERS, name.device, current(), name.size, fd);
    if (piece != NULL) {
        *at = piece->at;
    }
    pthread_mutex_unlock(&big);
    return piece == NULL ? MAP_FAILED : SUCCESS;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr at) {
    ENTER(CURRENT);
    return piece_end_at(at, PEERS, PEERS, INVALID_VALUE);
}

/* The descriptor's position says where in the memfd the range begins. */
CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr at, size_t size, int type,
                                       unsigned long long flags) {
    ENTER(CURRENT);
    CUresult code = INVALID_VALUE;
    pthread_mutex_lock(&big);
    struct piece *piece = piece_at(at);
    uint64_t backed = piece == NULL ? 0 : (piece->size + PAGE - 1) / PAGE * PAGE;
    int can = type == 1 && flags == 0 && piece != NULL && piece->kind == ALLOCATED;
    if (can && at % PAGE == 0 && size % PAGE == 0 && size > 0 && at - piece->at + size <= backed) {
        char path[64];
        snprintf(path, sizeof path, "/proc/self/fd/%d", piece->fd);
        int fd = open(path, O_RDWR);
        if (fd >= 0 && lseek(fd, (off_t)(at - piece->at), SEEK_SET) >= 0) {
            memcpy(handle, &fd, sizeof fd);
            code = SUCCESS;
        }
    }
    pthread_mutex_unlock(&big);
    return code;
}

CUresult cuFlushGPUDirectRDMAWrites(int target, int scope) {
    ENTER(CURRENT);
    return target == 0 && scope == 100 && (attributes[117] & 1) != 0 ? SUCCESS : NOT_SUPPORTED;
}
