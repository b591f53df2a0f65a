/* The processes that use the devices: how they come and go. */
#define _GNU_SOURCE
#include "daemon.h"

#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

struct client clients[MAX_CLIENTS];

struct client *client_new(int socket) {
    static uint64_t number;
    struct ucred peer;
    socklen_t len = sizeof peer;
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &len) < 0) {
        return NULL;
    }
    for (struct client *client = clients; client < clients + MAX_CLIENTS; client++) {
        if (!client->used) {
            int alive = (int)syscall(SYS_pidfd_open, peer.pid, 0);
            *client = (struct client){.used = alive >= 0,
                .socket = socket,
                .alive = alive,
                .doorbell = -1,
                .process = peer.pid,
                .number = ++number};
            return alive >= 0 ? client : NULL;
        }
    }
    return NULL;
}

void client_gone(struct client *client) {
    objects_gone(client);
    if (client->doorbell >= 0) {
        close(client->doorbell);
    }
    close(client->socket);
    close(client->alive);
    memset(client, 0, sizeof *client);
}
