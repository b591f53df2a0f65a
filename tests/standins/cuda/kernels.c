/* Modules and their kernels. One is known: kvik's, which copies the pieces of a list. */
#include "driver.h"

#include <stdlib.h>
#include <string.h>

static const char NAME[] = "kvik_copy_pieces";
/* What a warp copies at a time: a piece has so many shares at most as the launch says, and no byte behind them is copied. */
enum { SHARE = 4096, MOST_THREADS = 256 };

struct entry {
    uint64_t to, from, size, unused;
};

struct launch {
    const struct entry *list;
    uint32_t count, parts;
    /* The list as it was when the kernel was launched. */
    struct entry was[];
};

/* They stay for ever, as a context's do. */
struct module {
    struct context *context;
};

/* The driver compiles the text, and waits for all that runs in the context before it puts the code there. */
CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    ENTER(CURRENT);
    char entry[64] = ".visible .entry ";
    strcat(entry, NAME);
    if (strncmp(image, "//", 2) != 0 || strstr(image, entry) == NULL || strstr(image, ".target sm_70\n") == NULL) {
        return INVALID_IMAGE;
    }
    pthread_mutex_lock(&big);
    wait_for_all(current());
    CUresult code = current()->lost;
    *module = calloc(1, sizeof **module);
    (*module)->context = current();
    pthread_mutex_unlock(&big);
    return code;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    ENTER(CURRENT);
    if (strcmp(name, NAME) != 0) {
        return NOT_FOUND;
    }
    *function = module;
    return SUCCESS;
}

/* Whether the device's kernels reach all of a range. */
static int is_reached(uint64_t at, uint64_t size, const struct context *context) {
    if (is_whole(at, size, 1)) {
        return size == 0 || piece_at(at)->device == context->device;
    }
    return is_whole(at, size, 0);
}

static void check(const struct launch *launch, const struct context *context) {
    if (launch->count == 0 || !is_whole((uint64_t)launch->list, launch->count * sizeof *launch->list, 0)) {
        broken("a kernel is given a list of %u pieces that is not page-locked", launch->count);
    }
    for (uint32_t number = 0; number < launch->count; number++) {
        const struct entry *entry = &launch->list[number];
        if (!is_reached(entry->to, entry->size, context) || !is_reached(entry->from, entry->size, context)) {
            broken("a kernel copies %llu bytes from or to memory that its device does not reach",
                   (unsigned long long)entry->size);
        }
    }
}

CUresult cuLaunchKernel(CUfunction function, unsigned blocks, unsigned blocks_y, unsigned blocks_z, unsigned threads,
                        unsigned threads_y, unsigned threads_z, unsigned shared, CUstream stream, void **given,
                        void **extra) {
    ENTER(CURRENT);
    if (function == NULL || function->context != current() || extra != NULL || shared != 0 ||
        (uint64_t)blocks_y * blocks_z * threads_y * threads_z != 1 || blocks == 0 || threads == 0 ||
        threads > MOST_THREADS || threads % 32 != 0) {
        return INVALID_VALUE;
    }
    struct launch head = {*(const struct entry **)given[0], *(uint32_t *)given[1], *(uint32_t *)given[2]};
    pthread_mutex_lock(&big);
    check(&head, current());
    size_t size = head.count * sizeof *head.list;
    struct launch *launch = malloc(sizeof head + size);
    *launch = head;
    memcpy(launch->was, head.list, size);
    CUresult code = give_launch(stream, launch);
    if (code != SUCCESS) {
        free(launch);
    }
    pthread_mutex_unlock(&big);
    return code;
}

void launch_use(const struct launch *launch, int more) {
    use((uint64_t)launch->list, launch->count * sizeof *launch->list, more);
    for (uint32_t number = 0; number < launch->count; number++) {
        use(launch->was[number].to, launch->was[number].size, more);
        use(launch->was[number].from, launch->was[number].size, more);
    }
}

/* The pieces in an order that is drawn, always the same one for as many. */
uint64_t launch_run(const struct launch *launch) {
    if (memcmp(launch->list, launch->was, launch->count * sizeof *launch->list) != 0) {
        broken("a list of %u pieces is changed before the kernel has read it", launch->count);
    }
    uint32_t *order = malloc(launch->count * sizeof *order);
    uint64_t drawn = 1;
    for (uint32_t number = 0; number < launch->count; number++) {
        drawn = drawn * 6364136223846793005u + 1442695040888963407u;
        uint32_t other = (uint32_t)((drawn >> 33) % (number + 1));
        order[number] = order[other];
        order[other] = number;
    }
    uint64_t most = (uint64_t)launch->parts * SHARE;
    for (uint32_t number = 0; number < launch->count; number++) {
        const struct entry *entry = &launch->was[order[number]];
        move(entry->to, entry->from, entry->size < most ? entry->size : most);
    }
    free(order);
    return launch->was[0].to;
}
