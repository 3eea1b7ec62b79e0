/* One process's side of the simulated driver. `sim.mutex` guards every list here; work runs without it. */
#ifndef SIMCUDA_SIM_H
#define SIMCUDA_SIM_H

#include "kernels.h"
#include "library.h"
#include "world.h"

typedef struct Context {
    struct Context *next;
    int ordinal;
    int alive;
    int primary;
    int references; /* of a primary context */
    unsigned int flags;
    CUresult error; /* not 0: every call in it answers this */
    uint64_t block;      /* address of the memory that a context itself takes */
    CUstream legacy, per_thread;
} Context;

typedef struct {
    uint64_t address, bytes, offset;
    uint64_t group; /* address of the first byte that may be reached from this one: a mapping has many segments */
    uint64_t asked; /* bytes that the caller asked for */
    int gpu;
    int kind;
    Context *context; /* NULL for a mapping of another process's memory, and for SEGMENT_VIRTUAL */
    unsigned int usage;    /* USAGE_HW_DECOMPRESS, of SEGMENT_VIRTUAL and SEGMENT_POOL */
    unsigned int access;   /* SEGMENT_VIRTUAL: bit i: device i may */
    struct Physical *backing; /* SEGMENT_VIRTUAL */
    int leaving;           /* SEGMENT_POOL: its cuMemFreeAsync is enqueued */
} Segment;
enum {
    SEGMENT_MEMORY = 0, /* cuMemAlloc */
    SEGMENT_CONTEXT,
    SEGMENT_MAPPED,     /* another process's */
    SEGMENT_VIRTUAL,    /* cuMemMap */
    SEGMENT_POOL        /* cuMemAllocAsync */
};
#define USAGE_HW_DECOMPRESS 2u

typedef struct HostRange {
    struct HostRange *next;
    uint64_t address, bytes;
    unsigned int flags;
    int owned; /* by cuMemHostAlloc */
    int managed;
    Context *context;
} HostRange;

typedef struct Event {
    struct Event *next;
    Context *context;
    unsigned int flags;
    int references;
    uint64_t recorded, done; /* generations */
    uint64_t time;           /* ns, of the last one done */
    CUresult error;
} Event;

enum {
    WORK_COPY = 1, WORK_SET, WORK_RECORD, WORK_WAIT_EVENT, WORK_WAIT_STREAM, WORK_HOST, WORK_CALLBACK, WORK_KERNEL,
    WORK_LIBRARY, WORK_FREE, WORK_DECOMPRESS
};

typedef struct Work {
    struct Work *next;
    int kind;
    uint64_t destination, source, bytes; /* COPY, SET (count of elements) */
    uint32_t value;                      /* SET */
    int width;                           /* SET: bytes an element */
    Event *event;
    uint64_t generation;
    struct Stream *other;
    CUhostFn function;
    CUstreamCallback callback;
    void *user_data;
    const struct Kernel *kernel;
    const struct Launch *launch;         /* KERNEL; lies in memory */
    LibraryRun run;                      /* LIBRARY; what it gets lies in memory */
    void *memory;                        /* freed when the work is done */
    int fault, scope, fault_error; /* of a fault that the call met, -1 for none */
    CUresult *answer;       /* where a synchronous call wants the result */
} Work;

typedef struct Stream {
    struct Stream *next;
    Context *context;
    unsigned int flags;
    int priority;
    int default_stream;
    int capturing;
    int references; /* the list's, the worker's, those of WORK_WAIT_STREAM */
    int destroyed;
    int started;
    uint64_t submitted, completed;
    CUresult error;
    Work *head, **tail;
    pthread_cond_t arrived;
} Stream;

typedef struct {
    pthread_mutex_t mutex;
    pthread_cond_t progress; /* work done, a gate opened, a thread ended */
    World *world;
    Process *process;
    int pid;
    _Atomic int initialized;
    _Atomic int stopping;
    int threads;
    int gpus;
    unsigned char *memory[MAX_GPUS]; /* of physical GPUs */
    uint64_t arena, arena_next;      /* device addresses: nothing that the CPU can reach */
    Context primary[MAX_GPUS];
    Context *contexts; /* cuCtxCreate's */
    Stream *streams;
    Event *events;
    Segment *segment;
    size_t segments, segment_room;
    HostRange *host;
    struct Module *modules;
    struct Operation *operations;
    int gate_closed, in_flight;
    int restore_thread_ended;
    pthread_t restore_thread;
    uint64_t next_id;
    struct Physical *physical;   /* virtual.c: cuMemCreate's */
    struct Reservation *reserved;
    struct Pool *pools;
} Sim;

extern Sim sim;
extern _Thread_local int sim_worker_thread; /* runs host functions: no API calls */
extern _Thread_local int sim_worker_ordinal; /* device of the work that this thread runs */

#define ARENA_BYTES (1ull << 42)
#define WAIT_NS 20000000ull /* how long a wait on another process goes without a look at whether it lives */

/* process.c */
CUresult process_attach(void);        /* the world alone */
CUresult process_init(void);
void process_wait(void);              /* sim.progress, under sim.mutex, at most WAIT_NS */
void *restore_thread_main(void *unused);
int physical(int ordinal);

/* call.c: every API call runs between these */
typedef struct {
    const char *name;
    int fault, scope;
    CUresult fault_error;
} Call;
extern _Thread_local Call *current_call;
CUresult call_begin(Call *call, const char *name);
CUresult call_end(Call *call, CUresult result);
#define API(name, base, parameters, arguments)                \
    static CUresult do_##name parameters;                     \
    EXPORT CUresult name parameters {                         \
        Call call;                                            \
        CUresult result = call_begin(&call, base);            \
        if (result == CUDA_SUCCESS) result = call_end(&call, do_##name arguments); \
        return result;                                        \
    }                                                         \
    static CUresult do_##name parameters

/* context.c */
Context *context_current(void);
CUresult context_needed(Context **context); /* INVALID_CONTEXT, CONTEXT_IS_DESTROYED */
Context *context_primary_of(int gpu);       /* of a physical GPU, retained by this process; NULL */
int context_live(const Context *context);
void context_destroy(Context *context);
void context_forget_thread(void);
CUresult context_create(Context *context, int ordinal);
void context_fill(const Context *context);
void context_check(Context *context);

/* memory.c. Under sim.mutex: */
Segment *segment_insert(Segment segment); /* NULL: no memory */
Segment *segment_at(uint64_t address);
void segment_drop(size_t i);
uint64_t arena_take(uint64_t bytes, uint64_t alignment); /* addresses; 0: none are left */
CUresult physical_take(int gpu, uint64_t bytes, int kind, Allocation *out);
void physical_give(const Allocation *allocation);
/* Not under it: */
CUresult memory_allocate(Context *context, uint64_t bytes, int kind, uint64_t *address);
void memory_free(uint64_t address);
void memory_free_context(Context *context);
CUresult memory_map(const Allocation *allocations, uint32_t count, int gpu, uint64_t *address, uint64_t *bytes);
void memory_unmap(uint64_t group);
int memory_is_device(uint64_t address);
/* Pointer to the bytes behind a device address and how many lie in one piece; NULL outside of an allocation. */
unsigned char *memory_bytes(uint64_t address, uint64_t wanted, uint64_t *run, int *gpu);
int memory_covers(uint64_t address, uint64_t bytes);
/* What a kernel of a device reaches of device memory: within what was asked for. */
unsigned char *memory_reach(uint64_t address, uint64_t wanted, uint64_t *run, int ordinal);
int memory_capable(uint64_t address); /* of the decompression engine */
HostRange *host_find(uint64_t address, uint64_t bytes);
void memory_reset(void);

/* virtual.c, pool.c */
void virtual_moved(const Allocation *before, const Allocation *after); /* under sim.mutex */
void virtual_reset(void);
void pools_reset(void);

/* stream.c */
CUresult stream_resolve(CUstream handle, Stream **stream);
int stream_live(const Stream *stream);
Stream *stream_make(Context *context, unsigned int flags);
void stream_destroy(Stream *stream);
void stream_release(Stream *stream);
CUresult stream_submit(Stream *stream, Work work, int wait);
CUresult stream_wait(Stream *stream); /* for all that was submitted before */
CUresult streams_wait_all(const Context *context, uint64_t deadline); /* NULL: of all contexts */

/* work.c */
CUresult work_run(Stream *stream, Work *work);
CUresult link_pass(int gpu, int direction, uint64_t bytes);

/* decompress.c */
CUresult decompress_run(const void *batch);

/* device.c */
void device_engine(int gpu, int *mask, int *longest); /* of a physical GPU: what its decompression engine can do */

/* event.c */
void event_release(Event *event);
void events_destroy(const Context *context);

/* module.c */
void modules_destroy(const Context *context);

/* custom_storage.c */
CUresult custom_open(Process *target, int end_state, CUcheckpointCustomStorageInfo **out);
CUresult custom_contexts(Process *target, const int32_t *new_gpu);
void operations_forget(void);

/* checkpoint.c */
CUresult turn_take(Process *target, int pid);
void turn_give(Process *target);
CUresult command_run(Process *target, int pid, const Command *request);


#endif
