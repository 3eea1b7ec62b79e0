/* The contract between the capture library, inside a launched process, and whoever saves or restores that process.
 *
 * A process that was started by `ckptpipe launch` and uses CUDA has two memfds: the *pool*, which holds the driver's
 * host image while the process is checkpointed, and the *control page*, this struct followed by the piece table and the
 * block table.
 * Both are handed over by handover.h. Read README.md beside this file first.
 *
 * Who writes what: the library writes every field but those that are marked (controller). All fields are naturally
 * aligned; those marked _Atomic are read and written with acquire and release. Sizes and offsets are bytes.
 */
#ifndef CKPT_CONTROL_H
#define CKPT_CONTROL_H

#include <stdint.h>

#define CKPT_CONTROL_MAGIC 0x4c525443544b4343ull /* "CCKTCTRL" */
#define CKPT_CONTROL_VERSION 4u /* another version has another layout: refuse it */

#define CKPT_PIECE_BYTES (2ull << 20) /* of the pool; images start at multiples of it */
#define CKPT_IMAGES 8u                /* images at a time in one process */
#define CKPT_LATE 256u                /* late ranges remembered; the piece table has them all */
#define CKPT_PIECES (1u << 21)        /* entries of the piece table: pools of up to 4 TiB */
#define CKPT_TEXT 192u
#define CKPT_PIECES_OFFSET (64ull << 10) /* of the piece table in the control memfd */
#define CKPT_BLOCK_BYTES (16ull << 10) /* that have a checksum */
#define CKPT_BLOCKS_OFFSET (CKPT_PIECES_OFFSET + CKPT_PIECES * 8ull) /* of the block table in the control memfd */
#define CKPT_BLOCKS (CKPT_PIECES * (CKPT_PIECE_BYTES / CKPT_BLOCK_BYTES))
#define CKPT_CONTROL_BYTES (CKPT_BLOCKS_OFFSET + CKPT_BLOCKS * 8ull) /* nearly all of it holes */

enum ckpt_hook { /* how the driver's calls reach the library */
    CKPT_HOOK_NONE = 0,
    CKPT_HOOK_RELOCATIONS = 1, /* libcuda's own relocation entries were redirected */
    CKPT_HOOK_SYMBOLS = 2,     /* symbols that take libc's place for every library */
};

enum ckpt_pool_state {
    CKPT_POOL_ABSENT = 0,
    CKPT_POOL_WARMING = 1, /* usable; pages are still being made */
    CKPT_POOL_READY = 2,
    CKPT_POOL_GONE = 3, /* could not be made, or was lost: `reason` */
};

enum ckpt_reason { /* why the driver's own way was taken, or there is no pool; `text` has the words */
    CKPT_REASON_NONE = 0,
    CKPT_REASON_NO_POOL = 1,      /* it was never made */
    CKPT_REASON_TOO_SMALL = 2,    /* the pool has no free range of that size */
    CKPT_REASON_BUDGET = 3,       /* the launch tree's budget is used up */
    CKPT_REASON_MEMORY = 4,       /* the machine or a cgroup has not enough memory left */
    CKPT_REASON_PLACE = 5,        /* the pool could not be mapped where the driver wants it */
    CKPT_REASON_SYSTEM = 6,       /* a system call failed */
    CKPT_REASON_NOT_EXPECTED = 7, /* looked like an image, but no checkpoint was plausible: not served on purpose */
    CKPT_REASON_HOOK = 8,         /* the driver's calls could not be redirected */
};

enum ckpt_phase { /* of an image */
    CKPT_PHASE_FREE = 0,
    CKPT_PHASE_WRITING = 1, /* mapped: the driver fills it, or the process is checkpointed */
    CKPT_PHASE_READING = 2, /* the driver has begun to read it: a restore */
};

enum ckpt_gate { /* of an image (controller) */
    CKPT_GATE_OPEN = 0,   /* the driver may read everything */
    CKPT_GATE_CLOSED = 1, /* it may read [0, ready) and waits for the rest */
    CKPT_GATE_FAILED = 2, /* the rest will never be good: a driver that wants it ends the process */
};

enum ckpt_image_flag {
    CKPT_IMAGE_SETTLED = 1,   /* ranges that were never written hold zeros */
    CKPT_IMAGE_UNTRACKED = 2, /* more gaps than could be remembered: `watermark` stands still, the piece table is right */
    CKPT_IMAGE_MOVED = 4,     /* mapped at an address that the driver asked for */
    CKPT_IMAGE_SUMMED = 8,    /* a controller had armed the process when it was mapped: the block table is kept */
};

enum ckpt_pages { CKPT_PAGES_AUTO = 0, CKPT_PAGES_SMALL = 1, CKPT_PAGES_THP = 2, CKPT_PAGES_HUGETLB = 3 };

/* One image of the driver: [offset, offset + bytes) of the pool. 256 bytes.
 *
 * Release order while the driver writes, for each of its copies:
 *   1. `started` of every piece that it touches goes up, and its blocks are claimed;
 *   2. if it begins below `high`, the range joins the late list (late[], late_count);
 *   3. the bytes are stored, each worker fences its non-temporal stores, and enters what they sum up to;
 *   4. `finished` of these pieces goes up, then `written`, `high` and `watermark` are released;
 *   5. `events` goes up, and watchers are woken.
 * So [0, watermark) was written completely. A reader of a piece notes `finished`, reads the bytes, and may keep them
 * if afterwards started == finished == the number noted. What it read before a late write is found the same way at
 * the end: pieces whose `finished` differs from the number noted are read again.
 *
 * A restore through a window, for an image that was evicted: `window` is set while the gate is closed, and the image's
 * byte x is then at offset + x % window of the pool, while it is in [base, ready). The driver reads in sequence, so
 * that the controller fills places again which it has left: `base` is raised first, then `consumed` is looked at, and
 * only when that is not below `base` is anything overwritten. A copy does the reverse: it lowers `consumed` to its own
 * start if need be, then looks at `base`, and last at `ready`. One that begins below `base` waits until the controller
 * has come back for it, which it does when all copies that are under way wait: `ready` goes back, then `base`.
 * The gate of such an image is never opened, and it needs no more of the pool than its window.
 *
 * A restore that takes over from one whose controller died, while the driver still waits or copies: `ready` goes to 0
 * before a byte is touched or `window` is set. A copy looks at both once more when it has its bytes, and takes them
 * again from the gate on where either is not what it was.
 *
 * Bytes that the driver never writes (beyond its last copy, say) are zeros after SETTLE (handover.h), or after the
 * driver's first read. Before, they may hold what an earlier image left.
 */
struct ckpt_image {
    _Atomic uint32_t phase;
    _Atomic uint32_t gate;  /* (controller) */
    _Atomic uint64_t ready; /* (controller) bytes from the image's start that the driver may read while the gate is closed */
    uint64_t generation;    /* of the control page, when this image was mapped: never the same for two images */
    uint64_t address;       /* in the process */
    uint64_t offset;        /* in the pool */
    uint64_t bytes;         /* as the driver asked */
    _Atomic uint64_t watermark;
    _Atomic uint64_t high;    /* end of the furthest write */
    _Atomic uint64_t written; /* bytes stored by the driver, rewrites too */
    _Atomic uint64_t read;
    _Atomic uint64_t copies; /* calls, both directions */
    _Atomic uint32_t flags;  /* enum ckpt_image_flag */
    _Atomic uint32_t late_count; /* of this image, those that the list has no room for too */
    _Atomic uint32_t gate_waits; /* copies that had to wait at the gate */
    uint32_t padding;
    uint64_t map_ns;             /* how long the driver's mmap took */
    uint64_t began_ns, ended_ns; /* CLOCK_MONOTONIC of the first and last byte written */
    uint64_t read_began_ns, read_ended_ns;
    _Atomic uint64_t window;   /* (controller) bytes, 0: the image lies in the pool from end to end */
    _Atomic uint64_t base;     /* (controller) with a window: bytes below it are not there any more */
    _Atomic uint64_t consumed; /* with a window: no copy that is under way needs bytes below it */
    _Atomic uint32_t readers;  /* with a window: copies out of it that are under way */
    _Atomic uint32_t waiting;  /* copies that wait at the gate now */
    uint64_t reserved[10];
};

struct ckpt_late {
    uint64_t generation; /* of the image */
    uint64_t start, bytes; /* in the image */
    uint64_t serial;       /* 1, 2, 3…: entry (serial - 1) % CKPT_LATE */
};

struct ckpt_control {
    uint64_t magic;
    uint32_t version;
    uint32_t header_bytes;  /* sizeof(struct ckpt_control) */
    uint64_t control_bytes; /* of this memfd */
    uint32_t piece_bytes;
    uint32_t images;

    int32_t pid;          /* in the process's own PID namespace */
    uint32_t hook;        /* enum ckpt_hook */
    uint64_t hooked;      /* how many entries of libcuda were redirected */
    uint64_t start_time;  /* field 22 of /proc/PID/stat */
    char library[CKPT_TEXT]; /* path of the libcuda that was found */

    _Atomic uint32_t pool_state;
    uint32_t pool_pages;            /* enum ckpt_pages: what was got */
    uint64_t pool_bytes;            /* of the memfd; it never changes */
    _Atomic uint64_t pool_warm;     /* from its start, pages are there */
    _Atomic uint64_t pool_huge;     /* of these, in huge pages */
    uint64_t page_bytes;            /* size of most pages: 4096, 65536, 2 MiB… */
    int32_t numa_node;              /* of the workers and the pool, -1 for none */
    uint32_t workers;               /* threads that copy, the driver's own included */
    char stores[16];                /* "avx512", "avx2", "sse2", "plain" */
    uint64_t budget_bytes, budget_used; /* of the launch tree, when the pool last asked */

    _Atomic uint64_t generation; /* images ever mapped */
    _Atomic uint32_t events;     /* futex: goes up with every change that a watcher may want to see */
    _Atomic uint32_t watchers;   /* (controller) how many wait on `events`; nobody is woken while it is 0 */
    _Atomic uint32_t gate_events; /* (controller) futex: raise it after every change of `ready` or `gate`, then wake */
    _Atomic uint32_t gate_waiters; /* copies that wait on `gate_events` */
    _Atomic uint32_t pool_holes;  /* (controller) set it before punching holes into the pool; cleared when refilled */
    _Atomic uint32_t gate_deadline_ms; /* (controller) a gate whose `ready` stands still so long ends the process */
    _Atomic uint32_t gate_orphan_ms;   /* (controller) the same, once the feeder's connection is closed */
    _Atomic uint32_t feeders;          /* connections that feed (handover.h) */
    _Atomic uint32_t armed;            /* connections that expect a checkpoint */
    uint32_t padding;

    _Atomic uint64_t served, returned; /* images that the pool took, and got back */
    _Atomic uint64_t fallbacks;        /* images that went the driver's way */
    uint64_t fallback_bytes;           /* of the last of them */
    uint32_t fallback_reason;          /* enum ckpt_reason */
    uint32_t pool_reason;              /* why there is no pool, or why its pages are not those asked for */
    char fallback_text[CKPT_TEXT];
    char pool_text[CKPT_TEXT];

    char failure[CKPT_TEXT]; /* (controller) why a gate failed; or (library) why the process was ended */
    _Atomic uint32_t ended;  /* the library ended the process: never unverified bytes */
    uint32_t padding2;

    _Atomic uint64_t late_serial;
    struct ckpt_late late[CKPT_LATE];

    struct ckpt_image image[CKPT_IMAGES];
};

/* The piece table, at CKPT_PIECES_OFFSET: entry i is [i * CKPT_PIECE_BYTES, …) of the pool. Both numbers are of the
 * image that has the piece now, and 0 when it is mapped. */
struct ckpt_piece {
    _Atomic uint32_t started, finished; /* writes */
};

_Static_assert(sizeof(struct ckpt_image) == 256, "layout");
_Static_assert(sizeof(struct ckpt_control) <= CKPT_PIECES_OFFSET, "layout");
_Static_assert(sizeof(struct ckpt_piece) == 8, "layout");

/* The block table, at CKPT_BLOCKS_OFFSET: the 64-bit entry i is [i * CKPT_BLOCK_BYTES, …) of the pool, for the image that
 * has the block now, if that is CKPT_IMAGE_SUMMED. The lower half is the CRC32C of the block's first bytes, as the driver
 * wrote them: so many as the length says. It is good where the length is the block's, or what the image has of it, and
 * the entry is neither claimed nor spoilt. Who takes it for the bytes in the pool notes `finished` before, like a
 * reader: a late write is found in the same way. */
#define CKPT_BLOCK_LENGTH_SHIFT 32
#define CKPT_BLOCK_LENGTH_MASK 0x7fffull
#define CKPT_BLOCK_CLAIMED (1ull << 48) /* a write is under way */
#define CKPT_BLOCK_SPOILT (1ull << 49)  /* written twice, or in a way that was not summed */
#define CKPT_BLOCK_DATA (1ull << 50)    /* not all of the bytes are zero */

#define CKPT_EXIT_STATUS 74 /* EX_IOERR: the status of a process that was ended at the gate */

#endif
