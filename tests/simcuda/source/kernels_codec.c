/* Twins of the device codec's kernels (pyx/kernels): transforms, compaction, checksums of batches. */
#define _GNU_SOURCE
#include "kernels.h"

const Kernel codec_kernels[] = {
    {.name = NULL},
};
