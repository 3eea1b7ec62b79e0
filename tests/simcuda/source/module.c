/* Modules: nothing is compiled. An image is text (CUDA C++ or PTX); of the kernels that the simulation knows,
 * a module has those whose name is in the text. An image with none of them answers NO_BINARY_FOR_GPU. */
#define _GNU_SOURCE
#include "sim.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#define MAX_KERNELS 256

typedef struct Module {
    struct Module *next;
    Context *context;
    uint64_t kernels[MAX_KERNELS / 64]; /* bit i: kernel_at(i) */
} Module;

static int named_in(const char *text, const char *name) {
    size_t length = strlen(name);
    for (const char *at = text; (at = strstr(at, name)); at++) {
        int before = at > text && (isalnum((unsigned char)at[-1]) || at[-1] == '_');
        int after = isalnum((unsigned char)at[length]) || at[length] == '_';
        if (!before && !after) return 1;
    }
    return 0;
}

API(cuModuleLoadData, "cuModuleLoadData", (CUmodule * out, const void *image), (out, image)) {
    Context *context;
    CUresult result = context_needed(&context);
    if (result != CUDA_SUCCESS) return result;
    if (!out || !image) return CUDA_ERROR_INVALID_VALUE;
    if (memcmp(image, "\x7f" "ELF", 4) == 0 || memcmp(image, "\x50\xed\x55\xba", 4) == 0)
        return CUDA_ERROR_NO_BINARY_FOR_GPU; /* a cubin or a fat binary: machine code */
    Module *module = calloc(1, sizeof *module);
    if (!module) return CUDA_ERROR_OUT_OF_MEMORY;
    int found = 0;
    for (size_t i = 0; i < MAX_KERNELS && kernel_at(i); i++)
        if (named_in(image, kernel_at(i)->name)) {
            module->kernels[i / 64] |= 1ull << (i % 64);
            found = 1;
        }
    if (!found) {
        free(module);
        return CUDA_ERROR_NO_BINARY_FOR_GPU;
    }
    module->context = context;
    pthread_mutex_lock(&sim.mutex);
    module->next = sim.modules;
    sim.modules = module;
    pthread_mutex_unlock(&sim.mutex);
    *out = module;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleLoadDataEx(CUmodule *out, const void *image, unsigned int count, int *options, void **values) {
    (void)count;
    (void)options;
    (void)values;
    return cuModuleLoadData(out, image);
}

/* Under sim.mutex. */
static Module *live(const Module *module) {
    Module *other = sim.modules;
    while (other && other != module) other = other->next;
    return other;
}

static void drop(Module *module) {
    Module **at = &sim.modules;
    while (*at != module) at = &(*at)->next;
    *at = module->next;
    free(module);
}

void modules_destroy(const Context *context) {
    pthread_mutex_lock(&sim.mutex);
    for (Module *module = sim.modules, *next; module; module = next) {
        next = module->next;
        if (module->context == context) drop(module);
    }
    pthread_mutex_unlock(&sim.mutex);
}

API(cuModuleUnload, "cuModuleUnload", (CUmodule module), (module)) {
    pthread_mutex_lock(&sim.mutex);
    int known = live(module) != NULL;
    if (known) drop(module);
    pthread_mutex_unlock(&sim.mutex);
    return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

API(cuModuleGetFunction, "cuModuleGetFunction", (CUfunction * out, CUmodule module, const char *name),
    (out, module, name)) {
    if (!out || !name) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&sim.mutex);
    if (live(module)) {
        result = CUDA_ERROR_NOT_FOUND;
        for (size_t i = 0; i < MAX_KERNELS && kernel_at(i); i++)
            if ((module->kernels[i / 64] >> (i % 64) & 1) && strcmp(kernel_at(i)->name, name) == 0) {
                *out = kernel_at(i);
                result = CUDA_SUCCESS;
            }
    }
    pthread_mutex_unlock(&sim.mutex);
    return result;
}

API(cuFuncGetAttribute, "cuFuncGetAttribute", (int *value, int attribute, CUfunction function),
    (value, attribute, function)) {
    if (!value || !function || attribute < 0) return CUDA_ERROR_INVALID_VALUE;
    *value = attribute == 0 ? 1024 : 0; /* CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK */
    return CUDA_SUCCESS;
}

API(cuLaunchKernel, "cuLaunchKernel",
    (CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,
     unsigned int bz, unsigned int shared, CUstream handle, void **parameters, void **extra),
    (function, gx, gy, gz, bx, by, bz, shared, handle, parameters, extra)) {
    Stream *stream;
    CUresult result = stream_resolve(handle, &stream);
    if (result != CUDA_SUCCESS) return result;
    if (!function || (!parameters && !extra)) return CUDA_ERROR_INVALID_VALUE;
    if (!gx || !gy || !gz || !bx || !by || !bz || (uint64_t)bx * by * bz > 1024) return CUDA_ERROR_INVALID_VALUE;
    if (!parameters) return CUDA_ERROR_NOT_SUPPORTED; /* `extra` packing */
    Launch *launch = calloc(1, sizeof *launch + KERNEL_PARAMETER_BYTES);
    if (!launch) return CUDA_ERROR_OUT_OF_MEMORY;
    *launch = (Launch){.grid = {gx, gy, gz}, .block = {bx, by, bz}, .shared = shared};
    unsigned char *at = (unsigned char *)(launch + 1);
    for (int i = 0; i < KERNEL_PARAMETERS && function->bytes[i]; i++) {
        launch->parameter[i] = memcpy(at, parameters[i], (size_t)function->bytes[i]);
        at += (function->bytes[i] + 7) / 8 * 8;
    }
    return stream_submit(stream, (Work){.kind = WORK_KERNEL, .kernel = function, .launch = launch, .memory = launch}, 0);
}
