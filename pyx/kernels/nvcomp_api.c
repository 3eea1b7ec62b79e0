#include "nvcomp_api.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)

/* Options by word. Deflate, GDeflate: compress {algorithm}; ANS: compress {kind 0 (rANS), data type}, decompress
   {backend, data type}; all decompress: {backend}. What is not named is 0, which is also each one's default (LZ4:
   data type CHAR; ANS: automatic sub-chunks and states; Bitcomp: lossless). */
const ck_format ck_formats[CK_FORMATS] = {
    [CK_FORMAT_NONE] = {.name = "none", .symbol = ""},
    [CK_FORMAT_ZSTD] = {.name = "zstd", .symbol = "Zstd", .block = 64 * KIB, .largest = 16 * MIB, .alignment = 8,
                        .decompress = {{NV_BACKEND_CUDA}}},
    [CK_FORMAT_DEFLATE] = {.name = "deflate", .symbol = "Deflate", .block = 64 * KIB, .largest = 64 * KIB,
                           .alignment = 8, .levels = 6, .entropy_only = 1, .decompress = {{NV_BACKEND_CUDA}}},
    [CK_FORMAT_ANS] = {.name = "ans", .symbol = "ANS", .block = 512 * KIB, .largest = 16 * MIB, .alignment = 16,
                       .levels = 3, .entropy_only = 7, .compress = {{0, NV_UCHAR}},
                       .decompress = {{NV_BACKEND_CUDA, NV_BITS}}},
    [CK_FORMAT_GDEFLATE] = {.name = "gdeflate", .symbol = "Gdeflate", .block = 64 * KIB, .largest = 64 * KIB,
                            .alignment = 8, .levels = 6, .entropy_only = 1, .decompress = {{NV_BACKEND_CUDA}}},
    [CK_FORMAT_LZ4] = {.name = "lz4", .symbol = "LZ4", .block = 64 * KIB, .largest = 16 * MIB, .alignment = 4,
                       .decompress = {{NV_BACKEND_CUDA}}},
    [CK_FORMAT_SNAPPY] = {.name = "snappy", .symbol = "Snappy", .block = 64 * KIB, .largest = 16 * MIB, .alignment = 1,
                          .decompress = {{NV_BACKEND_CUDA}}},
    [CK_FORMAT_BITCOMP] = {.name = "bitcomp", .symbol = "Bitcomp", .block = 64 * KIB, .largest = 16 * MIB,
                           .alignment = 8, .compress = {{0, NV_UCHAR}}, .decompress = {{NV_BACKEND_CUDA}}},
};

static int find(ck_nvcomp *nvcomp, void *entry, const char *symbol, const char *what, char *detail, size_t room) {
    char name[96];
    snprintf(name, sizeof name, "nvcompBatched%s%s", symbol, what);
    *(void **)entry = dlsym(nvcomp->library, name);
    if (*(void **)entry != NULL) return 1;
    snprintf(detail, room, "%s", name);
    return 0;
}

static int find_format(ck_nvcomp *nvcomp, int id, char *detail, size_t room) {
    const char *symbol = ck_formats[id].symbol;
    nv_format *format = &nvcomp->format[id];
    return find(nvcomp, &format->compress_alignments, symbol, "CompressGetRequiredAlignments", detail, room) &&
           find(nvcomp, &format->compress_temp, symbol, "CompressGetTempSize", detail, room) &&
           find(nvcomp, &format->compress_limit, symbol, "CompressGetMaxOutputChunkSize", detail, room) &&
           find(nvcomp, &format->compress, symbol, "CompressAsync", detail, room) &&
           find(nvcomp, &format->decompress_alignments, symbol, "DecompressGetRequiredAlignments", detail, room) &&
           find(nvcomp, &format->decompress_temp, symbol, "DecompressGetTempSize", detail, room) &&
           find(nvcomp, &format->decompress, symbol, "DecompressAsync", detail, room);
}

int ck_nvcomp_load(ck_nvcomp *nvcomp, const char *path, char *detail, size_t room) {
    memset(nvcomp, 0, sizeof *nvcomp);
    detail[0] = 0;
    /* Local: nothing else in the process shall bind to its symbols because of us. Never closed: the driver knows
       its kernels. */
    nvcomp->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (nvcomp->library == NULL) {
        const char *why = dlerror();
        snprintf(detail, room, "%s", why ? why : "dlopen failed");
        return CK_NVCOMP_NO_LIBRARY;
    }
    nv_status (*properties)(nv_properties *);
    *(void **)&properties = dlsym(nvcomp->library, "nvcompGetProperties");
    *(void **)&nvcomp->status_string = dlsym(nvcomp->library, "nvcompGetStatusString");
    nvcomp->simulated = dlsym(nvcomp->library, "simnvcomp_version") != NULL;
    if (properties == NULL || properties(&nvcomp->properties) != NV_SUCCESS) {
        snprintf(detail, room, "nvcompGetProperties");
        return CK_NVCOMP_NO_ENTRY;
    }
    if (nvcomp->properties.version / 1000 != 6) return CK_NVCOMP_OTHER_VERSION;
    for (int id = 1; id < CK_FORMATS; id++) {
        if (find_format(nvcomp, id, detail, room)) continue;
        if (id == CK_FORMAT_DEFLATE || id == CK_FORMAT_ANS) return CK_NVCOMP_NO_ENTRY;
        memset(&nvcomp->format[id], 0, sizeof nvcomp->format[id]); /* this one is not offered */
    }
    detail[0] = 0;
    return CK_NVCOMP_LOADED;
}
