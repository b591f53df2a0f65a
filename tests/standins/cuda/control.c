/* What tests ask for: faults, settings, and counts. */
#include "driver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct fault_settings faults = {.delay = 20};

/* Functions that were called, and the one call of each that fails. */
static struct known {
    char name[48];
    int64_t calls;
    unsigned nth;
    CUresult code;
} known[128];

static struct known *known_as(const char *name) {
    for (int number = 0; number < 128; number++) {
        if (known[number].name[0] == 0) {
            snprintf(known[number].name, sizeof known[number].name, "%s", name);
        }
        if (strcmp(known[number].name, name) == 0) {
            return &known[number];
        }
    }
    broken("it knows fewer functions than %s needs", name);
}

CUresult fault(const char *name) {
    struct known *function = known_as(name);
    function->calls++;
    if (function->nth == 0 || --function->nth > 0) {
        return SUCCESS;
    }
    return function->code;
}

static void clear(void) {
    faults = (struct fault_settings){.delay = 20};
    for (int number = 0; number < 128; number++) {
        known[number].nth = 0;
    }
}

int obey(const char *command) {
    char name[48];
    unsigned nth, micros;
    int device, code, attribute, value, used = 0;
    if (sscanf(command, "fail %47s nth=%u code=%d%n", name, &nth, &code, &used) == 3 && command[used] == 0) {
        struct known *function = known_as(name);
        function->nth = nth;
        function->code = code;
    } else if (sscanf(command, "flip nth=%u%n", &nth, &used) == 1 && command[used] == 0) {
        faults.flip = nth;
    } else if (sscanf(command, "delay micros=%u%n", &micros, &used) == 1 && command[used] == 0) {
        faults.delay = micros;
    } else if (sscanf(command, "poison device=%d code=%d%n", &device, &code, &used) == 2 &&
               command[used] == 0) {
        lose(device, code);
    } else if (sscanf(command, "attribute id=%d value=%d%n", &attribute, &value, &used) == 2 &&
               command[used] == 0 && attribute >= 0 && attribute < MAX_ATTRIBUTES) {
        attributes[attribute] = value;
    } else if (strcmp(command, "stall") == 0 || strcmp(command, "release") == 0) {
        faults.stalled = command[0] == 's';
    } else if (strcmp(command, "clear") == 0) {
        clear();
    } else {
        return -1;
    }
    pthread_cond_broadcast(&changed);
    return 0;
}

int standin_control(const char *command) {
    pthread_mutex_lock(&big);
    int answer = obey(command);
    pthread_mutex_unlock(&big);
    return answer;
}

int64_t standin_count(const char *what) {
    int64_t count = -1;
    pthread_mutex_lock(&big);
    if (strcmp(what, "allocations") == 0) {
        count = pieces(ALLOCATED, MAPPED);
    } else if (strcmp(what, "opened") == 0) {
        count = pieces(PEERS, PEERS);
    } else if (strcmp(what, "pinned") == 0) {
        count = pieces(PINNED, REGISTERED);
    } else if (strcmp(what, "streams") == 0) {
        count = streams();
    } else if (strcmp(what, "events") == 0) {
        count = events();
    } else if (strcmp(what, "contexts") == 0) {
        count = contexts();
    } else if (strncmp(what, "cu", 2) == 0) {
        count = known_as(what)->calls;
    }
    pthread_mutex_unlock(&big);
    return count;
}

static int number_of(const char *name, int usual) {
    const char *text = getenv(name);
    return text == NULL || *text == 0 ? usual : atoi(text);
}

void begin_with_environment(void) {
    device_count = number_of("KVIK_STANDIN_CUDA_DEVICES", 2);
    version = number_of("KVIK_STANDIN_CUDA_VERSION", 12080);
    memory_of_each = (uint64_t)number_of("KVIK_STANDIN_CUDA_MEMORY", 1024) << 20;
    if (device_count < 0 || device_count > MAX_DEVICES) {
        broken("KVIK_STANDIN_CUDA_DEVICES is not 0 to %d", MAX_DEVICES);
    }
    const char *commands = getenv("KVIK_STANDIN_CUDA_FAULTS");
    char *all = strdup(commands == NULL ? "" : commands), *rest = all;
    for (char *command; (command = strsep(&rest, ";")) != NULL;) {
        if (*command != 0 && obey(command) != 0) {
            broken("KVIK_STANDIN_CUDA_FAULTS has no command: %s", command);
        }
    }
    free(all);
}
