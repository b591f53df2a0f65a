/* Streams: a thread for each, which does what it was given in order, and each copy later than that. */
#define _GNU_SOURCE
#include "driver.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Something that a stream does. */
struct deed {
    struct deed *next;
    enum { COPY, FILL, KERNEL, WAIT, CALL } what;
    /* Rows of bytes; a plain copy is one. */
    uint64_t to, from, width, height, to_pitch, from_pitch;
    /* A copy's source, where the stream has a copy of its own. */
    void *own;
    struct launch *launch;
    int value;
    uint64_t micros;
    struct stream *on;
    uint64_t until;
    CUstreamCallback callback;
    void *given;
};

struct stream {
    struct stream *next;
    struct context *context;
    int blocking, destroyed;
    struct deed *first, **last;
    /* Deeds that it was given, and those that have ended. */
    uint64_t given, ended;
};

struct event {
    struct event *next;
    struct context *context;
    struct stream *on;
    uint64_t until;
};

/* Streams stay for ever: events refer to them. */
static struct stream *all_streams;
static struct event *all_events;

__thread int in_callback;

int streams(void) {
    int count = 0;
    for (struct stream *stream = all_streams; stream != NULL; stream = stream->next) {
        count += !stream->destroyed && stream->context->legacy != stream;
    }
    return count;
}

int events(void) {
    int count = 0;
    for (struct event *event = all_events; event != NULL; event = event->next) {
        count++;
    }
    return count;
}

/* Notes what the deed uses, or does not any more. */
static void use_both(const struct deed *deed, int more) {
    if (deed->what == KERNEL) {
        launch_use(deed->launch, more);
        return;
    }
    for (uint64_t row = 0; row < deed->height; row++) {
        use(deed->to + row * deed->to_pitch, deed->width, more);
        if (deed->what == COPY) {
            use(deed->from + row * deed->from_pitch, deed->width, more);
        }
    }
}

/* The fault: one byte there is another one. */
static void flip(uint64_t to) {
    if (faults.flip > 0 && --faults.flip == 0) {
        unsigned char byte;
        move((uint64_t)&byte, to, 1);
        byte ^= 0xFF;
        move(to, (uint64_t)&byte, 1);
    }
}

static void do_rows(const struct deed *deed) {
    /* The last row first: nobody may count on any order. */
    for (uint64_t row = deed->height; row-- > 0;) {
        uint64_t to = deed->to + row * deed->to_pitch;
        if (deed->what == FILL) {
            fill(to, deed->value, deed->width);
        } else {
            move(to, deed->from + row * deed->from_pitch, deed->width);
        }
    }
    if (deed->what == COPY) {
        flip(deed->to);
    }
}

/* A context that is lost does nothing any more, but tells whoever asked to be told. */
static void do_deed(struct stream *stream, struct deed *deed) {
    struct context *context = stream->context;
    while (faults.stalled && context->lost == SUCCESS) {
        pthread_cond_wait(&changed, &big);
    }
    while (deed->what == WAIT && deed->on->ended < deed->until && context->lost == SUCCESS) {
        pthread_cond_wait(&changed, &big);
    }
    uint64_t micros = deed->what <= KERNEL ? faults.delay + deed->micros : 0;
    if (micros > 0 && context->lost == SUCCESS) {
        pthread_mutex_unlock(&big);
        usleep((useconds_t)micros);
        pthread_mutex_lock(&big);
    }
    if (deed->what == CALL) {
        CUresult code = context->lost;
        pthread_mutex_unlock(&big);
        in_callback = 1;
        deed->callback(stream, code, deed->given);
        in_callback = 0;
        pthread_mutex_lock(&big);
    } else if (deed->what <= KERNEL) {
        if (context->lost == SUCCESS && deed->what == KERNEL) {
            flip(launch_run(deed->launch));
        } else if (context->lost == SUCCESS) {
            do_rows(deed);
        }
        use_both(deed, -1);
    }
}

static void *work(void *given) {
    struct stream *stream = given;
    pthread_mutex_lock(&big);
    while (stream->first != NULL || !stream->destroyed) {
        struct deed *deed = stream->first;
        if (deed == NULL) {
            pthread_cond_wait(&changed, &big);
            continue;
        }
        do_deed(stream, deed);
        stream->first = deed->next;
        if (stream->first == NULL) {
            stream->last = &stream->first;
        }
        stream->ended++;
        free(deed->own);
        free(deed->launch);
        free(deed);
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&big);
    return NULL;
}

struct stream *stream_new(struct context *context, int blocking) {
    struct stream *stream = calloc(1, sizeof *stream);
    *stream = (struct stream){.next = all_streams, .context = context, .blocking = blocking};
    stream->last = &stream->first;
    all_streams = stream;
    pthread_t thread;
    if (pthread_create(&thread, NULL, work, stream) != 0) {
        broken("no thread can be made for a stream");
    }
    pthread_detach(thread);
    return stream;
}

static void append(struct stream *stream, const struct deed *given) {
    struct deed *deed = malloc(sizeof *deed);
    *deed = *given;
    deed->next = NULL;
    *stream->last = deed;
    stream->last = &deed->next;
    stream->given++;
    if (deed->what <= KERNEL) {
        use_both(deed, 1);
    }
    pthread_cond_broadcast(&changed);
}

static void append_wait(struct stream *stream, struct stream *on) {
    if (on != stream && on->ended < on->given) {
        append(stream, &(struct deed){.what = WAIT, .on = on, .until = on->given});
    }
}

/* The default stream comes behind all blocking ones, and they behind it. */
static void join(struct stream *stream) {
    struct stream *legacy = stream->context->legacy;
    for (struct stream *other = all_streams; stream == legacy && other != NULL; other = other->next) {
        if (other->blocking && other->context == stream->context) {
            append_wait(stream, other);
        }
    }
    if (stream->blocking) {
        append_wait(stream, legacy);
    }
}

/* The stream of a handle, or null: it must be one of the current context's. */
static struct stream *known(CUstream handle) {
    if (handle == NULL || handle == (CUstream)1) {
        return current()->legacy;
    }
    for (struct stream *stream = all_streams; stream != NULL; stream = stream->next) {
        if (stream == handle && !stream->destroyed && stream->context == current()) {
            return stream;
        }
    }
    return NULL;
}

static CUresult give(CUstream handle, const struct deed *deed) {
    struct stream *stream = known(handle);
    if (stream == NULL) {
        return INVALID_HANDLE;
    }
    join(stream);
    append(stream, deed);
    return SUCCESS;
}

CUresult give_launch(CUstream handle, struct launch *launch) {
    return give(handle, &(struct deed){.what = KERNEL, .launch = launch});
}

void wait_for(struct stream *stream) {
    uint64_t until = stream->given;
    while (stream->ended < until && stream->context->lost == SUCCESS) {
        pthread_cond_wait(&changed, &big);
    }
}

void wait_for_all(struct context *context) {
    for (struct stream *stream = all_streams; stream != NULL; stream = stream->next) {
        if (stream->context == context) {
            wait_for(stream);
        }
    }
}

/* Copies of which both sides are pieces; `to_device` and `from_device` say of which kind. */
static CUresult copy(const struct deed *deed, int to_device, int from_device, CUstream stream) {
    pthread_mutex_lock(&big);
    CUresult code = SUCCESS;
    for (uint64_t row = 0; row < deed->height && code == SUCCESS; row++) {
        int to_whole = is_whole(deed->to + row * deed->to_pitch, deed->width, to_device);
        int from_whole = is_whole(deed->from + row * deed->from_pitch, deed->width, from_device);
        if ((to_device && !to_whole) || (from_device && !from_whole)) {
            code = INVALID_VALUE;
        } else if (!to_whole || !from_whole) {
            broken("%llu bytes are copied in a stream from or to memory that is not page-locked",
                   (unsigned long long)deed->width);
        }
    }
    code = code == SUCCESS ? give(stream, deed) : code;
    pthread_mutex_unlock(&big);
    return code;
}

static struct deed plain(uint64_t to, uint64_t from, uint64_t size) {
    return (struct deed){.what = COPY, .to = to, .from = from, .width = size, .height = 1};
}

/* As the driver does it: it has read all bytes when it returns, and they may not be there yet. */
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size) {
    ENTER(CURRENT);
    CUresult code = INVALID_VALUE;
    pthread_mutex_lock(&big);
    if (is_whole(to, size, 1)) {
        void *own = malloc(size + 1);
        memcpy(own, from, size);
        struct deed deed = plain(to, (uint64_t)own, size);
        deed.own = own;
        code = give(NULL, &deed);
        if (size > 0 && piece_at(to)->finishes_copies) {
            wait_for(current()->legacy);
            code = current()->lost;
        }
    }
    pthread_mutex_unlock(&big);
    return code;
}

CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size) {
    ENTER(CURRENT);
    CUresult code = INVALID_VALUE;
    pthread_mutex_lock(&big);
    if (is_whole(from, size, 1)) {
        struct deed deed = plain((uint64_t)to, from, size);
        give(NULL, &deed);
        wait_for(current()->legacy);
        code = current()->lost;
    }
    pthread_mutex_unlock(&big);
    return code;
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t size, CUstream stream) {
    ENTER(CURRENT);
    struct deed deed = plain(to, (uint64_t)from, size);
    return copy(&deed, 1, 0, stream);
}

CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t size, CUstream stream) {
    ENTER(CURRENT);
    struct deed deed = plain((uint64_t)to, from, size);
    return copy(&deed, 0, 1, stream);
}

/* Whether a device's memory lies where a context is. */
static int lies_in(uint64_t at, const struct context *context) {
    pthread_mutex_lock(&big);
    const struct piece *piece = piece_at(at);
    int lies = piece != NULL && context != NULL && piece->device == context->device;
    pthread_mutex_unlock(&big);
    return lies;
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    ENTER(CURRENT);
    if (size > 0 && (!lies_in(to, current()) || !lies_in(from, current()))) {
        return INVALID_VALUE;
    }
    struct deed deed = plain(to, from, size);
    return copy(&deed, 1, 1, stream);
}

CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext there, CUdeviceptr from, CUcontext here, size_t size,
                           CUstream stream) {
    ENTER(CURRENT);
    if (size > 0 && (!lies_in(to, there) || !lies_in(from, here))) {
        return INVALID_VALUE;
    }
    struct deed deed = plain(to, from, size);
    return copy(&deed, 1, 1, stream);
}

CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *rows, CUstream stream) {
    ENTER(CURRENT);
    int to_device = rows->dst_type == TYPE_DEVICE, from_device = rows->src_type == TYPE_DEVICE;
    size_t most = (size_t)attributes[11];
    if (rows->src_x + rows->src_y + rows->dst_x + rows->dst_y != 0 || rows->dst_type - 1 > 1 ||
        rows->src_type - 1 > 1 || rows->dst_pitch < rows->width || rows->src_pitch < rows->width ||
        rows->dst_pitch > most || rows->src_pitch > most) {
        return INVALID_VALUE;
    }
    struct deed deed = {.what = COPY, .width = rows->width, .height = rows->height};
    deed.to = to_device ? rows->dst_device : (uint64_t)rows->dst_host;
    deed.from = from_device ? rows->src_device : (uint64_t)rows->src_host;
    deed.to_pitch = rows->dst_pitch;
    deed.from_pitch = rows->src_pitch;
    return copy(&deed, to_device, from_device, stream);
}

/* The last one first: they are in no order. */
CUresult cuMemcpyBatchAsync(CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t count,
                            CUmemcpyAttributes *how, size_t *firsts, size_t ways, size_t *failed,
                            CUstream stream) {
    ENTER(CURRENT);
    if (version < 12080) {
        return NOT_SUPPORTED;
    }
    /* No hints, and sources in the order of the stream, which may not be the default one. */
    if (ways != 1 || firsts[0] != 0 || how->order != 1 || how->flags != 0 || stream == NULL || count == 0) {
        return INVALID_VALUE;
    }
    *failed = SIZE_MAX;
    for (size_t number = count; number-- > 0;) {
        pthread_mutex_lock(&big);
        int to_device = is_whole(to[number], sizes[number], 1);
        int from_device = is_whole(from[number], sizes[number], 1);
        pthread_mutex_unlock(&big);
        struct deed deed = plain(to[number], from[number], sizes[number]);
        CUresult code = copy(&deed, to_device, from_device, stream);
        if (code != SUCCESS) {
            *failed = number;
            return code;
        }
    }
    return SUCCESS;
}

CUresult standin_fill(CUstream stream, CUdeviceptr at, size_t size, int value, unsigned micros) {
    ENTER(CURRENT);
    pthread_mutex_lock(&big);
    struct deed deed = {.what = FILL, .to = at, .width = size, .height = 1, .value = value, .micros = micros};
    CUresult code = is_whole(at, size, 1) ? give(stream, &deed) : INVALID_VALUE;
    pthread_mutex_unlock(&big);
    return code;
}

CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
    ENTER(CURRENT);
    if (flags > 1) {
        return INVALID_VALUE;
    }
    pthread_mutex_lock(&big);
    *stream = stream_new(current(), flags == 0);
    pthread_mutex_unlock(&big);
    return SUCCESS;
}

/* What it was given is done first. */
CUresult cuStreamDestroy_v2(CUstream handle) {
    ENTER(CURRENT);
    pthread_mutex_lock(&big);
    struct stream *stream = known(handle);
    int good = stream != NULL && stream != current()->legacy;
    if (good) {
        stream->destroyed = 1;
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&big);
    return good ? SUCCESS : INVALID_HANDLE;
}

CUresult cuStreamSynchronize(CUstream handle) {
    ENTER(CURRENT);
    CUresult code = INVALID_HANDLE;
    pthread_mutex_lock(&big);
    struct stream *stream = known(handle);
    if (stream != NULL) {
        join(stream);
        wait_for(stream);
        code = stream->context->lost;
    }
    pthread_mutex_unlock(&big);
    return code;
}

static struct event *known_event(CUevent handle) {
    struct event *event = all_events;
    while (event != NULL && event != handle) {
        event = event->next;
    }
    return event;
}

CUresult cuStreamWaitEvent(CUstream handle, CUevent given, unsigned flags) {
    ENTER(CURRENT);
    CUresult code = INVALID_HANDLE;
    pthread_mutex_lock(&big);
    struct stream *stream = known(handle);
    struct event *event = known_event(given);
    if (stream != NULL && event != NULL && flags == 0) {
        code = SUCCESS;
        if (event->on != NULL) {
            append(stream, &(struct deed){.what = WAIT, .on = event->on, .until = event->until});
        }
    }
    pthread_mutex_unlock(&big);
    return code;
}

CUresult cuStreamAddCallback(CUstream stream, CUstreamCallback callback, void *given, unsigned flags) {
    ENTER(CURRENT);
    if (flags != 0 || callback == NULL) {
        return INVALID_VALUE;
    }
    pthread_mutex_lock(&big);
    CUresult code = give(stream, &(struct deed){.what = CALL, .callback = callback, .given = given});
    pthread_mutex_unlock(&big);
    return code;
}

CUresult cuEventCreate(CUevent *event, unsigned flags) {
    ENTER(CURRENT);
    (void)flags;
    struct event *made = calloc(1, sizeof *made);
    pthread_mutex_lock(&big);
    made->context = current();
    made->next = all_events;
    all_events = made;
    pthread_mutex_unlock(&big);
    *event = made;
    return SUCCESS;
}

CUresult cuEventDestroy_v2(CUevent given) {
    ENTER(CURRENT);
    pthread_mutex_lock(&big);
    struct event **at = &all_events;
    while (*at != NULL && *at != given) {
        at = &(*at)->next;
    }
    struct event *event = *at;
    if (event != NULL) {
        *at = event->next;
        free(event);
    }
    pthread_mutex_unlock(&big);
    return event == NULL ? INVALID_HANDLE : SUCCESS;
}

CUresult cuEventRecord(CUevent given, CUstream handle) {
    ENTER(CURRENT);
    CUresult code = INVALID_HANDLE;
    pthread_mutex_lock(&big);
    struct stream *stream = known(handle);
    struct event *event = known_event(given);
    if (stream != NULL && event != NULL && event->context == stream->context) {
        join(stream);
        event->on = stream;
        event->until = stream->given;
        code = SUCCESS;
    }
    pthread_mutex_unlock(&big);
    return code;
}

CUresult cuEventQuery(CUevent given) {
    ENTER(INITIALISED);
    CUresult code = INVALID_HANDLE;
    pthread_mutex_lock(&big);
    struct event *event = known_event(given);
    if (event != NULL) {
        code = event->context->lost;
    }
    if (code == SUCCESS && event->on != NULL && event->on->ended < event->until) {
        code = NOT_READY;
    }
    pthread_mutex_unlock(&big);
    return code;
}
