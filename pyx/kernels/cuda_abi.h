/* The part of the CUDA driver's binary interface that ckptpipe calls, on 64-bit Linux.
 *
 * Written from the public reference of the driver API, so that the package builds where there is no CUDA.
 * Nothing here is linked: every function is found at run time, see cuda_driver.h.
 */
#ifndef CKPT_CUDA_ABI_H
#define CKPT_CUDA_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef int cu_result;
typedef int cu_device;
typedef uint64_t cu_address; /* CUdeviceptr */
typedef struct cu_context_s *cu_context;
typedef struct cu_stream_s *cu_stream;
typedef struct cu_event_s *cu_event;
typedef struct cu_module_s *cu_module;
typedef struct cu_function_s *cu_function;

enum {
    CU_OK = 0,
    CU_INVALID_VALUE = 1,
    CU_NOT_INITIALIZED = 3,
    CU_INVALID_CONTEXT = 201,
    CU_NOT_FOUND = 500,
    CU_NOT_READY = 600,
    CU_NOT_SUPPORTED = 801
};

enum { CU_STREAM_IS_NON_BLOCKING = 1 };
enum { CU_EVENT_BLOCKS = 1, CU_EVENT_NO_TIMING = 2 };
enum { CU_HOST_PORTABLE = 1, CU_HOST_DEVICEMAP = 2 }; /* of cuMemHostRegister and cuMemHostAlloc alike */
enum { CU_COMPUTE_MAJOR = 75, CU_COMPUTE_MINOR = 76 }; /* CUdevice_attribute */

/* cuCheckpoint*: CUDA 12.8; custom storage: CUDA 13.4. */
typedef struct {
    cu_address address;
    uint64_t nbytes;
    cu_stream stream;
} cu_custom_device;

typedef struct {
    void *handle;
    cu_custom_device *devices;
    uint32_t count;
    uint32_t padding;
} cu_custom_info;

typedef struct {
    cu_custom_info **custom_out;
    unsigned char reserved[56];
} cu_checkpoint_args;

typedef struct {
    unsigned char from[16], to[16]; /* CUuuid of the GPU at the checkpoint, and of the one to restore onto */
} cu_gpu_pair;

typedef struct {
    cu_gpu_pair *pairs;
    uint32_t pair_count;
    uint32_t padding;
    cu_custom_info **custom_out;
    unsigned char reserved[40];
} cu_restore_args;

_Static_assert(sizeof(cu_custom_device) == 24 && offsetof(cu_custom_device, stream) == 16, "layout");
_Static_assert(offsetof(cu_custom_info, devices) == 8 && offsetof(cu_custom_info, count) == 16, "layout");
_Static_assert(sizeof(cu_checkpoint_args) == 64, "layout");
_Static_assert(sizeof(cu_restore_args) == 64 && offsetof(cu_restore_args, custom_out) == 16, "layout");

#endif
