/* cuGetProcAddress: which entry points this driver has, and since which CUDA version each signature exists. */
#define _GNU_SOURCE
#include "sim.h"

#include <dlfcn.h>
#include <string.h>

typedef struct {
    const char *name; /* as asked for */
    int since;
    const char *symbol; /* as exported; NULL: the same */
} Entry;

/* Versions of one name in ascending order; the newest that the asked version allows is the answer. */
static const Entry entries[] = {
    {"cuInit", 2000, NULL},
    {"cuDriverGetVersion", 2020, NULL},
    {"cuGetErrorName", 6000, NULL},
    {"cuGetErrorString", 6000, NULL},
    {"cuGetProcAddress", 11030, NULL},
    {"cuGetProcAddress", 12000, "cuGetProcAddress_v2"},
    {"cuDeviceGet", 2000, NULL},
    {"cuDeviceGetCount", 2000, NULL},
    {"cuDeviceGetName", 2000, NULL},
    {"cuDeviceGetUuid", 9020, NULL},
    {"cuDeviceGetUuid", 11040, "cuDeviceGetUuid_v2"},
    {"cuDeviceTotalMem", 3020, "cuDeviceTotalMem_v2"},
    {"cuDeviceGetAttribute", 2000, NULL},
    {"cuDeviceGetPCIBusId", 4010, NULL},
    {"cuDeviceGetByPCIBusId", 4010, NULL},
    {"cuDeviceCanAccessPeer", 4000, NULL},
    {"cuDevicePrimaryCtxRetain", 7000, NULL},
    {"cuDevicePrimaryCtxRelease", 11000, "cuDevicePrimaryCtxRelease_v2"},
    {"cuDevicePrimaryCtxReset", 11000, "cuDevicePrimaryCtxReset_v2"},
    {"cuDevicePrimaryCtxSetFlags", 11000, "cuDevicePrimaryCtxSetFlags_v2"},
    {"cuDevicePrimaryCtxGetState", 7000, NULL},
    {"cuCtxCreate", 3020, "cuCtxCreate_v2"},
    {"cuCtxCreate", 12050, "cuCtxCreate_v4"},
    {"cuCtxDestroy", 4000, "cuCtxDestroy_v2"},
    {"cuCtxSetCurrent", 4000, NULL},
    {"cuCtxGetCurrent", 4000, NULL},
    {"cuCtxPushCurrent", 4000, "cuCtxPushCurrent_v2"},
    {"cuCtxPopCurrent", 4000, "cuCtxPopCurrent_v2"},
    {"cuCtxGetDevice", 2000, NULL},
    {"cuCtxGetDevice", 13000, "cuCtxGetDevice_v2"},
    {"cuCtxSynchronize", 2000, NULL},
    {"cuCtxSynchronize", 13000, "cuCtxSynchronize_v2"},
    {"cuCtxGetFlags", 7000, NULL},
    {"cuCtxGetApiVersion", 3020, NULL},
    {"cuCtxGetId", 12000, NULL},
    {"cuCtxGetStreamPriorityRange", 5050, NULL},
    {"cuMemGetInfo", 3020, "cuMemGetInfo_v2"},
    {"cuMemAlloc", 3020, "cuMemAlloc_v2"},
    {"cuMemFree", 3020, "cuMemFree_v2"},
    {"cuMemGetAddressRange", 3020, "cuMemGetAddressRange_v2"},
    {"cuMemAllocManaged", 6000, NULL},
    {"cuMemAllocHost", 3020, "cuMemAllocHost_v2"},
    {"cuMemHostAlloc", 2020, NULL},
    {"cuMemFreeHost", 2000, NULL},
    {"cuMemHostRegister", 6050, "cuMemHostRegister_v2"},
    {"cuMemHostUnregister", 4000, NULL},
    {"cuMemHostGetDevicePointer", 3020, "cuMemHostGetDevicePointer_v2"},
    {"cuMemHostGetFlags", 2030, NULL},
    {"cuMemGetAllocationGranularity", 10020, NULL},
    {"cuMemCreate", 10020, NULL},
    {"cuMemRelease", 10020, NULL},
    {"cuMemGetAllocationPropertiesFromHandle", 10020, NULL},
    {"cuMemRetainAllocationHandle", 11000, NULL},
    {"cuMemAddressReserve", 10020, NULL},
    {"cuMemAddressFree", 10020, NULL},
    {"cuMemMap", 10020, NULL},
    {"cuMemUnmap", 10020, NULL},
    {"cuMemSetAccess", 10020, NULL},
    {"cuMemGetAccess", 10020, NULL},
    {"cuMemPoolCreate", 11020, NULL},
    {"cuMemPoolDestroy", 11020, NULL},
    {"cuMemPoolTrimTo", 11020, NULL},
    {"cuMemPoolSetAttribute", 11020, NULL},
    {"cuMemPoolGetAttribute", 11020, NULL},
    {"cuDeviceGetDefaultMemPool", 11020, NULL},
    {"cuDeviceGetMemPool", 11020, NULL},
    {"cuMemAllocAsync", 11020, NULL},
    {"cuMemAllocFromPoolAsync", 11020, NULL},
    {"cuMemFreeAsync", 11020, NULL},
    {"cuMemBatchDecompressAsync", 12060, NULL},
    {"cuPointerGetAttribute", 4000, NULL},
    {"cuPointerGetAttributes", 7000, NULL},
    {"cuMemcpy", 4000, NULL},
    {"cuMemcpyAsync", 4000, NULL},
    {"cuMemcpyPeer", 4000, NULL},
    {"cuMemcpyPeerAsync", 4000, NULL},
    {"cuMemcpyHtoD", 3020, "cuMemcpyHtoD_v2"},
    {"cuMemcpyDtoH", 3020, "cuMemcpyDtoH_v2"},
    {"cuMemcpyDtoD", 3020, "cuMemcpyDtoD_v2"},
    {"cuMemcpyHtoDAsync", 3020, "cuMemcpyHtoDAsync_v2"},
    {"cuMemcpyDtoHAsync", 3020, "cuMemcpyDtoHAsync_v2"},
    {"cuMemcpyDtoDAsync", 3020, "cuMemcpyDtoDAsync_v2"},
    {"cuMemsetD8", 3020, "cuMemsetD8_v2"},
    {"cuMemsetD16", 3020, "cuMemsetD16_v2"},
    {"cuMemsetD32", 3020, "cuMemsetD32_v2"},
    {"cuMemsetD8Async", 3020, NULL},
    {"cuMemsetD16Async", 3020, NULL},
    {"cuMemsetD32Async", 3020, NULL},
    {"cuStreamCreate", 2000, NULL},
    {"cuStreamCreateWithPriority", 5050, NULL},
    {"cuStreamDestroy", 4000, "cuStreamDestroy_v2"},
    {"cuStreamQuery", 2000, NULL},
    {"cuStreamSynchronize", 2000, NULL},
    {"cuStreamWaitEvent", 3020, NULL},
    {"cuStreamGetCtx", 9020, NULL},
    {"cuStreamGetCtx", 12050, "cuStreamGetCtx_v2"},
    {"cuStreamGetDevice", 12080, NULL},
    {"cuStreamGetFlags", 5050, NULL},
    {"cuStreamGetPriority", 5050, NULL},
    {"cuStreamGetId", 12000, NULL},
    {"cuStreamIsCapturing", 10000, NULL},
    {"cuStreamBeginCapture", 10010, "cuStreamBeginCapture_v2"},
    {"cuStreamEndCapture", 10000, NULL},
    {"cuStreamAddCallback", 5000, NULL},
    {"cuLaunchHostFunc", 10000, NULL},
    {"cuLaunchHostFunc", 13020, "cuLaunchHostFunc_v2"},
    {"cuEventCreate", 2000, NULL},
    {"cuEventDestroy", 4000, "cuEventDestroy_v2"},
    {"cuEventRecord", 2000, NULL},
    {"cuEventRecordWithFlags", 11010, NULL},
    {"cuEventQuery", 2000, NULL},
    {"cuEventSynchronize", 2000, NULL},
    {"cuEventElapsedTime", 2000, NULL},
    {"cuEventElapsedTime", 12080, "cuEventElapsedTime_v2"},
    {"cuModuleLoadData", 2000, NULL},
    {"cuModuleLoadDataEx", 2010, NULL},
    {"cuModuleUnload", 2000, NULL},
    {"cuModuleGetFunction", 2000, NULL},
    {"cuFuncGetAttribute", 2020, NULL},
    {"cuLaunchKernel", 4000, NULL},
    {"cuIpcGetMemHandle", 4010, NULL},
    {"cuIpcOpenMemHandle", 11000, "cuIpcOpenMemHandle_v2"},
    {"cuIpcCloseMemHandle", 4010, NULL},
    {"cuCheckpointProcessGetRestoreThreadId", 12080, NULL},
    {"cuCheckpointProcessGetState", 12080, NULL},
    {"cuCheckpointProcessLock", 12080, NULL},
    {"cuCheckpointProcessCheckpoint", 12080, NULL},
    {"cuCheckpointProcessRestore", 12080, NULL},
    {"cuCheckpointProcessUnlock", 12080, NULL},
    {"cuCheckpointOperationComplete", 13040, NULL},
};

enum { FOUND = 0, SYMBOL_NOT_FOUND = 1, VERSION_NOT_SUFFICIENT = 2 };

EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **address, int version, uint64_t flags, int *status) {
    if (!symbol || !address || flags > 2) return CUDA_ERROR_INVALID_VALUE;
    int attached = process_attach() == CUDA_SUCCESS;
    int driver = attached ? sim.world->driver_version : 13040;
    int custom = attached ? sim.world->custom_storage : 1;
    if (version / 10 > driver / 10) return CUDA_ERROR_INVALID_VALUE; /* 13041, an update of 13.4, is 13.4 */
    *address = NULL;
    int answer = SYMBOL_NOT_FOUND;
    for (size_t i = 0; i < sizeof entries / sizeof entries[0]; i++) {
        const Entry *entry = &entries[i];
        if (strcmp(entry->name, symbol) != 0 || entry->since > driver) continue;
        if (!custom && strcmp(symbol, "cuCheckpointOperationComplete") == 0) continue;
        if (entry->since > version) {
            if (answer == SYMBOL_NOT_FOUND) answer = VERSION_NOT_SUFFICIENT;
            continue;
        }
        Dl_info self; /* this library's own symbol, whatever else the process has loaded */
        void *library = dladdr((void *)cuGetProcAddress_v2, &self) ? dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD) : NULL;
        if (!library) return CUDA_ERROR_UNKNOWN;
        *address = dlsym(library, entry->symbol ? entry->symbol : entry->name);
        dlclose(library);
        answer = *address ? FOUND : SYMBOL_NOT_FOUND;
    }
    if (status) *status = answer;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGetProcAddress(const char *symbol, void **address, int version, uint64_t flags) {
    int status;
    CUresult result = cuGetProcAddress_v2(symbol, address, version, flags, &status);
    return result == CUDA_SUCCESS && status != FOUND ? CUDA_ERROR_NOT_FOUND : result;
}
