/* Virtual memory management: addresses are reserved, memory is created, one is mapped to the other, devices get access.
 *
 * Memory is created on a device alone (host memory and shareable handles are NOT_SUPPORTED). It lives until its handle
 * is released and it is mapped nowhere. */
#define _GNU_SOURCE
#include "sim.h"

#include <stdlib.h>

#define GRANULARITY PIECE_BYTES
enum { ACCESS_NONE = 0, ACCESS_READ = 1, ACCESS_READ_WRITE = 3 };

typedef struct Physical {
    struct Physical *next;
    Allocation allocation;
    CUmemAllocationProp properties;
    int references; /* handles of it */
    int mappings;
} Physical;

typedef struct Reservation {
    struct Reservation *next;
    uint64_t address, bytes;
} Reservation;

/* Under sim.mutex. */
static Physical *live(CUmemGenericAllocationHandle handle) {
    Physical *other = sim.physical;
    while (other && other != (Physical *)(uintptr_t)handle) other = other->next;
    return other && other->references ? other : NULL;
}

static void let_go(Physical *physical_memory) {
    if (physical_memory->references || physical_memory->mappings) return;
    Physical **at = &sim.physical;
    while (*at != physical_memory) at = &(*at)->next;
    *at = physical_memory->next;
    physical_give(&physical_memory->allocation);
    free(physical_memory);
}

static Reservation *reservation_of(uint64_t address, uint64_t bytes) {
    Reservation *other = sim.reserved;
    while (other && !(address >= other->address && address + bytes <= other->address + other->bytes)) other = other->next;
    return other;
}

/* The mappings that lie in a range: their number, or -1 where one lies across its ends. */
static int mappings_in(uint64_t address, uint64_t bytes, uint64_t *covered) {
    int count = 0;
    *covered = 0;
    for (size_t i = 0; i < sim.segments; i++) {
        const Segment *segment = &sim.segment[i];
        if (segment->kind != SEGMENT_VIRTUAL || segment->address >= address + bytes ||
            segment->address + segment->bytes <= address)
            continue;
        if (segment->address < address || segment->address + segment->bytes > address + bytes) return -1;
        *covered += segment->bytes;
        count++;
    }
    return count;
}

void virtual_moved(const Allocation *before, const Allocation *after) {
    for (Physical *other = sim.physical; other; other = other->next)
        if (other->allocation.address == before->address) other->allocation = *after;
}

void virtual_reset(void) {
    for (Physical *other = sim.physical, *next; other; other = next) {
        next = other->next;
        free(other);
    }
    for (Reservation *other = sim.reserved, *next; other; other = next) {
        next = other->next;
        free(other);
    }
}

static CUresult check_properties(const CUmemAllocationProp *properties) {
    if (!properties || (properties->allocFlags.usage & ~3u)) return CUDA_ERROR_INVALID_VALUE;
    if (properties->type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
    if (properties->requestedHandleTypes) return CUDA_ERROR_NOT_SUPPORTED;
    if (properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return properties->location.type >= 2 && properties->location.type <= 4 ? CUDA_ERROR_NOT_SUPPORTED
                                                                                : CUDA_ERROR_INVALID_VALUE;
    return properties->location.id >= 0 && properties->location.id < sim.gpus ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

API(cuMemGetAllocationGranularity, "cuMemGetAllocationGranularity",
    (size_t * out, const CUmemAllocationProp *properties, int option), (out, properties, option)) {
    CUresult result = check_properties(properties);
    if (!out || option < 0 || option > 1) return CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) *out = GRANULARITY;
    return result;
}

API(cuMemCreate, "cuMemCreate",
    (CUmemGenericAllocationHandle * out, size_t bytes, const CUmemAllocationProp *properties, unsigned long long flags),
    (out, bytes, properties, flags)) {
    CUresult result = check_properties(properties);
    if (result != CUDA_SUCCESS) return result;
    if (!out || flags || !bytes || bytes % GRANULARITY) return CUDA_ERROR_INVALID_VALUE;
    if (bytes >= GPU_SPAN) return CUDA_ERROR_OUT_OF_MEMORY;
    Physical *made = calloc(1, sizeof *made);
    if (!made) return CUDA_ERROR_OUT_OF_MEMORY;
    made->properties = *properties;
    made->references = 1;
    pthread_mutex_lock(&sim.mutex);
    result = physical_take(physical(properties->location.id), bytes, ALLOCATION_MEMORY, &made->allocation);
    if (result == CUDA_SUCCESS) {
        made->next = sim.physical;
        sim.physical = made;
        *out = (CUmemGenericAllocationHandle)(uintptr_t)made;
    }
    pthread_mutex_unlock(&sim.mutex);
    if (result != CUDA_SUCCESS) free(made);
    return result;
}

API(cuMemRelease, "cuMemRelease", (CUmemGenericAllocationHandle handle), (handle)) {
    pthread_mutex_lock(&sim.mutex);
    Physical *found = live(handle);
    if (found) {
        found->references--;
        let_go(found);
    }
    pthread_mutex_unlock(&sim.mutex);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API(cuMemGetAllocationPropertiesFromHandle, "cuMemGetAllocationPropertiesFromHandle",
    (CUmemAllocationProp * out, CUmemGenericAllocationHandle handle), (out, handle)) {
    pthread_mutex_lock(&sim.mutex);
    const Physical *found = live(handle);
    if (found && out) *out = found->properties;
    pthread_mutex_unlock(&sim.mutex);
    return found && out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API(cuMemRetainAllocationHandle, "cuMemRetainAllocationHandle", (CUmemGenericAllocationHandle * out, void *address),
    (out, address)) {
    pthread_mutex_lock(&sim.mutex);
    const Segment *segment = segment_at((uint64_t)address);
    int known = out && segment && segment->kind == SEGMENT_VIRTUAL;
    if (known) {
        segment->backing->references++;
        *out = (CUmemGenericAllocationHandle)(uintptr_t)segment->backing;
    }
    pthread_mutex_unlock(&sim.mutex);
    return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API(cuMemAddressReserve, "cuMemAddressReserve",
    (CUdeviceptr * out, size_t bytes, size_t alignment, CUdeviceptr wish, unsigned long long flags),
    (out, bytes, alignment, wish, flags)) {
    (void)wish; /* a hint */
    if (!out || flags || !bytes || bytes % GRANULARITY || (alignment & (alignment - 1))) return CUDA_ERROR_INVALID_VALUE;
    Reservation *made = calloc(1, sizeof *made);
    if (!made) return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&sim.mutex);
    uint64_t at = bytes < ARENA_BYTES ? arena_take(bytes, alignment > GRANULARITY ? alignment : GRANULARITY) : 0;
    if (at) {
        *made = (Reservation){sim.reserved, at, bytes};
        sim.reserved = made;
        *out = at;
    }
    pthread_mutex_unlock(&sim.mutex);
    if (!at) free(made);
    return at ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API(cuMemAddressFree, "cuMemAddressFree", (CUdeviceptr address, size_t bytes), (address, bytes)) {
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    uint64_t covered;
    pthread_mutex_lock(&sim.mutex);
    for (Reservation **at = &sim.reserved; *at; at = &(*at)->next) {
        Reservation *found = *at;
        if (found->address != address || found->bytes != bytes || mappings_in(address, bytes, &covered)) continue;
        *at = found->next;
        free(found);
        result = CUDA_SUCCESS;
        break;
    }
    pthread_mutex_unlock(&sim.mutex);
    return result;
}

API(cuMemMap, "cuMemMap",
    (CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags),
    (address, bytes, offset, handle, flags)) {
    if (flags || offset || !bytes || bytes % GRANULARITY || address % GRANULARITY) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    uint64_t covered;
    pthread_mutex_lock(&sim.mutex);
    Physical *found = live(handle);
    const Reservation *reservation = reservation_of(address, bytes);
    if (found && reservation && bytes <= found->allocation.bytes && mappings_in(address, bytes, &covered) == 0) {
        Segment segment = {.address = address, .bytes = bytes, .offset = found->allocation.offset,
                           .group = reservation->address, .asked = bytes, .gpu = found->allocation.gpu,
                           .kind = SEGMENT_VIRTUAL, .usage = found->properties.allocFlags.usage, .backing = found};
        result = segment_insert(segment) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
        if (result == CUDA_SUCCESS) found->mappings++;
    }
    pthread_mutex_unlock(&sim.mutex);
    return result;
}

API(cuMemUnmap, "cuMemUnmap", (CUdeviceptr address, size_t bytes), (address, bytes)) {
    uint64_t covered;
    streams_wait_all(NULL, 0); /* what may still use it */
    pthread_mutex_lock(&sim.mutex);
    int whole = bytes && mappings_in(address, bytes, &covered) > 0 && covered == bytes;
    for (size_t i = sim.segments; whole && i-- > 0;) {
        const Segment *segment = &sim.segment[i];
        if (segment->kind != SEGMENT_VIRTUAL || segment->address < address || segment->address >= address + bytes)
            continue;
        Physical *backing = segment->backing;
        segment_drop(i);
        backing->mappings--;
        let_go(backing);
    }
    pthread_mutex_unlock(&sim.mutex);
    return whole ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API(cuMemSetAccess, "cuMemSetAccess", (CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count),
    (address, bytes, access, count)) {
    uint64_t covered;
    if (!access || !count || !bytes) return CUDA_ERROR_INVALID_VALUE;
    for (size_t k = 0; k < count; k++) {
        int flags = access[k].flags;
        if (access[k].location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
        if (access[k].location.id < 0 || access[k].location.id >= sim.gpus) return CUDA_ERROR_INVALID_DEVICE;
        if (flags != ACCESS_NONE && flags != ACCESS_READ && flags != ACCESS_READ_WRITE) return CUDA_ERROR_INVALID_VALUE;
    }
    pthread_mutex_lock(&sim.mutex);
    int whole = mappings_in(address, bytes, &covered) > 0 && covered == bytes;
    for (size_t i = 0; whole && i < sim.segments; i++) {
        Segment *segment = &sim.segment[i];
        if (segment->kind != SEGMENT_VIRTUAL || segment->address < address || segment->address >= address + bytes)
            continue;
        for (size_t k = 0; k < count; k++) {
            unsigned int bit = 1u << access[k].location.id;
            segment->access = access[k].flags == ACCESS_NONE ? segment->access & ~bit : segment->access | bit;
        }
    }
    pthread_mutex_unlock(&sim.mutex);
    return whole ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API(cuMemGetAccess, "cuMemGetAccess", (unsigned long long *out, const CUmemLocation *location, CUdeviceptr address),
    (out, location, address)) {
    if (!out || !location || location->type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
    if (location->id < 0 || location->id >= sim.gpus) return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&sim.mutex);
    const Segment *segment = segment_at(address);
    int known = segment && segment->kind == SEGMENT_VIRTUAL;
    if (known) *out = segment->access >> location->id & 1 ? ACCESS_READ_WRITE : ACCESS_NONE;
    pthread_mutex_unlock(&sim.mutex);
    return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
