/* Linux native AIO (io_submit(2)) by raw system calls; no libaio needed. Functions return a count or -errno. */
#ifndef CKPT_AIO_H
#define CKPT_AIO_H

#include <stddef.h>
#include <stdint.h>

enum { AIO_READ = 0, AIO_WRITE = 1 };

struct aio_cb { /* struct iocb of <linux/aio_abi.h>, little-endian */
    uint64_t data;
    uint32_t key, rw_flags;
    uint16_t opcode;
    int16_t reqprio;
    uint32_t fd;
    uint64_t buf, nbytes;
    int64_t offset;
    uint64_t reserved2;
    uint32_t flags, resfd;
};

struct aio_event {
    uint64_t data, obj;
    int64_t res, res2;
};

int aio_open(unsigned depth, unsigned long *context);
int aio_close(unsigned long context);
void aio_prepare(struct aio_cb *cb, int opcode, int fd, void *buf, size_t nbytes, int64_t offset, uint64_t data,
                 int eventfd);
int aio_submit(unsigned long context, long count, struct aio_cb **cbs);
int aio_reap(unsigned long context, struct aio_event *events, long room);

#endif
