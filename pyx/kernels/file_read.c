#include "file_read.h"

#include "copy.h"
#include "crc32c.h"

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

/* What is read by one call stays in the second-level cache until it has been checksummed. */
#define READ_BYTES ((size_t)256 << 10)
#define SCAN_BYTES ((size_t)64 << 10) /* on a worker's stack, which has 256 KiB */

int ck_read_file(int fd, unsigned char *destination, uint64_t offset, size_t nbytes, uint32_t *crc, uint64_t *fault) {
    uint32_t value = 0;
    size_t done = 0;
    while (done < nbytes) {
        size_t wanted = nbytes - done < READ_BYTES ? nbytes - done : READ_BYTES;
        ssize_t got = pread(fd, destination + done, wanted, (off_t)(offset + done));
        if (got <= 0) {
            if (got < 0 && errno == EINTR) continue;
            *fault = offset + done;
            return got < 0 ? errno : ENODATA;
        }
        value = ck_crc32c(value, destination + done, (size_t)got);
        done += (size_t)got;
    }
    *crc = value;
    return 0;
}

int ck_scan_file(int fd, uint64_t offset, size_t nbytes, uint32_t *crc, int *zero, uint64_t *fault) {
    unsigned char buffer[SCAN_BYTES];
    uint32_t value = 0;
    int all_zero = 1;
    size_t done = 0;
    while (done < nbytes) {
        size_t wanted = nbytes - done < sizeof buffer ? nbytes - done : sizeof buffer;
        ssize_t got = pread(fd, buffer, wanted, (off_t)(offset + done));
        if (got <= 0) {
            if (got < 0 && errno == EINTR) continue;
            *fault = offset + done;
            return got < 0 ? errno : ENODATA;
        }
        int piece_zero = 0;
        value = ck_pass(NULL, buffer, (size_t)got, value, &piece_zero);
        all_zero = all_zero && piece_zero;
        done += (size_t)got;
    }
    *crc = value;
    *zero = all_zero;
    return 0;
}

void ck_huge_pages(unsigned char *address, size_t nbytes) {
    uintptr_t start = ((uintptr_t)address + CK_HUGE_BYTES - 1) & ~(uintptr_t)(CK_HUGE_BYTES - 1);
    uintptr_t end = ((uintptr_t)address + nbytes) & ~(uintptr_t)(CK_HUGE_BYTES - 1);
    if (start >= end) return;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    /* The kernel refuses to collapse a range without any page. */
    for (uintptr_t at = start; at < end; at += CK_HUGE_BYTES)
        if (madvise((void *)at, page, MADV_POPULATE_WRITE)) return;
    madvise((void *)start, end - start, MADV_COLLAPSE);
}
