/* Reading a file through the page cache with its checksum in the same pass, and huge pages of shared memory. */
#ifndef CKPT_FILE_READ_H
#define CKPT_FILE_READ_H

#include <stddef.h>
#include <stdint.h>

/* 0 or an errno, ENODATA where the file ends before; `fault` is the offset that could not be read then. */
int ck_read_file(int fd, unsigned char *destination, uint64_t offset, size_t nbytes, uint32_t *crc, uint64_t *fault);

/* Checksum and zero test of what a file has there, through a small buffer that stays in the cache: nothing is kept. */
int ck_scan_file(int fd, uint64_t offset, size_t nbytes, uint32_t *crc, int *zero, uint64_t *fault);

/* Back whole huge pages of a range with huge pages where they are holes: a tenth of what faults of small pages cost,
 * and it works where the kernel's setting for shared memory is "never" (madvise(2), MADV_COLLAPSE, Linux 6.1). What
 * cannot be had so is left to faults. */
void ck_huge_pages(unsigned char *address, size_t nbytes);

#define CK_HUGE_BYTES ((size_t)2 << 20)

#endif
