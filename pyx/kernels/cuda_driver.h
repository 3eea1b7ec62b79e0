/* The CUDA driver's entry points, found at run time. */
#ifndef CKPT_CUDA_DRIVER_H
#define CKPT_CUDA_DRIVER_H

#include "cuda_abi.h"

/* X(field, entry, CUDA version whose signature is called, required, parameters) */
#define CK_CUDA_ENTRIES(X)                                                                                     \
    X(error_name, "cuGetErrorName", 6000, 1, (cu_result, const char **))                                       \
    X(error_string, "cuGetErrorString", 6000, 1, (cu_result, const char **))                                   \
    X(driver_version, "cuDriverGetVersion", 2020, 1, (int *))                                                  \
    X(device_count, "cuDeviceGetCount", 2000, 1, (int *))                                                      \
    X(device_attribute, "cuDeviceGetAttribute", 2000, 1, (int *, int, cu_device))                              \
    X(primary_state, "cuDevicePrimaryCtxGetState", 7000, 1, (cu_device, unsigned *, int *))                    \
    X(primary_retain, "cuDevicePrimaryCtxRetain", 7000, 1, (cu_context *, cu_device))                          \
    X(primary_release, "cuDevicePrimaryCtxRelease", 11000, 1, (cu_device))                                     \
    X(context_push, "cuCtxPushCurrent", 4000, 1, (cu_context))                                                 \
    X(context_pop, "cuCtxPopCurrent", 4000, 1, (cu_context *))                                                 \
    X(context_current, "cuCtxGetCurrent", 4000, 1, (cu_context *))                                             \
    X(context_set, "cuCtxSetCurrent", 4000, 1, (cu_context))                                                   \
    X(stream_create, "cuStreamCreate", 2000, 1, (cu_stream *, unsigned))                                       \
    X(stream_destroy, "cuStreamDestroy", 4000, 1, (cu_stream))                                                 \
    X(stream_wait, "cuStreamWaitEvent", 3020, 1, (cu_stream, cu_event, unsigned))                              \
    X(stream_synchronize, "cuStreamSynchronize", 2000, 1, (cu_stream))                                         \
    X(event_create, "cuEventCreate", 2000, 1, (cu_event *, unsigned))                                          \
    X(event_destroy, "cuEventDestroy", 4000, 1, (cu_event))                                                    \
    X(event_record, "cuEventRecord", 2000, 1, (cu_event, cu_stream))                                           \
    X(event_query, "cuEventQuery", 2000, 1, (cu_event))                                                        \
    X(event_synchronize, "cuEventSynchronize", 2000, 1, (cu_event))                                            \
    X(memory_allocate, "cuMemAlloc", 3020, 1, (cu_address *, size_t))                                          \
    X(memory_free, "cuMemFree", 3020, 1, (cu_address))                                                         \
    X(memory_fill, "cuMemsetD8Async", 3020, 1, (cu_address, unsigned char, size_t, cu_stream))                 \
    X(copy_down, "cuMemcpyDtoHAsync", 3020, 1, (void *, cu_address, size_t, cu_stream))                        \
    X(copy_up, "cuMemcpyHtoDAsync", 3020, 1, (cu_address, const void *, size_t, cu_stream))                    \
    X(host_allocate, "cuMemHostAlloc", 2020, 1, (void **, size_t, unsigned))                                   \
    X(host_address, "cuMemHostGetDevicePointer", 3020, 1, (cu_address *, void *, unsigned))                    \
    X(host_free, "cuMemFreeHost", 2000, 1, (void *))                                                           \
    X(host_register, "cuMemHostRegister", 6050, 1, (void *, size_t, unsigned))                                 \
    X(host_unregister, "cuMemHostUnregister", 4000, 1, (void *))                                               \
    X(module_load, "cuModuleLoadData", 2000, 0, (cu_module *, const void *))                                   \
    X(module_unload, "cuModuleUnload", 2000, 0, (cu_module))                                                   \
    X(module_function, "cuModuleGetFunction", 2000, 0, (cu_function *, cu_module, const char *))               \
    X(launch, "cuLaunchKernel", 4000, 0,                                                                       \
      (cu_function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, cu_stream, void **,  \
       void **))                                                                                               \
    X(checkpoint, "cuCheckpointProcessCheckpoint", 12080, 0, (int, cu_checkpoint_args *))                      \
    X(restore, "cuCheckpointProcessRestore", 12080, 0, (int, cu_restore_args *))                               \
    X(operation_complete, "cuCheckpointOperationComplete", 13040, 0, (void *))

typedef struct {
    void *library;
    cu_result (*find)(const char *, void **, int, uint64_t, int *); /* cuGetProcAddress_v2: CUDA 12.0 */
    int version;                                                    /* 13040 for 13.4 */
    int simulated;
#define CK_CUDA_FIELD(field, entry, since, required, parameters) cu_result(*field) parameters;
    CK_CUDA_ENTRIES(CK_CUDA_FIELD)
#undef CK_CUDA_FIELD
} ck_cuda;

enum { CK_CUDA_LOADED, CK_CUDA_NO_LIBRARY, CK_CUDA_TOO_OLD, CK_CUDA_NO_ENTRY };

/* Loads libcuda.so.1, once a process. CK_CUDA_*; `detail` gets what was wrong, in words or an entry's name. */
int ck_cuda_load(ck_cuda *cuda, char *detail, size_t room);
/* The newest version of an entry that the driver has, NULL where it has none. */
void *ck_cuda_find(const ck_cuda *cuda, const char *entry);

#endif
