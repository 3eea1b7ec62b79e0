/* Devices: what the world says of its GPUs. */
#define _GNU_SOURCE
#include "sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static const Gpu *device(CUdevice ordinal) {
    return ordinal >= 0 && ordinal < sim.gpus ? &sim.world->gpu[physical(ordinal)] : NULL;
}

EXPORT CUresult cuDriverGetVersion(int *version) {
    if (!version) return CUDA_ERROR_INVALID_VALUE;
    *version = process_attach() == CUDA_SUCCESS ? sim.world->driver_version : 13040;
    return CUDA_SUCCESS;
}

API(cuDeviceGetCount, "cuDeviceGetCount", (int *count), (count)) {
    if (!count) return CUDA_ERROR_INVALID_VALUE;
    *count = sim.gpus;
    return CUDA_SUCCESS;
}

API(cuDeviceGet, "cuDeviceGet", (CUdevice * out, int ordinal), (out, ordinal)) {
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    if (!device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *out = ordinal;
    return CUDA_SUCCESS;
}

API(cuDeviceGetName, "cuDeviceGetName", (char *name, int room, CUdevice ordinal), (name, room, ordinal)) {
    const Gpu *gpu = device(ordinal);
    if (!name || room <= 0) return CUDA_ERROR_INVALID_VALUE;
    if (!gpu) return CUDA_ERROR_INVALID_DEVICE;
    snprintf(name, (size_t)room, "%s", gpu->name);
    return CUDA_SUCCESS;
}

API(cuDeviceGetUuid_v2, "cuDeviceGetUuid", (CUuuid * uuid, CUdevice ordinal), (uuid, ordinal)) {
    const Gpu *gpu = device(ordinal);
    if (!uuid) return CUDA_ERROR_INVALID_VALUE;
    if (!gpu) return CUDA_ERROR_INVALID_DEVICE;
    memcpy(uuid->bytes, gpu->uuid, sizeof uuid->bytes);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice ordinal) { return cuDeviceGetUuid_v2(uuid, ordinal); }

API(cuDeviceTotalMem_v2, "cuDeviceTotalMem", (size_t * bytes, CUdevice ordinal), (bytes, ordinal)) {
    const Gpu *gpu = device(ordinal);
    if (!bytes) return CUDA_ERROR_INVALID_VALUE;
    if (!gpu) return CUDA_ERROR_INVALID_DEVICE;
    *bytes = gpu->memory;
    return CUDA_SUCCESS;
}

API(cuDeviceGetPCIBusId, "cuDeviceGetPCIBusId", (char *text, int room, CUdevice ordinal), (text, room, ordinal)) {
    const Gpu *gpu = device(ordinal);
    if (!text || room < 13) return CUDA_ERROR_INVALID_VALUE;
    if (!gpu) return CUDA_ERROR_INVALID_DEVICE;
    snprintf(text, (size_t)room, "%04X:%02X:%02X.0", (unsigned)gpu->pci_domain, (unsigned)gpu->pci_bus,
             (unsigned)gpu->pci_device);
    return CUDA_SUCCESS;
}

API(cuDeviceGetByPCIBusId, "cuDeviceGetByPCIBusId", (CUdevice * out, const char *text), (out, text)) {
    if (!out || !text) return CUDA_ERROR_INVALID_VALUE;
    unsigned domain = 0, bus, unit;
    if (sscanf(text, "%x:%x:%x", &domain, &bus, &unit) != 3) {
        domain = 0;
        if (sscanf(text, "%x:%x", &bus, &unit) != 2) return CUDA_ERROR_INVALID_VALUE;
    }
    for (int i = 0; i < sim.gpus; i++) {
        const Gpu *gpu = device(i);
        if ((unsigned)gpu->pci_domain == domain && (unsigned)gpu->pci_bus == bus && (unsigned)gpu->pci_device == unit) {
            *out = i;
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_INVALID_DEVICE;
}

static int set_attribute(const Gpu *gpu, int attribute, int otherwise) {
    for (int i = 0; i < MAX_ATTRIBUTES && gpu->attribute[i][0]; i++)
        if (gpu->attribute[i][0] == attribute) return gpu->attribute[i][1];
    return otherwise;
}

void device_engine(int gpu, int *mask, int *longest) {
    *mask = set_attribute(&sim.world->gpu[gpu], 136, 0);
    *longest = set_attribute(&sim.world->gpu[gpu], 137, 0);
}

API(cuDeviceGetAttribute, "cuDeviceGetAttribute", (int *value, int attribute, CUdevice ordinal),
    (value, attribute, ordinal)) {
    static const int known[][2] = {
        {1, 1024}, {2, 1024}, {3, 1024}, {4, 64}, {5, 2147483647}, {6, 65535}, {7, 65535}, {8, 49152},
        {10, 32}, /* warp size */ {15, 1}, {16, 132}, /* multiprocessors */ {19, 1}, {31, 1},
        {39, 2048}, {40, 3}, /* copy engines */ {41, 1}, /* unified addressing */ {75, 9}, {76, 0}, /* sm_90 */
        {78, 1}, {83, 1}, {91, 1}, {99, 1}, /* host registration */
        {102, 1}, /* virtual memory management */ {115, 1}, /* memory pools */
    };
    const Gpu *gpu = device(ordinal);
    if (!value || attribute <= 0 || attribute > 512) return CUDA_ERROR_INVALID_VALUE;
    if (!gpu) return CUDA_ERROR_INVALID_DEVICE;
    *value = 0;
    if (attribute == 33) *value = gpu->pci_bus;
    if (attribute == 34) *value = gpu->pci_device;
    if (attribute == 50) *value = gpu->pci_domain;
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (known[i][0] == attribute) *value = known[i][1];
    *value = set_attribute(gpu, attribute, *value);
    return CUDA_SUCCESS;
}

API(cuDeviceCanAccessPeer, "cuDeviceCanAccessPeer", (int *can, CUdevice a, CUdevice b), (can, a, b)) {
    if (!can) return CUDA_ERROR_INVALID_VALUE;
    if (!device(a) || !device(b)) return CUDA_ERROR_INVALID_DEVICE;
    *can = a != b;
    return CUDA_SUCCESS;
}
