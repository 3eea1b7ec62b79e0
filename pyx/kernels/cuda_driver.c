#include "cuda_driver.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static void *find_version(const ck_cuda *cuda, const char *entry, int version) {
    void *address = NULL;
    int status = 0;
    cu_result result = cuda->find(entry, &address, version, 0, &status);
    return result == CU_OK && status == 0 ? address : NULL;
}

void *ck_cuda_find(const ck_cuda *cuda, const char *entry) {
    /* Asked with the driver's own version, it gives the newest variant that the driver has. */
    return find_version(cuda, entry, cuda->version);
}

int ck_cuda_load(ck_cuda *cuda, char *detail, size_t room) {
    memset(cuda, 0, sizeof *cuda);
    detail[0] = 0;
    /* By its bare name: LD_LIBRARY_PATH counts, and a driver that is loaded already is taken. Local: nothing
       else in the process shall bind to its symbols because of us. Never closed: it has threads. */
    cuda->library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (cuda->library == NULL) {
        const char *why = dlerror();
        snprintf(detail, room, "%s", why ? why : "dlopen failed");
        return CK_CUDA_NO_LIBRARY;
    }
    cu_result (*driver_version)(int *);
    *(void **)&cuda->find = dlsym(cuda->library, "cuGetProcAddress_v2");
    *(void **)&driver_version = dlsym(cuda->library, "cuDriverGetVersion");
    if (driver_version == NULL || driver_version(&cuda->version) != CU_OK) cuda->version = 0;
    cuda->simulated = dlsym(cuda->library, "simcuda_version") != NULL;
    if (cuda->find == NULL) {
        snprintf(detail, room, "cuGetProcAddress_v2");
        return CK_CUDA_TOO_OLD;
    }
#define CK_CUDA_FIND(field, entry, since, required, parameters)         \
    *(void **)&cuda->field = find_version(cuda, entry, since);          \
    if (cuda->field == NULL && (required)) {                            \
        snprintf(detail, room, "%s", entry);                            \
        return CK_CUDA_NO_ENTRY;                                        \
    }
    CK_CUDA_ENTRIES(CK_CUDA_FIND)
#undef CK_CUDA_FIND
    return CK_CUDA_LOADED;
}
