#include "aio.h"

#include <errno.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { FLAG_RESFD = 1u << 0 };

_Static_assert(sizeof(struct aio_cb) == 64, "struct iocb");
_Static_assert(sizeof(struct aio_event) == 32, "struct io_event");
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "struct aio_cb is written for little-endian machines"
#endif

int aio_open(unsigned depth, unsigned long *context)
{
    *context = 0;
    return syscall(SYS_io_setup, depth, context) < 0 ? -errno : 0;
}

int aio_close(unsigned long context)
{
    return syscall(SYS_io_destroy, context) < 0 ? -errno : 0;
}

void aio_prepare(struct aio_cb *cb, int opcode, int fd, void *buf, size_t nbytes, int64_t offset, uint64_t data,
                 int eventfd)
{
    enum { CMD_PREAD = 0, CMD_PWRITE = 1 };
    memset(cb, 0, sizeof *cb);
    cb->data = data;
    cb->opcode = opcode == AIO_READ ? CMD_PREAD : CMD_PWRITE;
    cb->fd = (uint32_t)fd;
    cb->buf = (uintptr_t)buf;
    cb->nbytes = nbytes;
    cb->offset = offset;
    cb->flags = FLAG_RESFD;
    cb->resfd = (uint32_t)eventfd;
}

int aio_submit(unsigned long context, long count, struct aio_cb **cbs)
{
    long n;
    do {
        n = syscall(SYS_io_submit, context, count, cbs);
    } while (n < 0 && errno == EINTR);
    return n < 0 ? -errno : (int)n;
}

int aio_reap(unsigned long context, struct aio_event *events, long room)
{
    struct timespec now = {0, 0};
    long n;
    do {
        n = syscall(SYS_io_getevents, context, 0L, room, events, &now);
    } while (n < 0 && errno == EINTR);
    return n < 0 ? -errno : (int)n;
}
