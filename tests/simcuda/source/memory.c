/* Device memory: allocations, mappings of another process's allocations, registered host memory.
 *
 * A device address lies in an arena that the CPU can't touch, as on a real GPU; the bytes lie in the GPU's
 * file. Addresses only go up, so a stale one is never valid again. */
#define _GNU_SOURCE
#include "sim.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

/* The functions of this part run under sim.mutex. */

Segment *segment_insert(Segment segment) {
    if (sim.segments == sim.segment_room) {
        size_t room = sim.segment_room ? sim.segment_room * 2 : 64;
        Segment *more = realloc(sim.segment, room * sizeof *more);
        if (!more) return NULL;
        sim.segment = more;
        sim.segment_room = room;
    }
    size_t i = sim.segments++;
    for (; i && sim.segment[i - 1].address > segment.address; i--) sim.segment[i] = sim.segment[i - 1];
    sim.segment[i] = segment;
    return &sim.segment[i];
}

Segment *segment_at(uint64_t address) {
    size_t low = 0, high = sim.segments;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (sim.segment[middle].address + sim.segment[middle].bytes <= address) low = middle + 1;
        else high = middle;
    }
    return low < sim.segments && sim.segment[low].address <= address ? &sim.segment[low] : NULL;
}

void segment_drop(size_t i) {
    memmove(&sim.segment[i], &sim.segment[i + 1], (sim.segments - i - 1) * sizeof *sim.segment);
    sim.segments--;
}

uint64_t arena_take(uint64_t bytes, uint64_t alignment) {
    uint64_t at = round_up(sim.arena_next, alignment);
    if (at + bytes > sim.arena + ARENA_BYTES) return 0;
    sim.arena_next = round_up(at + bytes + PAGE_BYTES, PIECE_BYTES); /* a gap: no overrun goes unseen */
    return at;
}

CUresult physical_take(int index, uint64_t bytes, int kind, Allocation *out) {
    Gpu *gpu = &sim.world->gpu[index];
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    world_lock(sim.world);
    world_reap(sim.world);
    Process *process = sim.process;
    if (process->allocations < MAX_ALLOCATIONS && world_used(sim.world, index) + bytes <= gpu->memory &&
        gpu->next_offset + bytes <= GPU_SPAN) {
        uint64_t at = arena_take(bytes, PIECE_BYTES);
        if (at) {
            *out = (Allocation){at, bytes, gpu->next_offset, index, kind};
            process->allocation[process->allocations++] = *out;
            gpu->next_offset += bytes;
            result = CUDA_SUCCESS;
        }
    }
    world_unlock(sim.world);
    return result;
}

void physical_give(const Allocation *allocation) {
    world_lock(sim.world);
    Process *process = sim.process;
    for (uint32_t k = 0; k < process->allocations; k++) {
        if (process->allocation[k].address != allocation->address) continue;
        process->allocations--;
        memmove(&process->allocation[k], &process->allocation[k + 1],
                (process->allocations - k) * sizeof process->allocation[0]);
        break;
    }
    world_unlock(sim.world);
    madvise(sim.memory[allocation->gpu] + allocation->offset, allocation->bytes, MADV_REMOVE);
}

static void free_segment(size_t i) {
    Segment segment = sim.segment[i];
    segment_drop(i);
    if (segment.kind == SEGMENT_MAPPED || segment.kind == SEGMENT_VIRTUAL) return;
    physical_give(&(Allocation){segment.address, segment.bytes, segment.offset, segment.gpu, 0});
}

/* Until here. */

CUresult memory_allocate(Context *context, uint64_t asked, int kind, uint64_t *address) {
    if (!asked) return CUDA_ERROR_INVALID_VALUE;
    if (asked >= GPU_SPAN) return CUDA_ERROR_OUT_OF_MEMORY;
    Allocation taken;
    pthread_mutex_lock(&sim.mutex);
    CUresult result = physical_take(physical(context->ordinal), round_up(asked, PAGE_BYTES),
                                    kind == SEGMENT_CONTEXT ? ALLOCATION_CONTEXT : ALLOCATION_MEMORY, &taken);
    if (result == CUDA_SUCCESS) {
        Segment segment = {.address = taken.address, .bytes = taken.bytes, .offset = taken.offset,
                           .group = taken.address, .asked = asked, .gpu = taken.gpu, .kind = kind, .context = context};
        if (segment_insert(segment)) {
            *address = taken.address;
        } else {
            physical_give(&taken);
            result = CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    pthread_mutex_unlock(&sim.mutex);
    return result;
}

void memory_free(uint64_t address) {
    pthread_mutex_lock(&sim.mutex);
    Segment *segment = segment_at(address);
    if (segment && segment->address == address) free_segment((size_t)(segment - sim.segment));
    pthread_mutex_unlock(&sim.mutex);
}

void memory_free_context(Context *context) {
    pthread_mutex_lock(&sim.mutex);
    for (size_t i = sim.segments; i-- > 0;)
        if (sim.segment[i].context == context) free_segment(i);
    for (HostRange **at = &sim.host; *at;) {
        HostRange *range = *at;
        if (range->context != context) {
            at = &range->next;
            continue;
        }
        *at = range->next;
        if (range->owned) munmap((void *)range->address, range->bytes);
        free(range);
    }
    pthread_mutex_unlock(&sim.mutex);
}

CUresult memory_map(const Allocation *allocations, uint32_t count, int gpu, uint64_t *address, uint64_t *bytes) {
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&sim.mutex);
    uint64_t group = sim.arena_next, at = group;
    for (uint32_t i = 0; i < count && result == CUDA_SUCCESS; i++) {
        const Allocation *allocation = &allocations[i];
        if (allocation->gpu != gpu) continue;
        Segment segment = {.address = at, .bytes = allocation->bytes, .offset = allocation->offset, .group = group,
                           .asked = allocation->bytes, .gpu = gpu, .kind = SEGMENT_MAPPED};
        if (at + allocation->bytes > sim.arena + ARENA_BYTES || !segment_insert(segment)) {
            result = CUDA_ERROR_OUT_OF_MEMORY;
            break;
        }
        at += allocation->bytes;
    }
    sim.arena_next = round_up(at + PAGE_BYTES, PIECE_BYTES);
    pthread_mutex_unlock(&sim.mutex);
    *address = group;
    *bytes = at - group;
    if (result != CUDA_SUCCESS) memory_unmap(group);
    return result;
}

void memory_unmap(uint64_t group) {
    pthread_mutex_lock(&sim.mutex);
    for (size_t i = sim.segments; i-- > 0;)
        if (sim.segment[i].kind == SEGMENT_MAPPED && sim.segment[i].group == group) segment_drop(i);
    pthread_mutex_unlock(&sim.mutex);
}

void memory_reset(void) {
    free(sim.segment);
    virtual_reset();
    pools_reset();
    for (HostRange *range = sim.host, *next; range; range = next) {
        next = range->next;
        if (range->owned) munmap((void *)range->address, range->bytes);
        free(range);
    }
}

int memory_is_device(uint64_t address) { return address >= sim.arena && address < sim.arena + ARENA_BYTES; }

unsigned char *memory_bytes(uint64_t address, uint64_t wanted, uint64_t *run, int *gpu) {
    pthread_mutex_lock(&sim.mutex);
    Segment *segment = segment_at(address);
    unsigned char *bytes = NULL;
    if (segment) {
        uint64_t skip = address - segment->address;
        *run = segment->bytes - skip < wanted ? segment->bytes - skip : wanted;
        *gpu = segment->gpu;
        bytes = sim.memory[segment->gpu] + segment->offset + skip;
    }
    pthread_mutex_unlock(&sim.mutex);
    return bytes;
}

/* Mapped memory is that of the devices that were given access; all other is its own GPU's. */
static int segment_reached(const Segment *segment, int ordinal) {
    return segment->kind == SEGMENT_VIRTUAL ? segment->access >> ordinal & 1 : segment->gpu == physical(ordinal);
}

unsigned char *memory_reach(uint64_t address, uint64_t wanted, uint64_t *run, int ordinal) {
    unsigned char *bytes = NULL;
    pthread_mutex_lock(&sim.mutex);
    const Segment *segment = segment_at(address);
    if (segment && segment_reached(segment, ordinal) && address - segment->address < segment->asked) {
        uint64_t skip = address - segment->address, left = segment->asked - skip;
        const Segment *after = left < wanted ? segment_at(segment->address + segment->bytes) : NULL;
        if (left >= wanted || (after && after->group == segment->group)) {
            *run = left < wanted ? left : wanted;
            bytes = sim.memory[segment->gpu] + segment->offset + skip;
        }
    }
    pthread_mutex_unlock(&sim.mutex);
    return bytes;
}

int memory_covers(uint64_t address, uint64_t bytes) {
    pthread_mutex_lock(&sim.mutex);
    const Segment *segment = segment_at(address);
    uint64_t end = address + bytes, group = segment ? segment->group : 0;
    while (segment && segment->address + segment->bytes < end) {
        if (segment->kind == SEGMENT_VIRTUAL && !segment->access) segment = NULL;
        if (segment) segment = segment_at(segment->address + segment->bytes);
        if (segment && segment->group != group) segment = NULL;
    }
    if (segment && segment->kind == SEGMENT_VIRTUAL && !segment->access) segment = NULL;
    pthread_mutex_unlock(&sim.mutex);
    return segment != NULL;
}

/* Under sim.mutex. */
HostRange *host_find(uint64_t address, uint64_t bytes) {
    for (HostRange *range = sim.host; range; range = range->next)
        if (address >= range->address && address + bytes <= range->address + range->bytes) return range;
    return NULL;
}

API(cuMemGetInfo_v2, "cuMemGetInfo", (size_t * available, size_t *total), (available, total)) {
    Context *context;
    CUresult result = context_needed(&context);
    if (result != CUDA_SUCCESS) return result;
    if (!available || !total) return CUDA_ERROR_INVALID_VALUE;
    int gpu = physical(context->ordinal);
    world_lock(sim.world);
    world_reap(sim.world);
    uint64_t used = world_used(sim.world, gpu);
    world_unlock(sim.world);
    *total = sim.world->gpu[gpu].memory;
    *available = used < *total ? *total - used : 0;
    return CUDA_SUCCESS;
}

API(cuMemAlloc_v2, "cuMemAlloc", (CUdeviceptr * out, size_t bytes), (out, bytes)) {
    Context *context;
    CUresult result = context_needed(&context);
    if (result != CUDA_SUCCESS) return result;
    uint64_t address;
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    result = memory_allocate(context, bytes, SEGMENT_MEMORY, &address);
    if (result == CUDA_SUCCESS) *out = address;
    return result;
}

API(cuMemFree_v2, "cuMemFree", (CUdeviceptr address), (address)) {
    Context *context;
    CUresult result = context_needed(&context);
    if (result != CUDA_SUCCESS || !address) return result;
    streams_wait_all(context, 0); /* cuMemFree waits for what may still use it */
    result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sim.mutex);
    Segment *segment = segment_at(address);
    HostRange *range = host_find(address, 1);
    int owned = segment && (segment->kind == SEGMENT_MEMORY || segment->kind == SEGMENT_POOL);
    if (owned && segment->address == address && !segment->leaving) {
        free_segment((size_t)(segment - sim.segment));
        result = CUDA_SUCCESS;
    } else if (range && range->managed && range->address == address) {
        HostRange **at = &sim.host;
        while (*at != range) at = &(*at)->next;
        *at = range->next;
        munmap((void *)range->address, range->bytes);
        free(range);
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&sim.mutex);
    return result;
}

/* Under sim.mutex: what was allocated, or mapped, at once. */
static void range_of(const Segment *segment, uint64_t *base, uint64_t *bytes) {
    *base = segment->kind == SEGMENT_VIRTUAL ? segment->address : segment->group;
    *bytes = segment->kind == SEGMENT_VIRTUAL ? segment->asked : 0;
    for (size_t i = 0; segment->kind != SEGMENT_VIRTUAL && i < sim.segments; i++)
        if (sim.segment[i].group == *base) *bytes += sim.segment[i].asked;
}

API(cuMemGetAddressRange_v2, "cuMemGetAddressRange", (CUdeviceptr * base, size_t *bytes, CUdeviceptr address),
    (base, bytes, address)) {
    pthread_mutex_lock(&sim.mutex);
    const Segment *segment = segment_at(address);
    if (segment) {
        uint64_t start, total;
        range_of(segment, &start, &total);
        if (base) *base = start;
        if (bytes) *bytes = total;
    }
    pthread_mutex_unlock(&sim.mutex);
    return segment ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

static int ordinal_of(int gpu) {
    for (int i = 0; i < sim.gpus; i++)
        if (physical(i) == gpu) return i;
    return -1;
}

/* cuMemAlloc's memory can be the decompression engine's, other memory where it was made for it. */
static int segment_capable(const Segment *segment) {
    return segment->kind == SEGMENT_MEMORY || (segment->usage & USAGE_HW_DECOMPRESS);
}

int memory_capable(uint64_t address) {
    pthread_mutex_lock(&sim.mutex);
    const Segment *segment = segment_at(address);
    int capable = segment && segment_capable(segment);
    pthread_mutex_unlock(&sim.mutex);
    return capable;
}

static CUresult pointer_attribute(void *out, int attribute, CUdeviceptr address) {
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&sim.mutex);
    const Segment *segment = segment_at(address);
    const HostRange *range = host_find(address, 1);
    Context *context = segment ? segment->context : range ? range->context : NULL;
    if (segment && !context) context = context_primary_of(segment->gpu);
    uint64_t base = range ? range->address : 0, bytes = range ? range->bytes : 0;
    if (segment) range_of(segment, &base, &bytes);
    if (!segment && !range) {
        result = CUDA_ERROR_INVALID_VALUE; /* memory that the driver doesn't know */
    } else {
        switch (attribute) {
        case 1: *(CUcontext *)out = context; break;
        case 2: *(unsigned int *)out = segment ? 2 : 1; break;
        case 3: *(CUdeviceptr *)out = address; break;
        case 4:
            if (segment) result = CUDA_ERROR_INVALID_VALUE;
            else *(CUdeviceptr *)out = address;
            break;
        case 6: *(int *)out = 0; break;
        case 7: *(unsigned long long *)out = base; break;
        case 8: *(int *)out = range && range->managed; break;
        case 9: *(int *)out = segment ? ordinal_of(segment->gpu) : context ? context->ordinal : -1; break;
        case 11: *(CUdeviceptr *)out = base; break;
        case 12: *(size_t *)out = bytes; break;
        case 13: *(int *)out = 1; break;
        case 18: *(size_t *)out = bytes; break;
        case 19: *(CUdeviceptr *)out = base; break;
        case 21: *(int *)out = segment && segment_capable(segment); break;
        default: result = CUDA_ERROR_NOT_SUPPORTED;
        }
    }
    pthread_mutex_unlock(&sim.mutex);
    return result;
}

API(cuPointerGetAttribute, "cuPointerGetAttribute", (void *out, int attribute, CUdeviceptr address),
    (out, attribute, address)) {
    return out ? pointer_attribute(out, attribute, address) : CUDA_ERROR_INVALID_VALUE;
}

API(cuPointerGetAttributes, "cuPointerGetAttributes",
    (unsigned int count, int *attributes, void **out, CUdeviceptr address), (count, attributes, out, address)) {
    if (!attributes || !out) return CUDA_ERROR_INVALID_VALUE;
    for (unsigned int i = 0; i < count; i++) {
        CUresult result = pointer_attribute(out[i], attributes[i], address);
        if (result == CUDA_SUCCESS) continue;
        if (result != CUDA_ERROR_INVALID_VALUE) return result;
        /* Unknown memory: each answer is its type's zero. */
        int wide = attributes[i] == 1 || attributes[i] == 3 || attributes[i] == 4 || attributes[i] == 7 ||
                   attributes[i] == 11 || attributes[i] == 12 || attributes[i] == 18 || attributes[i] == 19;
        memset(out[i], 0, wide ? 8 : 4);
        if (attributes[i] == 9) *(int *)out[i] = -2;
    }
    return CUDA_SUCCESS;
}
