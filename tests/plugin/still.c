/*
 * A plug-in of 16 devices that move nothing: what is posted has ended when the device is polled next. What kvik
 * does around its NICs is measured with it. With KVIK_STILL_POLLED=1 the devices have no descriptor.
 */
#include <kvik/nic.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { DEVICES = 16, DEPTH = 256, REFUSED = -1 };

struct kvik_nic_device {
    uint64_t tokens[DEPTH];
    uint32_t ended;
    uint64_t fences;
    int32_t descriptor;
};

struct kvik_nic_conn {
    int of;
};

static int32_t device_count(void) {
    return DEVICES;
}

static int32_t device_name(uint32_t number, char *name, uint32_t room) {
    snprintf(name, room, "still%u", number);
    return KVIK_NIC_OK;
}

static int32_t open_device(uint32_t number, struct kvik_nic_device **device) {
    const char *polled = getenv("KVIK_STILL_POLLED");
    (void)number;
    *device = calloc(1, sizeof **device);
    if (*device == NULL)
        return REFUSED;
    (*device)->descriptor = polled != NULL && *polled == '1' ? -1 : eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    return KVIK_NIC_OK;
}

static void close_device(struct kvik_nic_device *device) {
    if (device->descriptor >= 0)
        close(device->descriptor);
    free(device);
}

static int32_t limits(struct kvik_nic_device *device, struct kvik_nic_limits *limits) {
    (void)device;
    *limits = (struct kvik_nic_limits){1 << 20, 1, DEPTH};
    return KVIK_NIC_OK;
}

static int32_t address(struct kvik_nic_device *device, uint8_t *address, uint32_t *length) {
    memcpy(address, &device->fences, sizeof device->fences);
    *length = sizeof device->fences;
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
    return KVIK_NIC_OK;
}

static int32_t conn_open(struct kvik_nic_device *device, const uint8_t *address, uint32_t length,
                         struct kvik_nic_conn **conn) {
    (void)device, (void)address, (void)length;
    *conn = calloc(1, sizeof **conn);
    return *conn == NULL ? REFUSED : KVIK_NIC_OK;
}

static void conn_close(struct kvik_nic_device *device, struct kvik_nic_conn *conn) {
    (void)device;
    free(conn);
}

static int32_t post(struct kvik_nic_device *device, const struct kvik_nic_post *post) {
    if (device->ended == DEPTH)
        return KVIK_NIC_FULL;
    device->tokens[device->ended++] = post->token;
    return KVIK_NIC_OK;
}

static int32_t poll_device(struct kvik_nic_device *device, struct kvik_nic_completion *into, uint32_t room) {
    uint32_t taken = 0;
    while (taken < room && device->ended > 0)
        into[taken++] = (struct kvik_nic_completion){device->tokens[--device->ended], KVIK_NIC_OK, 0};
    return (int32_t)taken;
}

/* Whatever there is to poll for was posted by the thread that asks: nothing has to be signalled. */
static int32_t descriptor(struct kvik_nic_device *device) {
    return device->descriptor;
}

static int32_t may_sleep(struct kvik_nic_device *device) {
    return device->ended == 0;
}

static int32_t cancel(struct kvik_nic_device *device, struct kvik_nic_conn *conn) {
    device->ended = 0;
    conn_close(device, conn);
    return KVIK_NIC_ALL;
}

static int32_t fence(struct kvik_nic_device *device, uint8_t *into, uint32_t *length) {
    device->fences++;
    return address(device, into, length);
}

static void error_text(struct kvik_nic_device *device, int32_t error, char *text, uint32_t room) {
    (void)device;
    snprintf(text, room, "error %d", error);
}

static const struct kvik_nic_plugin TABLE = {
    .size = sizeof(struct kvik_nic_plugin),
    .version = KVIK_NIC_VERSION,
    .oldest = KVIK_NIC_VERSION,
    .newest = KVIK_NIC_VERSION,
    .name = "still",
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
    .cancel = cancel,
    .fence = fence,
    .error_text = error_text,
};

const struct kvik_nic_plugin *kvik_nic_plugin(uint32_t oldest, uint32_t newest) {
    (void)oldest, (void)newest;
    return &TABLE;
}
