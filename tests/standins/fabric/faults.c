/* What the commands of a test do to the devices. See README.md. */
#define _GNU_SOURCE
#include "device.h"

#include <stdio.h>
#include <string.h>

const uint32_t usual_status = STATUS_REMOTE_ABORT;

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
    faults[number] = (struct faults){0};
    for (uint32_t at = 0; at < device->count; at++) {
        device->works[at]->due = 0;
    }
    atomic_store(&board->devices[number].again, 0);
    atomic_store(&board->devices[number].blind, 0);
    atomic_store(&board->devices[number].mute, 0);
    set_down(number, 0);
}

int apply(const struct fault *fault, uint32_t number) {
    if (strcmp(fault->kind, "down") == 0 || strcmp(fault->kind, "up") == 0) {
        set_down(number, strcmp(fault->kind, "down") == 0);
    } else if (strcmp(fault->kind, "same") == 0) {
        faults[number].same = (uint32_t)fault->count;
    } else if (strcmp(fault->kind, "mute") == 0) {
        atomic_store(&board->devices[number].mute, (uint32_t)fault->count);
    } else if (strcmp(fault->kind, "clear") == 0) {
        clear(number);
    } else {
        return 0;
    }
    return 1;
}

void tell_objects(char *answer, uint64_t room) {
    uint64_t known = 0, slots = 0, software = 0, in_flight = 0, stuck = 0, left = 0, same = 0;
    for (uint32_t at = 0; at < MAX_CLIENTS; at++) {
        slots += clients[at].tally != NULL ? atomic_load(&clients[at].tally->slots) : 0;
        software += clients[at].tally != NULL ? atomic_load(&clients[at].tally->software) : 0;
    }
    for (uint32_t at = 0; at <= MAX_REGIONS; at++) {
        known += regions[at].used != 0;
    }
    for (uint32_t number = 0; number < MAX_DEVICES; number++) {
        in_flight += devices[number].count;
        left += faults[number].same;
        for (uint32_t at = 0; at < devices[number].count; at++) {
            stuck += devices[number].works[at]->stuck != 0;
        }
    }
    for (uint32_t at = 0; at < live_count; at++) {
        same += live[at]->same != 0;
    }
    snprintf(answer, room,
        "endpoints=%u regions=%lu slots=%lu software=%lu in_flight=%lu stuck=%lu same=%lu same_left=%lu",
        live_count, known, slots, software, in_flight, stuck, same, left);
}
