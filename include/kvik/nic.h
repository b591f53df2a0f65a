/*
 * NICs that kvik does not know by itself: what a plug-in gives, and what it promises.
 *
 * A plug-in is a shared library with one exported function, kvik_nic_plugin(), which returns a table of
 * functions. kvik loads the file that the option `nic_library` names when the option `nics` is "plugin",
 * and never unloads it. docs/plugins.md goes through it step by step; examples/plugin is one that works.
 *
 * In a few words: a device is opened by the one thread that will use it. Memory becomes a region, which
 * peers name by a key. A connection leads to a peer's device; reads and writes are posted on it and go on without
 * the peer's processor or with it, as the device likes. Completions are polled for. Two calls stop bytes:
 * cancel() what was posted here, fence() what peers may still do to memory here. All of kvik's promises about
 * memory rest on those two.
 *
 * C99. All numbers are of the machine's own byte order. Nothing here depends on a header of kvik but this
 * one.
 */
#ifndef KVIK_NIC_H
#define KVIK_NIC_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version that this header describes. */
#define KVIK_NIC_VERSION 1u

/* Bytes of a plug-in's name, with the zero at its end. */
#define KVIK_NIC_NAME 48u
/* Bytes of a device's name, with the zero at its end. */
#define KVIK_NIC_DEVICE_NAME 64u
/* Bytes of an address, at most. All devices of an engine together have room for 1536, and 2 for each. */
#define KVIK_NIC_ADDRESS 512u
/* Devices that a plug-in lists, at most; an engine uses 32 of them at most. */
#define KVIK_NIC_DEVICES 1024u
/* Pieces of one operation that kvik makes use of. */
#define KVIK_NIC_PIECES 8u

/* What functions return: 0 or more is as described with each; a negative number is an error of the
 * plug-in's own choosing, which its error_text() explains. */
#define KVIK_NIC_OK 0
/* post(): there is no room now; kvik polls and posts again. */
#define KVIK_NIC_FULL 1
/* cancel(): not only this connection was cut, but every connection of the device. */
#define KVIK_NIC_ALL 1

/* Directions of an operation, as who posts it sees them. */
#define KVIK_NIC_READ 1u  /* bytes of the peer come here */
#define KVIK_NIC_WRITE 2u /* own bytes go there */

/* Kinds of devices that memory may lie on. */
#define KVIK_NIC_MEMORY_CUDA 1u /* an NVIDIA GPU, numbered as the CUDA driver does in this process */

/* What a plug-in does with the dma-buf of a device's memory. */
#define KVIK_NIC_DMABUF_UNUSED 0u
#define KVIK_NIC_DMABUF_WANTED 1u /* it takes one where the device's driver makes one */
#define KVIK_NIC_DMABUF_NEEDED 2u /* it cannot do without */

/* The plug-in's own; kvik only keeps pointers to them. */
struct kvik_nic_device;
struct kvik_nic_region;
struct kvik_nic_conn;

/* What an open device takes. */
struct kvik_nic_limits {
    uint64_t longest; /* bytes of one operation, at least 1; kvik posts at most 1 MiB at once */
    uint32_t pieces;  /* pieces of one operation, at least 1 */
    uint32_t depth;   /* operations in flight on the device, at least 1; kvik posts no more */
};

/* Which memory of other devices an open device reaches. */
struct kvik_nic_memories {
    uint32_t kinds;  /* a bit for each, 1u << KVIK_NIC_MEMORY_...; 0: host memory only */
    uint32_t dmabuf; /* KVIK_NIC_DMABUF_... */
};

/* Memory of a device, such as a GPU. */
struct kvik_nic_memory {
    uint32_t kind;    /* KVIK_NIC_MEMORY_... */
    uint32_t number;  /* of the device, among those of its kind that this process sees */
    uint64_t address; /* of the first byte, as the device has it: the processor reaches nothing there */
    uint64_t length;  /* at least 1 */
    uint64_t offset;  /* of the first byte in the dma-buf: those are of whole pages */
    int32_t dmabuf;   /* -1 where there is none. It is valid during the call only: who keeps it duplicates it */
    uint32_t zero;    /* 0 */
};

/* Bytes of a region that lie in one run. */
struct kvik_nic_piece {
    void *start; /* in a device's memory a number, as `address` above */
    uint64_t length; /* at least 1 */
};

/* An operation: pieces here, in their order, to or from one run at the peer. The structure and its pieces
 * are valid during the call only; the memory and the region are, until the operation has ended or was cut.
 * */
struct kvik_nic_post {
    struct kvik_nic_conn *conn;
    struct kvik_nic_region *region; /* all pieces lie in it */
    const struct kvik_nic_piece *pieces;
    uint32_t count;   /* of pieces: 1 to the device's limit */
    uint32_t op;      /* KVIK_NIC_READ or KVIK_NIC_WRITE */
    uint64_t remote;  /* where the run begins: the `base` of the peer's region, and an offset in it */
    uint64_t key;     /* the key of the peer's region */
    uint64_t token;   /* given back with the completion; kvik never gives one twice on a device */
};

/* An operation has ended. */
struct kvik_nic_completion {
    uint64_t token;
    int32_t status; /* KVIK_NIC_OK, or an error */
    uint32_t zero;  /* 0 */
};

/*
 * The table. Its head is the same in all versions, for ever; what follows belongs to `version`. Functions
 * may be added at the end without a new version: `size` says how far the table goes, and who finds it
 * shorter goes without them. Every function of version 1 must be there unless its text says otherwise. The
 * table stays as it is for the life of the process.
 *
 * Threads. device_count() and device_name() are called by any thread at any time. open() is called by the
 * thread that then makes all other calls for this device, one at a time, until close(). Several devices are
 * used by several threads at once; and one device may be opened more than once in a process, since a
 * process may have several engines: each is then a device of its own, or open() refuses. A plug-in may have
 * threads of its own, with all signals blocked.
 *
 * Nothing blocks: no call waits for a peer, or for a network. A call may wait for its own hardware for as
 * long as a bounded step takes, milliseconds; only open(), close(), region_add() and region_remove() may
 * take longer.
 *
 * Nothing is trusted either way: what comes from peers (addresses, keys, what is on the wire) is the
 * plug-in's to check. kvik checks what the plug-in says: lengths, counts, names, tokens.
 *
 * Descriptors are opened close-on-exec. A child that was forked makes no calls.
 */
struct kvik_nic_plugin {
    /* ---- the head ---- */
    uint32_t size;    /* bytes of this table */
    uint32_t version; /* the version of what follows; 0 where there is none that both know */
    uint32_t oldest;  /* the versions that the plug-in knows: from this one */
    uint32_t newest;  /* to this one */
    /* What it is called: UTF-8 that can be printed, without a colon, with a zero at its end. Reports show
     * it, and two engines reach each other by plug-ins of one name only: it stands for what is spoken on
     * the wire. Change it when that changes. */
    char name[KVIK_NIC_NAME];

    /* ---- version 1 ---- */

    /* How many devices there are now, at most KVIK_NIC_DEVICES; negative: they cannot be listed. */
    int32_t (*device_count)(void);

    /* Writes the name of a device, numbered from 0: UTF-8 that can be printed, without a comma, at most
     * `room` bytes with the zero at its end. Each has another one. */
    int32_t (*device_name)(uint32_t number, char *name, uint32_t room);

    /* Opens a device, and writes it to `device`. */
    int32_t (*open)(uint32_t number, struct kvik_nic_device **device);

    /* Closes it, and the connections that it still has. When this returns nothing touches memory for it any more,
     * from here or from a peer. Its regions are removed before. */
    void (*close)(struct kvik_nic_device *device);

    /* Writes what it takes, which does not change while it is open. */
    int32_t (*limits)(struct kvik_nic_device *device, struct kvik_nic_limits *limits);

    /* Writes the address by which peers' devices open connections to this one. `length` has the room,
     * KVIK_NIC_ADDRESS, and is set to the bytes that were written, at least 1. It stays the same until
     * fence() gives another one. It should be hard to guess where whoever has it can reach memory. */
    int32_t (*address)(struct kvik_nic_device *device, uint8_t *address, uint32_t *length);

    /* Makes host memory known to the device (region_add_on() does memory of GPUs): for own operations, and for those of peers that have its key.
     * Writes the region, the key, and what peers take for the address of its first byte (the address
     * itself, or 0, say). kvik keeps the memory mapped until region_remove() has returned 0. */
    int32_t (*region_add)(struct kvik_nic_device *device, void *start, uint64_t length,
                          struct kvik_nic_region **region, uint64_t *key, uint64_t *base);

    /* Makes it unknown. Nothing that was posted here is in flight on it. What peers have in flight on it
     * must not touch it after this has returned 0: such operations fail. After an error kvik never gives
     * the memory back. */
    int32_t (*region_remove)(struct kvik_nic_device *device, struct kvik_nic_region *region);

    /* Opens a connection to the device of this address, which a peer has told. It only begins to: where the peer
     * cannot be reached, what is posted on the connection fails. An error means that this can be no address. */
    int32_t (*conn_open)(struct kvik_nic_device *device, const uint8_t *address, uint32_t length,
                         struct kvik_nic_conn **conn);

    /* Closes a connection on which nothing is in flight. */
    void (*conn_close)(struct kvik_nic_device *device, struct kvik_nic_conn *conn);

    /* Posts an operation: KVIK_NIC_OK when it is in flight, KVIK_NIC_FULL when there is no room for it now.
     * An error means that it can never be posted, and nothing of it is in flight; it ends the transfer. A
     * peer that cannot be reached is no such error: the operation is taken, and its completion says so,
     * since kvik mends that.
     *
     * Each operation that was taken ends with exactly one completion, in any order, unless it is cut. A
     * read has ended when its bytes are here, a write when they are in the peer's memory for everybody
     * there to see: to have sent them is not enough. In between, bytes move in any order. After an end,
     * good or bad, the operation touches no memory of this process any more. After a bad end it may still
     * touch the peer's, until the peer has fenced. */
    int32_t (*post)(struct kvik_nic_device *device, const struct kvik_nic_post *post);

    /* Lets the device work where it needs that, for peers too, without waiting; writes at most `room`
     * completions, and returns how many. An error means that nothing can be learnt of operations any more:
     * kvik cuts them all. */
    int32_t (*poll)(struct kvik_nic_device *device, struct kvik_nic_completion *completions, uint32_t room);

    /* A descriptor that is readable (by epoll, level-triggered) as long as poll() has something to do, for
     * peers too; -1 where there is none, and kvik polls as long as anything may move. Asked once; it
     * belongs to the device and stays open until close(). */
    int32_t (*descriptor)(struct kvik_nic_device *device);

    /* 1: kvik's thread may sleep until the descriptor is readable; from this call on, anything that comes
     * makes it so. 0: there is something to poll for already. Called before each sleep, where there is a
     * descriptor. */
    int32_t (*may_sleep)(struct kvik_nic_device *device);

    /* Stops what was posted on a connection, and closes the connection. When this returns, none of it touches memory of
     * this process any more, be it by hardware, by a thread or by a late packet, and no completion of it is
     * told, not even one that was waiting for poll(). What it may still do to the peer's memory is for the
     * peer's fence(). A device that can only stop everything does so, closes all its connections, and returns
     * KVIK_NIC_ALL: kvik posts again what others had in flight. After an error everything is as before, and
     * kvik keeps the memory from its users. */
    int32_t (*cancel)(struct kvik_nic_device *device, struct kvik_nic_conn *conn);

    /* Cuts what peers can reach. When this returns, nothing that any peer has posted, or posts later on a
     * connection that it opened before or opens later with an address that was given before, touches memory of
     * this process any more: neither writes it nor reads it. Such operations end with errors at those
     * peers. Own operations go on.
     *
     * Writes the address by which it is reached from now on, as address() does. It must be another one than
     * all before, if only by a number in it which is checked when a connection is opened: a peer that was told the
     * old address and opens its connection only now has been cut off too. kvik tells the new one to those that may
     * come back. After an error everything is as before, and the pages that peers could reach stay in
     * quarantine. */
    int32_t (*fence)(struct kvik_nic_device *device, uint8_t *address, uint32_t *length);

    /* 1: the device can be used; 0: not now: it has no link, say. Called after each poll(), so it must cost
     * nothing. May be null for a device that tells by failed operations only. While it is down kvik cuts
     * what is in flight, and posts nothing. */
    int32_t (*is_up)(struct kvik_nic_device *device);

    /* Writes what a negative number means: UTF-8, at most `room` bytes with the zero at its end. `device`
     * is null when no device was asked. It is shown to people behind "the plug-in NAME: "; say what to do
     * where that is known. */
    void (*error_text)(struct kvik_nic_device *device, int32_t error, char *text, uint32_t room);

    /* ---- added to version 1: both are there, or neither ---- */

    /* Writes which memory of other devices region_add_on() takes. Asked once, after limits(). A device that
     * has not these functions reaches host memory only. */
    int32_t (*memories)(struct kvik_nic_device *device, struct kvik_nic_memories *memories);

    /* As region_add(), for memory of a device; kvik keeps it allocated as long. All else is as for host memory: what
     * a read has brought is in that memory when the read has ended, and what cancel() and fence() have cut touches it
     * no more. kvik sees to it that the device's own work sees what has come. After an error the pages go by
     * another transport, with error_text() as the reason. */
    int32_t (*region_add_on)(struct kvik_nic_device *device, const struct kvik_nic_memory *memory,
                             struct kvik_nic_region **region, uint64_t *key, uint64_t *base);
};

#if defined(__GNUC__)
#define KVIK_NIC_EXPORT __attribute__((visibility("default")))
#else
#define KVIK_NIC_EXPORT
#endif

/*
 * The one function that a plug-in exports. kvik says the versions that it knows, from `oldest` to `newest`;
 * the answer is the table of the newest version that both know. Where there is none, it is a table of which
 * only the head counts, with version 0; kvik refuses it, and names both ranges. Never null. May be called
 * more than once, by any thread.
 */
KVIK_NIC_EXPORT const struct kvik_nic_plugin *kvik_nic_plugin(uint32_t oldest, uint32_t newest);

#ifdef __cplusplus
}
#endif

#endif
