/* What the commands of a test do to the devices. See README.md. */
#include "device.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

const uint32_t usual_status = IBV_WC_RETRY_EXC_ERR;

static void set_down(uint32_t number, uint32_t down) {
    if (is_down(number) == (down != 0)) {
        return;
    }
    atomic_store(&board->devices[number].down, down);
    if (down) {
        tell_all(number, IBV_EVENT_PORT_ERR);
    } else {
        devices[number].turn++;
        tell_all(number, IBV_EVENT_PORT_ACTIVE);
        tell_all(number, IBV_EVENT_GID_CHANGE);
    }
}

/* The device is of no use any more: what it had is silent. */
static void end_device(uint32_t number) {
    for (struct object *object = objects; object != NULL; object = object->next) {
        if (object->kind == QUEUE && object->device == number) {
            ((struct queue *)object)->state = IBV_QPS_ERR;
            silence((struct queue *)object);
        }
    }
    tell_all(number, IBV_EVENT_DEVICE_FATAL);
}

/* It is unplugged: what tells of events and completions can be read no more. */
static void unplug_device(uint32_t number) {
    end_device(number);
    for (struct object *object = objects; object != NULL; object = object->next) {
        if ((object->kind == CONTEXT || object->kind == CHANNEL) && object->device == number) {
            close(((struct channel *)object)->events);
            ((struct channel *)object)->events = -1;
        }
    }
}

int apply(const struct fault *fault, uint32_t number) {
    if (strcmp(fault->kind, "lose") == 0) {
        faults[number].lose = (uint32_t)fault->count;
    } else if (strcmp(fault->kind, "full") == 0) {
        faults[number].full = (uint32_t)fault->count;
    } else if (strcmp(fault->kind, "down") == 0 || strcmp(fault->kind, "up") == 0) {
        set_down(number, strcmp(fault->kind, "down") == 0);
    } else if (strcmp(fault->kind, "fatal") == 0) {
        end_device(number);
    } else if (strcmp(fault->kind, "gone") == 0) {
        unplug_device(number);
    } else if (strcmp(fault->kind, "clear") == 0) {
        clear_faults(number);
        atomic_store(&board->devices[number].again, 0);
        atomic_store(&board->devices[number].blind, 0);
        set_down(number, 0);
    } else {
        return 0;
    }
    return 1;
}

void tell_objects(char *answer, uint64_t room) {
    uint32_t of[QUEUE + 1] = {0};
    uint64_t in_flight = 0, stuck = 0;
    for (struct object *object = objects; object != NULL; object = object->next) {
        const struct queue *queue = (struct queue *)object;
        of[object->kind]++;
        if (object->kind == QUEUE) {
            in_flight += queue->posted - queue->ended;
            stuck += queue->begun && queue->stuck && queue->ended != queue->posted;
        }
    }
    snprintf(answer, room,
        "contexts=%u channels=%u completions=%u regions=%u queues=%u in_flight=%lu stuck=%lu",
        of[CONTEXT], of[CHANNEL], of[COMPLETIONS], of[REGION], of[QUEUE], in_flight, stuck);
}
