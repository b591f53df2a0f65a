/* Writes that were told of as failed while their bytes are still on the wire: they land when a test says so,
 * or not at all, if the endpoint that they go to is closed before. What becomes of who posted them is nothing
 * to them. */
#include "device.h"

#include <stdlib.h>

struct late {
    struct late *next;
    /* Where they came from, and where they go: by name and token, since an endpoint's place is used again. */
    uint32_t device, target, token;
    pid_t process;
    uint64_t at, len;
    unsigned char bytes[];
};

static struct late *first;

void late_leave(struct work *work) {
    const struct order *order = &work->order;
    struct late *late = malloc(sizeof *late + order->len);
    if (late != NULL &&
        fetch(work->from->client->process, order->local, late->bytes, order->len) == order->len) {
        late->device = work->from->device;
        late->target = work->target;
        late->token = work->token;
        late->process = work->target_process;
        late->at = order->remote;
        late->len = order->len;
        late->next = first;
        first = late;
    } else {
        free(late);
    }
    end(work, work->status);
}

static void take(struct late **at, int lands) {
    struct late *late = *at;
    *at = late->next;
    if (lands) {
        if (put(late->process, late->at, late->bytes, late->len) != late->len) {
            counts.orphans++;
        }
        counts.bytes += late->len;
        counts.landed++;
    }
    free(late);
}

void late_land(uint32_t device) {
    for (struct late **at = &first; *at != NULL;) {
        if ((*at)->device == device) {
            take(at, 1);
        } else {
            at = &(*at)->next;
        }
    }
}

void late_stop(const struct endpoint *target) {
    for (struct late **at = &first; *at != NULL;) {
        if ((*at)->target == target->name && (*at)->token == target->token) {
            take(at, 0);
        } else {
            at = &(*at)->next;
        }
    }
}

uint64_t late_count(void) {
    uint64_t count = 0;
    for (const struct late *late = first; late != NULL; late = late->next) {
        count++;
    }
    return count;
}
