/* What a kernel's twin in C sees: its parameters, its grid, and memory as its GPU would reach it.
 *
 * A twin is `static CUresult twin(const Launch *launch)`. It runs once a launch, in stream order, and does the whole
 * grid's work. It answers CUDA_SUCCESS, or the error that it then leaves in the context, as a kernel's fault does. */
#ifndef SIMCUDA_KERNELS_H
#define SIMCUDA_KERNELS_H

#include "abi.h"

#define KERNEL_PARAMETERS 24
#define KERNEL_PARAMETER_BYTES 4096 /* of all of them together */

typedef struct Launch {
    const unsigned char *parameter[KERNEL_PARAMETERS]; /* each alone in a multiple of 8 bytes, the rest zeros */
    unsigned int grid[3], block[3], shared;
} Launch;

typedef struct Kernel {
    const char *name;
    int bytes[KERNEL_PARAMETERS]; /* of each parameter; 0 ends: a structure by value has its own size */
    CUresult (*run)(const Launch *launch);
} Kernel;

/* A parameter of at most 8 bytes, widened with zeros. */
uint64_t launch_value(const Launch *launch, int i);

/* The bytes at an address that the running work's GPU can reach: its own memory within what was asked for (another
 * GPU's needs peer access, which the simulation doesn't give), or host memory that the driver knows. `run` is how
 * many of `wanted` lie in one piece, which is all of them except in another process's memory. NULL: a fault. */
unsigned char *reach(uint64_t address, uint64_t wanted, uint64_t *run);

/* The same for all of `bytes` in one piece: NULL where they are not, and for bytes == 0 any address. */
unsigned char *reach_all(uint64_t address, uint64_t bytes);

/* Copies that may span pieces. CUDA_ERROR_ILLEGAL_ADDRESS, and nothing copied, when a byte is out of reach. */
CUresult device_read(void *to, uint64_t address, uint64_t bytes);
CUresult device_write(uint64_t address, const void *from, uint64_t bytes);

/* CRC32C of more bytes: begin with 0xffffffff, invert at the end. */
uint32_t crc32c_more(uint32_t state, const unsigned char *bytes, uint64_t count);

/* NULL past the last. kernels.c has the table of tables. */
const Kernel *kernel_at(size_t i);

/* Tables end with a NULL name. */
extern const Kernel checksum_kernels[], codec_kernels[];

#endif
