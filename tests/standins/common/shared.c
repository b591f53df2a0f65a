#define _GNU_SOURCE
#include "shared.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

int send_with(int socket, const void *bytes, uint64_t len, const int *fds, int count) {
    char room[CMSG_SPACE(2 * sizeof(int))] = {0};
    struct iovec iov = {.iov_base = (void *)bytes, .iov_len = len};
    struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1};
    if (count > 0) {
        message.msg_control = room;
        message.msg_controllen = CMSG_SPACE((size_t)count * sizeof(int));
        struct cmsghdr *head = CMSG_FIRSTHDR(&message);
        head->cmsg_level = SOL_SOCKET;
        head->cmsg_type = SCM_RIGHTS;
        head->cmsg_len = CMSG_LEN((size_t)count * sizeof(int));
        memcpy(CMSG_DATA(head), fds, (size_t)count * sizeof(int));
    }
    return (int)sendmsg(socket, &message, MSG_NOSIGNAL);
}

int receive_with(int socket, void *bytes, uint64_t len, int fds[2], int *count) {
    char room[CMSG_SPACE(2 * sizeof(int))] = {0};
    struct iovec iov = {.iov_base = bytes, .iov_len = len};
    struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1};
    message.msg_control = room;
    message.msg_controllen = sizeof room;
    *count = 0;
    int got = (int)recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    struct cmsghdr *head = got > 0 ? CMSG_FIRSTHDR(&message) : NULL;
    if (head != NULL && head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_RIGHTS) {
        *count = (int)((head->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        memcpy(fds, CMSG_DATA(head), (size_t)*count * sizeof(int));
    }
    return got;
}

int socket_address(struct sockaddr_un *at, const char *folder, const char *name) {
    memset(at, 0, sizeof *at);
    at->sun_family = AF_UNIX;
    int len = snprintf(at->sun_path, sizeof at->sun_path, "%s/%s", folder, name);
    return len > 0 && (size_t)len < sizeof at->sun_path;
}

int shared_memory(const char *name, uint64_t bytes, void **at) {
    int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) < 0) {
        return -1;
    }
    *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return *at == MAP_FAILED ? -1 : fd;
}

void *shared_mapped(int fd, uint64_t bytes) {
    struct stat stat;
    if (fstat(fd, &stat) < 0 || (uint64_t)stat.st_size < bytes) {
        return NULL;
    }
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return at == MAP_FAILED ? NULL : at;
}
