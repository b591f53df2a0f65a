/* Memory. A device's addresses lie in a reservation that nobody can touch; its bytes are a memfd, which is
 * mapped elsewhere. */
#define _GNU_SOURCE
#include "driver.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Addresses are never given out again, so that what was freed is unknown for ever. Sanitizers leave no room
 * for many more. */
static const uint64_t RESERVED = 128ull << 30;
static uint64_t next_address, reserved_to;
static uint64_t next_serial = 1;
static struct piece *first;

int on_device(const struct piece *piece) {
    return piece->kind <= PEERS;
}

struct piece *piece_at(uint64_t at) {
    for (struct piece *piece = first; piece != NULL; piece = piece->next) {
        if (at >= piece->at && at - piece->at < piece->size) {
            return piece;
        }
    }
    return NULL;
}

int pieces(enum kind from, enum kind to) {
    int count = 0;
    for (struct piece *piece = first; piece != NULL; piece = piece->next) {
        count += piece->kind >= from && piece->kind <= to;
    }
    return count;
}

static uint64_t whole_pages(uint64_t size) {
    return (size + PAGE - 1) / PAGE * PAGE;
}

static uint64_t reserve(uint64_t size) {
    if (next_address == 0) {
        void *at = mmap(NULL, RESERVED, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at == MAP_FAILED) {
            broken("no addresses can be reserved");
        }
        next_address = (uint64_t)at;
        reserved_to = next_address + RESERVED;
    }
    if (size > reserved_to - next_address) {
        broken("this process has allocated more than there are addresses for");
    }
    uint64_t at = next_address;
    next_address += size;
    return at;
}

static struct piece *add(enum kind kind, int device, struct context *context, uint64_t at, uint64_t size) {
    struct piece *piece = calloc(1, sizeof *piece);
    *piece = (struct piece){.next = first, .kind = kind, .context = context, .device = device, .fd = -1,
                            .at = at, .size = size, .serial = next_serial++, .bytes = (unsigned char *)at};
    first = piece;
    return piece;
}

static uint64_t room_of(int device) {
    uint64_t taken = 0;
    for (struct piece *piece = first; piece != NULL; piece = piece->next) {
        taken += on_device(piece) && piece->kind != PEERS && piece->device == device ? piece->size : 0;
    }
    return memory_of_each - taken;
}

/* A descriptor is that of a peer's memory; without one, memory is made. Behind it is a gap, except between
 * mappings. */
struct piece *piece_new(enum kind kind, int device, struct context *context, uint64_t size, int fd) {
    uint64_t backed = whole_pages(size);
    if (fd < 0) {
        char name[64];
        snprintf(name, sizeof name, "standin-cuda-%llu", (unsigned long long)next_serial);
        if (size == 0 || size > room_of(device) || (fd = memfd_create(name, MFD_CLOEXEC)) < 0) {
            return NULL;
        }
        if (ftruncate(fd, (off_t)backed) != 0) {
            close(fd);
            return NULL;
        }
    }
    void *bytes = mmap(NULL, backed, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (bytes == MAP_FAILED) {
        close(fd);
        return NULL;
    }
    struct piece *piece = add(kind, device, context, reserve(backed + (kind == MAPPED ? 0 : PAGE)), size);
    piece->fd = fd;
    piece->bytes = bytes;
    return piece;
}

void piece_end(struct piece *piece) {
    if (piece->busy > 0) {
        broken("%llu bytes at %#llx are let go of while a copy uses them", (unsigned long long)piece->size,
               (unsigned long long)piece->at);
    }
    struct piece **at = &first;
    while (*at != piece) {
        at = &(*at)->next;
    }
    *at = piece->next;
    if (piece->kind != REGISTERED) {
        munmap(piece->bytes, whole_pages(piece->size));
    }
    if (piece->fd >= 0) {
        close(piece->fd);
    }
    free(piece);
}

static int is_busy(const struct context *context) {
    int busy = 0;
    for (struct piece *piece = first; piece != NULL; piece = piece->next) {
        busy |= piece->context == context && piece->busy > 0;
    }
    return busy;
}

void pieces_end_of(struct context *context) {
    /* One that is lost does what it was given no more, but has not come to all of it. */
    while (context->lost != SUCCESS && is_busy(context)) {
        pthread_cond_wait(&changed, &big);
    }
    for (struct piece *piece = first, *next; piece != NULL; piece = next) {
        next = piece->next;
        if (piece->context == context && on_device(piece)) {
            piece_end(piece);
        }
    }
}

int is_whole(uint64_t at, uint64_t size, int device) {
    if (at + size < at) {
        return 0;
    }
    for (uint64_t end = at + size; at < end;) {
        struct piece *piece = piece_at(at);
        if (piece == NULL || on_device(piece) != device) {
            return 0;
        }
        at = piece->at + piece->size;
    }
    return 1;
}

void use(uint64_t at, uint64_t size, int more) {
    for (uint64_t end = at + size; at < end;) {
        struct piece *piece = piece_at(at);
        if (piece == NULL) {
            return;
        }
        piece->busy += more;
        at = piece->at + piece->size;
    }
}

/* How many of the bytes lie side by side, and where: memory that is no piece is what its address says. */
static uint64_t side_by_side(uint64_t at, uint64_t size, unsigned char **bytes) {
    struct piece *piece = piece_at(at);
    if (piece == NULL) {
        *bytes = (unsigned char *)at;
        return size;
    }
    *bytes = piece->bytes + (at - piece->at);
    uint64_t here = piece->at + piece->size - at;
    return here < size ? here : size;
}

void move(uint64_t to, uint64_t from, uint64_t size) {
    while (size > 0) {
        unsigned char *into, *source;
        uint64_t some = side_by_side(from, side_by_side(to, size, &into), &source);
        memmove(into, source, some);
        to += some;
        from += some;
        size -= some;
    }
}

void fill(uint64_t to, int value, uint64_t size) {
    while (size > 0) {
        unsigned char *into;
        uint64_t some = side_by_side(to, size, &into);
        memset(into, value, some);
        to += some;
        size -= some;
    }
}

static CUresult allocate(CUdeviceptr *at, size_t size, enum kind kind) {
    pthread_mutex_lock(&big);
    struct context *context = current();
    struct piece *piece = piece_new(kind, context->device, context, size, -1);
    if (piece != NULL) {
        *at = piece->at;
    }
    pthread_mutex_unlock(&big);
    return piece == NULL ? size == 0 ? INVALID_VALUE : OUT_OF_MEMORY : SUCCESS;
}

CUresult cuMemAlloc_v2(CUdeviceptr *at, size_t size) {
    ENTER(CURRENT);
    return allocate(at, size, ALLOCATED);
}

CUresult cuMemAllocManaged(CUdeviceptr *at, size_t size, unsigned flags) {
    ENTER(CURRENT);
    (void)flags;
    return allocate(at, size, MANAGED);
}

CUresult standin_map(CUdeviceptr *at, size_t each, int count) {
    ENTER(CURRENT);
    for (int number = 0; number < count; number++) {
        CUdeviceptr next;
        CUresult code = each % PAGE != 0 ? INVALID_VALUE : allocate(&next, each, MAPPED);
        if (code != SUCCESS) {
            return code;
        }
        pthread_mutex_lock(&big);
        piece_at(next)->context = NULL;
        pthread_mutex_unlock(&big);
        *at = number == 0 ? next : *at;
    }
    return SUCCESS;
}

/* Ends the piece that begins there and is of one of these kinds. As with the driver, all that the context was
 * given is done before; but nobody may count on that for what the piece itself is used for. */
CUresult piece_end_at(uint64_t at, enum kind from, enum kind to, CUresult otherwise) {
    pthread_mutex_lock(&big);
    struct piece *piece = piece_at(at);
    int good = piece != NULL && piece->at == at && piece->kind >= from && piece->kind <= to;
    if (good && piece->busy == 0) {
        wait_for_all(current());
    }
    if (good) {
        piece_end(piece);
    }
    pthread_mutex_unlock(&big);
    return good ? SUCCESS : otherwise;
}

CUresult cuMemFree_v2(CUdeviceptr at) {
    ENTER(CURRENT);
    return piece_end_at(at, ALLOCATED, MAPPED, INVALID_VALUE);
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr at) {
    ENTER(CURRENT);
    pthread_mutex_lock(&big);
    struct piece *piece = piece_at(at);
    if (piece != NULL) {
        *base = piece->at;
        *size = piece->size;
    }
    pthread_mutex_unlock(&big);
    return piece == NULL ? INVALID_VALUE : SUCCESS;
}

CUresult cuMemHostAlloc(void **at, size_t size, unsigned flags) {
    ENTER(CURRENT);
    if (size == 0 || flags != 1) {
        return INVALID_VALUE;
    }
    void *made = mmap(NULL, whole_pages(size), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) {
        return OUT_OF_MEMORY;
    }
    pthread_mutex_lock(&big);
    add(PINNED, current()->device, current(), (uint64_t)made, size);
    pthread_mutex_unlock(&big);
    *at = made;
    return SUCCESS;
}

CUresult cuMemFreeHost(void *at) {
    ENTER(CURRENT);
    return piece_end_at((uint64_t)at, PINNED, PINNED, INVALID_VALUE);
}

CUresult cuMemHostRegister_v2(void *at, size_t size, unsigned flags) {
    ENTER(CURRENT);
    if (size == 0 || flags != 1) {
        return INVALID_VALUE;
    }
    pthread_mutex_lock(&big);
    uint64_t start = (uint64_t)at;
    int there = 0;
    for (struct piece *piece = first; piece != NULL; piece = piece->next) {
        there |= start < piece->at + piece->size && piece->at < start + size;
    }
    if (!there) {
        add(REGISTERED, current()->device, current(), start, size);
    }
    pthread_mutex_unlock(&big);
    return there ? ALREADY_REGISTERED : SUCCESS;
}

CUresult cuMemHostUnregister(void *at) {
    ENTER(CURRENT);
    return piece_end_at((uint64_t)at, REGISTERED, REGISTERED, NOT_REGISTERED);
}

/* As the driver has it: what it does not know is no error, and the answers are zeros. */
static void answer(const struct piece *piece, int asked, void *into) {
    switch (asked) {
    case 1:
        *(void **)into = piece->context;
        break;
    case 2:
        *(uint32_t *)into = on_device(piece) ? TYPE_DEVICE : TYPE_HOST;
        break;
    case 8:
        *(uint32_t *)into = piece->kind == MANAGED;
        break;
    case 9:
        *(int *)into = piece->device;
        break;
    case 10:
        *(unsigned char *)into = piece->kind == ALLOCATED;
        break;
    case 11:
        *(uint64_t *)into = piece->at;
        break;
    case 12:
        *(size_t *)into = piece->size;
        break;
    default:
        broken("it knows no attribute %d of pointers", asked);
    }
}

CUresult cuPointerGetAttributes(unsigned count, int *asked, void **into, CUdeviceptr at) {
    ENTER(INITIALISED);
    pthread_mutex_lock(&big);
    static const struct piece nothing = {.kind = PINNED, .device = -2};
    const struct piece *piece = piece_at(at);
    for (unsigned number = 0; number < count; number++) {
        answer(piece == NULL ? &nothing : piece, asked[number], into[number]);
        if (piece == NULL && asked[number] == 2) {
            *(uint32_t *)into[number] = 0;
        }
    }
    pthread_mutex_unlock(&big);
    return SUCCESS;
}

CUresult cuPointerSetAttribute(const void *value, int attribute, CUdeviceptr at) {
    ENTER(INITIALISED);
    CUresult code = SUCCESS;
    pthread_mutex_lock(&big);
    struct piece *piece = piece_at(at);
    if (piece == NULL || attribute != 6) {
        code = INVALID_VALUE;
    } else if (piece->kind != ALLOCATED) {
        code = NOT_SUPPORTED;
    } else {
        piece->finishes_copies = *(const uint32_t *)value != 0;
    }
    pthread_mutex_unlock(&big);
    return code;
}

int standin_peek(CUdeviceptr at, void *into, size_t size) {
    pthread_mutex_lock(&big);
    int whole = is_whole(at, size, 1);
    if (whole) {
        move((uint64_t)into, at, size);
    }
    pthread_mutex_unlock(&big);
    return whole ? 0 : -1;
}

int standin_poke(CUdeviceptr at, const void *from, size_t size) {
    pthread_mutex_lock(&big);
    int whole = is_whole(at, size, 1);
    if (whole) {
        move(at, (uint64_t)from, size);
    }
    pthread_mutex_unlock(&big);
    return whole ? 0 : -1;
}
