/* The driver's interface as far as kvik and its tests use it, and what the files of the stand-in share.
 *
 * The values are those of the driver's own header; what they mean is told in the README. */
#ifndef STANDIN_CUDA_H
#define STANDIN_CUDA_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#define API __attribute__((visibility("default")))

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef struct context *CUcontext;
typedef struct stream *CUstream;
typedef struct event *CUevent;
typedef struct module *CUmodule, *CUfunction;
typedef struct { unsigned char bytes[64]; } CUipcMemHandle;
typedef struct { unsigned char bytes[16]; } CUuuid;
typedef void (*CUstreamCallback)(CUstream stream, CUresult status, void *given);
typedef struct {
    int order, source[2], target[2];
    unsigned flags;
} CUmemcpyAttributes;
typedef struct {
    size_t src_x, src_y;
    uint32_t src_type;
    const void *src_host;
    CUdeviceptr src_device;
    void *src_array;
    size_t src_pitch, dst_x, dst_y;
    uint32_t dst_type;
    void *dst_host;
    CUdeviceptr dst_device;
    void *dst_array;
    size_t dst_pitch, width, height;
} CUDA_MEMCPY2D;

enum {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100,
    INVALID_DEVICE = 101, INVALID_IMAGE = 200, INVALID_CONTEXT = 201, MAP_FAILED = 205, ECC_UNCORRECTABLE = 214,
    JIT_COMPILER_NOT_FOUND = 221, UNSUPPORTED_PTX_VERSION = 222, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600,
    ILLEGAL_ADDRESS = 700, LAUNCH_OUT_OF_RESOURCES = 701, CONTEXT_IS_DESTROYED = 709,
    ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, LAUNCH_FAILED = 719, NOT_SUPPORTED = 801,
    SYSTEM_DRIVER_MISMATCH = 803, UNKNOWN = 999,
};
enum { TYPE_HOST = 1, TYPE_DEVICE = 2 };
enum { MAX_DEVICES = 8, MAX_ATTRIBUTES = 256, PAGE = 4096 };

/* rules.c: a broken rule ends the process, with a line that names it. */
_Noreturn void broken(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Everything below is under this lock; `changed` is told of whatever somebody may wait for. */
extern pthread_mutex_t big;
extern pthread_cond_t changed;

/* contexts.c */
struct context {
    int device, users, destroyed;
    CUresult lost;
    /* The default one: what goes there waits for all streams that block, and they for it. */
    struct stream *legacy;
};
extern int device_count, version;
extern int attributes[MAX_ATTRIBUTES];
extern uint64_t memory_of_each;
/* What a function needs: CUDA initialised, or a context of this thread too. */
enum { NOTHING, INITIALISED, CURRENT };
/* Whether a call may go on: 0, or what it returns. */
CUresult enter(const char *name, int needs);
struct context *current(void);
void lose(int device, CUresult code);
int contexts(void);
#define ENTER(needs)                                                                                         \
    do {                                                                                                     \
        CUresult refused = enter(__func__, needs);                                                           \
        if (refused != SUCCESS) {                                                                            \
            return refused;                                                                                  \
        }                                                                                                    \
    } while (0)

/* memory.c */
enum kind { ALLOCATED, MANAGED, MAPPED, PEERS, PINNED, REGISTERED };
struct piece {
    struct piece *next;
    enum kind kind;
    struct context *context;
    int device, fd, finishes_copies;
    uint64_t at, size, serial;
    /* Where the bytes are: the address itself cannot be touched where it is a device's. */
    unsigned char *bytes;
    /* Copies that are in flight. */
    int busy;
};
struct piece *piece_at(uint64_t at);
struct piece *piece_new(enum kind kind, int device, struct context *context, uint64_t size, int fd);
void piece_end(struct piece *piece);
CUresult piece_end_at(uint64_t at, enum kind from, enum kind to, CUresult otherwise);
void pieces_end_of(struct context *context);
int pieces(enum kind from, enum kind to);
int on_device(const struct piece *piece);
/* Whether all of a range is a device's memory, or the host's that is page-locked. */
int is_whole(uint64_t at, uint64_t size, int device);
/* Notes that a copy uses a range, or does not any more. Memory that is no piece is nobody's to note. */
void use(uint64_t at, uint64_t size, int more);
/* Copies between any two places: of devices where they are whole, else what the address says. */
void move(uint64_t to, uint64_t from, uint64_t size);
void fill(uint64_t to, int value, uint64_t size);

/* streams.c */
struct stream *stream_new(struct context *context, int blocking);
int streams(void);
int events(void);
/* Whether this thread runs a callback, which may call nothing here. */
extern __thread int in_callback;
/* All that the stream was given so far has ended; lets go of the lock meanwhile. */
void wait_for(struct stream *stream);
/* The same of all streams of a context. */
void wait_for_all(struct context *context);

/* What a kernel was launched for, which the stream frees. */
struct launch;
CUresult give_launch(CUstream stream, struct launch *launch);

/* kernels.c */
/* Notes that a kernel uses its list and its pieces, or does not any more. */
void launch_use(const struct launch *launch, int more);
/* Copies the pieces: where the first of them is. */
uint64_t launch_run(const struct launch *launch);

/* control.c */
struct fault_settings {
    uint64_t delay;
    int stalled;
    /* The copy, counted from here on, of which one byte is another. */
    unsigned flip;
};
extern struct fault_settings faults;
/* What this call of a function returns instead of doing anything, or 0. */
CUresult fault(const char *name);
int obey(const char *command);
void begin_with_environment(void);

/* The driver's functions. */
API CUresult cuInit(unsigned flags);
API CUresult cuDriverGetVersion(int *version);
API CUresult cuGetErrorName(CUresult code, const char **name);
API CUresult cuGetErrorString(CUresult code, const char **text);
API CUresult cuDeviceGetCount(int *count);
API CUresult cuDeviceGet(CUdevice *device, int ordinal);
API CUresult cuDeviceGetName(char *name, int room, CUdevice device);
API CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device);
API CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device);
API CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device);
API CUresult cuDeviceGetPCIBusId(char *bus, int room, CUdevice device);
API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device);
API CUresult cuDevicePrimaryCtxReset_v2(CUdevice device);
API CUresult cuCtxPushCurrent_v2(CUcontext context);
API CUresult cuCtxPopCurrent_v2(CUcontext *context);
API CUresult cuCtxGetCurrent(CUcontext *context);
API CUresult cuCtxSetCurrent(CUcontext context);
API CUresult cuMemAlloc_v2(CUdeviceptr *at, size_t size);
API CUresult cuMemAllocManaged(CUdeviceptr *at, size_t size, unsigned flags);
API CUresult cuMemFree_v2(CUdeviceptr at);
API CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr at);
API CUresult cuMemHostAlloc(void **at, size_t size, unsigned flags);
API CUresult cuMemFreeHost(void *at);
API CUresult cuMemHostRegister_v2(void *at, size_t size, unsigned flags);
API CUresult cuMemHostUnregister(void *at);
API CUresult cuPointerGetAttributes(unsigned count, int *asked, void **into, CUdeviceptr at);
API CUresult cuPointerSetAttribute(const void *value, int attribute, CUdeviceptr at);
API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size);
API CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size);
API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t size, CUstream stream);
API CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t size, CUstream stream);
API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream);
API CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext there, CUdeviceptr from, CUcontext here,
                               size_t size, CUstream stream);
API CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *rows, CUstream stream);
API CUresult cuMemcpyBatchAsync(CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t count,
                                CUmemcpyAttributes *how, size_t *firsts, size_t ways, size_t *failed,
                                CUstream stream);
API CUresult cuStreamCreate(CUstream *stream, unsigned flags);
API CUresult cuStreamDestroy_v2(CUstream stream);
API CUresult cuStreamSynchronize(CUstream stream);
API CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags);
API CUresult cuStreamAddCallback(CUstream stream, CUstreamCallback callback, void *given, unsigned flags);
API CUresult cuEventCreate(CUevent *event, unsigned flags);
API CUresult cuEventDestroy_v2(CUevent event);
API CUresult cuEventRecord(CUevent event, CUstream stream);
API CUresult cuEventQuery(CUevent event);
API CUresult cuModuleLoadData(CUmodule *module, const void *image);
API CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name);
API CUresult cuLaunchKernel(CUfunction function, unsigned blocks, unsigned blocks_y, unsigned blocks_z,
                            unsigned threads, unsigned threads_y, unsigned threads_z, unsigned shared, CUstream stream,
                            void **given, void **extra);
API CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr at);
API CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *at, CUipcMemHandle handle, unsigned flags);
API CUresult cuIpcCloseMemHandle(CUdeviceptr at);
API CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr at, size_t size, int type,
                                           unsigned long long flags);
API CUresult cuFlushGPUDirectRDMAWrites(int target, int scope);

/* For tests. */
/* A command of the README: 0, or -1 if it is none. */
API int standin_control(const char *command);
/* Objects that are there, or how often a function was called (its name): -1 for what is neither. */
API int64_t standin_count(const char *what);
/* A kernel: after so many microseconds, the bytes are all of this value. */
API CUresult standin_fill(CUstream stream, CUdeviceptr at, size_t size, int value, unsigned micros);
/* Mappings side by side, as one range of addresses. */
API CUresult standin_map(CUdeviceptr *at, size_t each, int count);
/* A device's bytes as they are at this moment, in no order with anything. */
API int standin_peek(CUdeviceptr at, void *into, size_t size);
API int standin_poke(CUdeviceptr at, const void *from, size_t size);

#endif
