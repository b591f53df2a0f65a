/* What processes ask for, and what is closed when they end. */
#define _GNU_SOURCE
#include "device.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

struct endpoint endpoints[MAX_ENDPOINTS];
struct endpoint *live[MAX_ENDPOINTS];
uint32_t live_count;
struct region regions[MAX_REGIONS + 1];
/* Of each device, what was closed last. */
static struct {
    uint32_t name, token;
} closed[MAX_DEVICES];

static void close_endpoint(struct endpoint *endpoint) {
    closed[endpoint->device].name = endpoint->name;
    closed[endpoint->device].token = endpoint->token;
    let_go(endpoint);
    live[endpoint->place] = live[--live_count];
    live[endpoint->place]->place = endpoint->place;
    munmap(endpoint->queues, bytes_of_queues(endpoint->size));
    free(endpoint->works);
    free(endpoint->free);
    memset(endpoint, 0, sizeof *endpoint);
}

static void close_region(struct region *region) {
    region->used = 0;
}

void objects_gone(struct client *client) {
    for (struct endpoint *endpoint = endpoints; endpoint < endpoints + MAX_ENDPOINTS; endpoint++) {
        if (endpoint->used && endpoint->client == client) {
            close_endpoint(endpoint);
        }
    }
    for (struct region *region = regions; region <= regions + MAX_REGIONS; region++) {
        if (region->used && region->client == client) {
            close_region(region);
        }
    }
    if (client->tally != NULL) {
        munmap(client->tally, sizeof *client->tally);
    }
}

/* A place that is free, looked for from where the last one was found: names come back late. */
static struct endpoint *free_endpoint(void) {
    static uint32_t next;
    for (uint32_t step = 0; step < MAX_ENDPOINTS; step++) {
        struct endpoint *endpoint = &endpoints[next++ % MAX_ENDPOINTS];
        if (!endpoint->used) {
            return endpoint;
        }
    }
    return NULL;
}

static int open_endpoint(struct client *client, const struct request *request, int fd, struct reply *reply) {
    struct endpoint *endpoint = free_endpoint();
    uint32_t token = chance(UINT32_MAX) + 1;
    uint32_t size = (uint32_t)request->a;
    if (request->a == 0 || request->a > MAX_DEPTH || (size & (size - 1)) != 0 || fd < 0) {
        return EINVAL;
    }
    if (endpoint == NULL) {
        return ENOMEM;
    }
    struct endpoint *last = &endpoints[closed[request->device].name];
    int same = !last->used && takes_one(&faults[request->device].same);
    if (same) {
        endpoint = last;
        token = closed[request->device].token;
    }
    struct queues *queues = shared_mapped(fd, bytes_of_queues(size));
    struct work *works = calloc(size, sizeof *works);
    uint32_t *ids = calloc(size, sizeof *ids);
    if (queues == NULL || works == NULL || ids == NULL) {
        if (queues != NULL) {
            munmap(queues, bytes_of_queues(size));
        }
        free(works);
        free(ids);
        return ENOMEM;
    }
    for (uint32_t id = 0; id < size; id++) {
        ids[id] = id;
    }
    uint32_t name = (uint32_t)(endpoint - endpoints);
    *endpoint = (struct endpoint){.used = 1,
        .device = request->device,
        .domain = request->domain,
        .token = token,
        .same = same,
        .name = name,
        .client = client,
        .queues = queues,
        .size = size,
        .works = works,
        .free = ids,
        .place = live_count};
    live[live_count++] = endpoint;
    reply->value = name;
    reply->address.endpoint = (uint16_t)name;
    reply->address.token = endpoint->token;
    reply->address.gid[0] = 0xFE;
    reply->address.gid[1] = 0x80;
    reply->address.gid[15] = (uint8_t)request->device;
    return 0;
}

static int add_region(struct client *client, const struct request *request, struct reply *reply) {
    static uint32_t next;
    if (request->b == 0 || request->a + request->b < request->a) {
        return EINVAL;
    }
    for (uint32_t step = 0; step < MAX_REGIONS; step++) {
        uint32_t place = 1 + next++ % MAX_REGIONS;
        struct region *region = &regions[place];
        if (region->used) {
            continue;
        }
        uint16_t turn = (uint16_t)(region->turn + 1);
        *region = (struct region){.used = 1,
            .turn = turn,
            .device = request->device,
            .domain = request->domain,
            .client = client,
            .at = request->a,
            .len = request->b,
            .access = request->c,
            .place = request->d};
        reply->value = (uint32_t)turn << 16 | place;
        return 0;
    }
    return ENOMEM;
}

static int close_named(struct client *client, const struct request *request) {
    if (request->kind == CLOSE_ENDPOINT) {
        struct endpoint *endpoint = request->a < MAX_ENDPOINTS ? &endpoints[request->a] : NULL;
        if (endpoint == NULL || !endpoint->used || endpoint->client != client) {
            return EINVAL;
        }
        if (takes_one(&faults[endpoint->device].busy)) {
            return EBUSY;
        }
        close_endpoint(endpoint);
        return 0;
    }
    struct region *region = &regions[request->a & 0xFFFF];
    if (!region->used || region->client != client || region->turn != request->a >> 16) {
        return EINVAL;
    }
    if (takes_one(&faults[region->device].keep)) {
        return EBUSY;
    }
    close_region(region);
    return 0;
}

static int greet(struct client *client, int fds[2], int count, struct reply *reply) {
    if (client->tally != NULL || count != 2) {
        return EINVAL;
    }
    client->tally = shared_mapped(fds[1], sizeof *client->tally);
    client->doorbell = dup(fds[0]);
    reply->value = seed;
    return client->tally != NULL && client->doorbell >= 0 ? 0 : ENOMEM;
}

void serve(struct client *client) {
    struct request request;
    struct reply reply = {0};
    int fds[2], count = 0;
    int got = receive_with(client->socket, &request, sizeof request, fds, &count);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
        return;
    }
    if (got != sizeof request || request.device >= MAX_DEVICES) {
        reply.error = EINVAL;
    } else if (request.kind == HELLO) {
        reply.error = greet(client, fds, count, &reply);
    } else if (request.kind == OPEN_ENDPOINT) {
        reply.error = open_endpoint(client, &request, count == 1 ? fds[0] : -1, &reply);
    } else if (request.kind == REGISTER) {
        reply.error = add_region(client, &request, &reply);
    } else {
        reply.error = close_named(client, &request);
    }
    for (int at = 0; at < count; at++) {
        close(fds[at]);
    }
    int hello = got == sizeof request && request.kind == HELLO;
    if (got <= 0 || send_with(client->socket, &reply, sizeof reply, &board_fd, hello) != sizeof reply) {
        client_gone(client);
    }
}
