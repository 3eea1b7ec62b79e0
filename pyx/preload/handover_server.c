#define _GNU_SOURCE
#include "handover_server.h"

#include "config.h"
#include "control_page.h"
#include "descriptor.h"
#include "futex.h"
#include "handover.h"
#include "image.h"
#include "pool.h"
#include "process_facts.h"
#include "ring.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>

#define STACK_BYTES (256u << 10)
#define SLICE_BYTES (64ull << 20) /* warmed between two looks at the sockets */
#define NODE_PATIENCE_NS 2000000000ull /* how long the pool waits for the driver to open its GPU: then its node is known */
#define NODE_LOOK_MS 20
#define HURRY_LOOK_MS 5 /* while the driver waits for the pool */

struct client {
    struct ckpt_descriptor socket;
    int armed, feeds;
    uint64_t prepare; /* bytes that it waits for */
};

static struct {
    struct ckpt_descriptor listener;
    struct client client[CKPT_HANDOVER_CLIENTS];
    struct ckpt_descriptor wake; /* eventfd */
    int made;
    uint64_t started_ns;
} server = {.listener = CKPT_NO_DESCRIPTOR, .wake = CKPT_NO_DESCRIPTOR};

/* ---- the socket ---- */

static int open_listener(void) {
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    for (int n = 0; fd >= 0 && n < CKPT_HANDOVER_NAMES; n++) {
        struct sockaddr_un name = {.sun_family = AF_UNIX};
        int length = snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "ckptpipe/%d/%llu/%d", (int)getpid(),
                              (unsigned long long)ckpt_control->start_time, n);
        socklen_t size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
        if (bind(fd, (struct sockaddr *)&name, size) == 0 && listen(fd, CKPT_HANDOVER_CLIENTS) == 0) return fd;
        if (errno != EADDRINUSE) break;
    }
    if (fd >= 0) close(fd);
    return -1;
}

static void answer(int socket, uint32_t kind, int error, uint64_t value, const char *text, const int *fds, int count) {
    struct ckpt_answer reply = {CKPT_HANDOVER_MAGIC, CKPT_HANDOVER_VERSION, error, kind, value, ""};
    union {
        char room[CMSG_SPACE(2 * sizeof(int))];
        struct cmsghdr aligned;
    } ancillary;
    struct iovec part = {&reply, sizeof reply};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    strncpy(reply.text, text, sizeof reply.text - 1);
    if (count) {
        memset(&ancillary, 0, sizeof ancillary);
        message.msg_control = ancillary.room;
        message.msg_controllen = CMSG_SPACE((size_t)count * sizeof(int));
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN((size_t)count * sizeof(int));
        memcpy(CMSG_DATA(header), fds, (size_t)count * sizeof(int));
    }
    /* A client that does not read its answers gets none. */
    sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* ---- clients ---- */

static void count_roles(void) {
    uint32_t armed = 0, feeders = 0;
    for (int i = 0; i < CKPT_HANDOVER_CLIENTS; i++) {
        armed += server.client[i].armed != 0;
        feeders += server.client[i].feeds != 0;
    }
    atomic_store(&ckpt_control->armed, armed);
    if (atomic_exchange(&ckpt_control->feeders, feeders) == feeders) return;
    atomic_fetch_add(&ckpt_control->gate_events, 1); /* a copy at the gate counts the time from now */
    ckpt_futex_wake(&ckpt_control->gate_events, INT_MAX, 1);
}

static void drop(struct client *client) {
    ckpt_descriptor_close(&client->socket);
    memset(client, 0, sizeof *client);
    client->socket.fd = -1;
    count_roles();
}

static void attach(int socket) {
    int fds[2], count = 0, control = ckpt_control_fd();
    if (control < 0) {
        answer(socket, CKPT_ATTACH, EBADF, 0, "the program closed the descriptors of its pool", NULL, 0);
        return;
    }
    pthread_mutex_lock(&ckpt_pool_lock);
    if (ckpt_pool_bytes() && (fds[0] = ckpt_pool_fd()) >= 0) count = 1;
    pthread_mutex_unlock(&ckpt_pool_lock);
    fds[count++] = control;
    answer(socket, CKPT_ATTACH, 0, (uint64_t)count, "", fds, count);
}

static void make_pool(void) {
    pthread_mutex_lock(&ckpt_pool_lock);
    ckpt_pool_make();
    pthread_mutex_unlock(&ckpt_pool_lock);
    server.made = 1;
}

static void prepare(struct client *client, uint64_t bytes) {
    make_pool();
    if (!ckpt_pool_bytes())
        answer(client->socket.fd, CKPT_PREPARE, ENODEV, 0, ckpt_control->pool_text, NULL, 0);
    else if (bytes > ckpt_pool_bytes())
        answer(client->socket.fd, CKPT_PREPARE, E2BIG, atomic_load(&ckpt_control->pool_warm),
               "the pool is smaller than that", NULL, 0);
    else
        client->prepare = bytes ? bytes : 1; /* answered when it is warm */
}

static void serve(struct client *client) {
    struct ckpt_request request;
    int socket = client->socket.fd;
    ssize_t got = recv(socket, &request, sizeof request, MSG_DONTWAIT | MSG_TRUNC);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) {
        drop(client);
        return;
    }
    if (got != sizeof request || request.magic != CKPT_HANDOVER_MAGIC || request.version != CKPT_HANDOVER_VERSION ||
        request.flags) {
        answer(socket, 0, EPROTO, 0, "not a request of this version", NULL, 0);
        return;
    }
    uint64_t value = 0;
    switch (request.kind) {
    case CKPT_ATTACH: attach(socket); return;
    case CKPT_PREPARE: prepare(client, request.argument); return;
    case CKPT_ARM: client->armed = 1; break;
    case CKPT_DISARM: client->armed = 0; break;
    case CKPT_FEED: client->feeds = 1; break;
    case CKPT_SETTLE: value = ckpt_images_settle(); break;
    default: answer(socket, request.kind, EPROTO, 0, "an unknown request", NULL, 0); return;
    }
    count_roles();
    answer(socket, request.kind, 0, value, "", NULL, 0);
}

static void admit(void) {
    int socket = accept4(server.listener.fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (socket < 0) return;
    struct ucred peer;
    socklen_t size = sizeof peer;
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) || (peer.uid != 0 && peer.uid != geteuid())) {
        answer(socket, 0, EACCES, 0, "this process belongs to another user", NULL, 0);
        close(socket);
        return;
    }
    for (int i = 0; i < CKPT_HANDOVER_CLIENTS; i++) {
        if (server.client[i].socket.fd >= 0) continue;
        server.client[i].socket = ckpt_descriptor_of(socket);
        return;
    }
    answer(socket, 0, EBUSY, 0, "too many others are connected", NULL, 0);
    close(socket);
}

/* ---- warming ---- */

static uint64_t wanted_by_clients(void) {
    uint64_t most = 0;
    for (int i = 0; i < CKPT_HANDOVER_CLIENTS; i++)
        if (server.client[i].prepare > most) most = server.client[i].prepare;
    return most;
}

static void answer_prepared(int error, const char *text) {
    uint64_t warm = atomic_load(&ckpt_control->pool_warm);
    for (int i = 0; i < CKPT_HANDOVER_CLIENTS; i++) {
        struct client *client = &server.client[i];
        if (!client->prepare || (!error && client->prepare > warm)) continue;
        client->prepare = 0;
        answer(client->socket.fd, CKPT_PREPARE, error, warm, text, NULL, 0);
    }
}

/* A slice of what somebody wants; 1 while there is more to do. */
static int warm_some(void) {
    if (!server.made || atomic_load(&ckpt_pool_hurry)) return server.made;
    char text[CKPT_TEXT] = "";
    pthread_mutex_lock(&ckpt_pool_lock);
    uint64_t wanted = ckpt_pool_wanted(), asked = wanted_by_clients(), warm = atomic_load(&ckpt_control->pool_warm);
    uint64_t goal = asked > wanted ? asked : wanted;
    /* In the background half of the threads: the program is at work. Not when somebody waits for it. */
    unsigned width = asked ? 0 : (ckpt_ring_threads() + 1) / 2;
    int reason = 0;
    if (goal > warm) reason = ckpt_pool_warm(warm + SLICE_BYTES < goal ? warm + SLICE_BYTES : goal, width, text);
    warm = atomic_load(&ckpt_control->pool_warm);
    if (reason) {
        ckpt_pool_want(0);
        ckpt_control->pool_reason = (uint32_t)reason;
        ckpt_control_text(ckpt_control->pool_text, "%s", text);
    }
    int more = !reason && goal > warm;
    uint32_t warming = CKPT_POOL_WARMING;
    if (!more && atomic_compare_exchange_strong(&ckpt_control->pool_state, &warming, CKPT_POOL_READY))
        ckpt_control_event();
    pthread_mutex_unlock(&ckpt_pool_lock);
    answer_prepared(reason ? ENOMEM : 0, text);
    return more;
}

/* Pages come from the node of the threads that touch them first, so the node should be known before. */
static int may_make_pool(void) {
    if (ckpt_config.numa_node != -1 || ckpt_node_count() < 2) return 1;
    return ckpt_gpu_node() != -2 || ckpt_now_ns() - server.started_ns > NODE_PATIENCE_NS;
}

static void clear_wake(void) {
    uint64_t count;
    ssize_t got = read(server.wake.fd, &count, sizeof count);
    (void)got;
}

void ckpt_handover_wake(void) {
    uint64_t one = 1;
    int fd = ckpt_descriptor_number(&server.wake);
    ssize_t put = fd >= 0 ? write(fd, &one, sizeof one) : 0;
    (void)put;
}

static void *run(void *unused) {
    (void)unused;
    prctl(PR_SET_NAME, "ckptpipe-pool", 0, 0, 0);
    server.started_ns = ckpt_now_ns();
    int more = 1;
    for (;;) {
        struct pollfd polled[2 + CKPT_HANDOVER_CLIENTS];
        struct client *of[2 + CKPT_HANDOVER_CLIENTS];
        nfds_t count = 0;
        if (!server.made && may_make_pool()) make_pool();
        more = warm_some();
        if (ckpt_descriptor_number(&server.listener) >= 0)
            polled[count++] = (struct pollfd){.fd = server.listener.fd, .events = POLLIN};
        if (ckpt_descriptor_number(&server.wake) >= 0)
            polled[count++] = (struct pollfd){.fd = server.wake.fd, .events = POLLIN};
        for (int i = 0; i < CKPT_HANDOVER_CLIENTS; i++) {
            struct client *client = &server.client[i];
            if (client->socket.fd < 0) continue;
            if (ckpt_descriptor_number(&client->socket) < 0) { /* the program closed it */
                drop(client);
                continue;
            }
            of[count] = client;
            polled[count++] = (struct pollfd){.fd = client->socket.fd, .events = POLLIN};
        }
        int timeout = !server.made ? NODE_LOOK_MS : !more ? -1 : atomic_load(&ckpt_pool_hurry) ? HURRY_LOOK_MS : 0;
        if (poll(polled, count, timeout) < 0 && errno != EINTR) return NULL;
        for (nfds_t i = 0; i < count; i++) {
            if (!polled[i].revents) continue;
            if (polled[i].fd == server.listener.fd)
                admit();
            else if (polled[i].fd == server.wake.fd)
                clear_wake();
            else
                serve(of[i]);
        }
    }
}

void ckpt_handover_start(void) {
    sigset_t all, before;
    pthread_attr_t attributes;
    pthread_t thread;
    for (int i = 0; i < CKPT_HANDOVER_CLIENTS; i++) server.client[i].socket.fd = -1;
    server.listener = ckpt_descriptor_of(open_listener());
    server.wake = ckpt_descriptor_of(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    if (pthread_create(&thread, &attributes, run, NULL)) ckpt_descriptor_close(&server.listener);
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void ckpt_handover_forget(void) {
    ckpt_descriptor_close(&server.listener);
    ckpt_descriptor_close(&server.wake);
    for (int i = 0; i < CKPT_HANDOVER_CLIENTS; i++) ckpt_descriptor_close(&server.client[i].socket);
    memset(&server, 0, sizeof server);
    server.listener.fd = server.wake.fd = -1;
}
