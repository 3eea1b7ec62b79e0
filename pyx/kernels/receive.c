#include "receive.h"

#include "crc32c.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#define LOOK_MS 100

/* Wake up when this much is there, or an end or an error of the connection (socket(7), SO_RCVLOWAT). Not the
 * kernel's TCP: at every byte. */
static void low_water(const ck_receive *body, size_t nbytes) {
    int mark = (int)nbytes;
    setsockopt(body->socket, SOL_SOCKET, SO_RCVLOWAT, &mark, sizeof mark);
}

/* Until `filled` is `wanted`. */
static int fill(ck_receive *body, unsigned char *memory, size_t wanted, size_t *mark) {
    while (body->filled < wanted) {
        if (__atomic_load_n(&body->stop, __ATOMIC_ACQUIRE)) return CK_RECEIVE_STOPPED;
        if (*mark != wanted - body->filled) low_water(body, *mark = wanted - body->filled);
        struct pollfd readable = {body->socket, POLLIN, 0};
        int ready = poll(&readable, 1, LOOK_MS);
        if (ready < 0 && errno != EINTR) {
            body->error = errno;
            return CK_RECEIVE_SOCKET;
        }
        if (ready < 0) continue;
        /* Also where the mark was not reached in that time: a slow connection shows its progress. */
        ssize_t got = recv(body->socket, memory + body->filled, wanted - body->filled, MSG_DONTWAIT);
        if (got == 0) return CK_RECEIVE_ENDED;
        if (got < 0) {
            if (errno == EAGAIN || errno == EINTR) continue;
            body->error = errno;
            return CK_RECEIVE_SOCKET;
        }
        body->filled += (size_t)got;
        __atomic_fetch_add(&body->arrived, (size_t)got, __ATOMIC_RELAXED);
    }
    return CK_RECEIVE_WHOLE;
}

static int write_file(ck_receive *body, const unsigned char *memory) {
    size_t written = 0;
    while (written < body->filled) {
        ssize_t count =
            pwrite(body->file, memory + written, body->filled - written, (off_t)(body->offset + body->done + written));
        if (count < 0) {
            if (errno == EINTR) continue;
            body->error = errno;
            return CK_RECEIVE_FILE;
        }
        written += (size_t)count;
    }
    return CK_RECEIVE_WHOLE;
}

/* What lies behind `done` is checksummed and written, and counts. */
static int take(ck_receive *body, const unsigned char *memory) {
    uint32_t crc = ck_crc32c(body->crc, memory, body->filled);
    if (body->file >= 0) {
        int outcome = write_file(body, memory);
        if (outcome != CK_RECEIVE_WHOLE) return outcome;
    }
    body->crc = crc;
    body->done += body->filled;
    body->filled = 0;
    return CK_RECEIVE_WHOLE;
}

int ck_receive_run(ck_receive *body) {
    int outcome = CK_RECEIVE_WHOLE;
    size_t mark = 1;
    while (outcome == CK_RECEIVE_WHOLE && body->done < body->nbytes) {
        unsigned char *memory = body->through ? body->memory : body->memory + body->done;
        /* Pieces end where pages of the file do. */
        size_t wanted = CK_RECEIVE_BYTES - (size_t)((body->offset + body->done) % CK_RECEIVE_BYTES);
        if (wanted > body->nbytes - body->done) wanted = body->nbytes - body->done;
        if (wanted < body->filled) wanted = body->filled;
        outcome = fill(body, memory, wanted, &mark);
        int taken = body->filled ? take(body, memory) : CK_RECEIVE_WHOLE;
        if (taken != CK_RECEIVE_WHOLE) outcome = taken;
    }
    if (mark != 1) low_water(body, 1);
    return outcome;
}

void ck_receive_stop(ck_receive *body) { __atomic_store_n(&body->stop, 1, __ATOMIC_RELEASE); }

size_t ck_receive_arrived(const ck_receive *body) { return __atomic_load_n(&body->arrived, __ATOMIC_RELAXED); }
