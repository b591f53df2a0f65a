/* What a test says to the devices: lines of text, each with a line for an answer. See README.md. */
#define _GNU_SOURCE
#include "device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct fault {
    char kind[16];
    /* One device, or all of them. */
    uint32_t first, last;
    uint64_t nth, one_in, status, count, micros;
};

/* `word=number`: false if there is none, or another word. */
static int number(const char *text, const char *word, uint64_t *value) {
    size_t len = strlen(word);
    if (strncmp(text, word, len) != 0 || text[len] != '=') {
        return 0;
    }
    char *end = NULL;
    *value = strtoull(text + len + 1, &end, 10);
    return end != text + len + 1 && *end == '\0' && *value <= UINT32_MAX;
}

static int parse(const char *line, struct fault *fault) {
    char copy[256], *rest = NULL;
    uint64_t device = 0;
    *fault = (struct fault){.last = MAX_DEVICES - 1, .status = STATUS_REMOTE_ABORT};
    if (snprintf(copy, sizeof copy, "%s", line) >= (int)sizeof copy) {
        return 0;
    }
    char *word = strtok_r(copy, " ", &rest);
    if (word == NULL || snprintf(fault->kind, sizeof fault->kind, "%s", word) >= (int)sizeof fault->kind) {
        return 0;
    }
    while ((word = strtok_r(NULL, " ", &rest)) != NULL) {
        if (number(word, "device", &device) && device < MAX_DEVICES) {
            fault->first = fault->last = (uint32_t)device;
        } else if (!number(word, "nth", &fault->nth) && !number(word, "one_in", &fault->one_in) &&
                   !number(word, "status", &fault->status) && !number(word, "count", &fault->count) &&
                   !number(word, "micros", &fault->micros)) {
            return 0;
        }
    }
    return 1;
}

static void set_down(uint32_t number, uint32_t down) {
    atomic_store(&board->devices[number].down, down);
    if (down) {
        /* What was posted before is the device's, and ends with it. */
        begin_posted();
        end_all(number, STATUS_UNREACHABLE);
    }
}

static void clear(uint32_t number) {
    struct device *device = &devices[number];
    device->fail_nth = device->fail_one_in = device->stick = device->late = 0;
    device->delay = 0;
    for (uint32_t at = 0; at < device->count; at++) {
        device->works[at]->due = 0;
    }
    atomic_store(&board->devices[number].again, 0);
    atomic_store(&board->devices[number].blind, 0);
    set_down(number, 0);
}

/* False for a kind that is none. */
static int apply(const struct fault *fault, uint32_t number) {
    struct device *device = &devices[number];
    if (strcmp(fault->kind, "fail") == 0) {
        device->fail_nth = (uint32_t)fault->nth;
        device->fail_one_in = (uint32_t)fault->one_in;
        device->fail_status = (uint32_t)fault->status;
    } else if (strcmp(fault->kind, "stick") == 0) {
        device->stick = (uint32_t)fault->count;
    } else if (strcmp(fault->kind, "late") == 0) {
        device->late = (uint32_t)fault->count;
        device->late_status = (uint32_t)fault->status;
    } else if (strcmp(fault->kind, "land") == 0) {
        late_land(number);
    } else if (strcmp(fault->kind, "blind") == 0) {
        atomic_store(&board->devices[number].blind, 1);
    } else if (strcmp(fault->kind, "delay") == 0) {
        device->delay = fault->micros * 1000;
    } else if (strcmp(fault->kind, "again") == 0) {
        atomic_store(&board->devices[number].again, (uint32_t)fault->count);
    } else if (strcmp(fault->kind, "down") == 0 || strcmp(fault->kind, "up") == 0) {
        set_down(number, strcmp(fault->kind, "down") == 0);
    } else if (strcmp(fault->kind, "clear") == 0) {
        clear(number);
    } else {
        return 0;
    }
    return 1;
}

static void tell_counts(char *answer, uint64_t room) {
    uint64_t users = 0, known = 0, slots = 0, software = 0, in_hand = 0, stuck = 0;
    for (uint32_t at = 0; at < MAX_CLIENTS; at++) {
        users += clients[at].used != 0;
        slots += clients[at].tally != NULL ? atomic_load(&clients[at].tally->slots) : 0;
        software += clients[at].tally != NULL ? atomic_load(&clients[at].tally->software) : 0;
    }
    for (uint32_t at = 0; at <= MAX_REGIONS; at++) {
        known += regions[at].used != 0;
    }
    for (uint32_t number = 0; number < MAX_DEVICES; number++) {
        in_hand += devices[number].count;
        for (uint32_t at = 0; at < devices[number].count; at++) {
            stuck += devices[number].works[at]->stuck != 0;
        }
    }
    snprintf(answer, room,
        "ok users=%lu endpoints=%u regions=%lu slots=%lu software=%lu in_hand=%lu stuck=%lu begun=%lu "
        "completed=%lu failed=%lu dropped=%lu pieces=%lu bytes=%lu orphans=%lu late=%lu landed=%lu seed=%lu",
        users, live_count, known, slots, software, in_hand, stuck, counts.begun, counts.completed,
        counts.failed, counts.dropped, counts.pieces, counts.bytes, counts.orphans, late_count(),
        counts.landed, seed);
}

void obey(const char *line, char *answer, uint64_t room) {
    struct fault fault;
    if (strcmp(line, "counts") == 0) {
        tell_counts(answer, room);
        return;
    }
    int good = parse(line, &fault);
    for (uint32_t number = fault.first; good && number <= fault.last; number++) {
        good = apply(&fault, number);
    }
    snprintf(answer, room, "%s", good ? "ok" : "error: no such command; see README.md of the stand-in");
}
