/* The library, its devices, and contexts: which thread is in which one. */
#include "driver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

pthread_mutex_t big = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
int device_count, version, attributes[MAX_ATTRIBUTES];
uint64_t memory_of_each;

enum { DEPTH = 32 };
static int initialised, forked;
static struct context *primary[MAX_DEVICES];
static __thread struct context *stack[DEPTH];
static __thread int depth;

static void in_child(void) {
    forked = 1;
}

__attribute__((constructor)) static void begin(void) {
    /* The longest row, multiprocessors, page-locked memory with one address for all, and what GPUDirect RDMA and dma-bufs
     * need. */
    attributes[11] = INT32_MAX;
    attributes[16] = 4;
    attributes[41] = 1;
    attributes[91] = 1;
    attributes[116] = 1;
    attributes[117] = 1;
    attributes[118] = 0;
    attributes[124] = 1;
    begin_with_environment();
    pthread_atfork(NULL, NULL, in_child);
}

CUresult enter(const char *name, int needs) {
    if (forked) {
        broken("%s in a forked child", name);
    }
    if (in_callback) {
        broken("%s in a callback of a stream", name);
    }
    pthread_mutex_lock(&big);
    CUresult refused = fault(name);
    if (refused == SUCCESS && needs >= INITIALISED && !initialised) {
        refused = NOT_INITIALIZED;
    }
    if (refused == SUCCESS && needs == CURRENT) {
        struct context *context = current();
        refused = context == NULL      ? INVALID_CONTEXT
                  : context->destroyed ? CONTEXT_IS_DESTROYED
                                       : context->lost;
    }
    pthread_mutex_unlock(&big);
    return refused;
}

struct context *current(void) {
    return depth > 0 ? stack[depth - 1] : NULL;
}

int contexts(void) {
    int count = 0;
    for (int device = 0; device < MAX_DEVICES; device++) {
        count += primary[device] != NULL;
    }
    return count;
}

void lose(int device, CUresult code) {
    if (device >= 0 && device < MAX_DEVICES && primary[device] != NULL) {
        primary[device]->lost = code;
    }
}

CUresult cuInit(unsigned flags) {
    ENTER(NOTHING);
    if (flags != 0) {
        return INVALID_VALUE;
    }
    if (device_count == 0) {
        return NO_DEVICE;
    }
    initialised = 1;
    return SUCCESS;
}

CUresult cuDriverGetVersion(int *into) {
    ENTER(NOTHING);
    *into = version;
    return SUCCESS;
}

static const struct {
    CUresult code;
    const char *name, *text;
} errors[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {MAP_FAILED, "CUDA_ERROR_MAP_FAILED", "mapping of buffer object failed"},
    {ECC_UNCORRECTABLE, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"},
    {JIT_COMPILER_NOT_FOUND, "CUDA_ERROR_JIT_COMPILER_NOT_FOUND", "PTX JIT compiler library not found"},
    {UNSUPPORTED_PTX_VERSION, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
     "the provided PTX was compiled with an unsupported toolchain."},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {LAUNCH_OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "memory is already registered"},
    {NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "memory is not registered"},
    {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {SYSTEM_DRIVER_MISMATCH, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "driver and library do not match"},
    {UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static CUresult words(CUresult code, const char **name, const char **text) {
    for (size_t number = 0; number < sizeof errors / sizeof *errors; number++) {
        if (errors[number].code == code) {
            *name = errors[number].name;
            *text = errors[number].text;
            return SUCCESS;
        }
    }
    *name = *text = NULL;
    return INVALID_VALUE;
}

CUresult cuGetErrorName(CUresult code, const char **name) {
    const char *other;
    return words(code, name, &other);
}

CUresult cuGetErrorString(CUresult code, const char **text) {
    const char *other;
    return words(code, &other, text);
}

CUresult cuDeviceGetCount(int *count) {
    ENTER(INITIALISED);
    *count = device_count;
    return SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER(INITIALISED);
    if (ordinal < 0 || ordinal >= device_count) {
        return INVALID_DEVICE;
    }
    *device = ordinal;
    return SUCCESS;
}

CUresult cuDeviceGetName(char *name, int room, CUdevice device) {
    ENTER(INITIALISED);
    snprintf(name, (size_t)room, "Stand-in %d", device);
    return SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    ENTER(INITIALISED);
    memset(uuid, 0x5A, sizeof *uuid);
    uuid->bytes[15] = (unsigned char)device;
    return SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    ENTER(INITIALISED);
    (void)device;
    *bytes = memory_of_each;
    return SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    ENTER(INITIALISED);
    (void)device;
    if (attribute < 0 || attribute >= MAX_ATTRIBUTES) {
        return INVALID_VALUE;
    }
    *value = attributes[attribute];
    return SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char *bus, int room, CUdevice device) {
    ENTER(INITIALISED);
    snprintf(bus, (size_t)room, "0000:%02X:00.0", 0x1A + device);
    return SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    ENTER(INITIALISED);
    pthread_mutex_lock(&big);
    if (primary[device] == NULL) {
        primary[device] = calloc(1, sizeof **primary);
        primary[device]->device = device;
        primary[device]->legacy = stream_new(primary[device], 0);
    }
    primary[device]->users++;
    *context = primary[device];
    pthread_mutex_unlock(&big);
    return SUCCESS;
}

/* It stays as a name, which says that it is gone. */
static void destroy(struct context *context) {
    context->destroyed = 1;
    primary[context->device] = NULL;
    pieces_end_of(context);
}

CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
    ENTER(INITIALISED);
    pthread_mutex_lock(&big);
    if (primary[device] != NULL) {
        destroy(primary[device]);
    }
    pthread_mutex_unlock(&big);
    return SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    ENTER(INITIALISED);
    CUresult code = SUCCESS;
    pthread_mutex_lock(&big);
    struct context *context = primary[device];
    if (context == NULL) {
        code = INVALID_CONTEXT;
    } else if (--context->users == 0) {
        destroy(context);
    }
    pthread_mutex_unlock(&big);
    return code;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
    ENTER(INITIALISED);
    if (context == NULL) {
        return INVALID_CONTEXT;
    }
    if (context->destroyed) {
        return CONTEXT_IS_DESTROYED;
    }
    if (depth == DEPTH) {
        broken("contexts are made current and never taken off again");
    }
    stack[depth++] = context;
    return SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    ENTER(INITIALISED);
    if (depth == 0) {
        return INVALID_CONTEXT;
    }
    *context = stack[--depth];
    return SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    ENTER(INITIALISED);
    *context = current();
    return SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    ENTER(INITIALISED);
    depth -= depth > 0;
    if (context != NULL) {
        stack[depth++] = context;
    }
    return SUCCESS;
}
