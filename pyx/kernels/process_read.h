/* Memory of another process, read with CRC32C and zero test in one pass. */
#ifndef CKPT_PROCESS_READ_H
#define CKPT_PROCESS_READ_H

#include <stddef.h>
#include <stdint.h>

/* 0, or the errno of process_vm_readv(2) and in *fault the address that it could not read. */
int ck_read_process(int pid, unsigned char *destination, uint64_t address, size_t nbytes, uint32_t *crc, int *zero,
                    uint64_t *fault);

#endif
