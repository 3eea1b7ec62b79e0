/* The part of nvCOMP's low-level batched interface that ckptpipe calls, in the version 6 of its headers.
 *
 * Written from the headers in NVIDIA's wheel (nvidia-libnvcomp-cu13), none of which is needed to build: the library
 * is opened at run time. The functions of all formats have the same parameters, and every options struct has 64
 * bytes and no member wider than 8: passed by value, they are one type to the caller (System V x86-64: 64 bytes on
 * the stack; AArch64: a pointer to a copy). What differs is which of their bytes mean something.
 */
#ifndef CKPT_NVCOMP_API_H
#define CKPT_NVCOMP_API_H

#include "cuda_abi.h"

typedef int nv_status; /* enum nvcompStatus_t */
enum { NV_SUCCESS = 0, NV_CANNOT_COMPRESS = 19 };

typedef struct {
    int32_t word[16];
} nv_options;

typedef struct {
    size_t input, output, temp;
} nv_alignments;

typedef struct {
    uint32_t version, cudart; /* 1000 * major + 100 * minor + patch */
} nv_properties;

_Static_assert(sizeof(nv_options) == 64, "every nvcompBatched…Opts_t has 64 bytes");
_Static_assert(sizeof(nv_properties) == 8 && sizeof(nv_alignments) == 24, "layout");

enum { NV_BACKEND_CUDA = 2 };                                       /* nvcompDecompressBackend_t */
enum { NV_UCHAR = 1, NV_FLOAT8_E4M3 = 9, NV_FLOAT16 = 10, NV_BITS = 255 }; /* nvcompType_t */

/* Ids as in FORMAT.md. */
enum {
    CK_FORMAT_NONE,
    CK_FORMAT_ZSTD,
    CK_FORMAT_DEFLATE,
    CK_FORMAT_ANS,
    CK_FORMAT_GDEFLATE,
    CK_FORMAT_LZ4,
    CK_FORMAT_SNAPPY,
    CK_FORMAT_BITCOMP,
    CK_FORMATS
};

typedef struct {
    nv_status (*compress_alignments)(nv_options, nv_alignments *);
    nv_status (*compress_temp)(size_t count, size_t largest, nv_options, size_t *temp, size_t total, cu_stream);
    nv_status (*compress_limit)(size_t largest, nv_options, size_t *limit);
    /* All arrays, and what their members point to, in memory that the device reaches. */
    nv_status (*compress)(const cu_address *from, const size_t *sizes, size_t largest, size_t count, cu_address temp,
                          size_t temp_bytes, const cu_address *to, size_t *stored, nv_options, nv_status *statuses,
                          cu_stream);
    nv_status (*decompress_alignments)(nv_options, nv_alignments *);
    nv_status (*decompress_temp)(size_t count, size_t largest, nv_options, size_t *temp, size_t total, cu_stream);
    nv_status (*decompress)(const cu_address *from, const size_t *stored, const size_t *room, size_t *actual,
                            size_t count, cu_address temp, size_t temp_bytes, const cu_address *to, nv_options,
                            nv_status *statuses, cu_stream);
} nv_format;

typedef struct {
    const char *name;      /* as FORMAT.md calls it */
    const char *symbol;    /* what stands for it in the functions' names */
    size_t block;          /* raw bytes of a block, by default */
    size_t largest;        /* raw bytes of a block that the compressor takes */
    size_t alignment;      /* that suits every level, both ways, by the headers' constants */
    int levels;            /* 0 to levels - 1 are known; 0: it has none */
    int entropy_only;      /* bit i: level i finds no repeats, only frequencies */
    nv_options compress, decompress; /* defaults */
} ck_format;

typedef struct {
    void *library;
    nv_properties properties;
    int simulated;
    const char *(*status_string)(nv_status);
    nv_format format[CK_FORMATS]; /* [CK_FORMAT_NONE] is empty */
} ck_nvcomp;

extern const ck_format ck_formats[CK_FORMATS];

enum { CK_NVCOMP_LOADED, CK_NVCOMP_NO_LIBRARY, CK_NVCOMP_OTHER_VERSION, CK_NVCOMP_NO_ENTRY };

/* Opens the library at `path`. CK_NVCOMP_*; `detail` gets what was wrong, in words or an entry's name. */
int ck_nvcomp_load(ck_nvcomp *nvcomp, const char *path, char *detail, size_t room);

#endif
