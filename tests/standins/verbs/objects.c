/* What processes open, and what is closed when they end. */
#define _GNU_SOURCE
#include "device.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct object *objects;

struct object *object_named(uint32_t kind, uint32_t name) {
    struct object *object = objects;
    while (object != NULL && (object->name != name || object->kind != kind)) {
        object = object->next;
    }
    return object;
}

void tell_event(const struct context *context, uint32_t name, enum ibv_event_type type) {
    struct happening happening = {.name = name, .type = type};
    ssize_t wrote = write(context->events, &happening, sizeof happening);
    /* Who reads no events loses them. */
    (void)wrote;
}

void tell_all(uint32_t device, enum ibv_event_type type) {
    for (struct object *object = objects; object != NULL; object = object->next) {
        if (object->kind == CONTEXT && object->device == device) {
            tell_event((struct context *)object, 0, type);
        }
    }
}

static void *add(size_t size, uint32_t kind, struct client *client, uint32_t device) {
    /* Numbers of queue pairs have 24 bits; keys have more, and these will do. */
    static uint32_t names = 0x10;
    struct object *object = calloc(1, size);
    if (object != NULL) {
        *object = (struct object){.next = objects, .kind = kind, .device = device, .client = client};
        names = names + 1 + chance(3);
        object->name = names &= 0xFFFFFF;
        objects = object;
    }
    return object;
}

/* Closed and opened as one. */
_Static_assert(offsetof(struct context, events) == offsetof(struct channel, events), "the same place");

static void close_object(struct object *object) {
    struct object **at = &objects;
    while (*at != object) {
        at = &(*at)->next;
    }
    *at = object->next;
    if (object->kind == CONTEXT || object->kind == CHANNEL) {
        close(((struct channel *)object)->events);
    } else if (object->kind == COMPLETIONS) {
        struct ring *ring = ((struct completions *)object)->ring;
        munmap(ring, bytes_of_ring(ring->size));
    } else if (object->kind == QUEUE) {
        struct queue *queue = (struct queue *)object;
        counts.dropped += queue->posted - queue->ended;
        silence(queue);
        free(queue->orders);
        free(queue->ids);
    }
    free(object);
}

void objects_gone(struct client *client) {
    for (uint32_t kind = QUEUE; kind >= CONTEXT; kind--) {
        for (struct object *object = objects, *next; object != NULL; object = next) {
            next = object->next;
            if (object->client == client && object->kind == kind) {
                close_object(object);
            }
        }
    }
}

/* What the client itself has opened. */
static void *own(const struct client *client, uint32_t kind, uint32_t name) {
    struct object *object = object_named(kind, name);
    return object != NULL && object->client == client ? object : NULL;
}

static int open_events(struct client *client, const struct request *request, int fd, struct reply *reply) {
    uint32_t kind = request->kind == OPEN_CONTEXT ? CONTEXT : CHANNEL;
    struct channel *channel = fd >= 0 ? add(sizeof *channel, kind, client, request->device) : NULL;
    if (channel == NULL) {
        return ENOMEM;
    }
    channel->events = dup(fd);
    reply->name = channel->object.name;
    return channel->events >= 0 ? 0 : EMFILE;
}

static int open_completions(
    struct client *client, const struct request *request, int fd, struct reply *reply) {
    struct context *context = own(client, CONTEXT, request->context);
    struct ring *ring = fd >= 0 ? shared_mapped(fd, bytes_of_ring(request->size)) : NULL;
    if (context == NULL || ring == NULL) {
        return EINVAL;
    }
    struct completions *queue = add(sizeof *queue, COMPLETIONS, client, request->device);
    if (queue == NULL) {
        return ENOMEM;
    }
    queue->context = context;
    queue->channel = own(client, CHANNEL, request->receives);
    queue->ring = ring;
    reply->name = queue->object.name;
    return 0;
}

/* What has not been taken goes into the new memory. */
static int resize(struct client *client, const struct request *request, int fd) {
    struct completions *queue = own(client, COMPLETIONS, request->name);
    struct ring *ring = fd >= 0 ? shared_mapped(fd, bytes_of_ring(request->size)) : NULL;
    if (queue == NULL || ring == NULL) {
        return EINVAL;
    }
    struct ring *old = queue->ring;
    uint32_t at = atomic_load(&old->consumed), end = atomic_load(&old->produced);
    if (end - at > request->size) {
        munmap(ring, bytes_of_ring(request->size));
        return EINVAL;
    }
    for (uint32_t to = 0; at != end; at++, to++) {
        dones_of(ring)[to] = dones_of(old)[at % old->size];
        atomic_store(&ring->produced, to + 1);
    }
    atomic_store(&ring->armed, atomic_load(&old->armed));
    munmap(old, bytes_of_ring(old->size));
    queue->ring = ring;
    return 0;
}

static int add_region(struct client *client, const struct request *request, struct reply *reply) {
    struct region *region = add(sizeof *region, REGION, client, request->device);
    if (region == NULL) {
        return ENOMEM;
    }
    region->domain = request->domain;
    region->access = request->access;
    region->at = request->at;
    region->len = request->len;
    region->place = request->place;
    reply->name = region->object.name;
    return 0;
}

static int open_queue(struct client *client, const struct request *request, struct reply *reply) {
    struct context *context = own(client, CONTEXT, request->context);
    struct completions *sends = own(client, COMPLETIONS, request->sends);
    struct completions *receives = own(client, COMPLETIONS, request->receives);
    if (context == NULL || sends == NULL || receives == NULL) {
        return EINVAL;
    }
    if (takes_one(&faults[request->device].full)) {
        return ENOMEM;
    }
    struct order *orders = calloc(request->cap.max_send_wr, sizeof *orders);
    uint64_t *ids = calloc(request->cap.max_recv_wr + 1, sizeof *ids);
    int room = orders != NULL && ids != NULL;
    struct queue *queue = room ? add(sizeof *queue, QUEUE, client, request->device) : NULL;
    if (queue == NULL) {
        free(orders);
        free(ids);
        return ENOMEM;
    }
    queue->context = context;
    queue->sends = sends;
    queue->receives = receives;
    queue->domain = request->domain;
    queue->signals_all = (int)request->signals_all;
    queue->cap = request->cap;
    queue->orders = orders;
    queue->ids = ids;
    reply->name = queue->object.name;
    return 0;
}

static int close_named(const struct client *client, uint32_t name) {
    for (uint32_t kind = CONTEXT; kind <= QUEUE; kind++) {
        struct object *object = own(client, kind, name);
        if (object != NULL) {
            struct faults *of = &faults[object->device];
            if ((kind == QUEUE && takes_one(&of->busy)) || (kind == REGION && takes_one(&of->keep))) {
                return EBUSY;
            }
            close_object(object);
            return 0;
        }
    }
    return EINVAL;
}

static int answer(struct client *client, const struct request *request, int fd, struct reply *reply) {
    struct queue *queue = own(client, QUEUE, request->name);
    int error;
    switch (request->kind) {
    case HELLO:
        reply->seed = seed;
        return 0;
    case OPEN_CONTEXT:
    case OPEN_CHANNEL:
        return open_events(client, request, fd, reply);
    case OPEN_COMPLETIONS:
        return open_completions(client, request, fd, reply);
    case RESIZE:
        return resize(client, request, fd);
    case REGISTER:
        return add_region(client, request, reply);
    case OPEN_QUEUE:
        return open_queue(client, request, reply);
    case MODIFY:
    case QUERY:
        if (queue == NULL) {
            return EINVAL;
        }
        error = request->kind == MODIFY ? modify(queue, &request->attr, request->mask) : 0;
        reply->state = queue->state;
        return error;
    case CLOSE:
        return close_named(client, request->name);
    case ASK_PORT:
        reply->name = devices[request->device].turn;
        reply->down = (uint32_t)is_down(request->device);
        return 0;
    default:
        return EINVAL;
    }
}

/* Work that was posted: what it is for may be gone by now. */
static void hear(const struct client *client, const struct told *told) {
    struct queue *queue = own(client, QUEUE, told->name);
    if (queue != NULL && told->kind == SEND) {
        take_orders(queue, told->orders, told->count);
    } else if (queue != NULL) {
        take_receives(queue, told->ids, told->count);
    }
}

void serve(struct client *client) {
    static union {
        struct request request;
        struct told told;
    } message;
    struct reply reply = {0};
    int fds[2], count = 0;
    int got = receive_with(client->socket, &message, sizeof message, fds, &count);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
        return;
    }
    if (got > 0 && (message.told.kind == SEND || message.told.kind == RECEIVE)) {
        hear(client, &message.told);
        return;
    }
    int good = got == sizeof message.request && message.request.device < MAX_DEVICES;
    if (good) {
        reply.error = answer(client, &message.request, count == 1 ? fds[0] : -1, &reply);
    }
    for (int at = 0; at < count; at++) {
        close(fds[at]);
    }
    int hello = good && message.request.kind == HELLO;
    if (!good || send_with(client->socket, &reply, sizeof reply, &board_fd, hello) != sizeof reply) {
        client_gone(client);
    }
}
