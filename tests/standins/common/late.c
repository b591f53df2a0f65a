/* Writes that were told of as failed while their bytes are still on the wire: they land when a test says so,
 * or not at all, if what they go through is closed before. What becomes of who posted them is nothing
 * to them. */
#include "daemon.h"

#include <stdlib.h>

struct late {
    struct late *next;
    uint32_t device;
    uint64_t target;
    pid_t process;
    uint64_t at, len;
    unsigned char *bytes;
};

static struct late *first;

void late_add(
    uint32_t device, uint64_t target, pid_t process, uint64_t at, unsigned char *bytes, uint64_t len) {
    struct late *late = malloc(sizeof *late);
    if (late == NULL) {
        free(bytes);
        return;
    }
    *late = (struct late){first, device, target, process, at, len, bytes};
    first = late;
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
    free(late->bytes);
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

void late_stop(uint64_t target) {
    for (struct late **at = &first; *at != NULL;) {
        if ((*at)->target == target) {
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
