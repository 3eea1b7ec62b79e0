/* What libcuda.so.1 gives to the simulated libraries beside it (libnvcomp.so): work in a stream's order, and device
 * memory as a kernel reaches it. They look these up with dlsym, under the names that are exported. */
#ifndef SIMCUDA_LIBRARY_H
#define SIMCUDA_LIBRARY_H

#include "abi.h"

/* Runs on the stream's thread. `chunk`: an error that a test ordered for the first chunk (scope="chunk"), or 0.
 * What it answers, unless CUDA_SUCCESS, is the context's lasting error, as a kernel's fault is. */
typedef CUresult (*LibraryRun)(void *memory, int chunk);

/* Goes through what every API call goes through, under `name`. `memory` is free()d when the work is done, also when
 * it did not run or the call failed. */
typedef CUresult (*SimcudaEnqueue)(const char *name, CUstream stream, LibraryRun run, void *memory);
CUresult simcuda_enqueue(const char *name, CUstream stream, LibraryRun run, void *memory);

/* In LibraryRun: CUDA_ERROR_ILLEGAL_ADDRESS, and nothing copied, when a byte is out of the GPU's reach. A NULL
 * pointer asks for no more than that answer. */
typedef CUresult (*SimcudaRead)(void *to, uint64_t address, uint64_t bytes);
typedef CUresult (*SimcudaWrite)(uint64_t address, const void *from, uint64_t bytes);
CUresult simcuda_read(void *to, uint64_t address, uint64_t bytes);
CUresult simcuda_write(uint64_t address, const void *from, uint64_t bytes);

/* The decompression engine of the stream's GPU: its algorithms (0: none) and the longest buffer. */
typedef CUresult (*SimcudaEngine)(CUstream stream, int *mask, int *longest);
CUresult simcuda_engine(CUstream stream, int *mask, int *longest);

/* Whether the engine can use the memory at a device address. */
typedef int (*SimcudaCapable)(uint64_t address);
int simcuda_capable(uint64_t address);

#endif
