#define _GNU_SOURCE
#include "nic.h"

#include <unistd.h>

void enter(struct gate *gate, const char *call) {
    int none = 0, me = gettid();
    if (!atomic_compare_exchange_strong(&gate->owner, &none, me)) {
        const char *other = atomic_load(&gate->call);
        broken("thread %d calls %s while thread %d is in %s of the same domain (FI_THREAD_DOMAIN)", me, call,
            none, other != NULL ? other : "a call");
    }
    atomic_store(&gate->call, call);
}

void leave(struct gate *gate) {
    atomic_store(&gate->owner, 0);
}
