/* What a test says to the devices: lines of text, each with a line for an answer. See README.md. */
#define _GNU_SOURCE
#include "daemon.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct faults faults[MAX_DEVICES];

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
    *fault = (struct fault){.last = MAX_DEVICES - 1, .status = usual_status};
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

int takes_one(uint32_t *left) {
    int is_one = *left > 0;
    *left -= (uint32_t)is_one;
    return is_one;
}

int fails_next(struct faults *of) {
    int by_chance = of->fail_one_in > 0 && chance(of->fail_one_in) == 0;
    return (takes_one(&of->fail_nth) && of->fail_nth == 0) || by_chance;
}

/* Kinds that all devices have. */
static int set(const struct fault *fault, uint32_t device) {
    struct faults *of = &faults[device];
    if (strcmp(fault->kind, "fail") == 0) {
        of->fail_nth = (uint32_t)fault->nth;
        of->fail_one_in = (uint32_t)fault->one_in;
        of->fail_status = (uint32_t)fault->status;
    } else if (strcmp(fault->kind, "stick") == 0) {
        of->stick = (uint32_t)fault->count;
    } else if (strcmp(fault->kind, "late") == 0) {
        of->late = (uint32_t)fault->count;
        of->late_status = (uint32_t)fault->status;
    } else if (strcmp(fault->kind, "busy") == 0) {
        of->busy = (uint32_t)fault->count;
    } else if (strcmp(fault->kind, "keep") == 0) {
        of->keep = (uint32_t)fault->count;
    } else if (strcmp(fault->kind, "land") == 0) {
        late_land(device);
    } else if (strcmp(fault->kind, "blind") == 0) {
        atomic_store(&board->devices[device].blind, 1);
    } else if (strcmp(fault->kind, "delay") == 0) {
        of->delay = fault->micros * 1000;
    } else if (strcmp(fault->kind, "again") == 0) {
        atomic_store(&board->devices[device].again, (uint32_t)fault->count);
    } else {
        return 0;
    }
    return 1;
}

static void tell_counts(char *answer, uint64_t room) {
    uint64_t users = 0;
    for (uint32_t at = 0; at < MAX_CLIENTS; at++) {
        users += clients[at].used != 0;
    }
    char objects[512];
    tell_objects(objects, sizeof objects);
    snprintf(answer, room,
        "ok users=%lu %s begun=%lu completed=%lu failed=%lu dropped=%lu pieces=%lu bytes=%lu orphans=%lu "
        "late=%lu landed=%lu seed=%lu",
        users, objects, counts.begun, counts.completed, counts.failed, counts.dropped, counts.pieces,
        counts.bytes, counts.orphans, late_count(), counts.landed, seed);
}

void obey(const char *line, char *answer, uint64_t room) {
    struct fault fault;
    if (strcmp(line, "counts") == 0) {
        tell_counts(answer, room);
        return;
    }
    int good = parse(line, &fault);
    for (uint32_t number = fault.first; good && number <= fault.last; number++) {
        good = set(&fault, number) || apply(&fault, number);
    }
    snprintf(answer, room, "%s", good ? "ok" : "error: no such command; see README.md of the stand-in");
}
