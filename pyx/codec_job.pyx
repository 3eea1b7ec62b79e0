# kernels: codec_plan nvcomp_api
"""Plans and chunks in flight, as the lanes of a device codec read them: checked before any thread sees
them."""

cimport cython
from libc.stdlib cimport calloc, free

from ckptpipe.pyx.codec_errors import (
    DecodeError,
    DecoderUnavailableError,
    ScratchTooSmallError,
    StoredMismatch,
)
from ckptpipe.pyx.encode_plan import Encoded
from ckptpipe.pyx.errors import CkptpipeError

from ckptpipe.pyx.cuda_driver cimport Driver
from ckptpipe.pyx.nvcomp cimport CK_FORMATS, Nvcomp, ck_formats
from ckptpipe.pyx.staging cimport Lease

cdef int ANS = 3
cdef int[3] ANS_TYPES = [1, 10, 9]  # nvcompType_t of u8, f16, fp8
cdef int[3] PLANES = [1, 2, 4]  # of each transform
cdef Py_ssize_t BLOCK_MIN = 4096  # FORMAT.md, section 4
cdef double ALWAYS = 9.0  # bits a byte: more than there are


@cython.final
cdef class Plan:
    """A plan as the lanes read it."""


@cython.final
@cython.no_gc_clear
cdef class Job:
    """A chunk in flight: holds its lease, and the codec's C side holds it, until it is reaped.

    It does not hold the codec: one that was thrown away ends its jobs when it is collected.
    """

    def __dealloc__(self):
        free(self.raw.lengths)

    def _abandon(self, future):
        if self.flying and future.cancelled():
            ck_codec_cancel(&self.raw)


cdef Plan new_plan(object plan, bint odd):
    """A plan, not yet measured; ``odd``: for chunks of odd length. ValueError where it makes no sense."""
    cdef Plan made = Plan.__new__(Plan)
    cdef int number = plan.codec_id, level = plan.level
    name = ck_formats[number].name.decode()
    if plan.transform not in (0, 1, 2):
        raise ValueError(f"transform is 0, 1 or 2, not {plan.transform}")
    if plan.ans_type not in (0, 1, 2):
        raise ValueError(f"ans_type is 0 (u8), 1 (f16) or 2 (fp8), not {plan.ans_type}")
    if number == ANS:  # planes are bytes, and 2-byte elements fill no odd chunk
        level = 0 if plan.transform or (odd and plan.ans_type == 1) else plan.ans_type
    elif not 0 <= level < max(ck_formats[number].levels, 1):
        raise ValueError(f"{name} has no level {level}")
    block = plan.block_bytes or ck_formats[number].block
    if not BLOCK_MIN <= block <= ck_formats[number].largest or block % 16:
        raise ValueError(f"blocks of {name} have {BLOCK_MIN} to {ck_formats[number].largest} bytes, "
                         f"a multiple of 16, not {block}")
    made.raw.format = number
    made.raw.level = level
    made.raw.transform = plan.transform
    made.raw.planes = PLANES[made.raw.transform]
    made.raw.block_bytes = block
    made.raw.options = ck_formats[number].compress
    if number == ANS:
        made.raw.options.word[1] = ANS_TYPES[level]
    elif ck_formats[number].levels:
        made.raw.options.word[0] = level
    # What a sample of the bytes says about a plane: nothing of types that are not bytes; of codecs that find
    # repeats, only that noise stays noise; of the others, whether 5 % can be gained.
    if number == ANS and level:
        made.raw.tried_below = ALWAYS
    elif ck_formats[number].entropy_only >> level & 1:
        made.raw.tried_below = 7.62
    else:
        made.raw.tried_below = 7.97
    return made


cdef Job encoding(Plan plan, Lease lease, Py_ssize_t nbytes, size_t device_address):
    """A chunk to encode; holds the lease."""
    cdef Job job = Job.__new__(Job)
    job.raw.kind = CK_JOB_ENCODE
    job.raw.plan = &plan.raw
    job.raw.device = device_address
    job.raw.raw = nbytes
    job.raw.host = lease.ptr
    job.raw.lengths = <uint32_t*>calloc(ck_plan_blocks(&plan.raw, nbytes), sizeof(uint32_t))
    if job.raw.lengths == NULL:
        raise MemoryError
    job.plan = plan
    lease.hold_destination(nbytes)
    job.lease = lease
    return job


cdef Job decoding(Lease lease, size_t loaded, Py_ssize_t stored_bytes, uint32_t stored_crc32c,
                  Py_ssize_t raw_bytes, int transform, tuple planes, size_t device_address):
    """A chunk to decode; holds the lease, or has its stored bytes at ``loaded`` on the device.

    ValueError where its planes cannot be those of such a chunk.
    """
    cdef Job job = Job.__new__(Job)
    if not 1 <= stored_bytes <= raw_bytes:
        raise ValueError(f"{stored_bytes} stored bytes of a chunk of {raw_bytes}")
    job.raw.kind = CK_JOB_DECODE
    job.raw.device = device_address
    job.raw.raw = raw_bytes
    job.raw.stored = stored_bytes
    job.raw.expected_crc = stored_crc32c
    job.raw.loaded = loaded
    set_planes(&job.raw, transform, planes)
    if lease is not None:
        job.raw.host = lease.ptr
        lease.hold_source(stored_bytes)
        job.lease = lease
    return job


cdef int set_planes(ck_codec_job* job, int transform, tuple planes) except -1:
    """Checks planes against what a chunk can be (FORMAT.md, section 4), and lays them down for the lanes."""
    cdef Py_ssize_t stored = 0, blocks = 0
    cdef int p, count
    if transform not in (0, 1, 2) or len(planes) != PLANES[transform]:
        raise ValueError(f"{len(planes)} planes of transform {transform}")
    count = PLANES[transform]
    for plane in planes:
        blocks += len(plane[5])
    job.lengths = <uint32_t*>calloc(max(blocks, 1), sizeof(uint32_t))
    if job.lengths == NULL:
        raise MemoryError
    blocks = 0
    for p in range(count):
        if planes[p][3] != (job.raw + count - 1 - p) // count:
            raise ValueError(f"plane {p} of {job.raw} bytes has {planes[p][3]}")
        job.plane[p].first = blocks
        set_plane(job, p, planes[p])
        blocks += job.plane[p].blocks
        stored += job.plane[p].stored
    if stored != job.stored:
        raise ValueError(f"planes of {stored} stored bytes in a chunk of {job.stored}")
    job.planes = count
    job.transform = transform
    return 0


cdef int set_plane(ck_codec_job* job, int p, object plane) except -1:
    cdef Py_ssize_t length, total = 0, raw, stored, block
    cdef ck_plane* made = &job.plane[p]
    cdef uint32_t at = made.first
    number, level, block, raw, stored, lengths = plane
    if not 0 <= number < CK_FORMATS:
        raise ValueError(f"plane {p} has codec {number}, which is not known here")
    if number == 0 and (lengths or stored != raw):
        raise ValueError(f"plane {p} is raw, with {len(lengths)} blocks and {stored} stored bytes of {raw}")
    if number and not (max(min(raw, BLOCK_MIN), 1) <= block <= raw
                       and len(lengths) == (raw + block - 1) // block):
        raise ValueError(f"plane {p} has {len(lengths)} blocks of {block} bytes in {raw}")
    if stored > job.stored:
        raise ValueError(f"plane {p} has {stored} stored bytes in a chunk of {job.stored}")
    for length in lengths:
        if not 1 <= length <= stored:
            raise ValueError(f"plane {p} has a block of {length} stored bytes")
        job.lengths[at] = length
        at += 1
        total += length
    if number and total != stored:
        raise ValueError(f"plane {p} has {stored} stored bytes and blocks of {total}")
    made.format = number
    made.level = level
    made.block_bytes = block
    made.raw = raw
    made.stored = stored
    made.blocks = len(lengths)
    return 0


cdef object encoded_of(const ck_codec_job* job):
    """The Encoded of a chunk that a lane is done with."""
    cdef int p
    cdef uint32_t b
    cdef const ck_plane* plane
    if job.zero:
        return Encoded(True, job.raw_crc, 0, 0, 0, ())
    planes = []
    for p in range(job.planes):
        plane = &job.plane[p]
        lengths = tuple([job.lengths[plane.first + b] for b in range(plane.blocks)])
        planes.append((plane.format, plane.level, plane.block_bytes, plane.raw, plane.stored, lengths))
    return Encoded(False, job.raw_crc, job.stored, job.stored_crc, job.transform, tuple(planes))


cdef object failure_of(Job job, Driver driver, Nvcomp nvcomp, int device, object scratch_bytes, int lanes):
    """The exception for a chunk that failed."""
    cdef ck_codec_job* raw = &job.raw
    where = f"{raw.raw} bytes of GPU {device} at {raw.device:#x}"
    if raw.failure == CK_FAIL_DRIVER:
        return driver.failure(raw.error, raw.call.decode(), where)
    if raw.failure == CK_FAIL_NVCOMP:
        return nvcomp_failure(nvcomp, raw.format, raw.call.decode(), raw.error, where)
    if raw.failure == CK_FAIL_STORED:
        return StoredMismatch(raw.stored_crc, raw.expected_crc)
    if raw.failure == CK_FAIL_BLOCK:
        name = ck_formats[raw.plane[raw.at_plane].format].name.decode()
        told = f", {nvcomp.status_text(raw.error)}" if raw.error and nvcomp is not None else ""
        size = "" if raw.found == raw.wanted else f": {raw.found} bytes instead of {raw.wanted}"
        words = f"block {raw.at_block} of plane {raw.at_plane} does not decode ({name}{told}){size}"
        return DecodeError(words, raw.at_plane, raw.at_block)
    if raw.failure == CK_FAIL_SCRATCH:
        return ScratchTooSmallError(scratch_bytes, raw.need * lanes)
    if raw.failure == CK_FAIL_DECODER:
        return DecoderUnavailableError(f"a chunk cannot be decoded on GPU {device}: {raw.call.decode()}",
                                       cure="let the decoder be chosen (--decompress-backend auto)")
    return MemoryError("a device codec found no host memory")


cdef object nvcomp_failure(Nvcomp nvcomp, int number, str call, int status, str detail=""):
    """A function of nvCOMP failed; ``call`` has … in place of the format's name."""
    words = f"{call.replace('…', ck_formats[number].symbol.decode())}: {nvcomp.status_text(status)}"
    return CkptpipeError(f"{words}: {detail}" if detail else words)
