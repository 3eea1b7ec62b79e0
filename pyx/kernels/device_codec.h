/* Chunks of device memory, compressed into host memory and back by the GPU, without the GIL.
 *
 * A few lanes a codec: each a thread with a stream, events (CU_EVENT_BLOCKING_SYNC) and a part of the scratch memory,
 * which is one allocation that is made once. A lane takes jobs that wait, first come first served, does as many of them
 * side by side as its scratch holds, and puts what has ended on a list; an eventfd says when that list stops being
 * empty. While one lane's bytes cross the link, the others compress; what is ready to be copied to the host waits in
 * streams of all lanes, so that one batch follows the other without a gap.
 */
#ifndef CKPT_DEVICE_CODEC_H
#define CKPT_DEVICE_CODEC_H

#include "cuda_driver.h"
#include "nvcomp_api.h"

enum { CK_JOB_ENCODE, CK_JOB_DECODE };
enum { CK_PLANES = 4, CK_LANES = 8, CK_BATCH = 64 }; /* planes a chunk, lanes a codec, chunks a batch: at most */
enum { CK_LINKS = 2 }; /* streams of copies to the host, at most */
enum { CK_DECODER_NONE, CK_DECODER_ENGINE, CK_DECODER_NVCOMP };

/* What went wrong with a job. */
enum {
    CK_FAIL_NONE,
    CK_FAIL_DRIVER,  /* error, call */
    CK_FAIL_NVCOMP,  /* error: an nv_status; call; block where it is one block's */
    CK_FAIL_STORED,  /* stored_crc is what was found */
    CK_FAIL_BLOCK,   /* a block was decoded to `found` bytes instead of `wanted` */
    CK_FAIL_SCRATCH, /* one chunk alone needs `need` bytes a lane */
    CK_FAIL_DECODER, /* the decoder that was asked for cannot take it; call says why */
    CK_FAIL_MEMORY   /* host memory */
};

/* How chunks are to be encoded. */
typedef struct {
    int format, level;
    int transform, planes;   /* 0, 1, 2: none, planes2, planes4; 1, 2, 4 */
    uint32_t block_bytes;
    nv_options options;
    double tried_below;      /* bits a byte: a plane of a higher entropy is not tried; above 8: always tried */
    size_t input_alignment;  /* the rest is found by ck_plan_measure */
    size_t slot;             /* bytes that a block may become, rounded up */
    uint32_t wave;           /* blocks of one launch: its temporary memory takes at most half of a lane */
    size_t need;             /* bytes of a lane for one chunk */
    int fits;                /* chunks that a lane held of late, 0: not known; under the codec's mutex */
} ck_plan;

typedef struct {
    int format; /* CK_FORMAT_NONE: stored as it is */
    int level;
    uint32_t block_bytes, raw, stored;
    uint32_t first, blocks; /* its block lengths in the job's */
} ck_plane;

typedef struct ck_codec_job {
    struct ck_codec_job *next;
    void *token; /* the caller's */
    int kind;
    int cancelled;       /* set by ck_codec_cancel: not begun if it has not been */
    const ck_plan *plan; /* of an encoding */
    cu_address device;
    unsigned char *host;
    cu_address loaded;   /* of a decoding: where the stored bytes lie on the device already; 0: at host */
    uint32_t raw, stored;
    uint32_t raw_crc, stored_crc, expected_crc;
    int zero;
    int transform, planes; /* planes 0: the raw bytes are what is stored */
    ck_plane plane[CK_PLANES];
    uint32_t *lengths; /* of blocks, room for all that there can be */
    int decoder;       /* CK_DECODER_*, of a decoding that succeeded */

    int failure;
    int format; /* of CK_FAIL_NVCOMP */
    cu_result error;
    const char *call;
    uint32_t at_plane, at_block, found, wanted;
    uint64_t need;

    /* A lane's own while it works on it. */
    cu_address out;                /* the stored bytes on the device */
    cu_address lay[CK_PLANES];     /* where each plane lies, 0: nowhere */
    uint32_t coded_at[CK_PLANES];  /* its first block among the batch's */
    double bits[CK_PLANES];        /* entropy, of a sample */
    int tried, engine;             /* bit p: plane p is compressed; is decoded by the engine */
    const uint32_t *scanned;       /* {CRC32C, 0 only if all bytes are} of the raw bytes, where the GPU writes it */
} ck_codec_job;

typedef struct ck_codec ck_codec;

typedef struct {
    const ck_cuda *cuda;
    const ck_nvcomp *nvcomp; /* NULL: none */
    cu_context context;
    cu_stream stream;        /* whose earlier work comes first; NULL: none */
    const void *image;       /* compiled kernels */
    uint64_t scratch_bytes;
    uint32_t chunk_bytes;    /* the largest */
    int lanes, links;
    int engine_mask;         /* formats that the decompression engine may be given, CU_MEM_DECOMPRESS_* */
    uint32_t engine_longest; /* bytes of its longest buffer */
    int engine_forced;       /* no other decoder */
} ck_codec_options;

/* 0; a CUresult > 0, with *call; or -errno, with *call. */
int ck_codec_open(ck_codec **codec, const ck_codec_options *options, const char **call);
int ck_codec_eventfd(const ck_codec *codec);
uint64_t ck_codec_lane_bytes(const ck_codec *codec);
/* Whether the scratch memory may be given to the decompression engine. */
int ck_codec_engine_memory(const ck_codec *codec);
/* Fills the plan's last members. CK_FAIL_*; *error is a CUresult or nv_status of *call. */
int ck_plan_measure(const ck_codec *codec, ck_plan *plan, int *error, const char **call);
/* Room for the lengths of all blocks that an encoding of `raw` bytes can have. */
uint32_t ck_plan_blocks(const ck_plan *plan, uint32_t raw);
void ck_codec_submit(ck_codec *codec, ck_codec_job *job);
static inline void ck_codec_cancel(ck_codec_job *job) { __atomic_store_n(&job->cancelled, 1, __ATOMIC_RELAXED); }
/* The jobs that ended, oldest first, linked by next; also clears the eventfd. */
ck_codec_job *ck_codec_reap(ck_codec *codec);
int ck_codec_running(ck_codec *codec);
uint64_t ck_codec_batches(ck_codec *codec); /* that were begun */
/* Asks the lanes to end once nothing waits; the eventfd tells when ck_codec_ended. */
void ck_codec_stop(ck_codec *codec);
int ck_codec_ended(ck_codec *codec);
/* Joins the threads (after ck_codec_stop; blocks until ck_codec_ended). */
void ck_codec_join(ck_codec *codec);
void ck_codec_free(ck_codec *codec);
/* In a forked child: closes the descriptor alone. */
void ck_codec_abandon(ck_codec *codec);

#endif
