/* The hand-over: a Unix socket of each launched process that uses CUDA, in the abstract namespace.
 *
 * Type SOCK_SEQPACKET; name "\0ckptpipe/<pid>/<start time>/<n>", pid in the process's innermost PID namespace (last
 * number of NSpid in /proc/PID/status), start time field 22 of /proc/PID/stat, n from 0 to 3 (the first that was
 * free: containers that share a network namespace may clash). The client asks SO_PEERCRED and takes the one whose
 * pid is the target's. The server asks it too, and serves its own user and root, nobody else: it closes.
 *
 * Each request is one packet and has one answer. The connection is also a lease: what it armed or feeds ends when it
 * is closed, in whatever way, so that a killed controller leaves nothing behind.
 */
#ifndef CKPT_HANDOVER_H
#define CKPT_HANDOVER_H

#include <stdint.h>

#define CKPT_HANDOVER_MAGIC 0x50504b43u /* "CKPP" */
#define CKPT_HANDOVER_VERSION 1u
#define CKPT_HANDOVER_NAMES 4
#define CKPT_HANDOVER_CLIENTS 8 /* connections at a time; another one is answered EBUSY */

enum ckpt_request_kind {
    CKPT_ATTACH = 1,  /* -> the pool's and the control page's descriptors (SCM_RIGHTS, in this order); without a pool
                         only the control page's. `value` of the answer: how many descriptors */
    CKPT_ARM = 2,     /* a checkpoint is coming: an image may be allocated by any thread of the driver's */
    CKPT_DISARM = 3,
    CKPT_PREPARE = 4, /* make `argument` bytes of the pool ready now; -> bytes that are warm. Takes as long as it takes */
    CKPT_SETTLE = 5,  /* the driver's checkpoint has returned: fill what it never wrote with zeros. -> bytes filled */
    CKPT_FEED = 6,    /* this connection feeds closed gates: when it ends, gate_orphan_ms counts */
};

struct ckpt_request {
    uint32_t magic, version, kind, flags; /* flags: 0 */
    uint64_t argument;
};

struct ckpt_answer {
    uint32_t magic, version;
    int32_t error; /* errno, 0 for success; EPROTO for a request that makes no sense */
    uint32_t kind;
    uint64_t value;
    char text[192]; /* of an error */
};

#endif
