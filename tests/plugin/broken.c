/*
 * Plug-ins that break one rule of include/kvik/nic.h each, by -DBREAK_RULE; without one it keeps them, with
 * a device that moves nothing: what is posted stays in flight until it is cut.
 */
#include <kvik/nic.h>

#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>

/* The numbers that crates/kvik-host/src/plugin/abi.rs has too. */
_Static_assert(offsetof(struct kvik_nic_plugin, device_count) == 64, "the head");
_Static_assert(offsetof(struct kvik_nic_plugin, error_text) == 200, "the last function at first");
_Static_assert(sizeof(struct kvik_nic_plugin) == 224, "the table");
_Static_assert(sizeof(struct kvik_nic_limits) == 16 && sizeof(struct kvik_nic_piece) == 16, "what is passed");
_Static_assert(sizeof(struct kvik_nic_post) == 56 && offsetof(struct kvik_nic_post, token) == 48, "a post");
_Static_assert(sizeof(struct kvik_nic_completion) == 16, "a completion");
_Static_assert(sizeof(struct kvik_nic_memories) == 8 && sizeof(struct kvik_nic_memory) == 40, "memory");
_Static_assert(offsetof(struct kvik_nic_memory, dmabuf) == 32, "memory of a device");

#ifdef BREAK_version
enum { OLDEST = 7, NEWEST = 9, VERSION = 0 };
#else
enum { OLDEST = 1, NEWEST = 1, VERSION = 1 };
#endif

#ifdef BREAK_table
enum { SIZE = offsetof(struct kvik_nic_plugin, fence) };
#elif defined(BREAK_first) /* breaks nothing: it was built before there was more */
enum { SIZE = offsetof(struct kvik_nic_plugin, memories) };
#else
enum { SIZE = sizeof(struct kvik_nic_plugin) };
#endif

#ifdef BREAK_name
#define NAME "bro\xFFken"
#elif defined(BREAK_colon)
#define NAME "bro:ken"
#else
#define NAME "broken"
#endif

struct kvik_nic_device {
    uint64_t fences;
    uint64_t last;
};

struct kvik_nic_conn {
    int posted;
};

static int32_t device_count(void) {
#if defined(BREAK_none)
    return 0;
#elif defined(BREAK_count)
    return 4096;
#elif defined(BREAK_list)
    return -7;
#else
    return 2;
#endif
}

static int32_t device_name(uint32_t number, char *name, uint32_t room) {
#if defined(BREAK_device)
    static const char names[2][8] = {"n0", "n\xC3\x28"};
#elif defined(BREAK_twice)
    static const char names[2][8] = {"n0", "n0"};
#else
    static const char names[2][8] = {"n0", "n1"};
#endif
#ifdef BREAK_endless
    memset(name, 'n', room);
    return (int32_t)(number & 0);
#endif
    memcpy(name, names[number], room < 8 ? room : 8);
    return KVIK_NIC_OK;
}

static int32_t open_device(uint32_t number, struct kvik_nic_device **device) {
    (void)number;
#ifdef BREAK_open
    *device = NULL;
    return KVIK_NIC_OK;
#endif
    *device = calloc(1, sizeof **device);
    return *device == NULL ? -1 : KVIK_NIC_OK;
}

static void close_device(struct kvik_nic_device *device) {
    free(device);
}

static int32_t limits(struct kvik_nic_device *device, struct kvik_nic_limits *limits) {
    (void)device;
#ifdef BREAK_limits
    *limits = (struct kvik_nic_limits){4096, 0, 16};
#else
    *limits = (struct kvik_nic_limits){4096, 2, 16};
#endif
    return KVIK_NIC_OK;
}

static int32_t address(struct kvik_nic_device *device, uint8_t *address, uint32_t *length) {
#if defined(BREAK_long)
    *length = KVIK_NIC_ADDRESS + 1;
#elif defined(BREAK_short)
    *length = 0;
#else
    memcpy(address, &device->fences, sizeof device->fences);
    *length = sizeof device->fences;
#endif
    (void)device, (void)address;
    return KVIK_NIC_OK;
}

static int32_t region_add(struct kvik_nic_device *device, void *start, uint64_t length,
                          struct kvik_nic_region **region, uint64_t *key, uint64_t *base) {
    (void)device, (void)length;
    *region = start;
    *key = *base = 0;
    return KVIK_NIC_OK;
}

static int32_t region_remove(struct kvik_nic_device *device, struct kvik_nic_region *region) {
    (void)device, (void)region;
#ifdef BREAK_remove
    return -1;
#endif
    return KVIK_NIC_OK;
}

static int32_t conn_open(struct kvik_nic_device *device, const uint8_t *address, uint32_t length,
                         struct kvik_nic_conn **conn) {
    (void)device, (void)address, (void)length;
    *conn = calloc(1, sizeof **conn);
    return *conn == NULL ? -1 : KVIK_NIC_OK;
}

static void conn_close(struct kvik_nic_device *device, struct kvik_nic_conn *conn) {
    (void)device;
#ifdef BREAK_cancel /* where nothing ends, what was posted is in flight */
    if (conn->posted > 0)
        abort();
#endif
    free(conn);
}

static int32_t post(struct kvik_nic_device *device, const struct kvik_nic_post *post) {
    device->last = post->token;
    post->conn->posted++;
#ifdef BREAK_post
    return 7;
#endif
    return KVIK_NIC_OK;
}

static int32_t poll_device(struct kvik_nic_device *device, struct kvik_nic_completion *into, uint32_t room) {
    (void)device, (void)into, (void)room;
#if defined(BREAK_token)
    into[0] = (struct kvik_nic_completion){device->last + 1, 0, 0};
    return 1;
#elif defined(BREAK_again)
    into[0] = into[1] = (struct kvik_nic_completion){device->last, 0, 0};
    return device->last != 0 ? 2 : 0;
#elif defined(BREAK_status)
    into[0] = (struct kvik_nic_completion){device->last, 5, 0};
    return device->last != 0;
#elif defined(BREAK_room)
    return (int32_t)room + 1;
#else
    return 0;
#endif
}

static int32_t descriptor(struct kvik_nic_device *device) {
    (void)device;
#ifdef BREAK_descriptor
    return 1 << 20;
#elif defined(BREAK_awake)
    return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
#endif
    return -1;
}

static int32_t may_sleep(struct kvik_nic_device *device) {
    (void)device;
#ifdef BREAK_awake /* there would be something to poll for, always */
    return 0;
#endif
    return 1;
}

#ifdef BREAK_down /* nothing: it cannot be used now */
static int32_t is_up(struct kvik_nic_device *device) {
    (void)device;
    return 0;
}
#endif

static int32_t cancel(struct kvik_nic_device *device, struct kvik_nic_conn *conn) {
#ifdef BREAK_cancel
    (void)device, (void)conn;
    return -1;
#endif
    conn_close(device, conn);
    return KVIK_NIC_OK;
}

static int32_t fence(struct kvik_nic_device *device, uint8_t *into, uint32_t *length) {
#ifndef BREAK_fence
    device->fences++;
#endif
    return address(device, into, length);
}

static void error_text(struct kvik_nic_device *device, int32_t error, char *text, uint32_t room) {
    (void)device, (void)error;
    /* Without a zero at its end, which is another rule that is broken: kvik takes what there is room for. */
    memset(text, 'x', room);
}

/* What kvik never calls of a table that ends before it. */
static int32_t memories(struct kvik_nic_device *device, struct kvik_nic_memories *memories) {
    (void)device;
#ifdef BREAK_first
    abort();
#endif
    *memories = (struct kvik_nic_memories){1u << KVIK_NIC_MEMORY_CUDA, KVIK_NIC_DMABUF_UNUSED};
#ifdef BREAK_dmabuf
    memories->dmabuf = 9;
#elif defined(BREAK_wanted) /* nothing: it takes what there is */
    memories->dmabuf = KVIK_NIC_DMABUF_WANTED;
#endif
    return KVIK_NIC_OK;
}

/* Sees that it is told of a dma-buf only if it has asked for one; the key says whether there was one. */
static int32_t region_add_on(struct kvik_nic_device *device, const struct kvik_nic_memory *memory,
                             struct kvik_nic_region **region, uint64_t *key, uint64_t *base) {
    int32_t code;
    if (memory->kind != KVIK_NIC_MEMORY_CUDA || (memory->dmabuf == -1) != (memory->offset == 0))
        return -1;
#ifndef BREAK_wanted
    if (memory->dmabuf != -1)
        return -1;
#endif
#ifdef BREAK_region
    *region = NULL;
    return KVIK_NIC_OK;
#endif
    code = region_add(device, (void *)(uintptr_t)memory->address, memory->length, region, key, base);
    *key = memory->dmabuf != -1;
    return code;
}

static const struct kvik_nic_plugin TABLE = {
    .size = SIZE,
    .version = VERSION,
    .oldest = OLDEST,
    .newest = NEWEST,
    .name = NAME,
    .device_count = device_count,
    .device_name = device_name,
    .open = open_device,
    .close = close_device,
    .limits = limits,
    .address = address,
    .region_add = region_add,
    .region_remove = region_remove,
    .conn_open = conn_open,
    .conn_close = conn_close,
    .post = post,
    .poll = poll_device,
    .descriptor = descriptor,
    .may_sleep = may_sleep,
#ifndef BREAK_function
    .cancel = cancel,
#endif
    .fence = fence,
#ifdef BREAK_down
    .is_up = is_up,
#endif
    .error_text = error_text,
    .memories = memories,
#ifndef BREAK_half
    .region_add_on = region_add_on,
#endif
};

const struct kvik_nic_plugin *kvik_nic_plugin(uint32_t oldest, uint32_t newest) {
    (void)oldest, (void)newest, (void)cancel, (void)region_add_on;
#ifdef BREAK_null
    return NULL;
#endif
    return &TABLE;
}
