/* What the processes of one simulated machine share: one file, mapped by all of them.
 *
 * SIMCUDA_DIR names a folder with `world` (this struct) and `gpu-K` (a sparse file, the memory of GPU K). The
 * file's bytes are physical memory; offsets are handed out upwards and never used again, so that freed memory
 * (a hole) can't be mistaken for live memory. How much is in use is summed over the processes' tables, so that
 * a process killed at any point leaves no wrong count.
 */
#ifndef SIMCUDA_WORLD_H
#define SIMCUDA_WORLD_H

#include <pthread.h>
#include <stdatomic.h>

#include "abi.h"

#define WORLD_MAGIC 0x53494d43u /* "SIMC" */
#define MAX_GPUS 8
#define MAX_PROCESSES 64
#define MAX_ALLOCATIONS 4096
#define MAX_FAULTS 64
#define MAX_COUNTERS 512
#define MAX_ATTRIBUTES 16
#define MAX_NAME 64
#define GPU_SPAN (1ull << 40)      /* bytes of offsets a GPU can hand out */
#define PAGE_BYTES (64ull << 10)   /* an allocation's size is rounded up to this */
#define PIECE_BYTES (2ull << 20)   /* the driver's own copies are this long */
#define RATE_STALLED (-1)

enum { DEVICE_TO_HOST = 0, HOST_TO_DEVICE = 1 };

typedef struct {
    char name[MAX_NAME];
    char chip[MAX_NAME]; /* restore wants the same */
    unsigned char uuid[16];
    int32_t pci_domain, pci_bus, pci_device;
    int32_t mig;
    uint64_t memory;
    uint64_t next_offset;
    _Atomic int64_t rate[2];      /* bytes a second; 0: unlimited; RATE_STALLED: nothing moves */
    uint64_t busy_until[2];       /* ns, CLOCK_MONOTONIC */
    _Atomic uint64_t moved[2];    /* bytes that crossed the link */
    int32_t attribute[MAX_ATTRIBUTES][2]; /* id, value; id 0 ends */
} Gpu;

enum { ALLOCATION_MEMORY = 0, ALLOCATION_CONTEXT = 1 };

typedef struct {
    uint64_t address; /* in its process */
    uint64_t bytes;   /* rounded up */
    uint64_t offset;
    int32_t gpu;
    int32_t kind;
} Allocation;

enum { COMMAND_LOCK = 1, COMMAND_UNLOCK, COMMAND_CHECKPOINT, COMMAND_RESTORE, COMMAND_PREPARE, COMMAND_FINISH };

typedef struct {
    _Atomic uint32_t posted; /* futex; a command runs while it differs from done */
    _Atomic uint32_t done;   /* futex */
    int32_t kind;
    int32_t fault; /* index of a fault to act on in the middle, or -1 */
    int32_t caller;
    int32_t next_state;          /* PREPARE, FINISH */
    int32_t new_gpu[MAX_GPUS];   /* RESTORE, PREPARE: physical GPU -> where it goes */
    uint64_t deadline;           /* LOCK: ns, 0 for none */
    int32_t result;
} Command;

enum { FLAG_UVM = 1, FLAG_IPC = 2 };
enum { KIND_NONE = 0, KIND_HOST = 1, KIND_CUSTOM = 2 };

typedef struct {
    int32_t pid; /* 0: free */
    int32_t restore_thread;
    uint64_t start_time; /* tells a reused pid */
    _Atomic int32_t state;
    _Atomic uint32_t flags;
    char name[16];
    int32_t gpus;
    int32_t gpu_of[MAX_GPUS]; /* ordinal -> physical GPU */
    int32_t resident;         /* the table's bytes occupy GPU memory */
    int32_t checkpoint_kind;
    uint64_t image_address, image_bytes;
    int32_t operation_pid; /* holds a custom-storage operation on this process */
    uint64_t operation_start_time;
    pthread_mutex_t command_mutex;
    Command command;
    uint32_t allocations;
    Allocation allocation[MAX_ALLOCATIONS];
} Process;

enum { POINT_BEFORE = 0, POINT_MIDDLE = 1, POINT_AFTER = 2 };
enum { SCOPE_CALL = 0, SCOPE_STREAM = 1, SCOPE_CONTEXT = 2, SCOPE_CHUNK = 3 };

typedef struct {
    int32_t armed;
    char call[MAX_NAME];
    int32_t pid;    /* the caller, 0 for any */
    int32_t target; /* of a checkpoint call, 0 for any */
    int32_t nth, times;
    int32_t point;
    int32_t scope; /* not SCOPE_CALL: the work that the call enqueues fails */
    int32_t error;
    int32_t state; /* left behind in the target, -1 for none */
    int32_t kill_caller, kill_target;
    uint32_t delay_ms;
    uint32_t hold;
    _Atomic uint32_t released; /* futex */
    _Atomic uint32_t fired;
} Fault;

typedef struct {
    char call[MAX_NAME];
    _Atomic uint64_t count;
} Counter;

typedef struct {
    uint32_t magic;
    uint32_t bytes; /* sizeof(World): library and control must agree */
    pthread_mutex_t mutex;
    _Atomic uint32_t link_epoch; /* futex; grows when a rate is set */
    int32_t driver_version, custom_storage, persistence;
    int32_t refuse_at_lock; /* targets with UVM, IPC or MIG: at lock instead of at checkpoint */
    int32_t gpus;
    uint64_t context_bytes; /* what a context costs on its GPU */
    uint64_t image_address; /* where the driver puts the host image, 0: where the kernel likes */
    uint32_t next_process;
    char directory[256];
    _Atomic uint32_t faults; /* armed ones */
    Gpu gpu[MAX_GPUS];
    Process process[MAX_PROCESSES];
    Fault fault[MAX_FAULTS];
    Counter counter[MAX_COUNTERS];
} World;

/* world.c */
World *world_open(const char *directory); /* NULL with errno */
void world_close(World *world);
void world_lock(World *world);
void world_unlock(World *world);
void robust_lock(pthread_mutex_t *mutex);
void robust_init(pthread_mutex_t *mutex);
uint64_t monotonic_ns(void);
void futex_wait(_Atomic uint32_t *word, uint32_t value, uint64_t timeout_ns); /* of any process; may return early */
void futex_wake(_Atomic uint32_t *word);
int process_id(void); /* of the caller, as the world knows it */
uint64_t process_start_time(int pid); /* 0: no such process, or a dead one */
void world_reap(World *world);       /* under the lock: frees what dead processes held */
uint64_t world_used(World *world, int gpu); /* under the lock */
Process *world_find(World *world, int pid); /* under the lock; NULL */
void world_punch(World *world, const Process *process); /* gives the memory of its allocations back */

/* faults.c */
int fault_take(World *world, const char *call, int caller, int target, Fault *copy); /* index or -1 */
CUresult fault_act(World *world, int index, int caller, int target);
void count_call(World *world, const char *call);

#endif
