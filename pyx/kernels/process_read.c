#include "process_read.h"

#include "copy.h"

#include <errno.h>
#include <sys/uio.h>

/* What is read by one call stays in the second-level cache until it has been checksummed. */
#define READ_BYTES ((size_t)256 << 10)

int ck_read_process(int pid, unsigned char *destination, uint64_t address, size_t nbytes, uint32_t *crc, int *zero,
                    uint64_t *fault) {
    uint32_t value = 0;
    int all_zero = 1;
    size_t done = 0;
    while (done < nbytes) {
        size_t wanted = nbytes - done < READ_BYTES ? nbytes - done : READ_BYTES;
        struct iovec to = {destination + done, wanted};
        struct iovec from = {(void *)(uintptr_t)(address + done), wanted};
        ssize_t got = process_vm_readv(pid, &to, 1, &from, 1, 0);
        if (got <= 0) { /* a range that begins where nothing can be read; 0 is not documented, and no progress */
            if (got < 0 && errno == EINTR) continue;
            *fault = address + done;
            return got < 0 ? errno : EIO;
        }
        /* A short count ends before a page that cannot be read: the next call says why. */
        int piece_zero;
        value = ck_pass(NULL, destination + done, (size_t)got, value, &piece_zero);
        all_zero = all_zero && piece_zero;
        done += (size_t)got;
    }
    *crc = value;
    *zero = all_zero;
    return 0;
}
