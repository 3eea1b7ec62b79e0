/* What the parts of a device codec share: its state, a lane's, and the launches. */
#ifndef CKPT_CODEC_LANE_H
#define CKPT_CODEC_LANE_H

#include "device_codec.h"

#include <pthread.h>

/* As in codec_device.cu. */
enum { CK_MANY_BLOCKS = 32, CK_PLANE_BLOCKS = 64, CK_SAMPLE_BLOCKS = 16, CK_CODEC_THREADS = 256 };
enum { CK_SAMPLE_LEAST = 4096 }; /* bytes of a chunk or plane that is worth a codec */
#define CK_PIECE_PART 65536u
typedef struct { uint64_t data, nbytes; } ck_range;
typedef struct { uint64_t data, nbytes, planes; } ck_sample;
typedef struct { uint64_t whole, nbytes, planes, plane[4]; } ck_split;
typedef struct { uint64_t from, to, nbytes; } ck_piece;

/* The driver's part that only a codec needs; found once a codec. */
typedef struct { /* CUmemDecompressParams */
    size_t source_bytes, room;
    cu_address actual;
    cu_address from, to;
    int algorithm;
    unsigned char padding[20];
} ck_engine_job;
_Static_assert(sizeof(ck_engine_job) == 64 && offsetof(ck_engine_job, algorithm) == 40, "CUmemDecompressParams");
enum { CU_POINTER_DECOMPRESS_CAPABLE = 21 };
enum { CU_ENGINE_DEFLATE = 1, CU_ENGINE_SNAPPY = 2, CU_ENGINE_LZ4 = 4 };

typedef struct ck_lane {
    ck_codec *codec;
    pthread_t thread;
    int started;
    cu_stream stream;
    cu_stream urgent; /* goes before the kernels of all lanes' streams: what the link waits for */
    cu_event mark, before, packed, copied[CK_BATCH];
    /* Tables: what kernels and nvCOMP read and write beside the data, at the same place in pinned host memory
       and on the device. `seen`: where kernels see the host's. Those below `kept` outlive ck_lane_begin. */
    unsigned char *host;
    cu_address device, seen;
    size_t table_room, table_used, table_kept;
    cu_address arena;
    size_t arena_room, arena_used;
    cu_address sums; /* what ckptpipe_crc_many keeps between blocks */
    ck_engine_job *engine_jobs;
    size_t engine_room;
    /* The first error of the batch. */
    int failure;
    int format;
    cu_result error;
    const char *call;
} ck_lane;

struct ck_codec {
    const ck_cuda *cuda;
    const ck_nvcomp *nvcomp;
    cu_context context;
    cu_stream borrowed;
    cu_module module;
    cu_function crc_many, sample, split, merge, copy_pieces, copy_table;
    cu_result (*batch_decompress)(ck_engine_job *, size_t, unsigned, size_t *, cu_stream);
    cu_result (*stream_urgent)(cu_stream *, unsigned, int);
    cu_result (*pointer_attribute)(void *, int, cu_address);
    cu_address scratch;
    uint64_t scratch_bytes, lane_bytes;
    uint32_t chunk_bytes;
    int engine_mask, engine_forced, engine_memory;
    uint32_t engine_longest;
    int eventfd;
    /* Copies of encoded chunks to the host, of all lanes, batch after batch, in turn: the start of one copy hides behind
       the end of another. */
    cu_stream link[CK_LINKS];
    int links;
    unsigned turn;
    pthread_mutex_t link_mutex;
    int together; /* chunks that are told of at once, at most */

    pthread_mutex_t mutex;
    pthread_cond_t work, more;
    ck_codec_job *first, *last;           /* not begun */
    ck_codec_job *done_first, *done_last;
    int waiting, running, alive;
    uint64_t batches;
    int lingering, enough; /* a lane waits a moment until so many jobs wait */
    int stop, ended;
    int lanes;
    ck_lane lane[CK_LANES];
};

static inline size_t ck_round(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

/* codec_lane.c: each says whether it succeeded; the first error is kept in the lane. */
int ck_lane_failed(ck_lane *lane, cu_result result, const char *call);
int ck_lane_refused(ck_lane *lane, nv_status status, int format, const char *call); /* by nvCOMP */
void ck_lane_begin(ck_lane *lane); /* the tables are empty, but for those that are kept */
void ck_lane_keep(ck_lane *lane);  /* those that there are, until the next batch */
/* A table of `bytes`: where the host writes or reads it; *device: where the device does. Its room was reckoned. */
void *ck_lane_table(ck_lane *lane, size_t bytes, cu_address *device);
cu_address ck_lane_take(ck_lane *lane, size_t bytes); /* of the arena, at a multiple of 256 */
/* Where a kernel writes to a table's host memory. */
static inline cu_address ck_lane_seen(const ck_lane *lane, const void *table) {
    return lane->seen + (cu_address)((const unsigned char *)table - lane->host);
}
/* By a kernel each: the copy engines are busy with data for long, and a table would wait behind it. */
int ck_lane_upload(ck_lane *lane); /* all tables that were made, but for those that are kept */
int ck_lane_download(ck_lane *lane, const void *table, size_t bytes);
int ck_lane_launch(ck_lane *lane, cu_function kernel, unsigned first, unsigned second, void **arguments);
int ck_lane_sums(ck_lane *lane, cu_address ranges, cu_address results, unsigned count);
int ck_lane_pieces(ck_lane *lane, cu_address pieces, size_t count, uint64_t longest);
int ck_lane_planes(ck_lane *lane, cu_function kernel, cu_address jobs, unsigned count);
int ck_lane_wait(ck_lane *lane); /* for all that was enqueued in its own stream */
void ck_lane_finish(ck_lane *lane, ck_codec_job *job);
void ck_lane_finish_all(ck_lane *lane, ck_codec_job **jobs, int count); /* told of at once; leaves NULLs */
/* Those that this lane does not hold beside its first `fits` wait again, before all others; leaves NULLs. */
void ck_lane_give_back(ck_lane *lane, ck_codec_job **jobs, int fits, int count);

/* What a lane can hold: bytes of tables for so many chunks and blocks. */
size_t ck_table_bytes(size_t chunks, size_t blocks);
#define CK_SUM_BYTES ((2 * CK_MANY_BLOCKS + 1) * 4 * CK_BATCH)
size_t ck_lane_tables(size_t lane_bytes);  /* what of a lane is tables */
size_t ck_lane_needed(size_t arena_bytes); /* the smallest lane with such an arena */

/* codec_plan.c */
int ck_plan_temp(const ck_codec *codec, const ck_plan *plan, size_t blocks, size_t *bytes); /* an nv_status */
void ck_plan_lay(ck_codec_job *job);                             /* the planes' lengths and blocks */
int ck_plan_samples(const ck_codec_job *job);                    /* whether a sample is needed */
void ck_plan_try(ck_codec_job *job, const uint32_t *counts);     /* which planes; counts NULL: all */
void ck_plan_settle(ck_codec_job *job);                          /* after their lengths are known */
size_t ck_plan_room(const ck_plan *plan, const ck_codec_job *job, size_t *blocks); /* of the arena, less temporary */

/* codec_setup.c */
void ck_codec_release(ck_codec *codec); /* in a thread where the context is current */
/* codec_lane.c */
void *ck_lane_run(void *lane);
void ck_codec_tell(ck_codec *codec);

/* codec_encode.c, codec_decode.c: a batch of jobs of one kind (and one plan); all end. */
void ck_encode(ck_lane *lane, ck_codec_job **jobs, int count);
void ck_decode(ck_lane *lane, ck_codec_job **jobs, int count);

#endif
