/* What every stand-in library and its daemon share: where they meet, and what both see.
 *
 * A process has one connection (SOCK_SEQPACKET) to the daemon of its folder. What is asked is answered; what
 * is told is not. */
#ifndef STANDIN_SHARED_H
#define STANDIN_SHARED_H

#include <stdatomic.h>
#include <stdint.h>

enum { MAX_DEVICES = 16, MAX_CLIENTS = 256 };

/* Files in the folder. */
#define NIC_SOCKET "nic"
#define CONTROL_SOCKET "control"
#define LOCK_FILE "lock"
#define LOG_FILE "log"

/* Seen by the daemon and by all its clients. */
struct board {
    /* The daemon sleeps: whoever posts wakes it. */
    _Atomic uint32_t asleep;
    struct {
        _Atomic uint32_t down;
        /* Posts that are still to be refused for want of room. */
        _Atomic uint32_t again;
        /* Its completions cannot be read. */
        _Atomic uint32_t blind;
        /* Failed operations of which there is to be no word, though the queue says that there are some. */
        _Atomic uint32_t mute;
    } devices[MAX_DEVICES];
};

/* A message with at most two descriptors. Each returns the bytes, or -1; `receive_with` 0 at the end. */
int send_with(int socket, const void *bytes, uint64_t len, const int *fds, int count);
int receive_with(int socket, void *bytes, uint64_t len, int fds[2], int *count);

/* The socket's address in a folder: false if the path is too long for one. */
struct sockaddr_un;
int socket_address(struct sockaddr_un *at, const char *folder, const char *name);

/* Memory of its own for two processes: the descriptor, or -1. */
int shared_memory(const char *name, uint64_t bytes, void **at);
/* The same at the other end: NULL if the descriptor has less. */
void *shared_mapped(int fd, uint64_t bytes);

#endif
