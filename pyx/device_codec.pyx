# kernels: codec_lane codec_plan codec_encode codec_decode codec_setup nvcomp_api
"""Chunks of device memory, compressed by the GPU into leased host memory, and decompressed from there.

Everything between the call and the future runs in the codec's lanes, without the GIL (kernels/device_codec.h).
On the way out: checksum and zero test, byte planes, nvCOMP, packing, checksum of what is stored, and only then the
copy over the link. On the way in: the copy, the checksum of what was stored (before a decoder sees a byte), the
decompression engine or nvCOMP, the planes put together, the checksum of the result.
"""

import asyncio
import os
import warnings
from typing import NamedTuple

cimport cython
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdlib cimport calloc, free
from libc.string cimport memset
from posix.unistd cimport getpid

from ckptpipe.pyx import cuda_kernel
from ckptpipe.pyx.errors import CkptpipeError

from ckptpipe.pyx.cuda_driver cimport CU_COMPUTE_MAJOR, CU_COMPUTE_MINOR, CU_OK, Driver, loaded
from ckptpipe.pyx.nvcomp cimport CK_FORMATS, Nvcomp, ck_formats
from ckptpipe.pyx.staging cimport Lease

cdef extern from "Python.h":
    unsigned long PyThread_get_thread_ident()

SCRATCH_BYTES = 512 << 20
LANES = 3
cdef int MAX_LANES = 8
cdef int ENGINE_MASK_ATTRIBUTE = 136  # CU_DEVICE_ATTRIBUTE_MEM_DECOMPRESS_ALGORITHM_MASK
cdef int ENGINE_LENGTH_ATTRIBUTE = 137  # CU_DEVICE_ATTRIBUTE_MEM_DECOMPRESS_MAXIMUM_LENGTH
cdef int ENGINE_DEFLATE = 1
cdef dict ENGINE_FORMATS = {2: 1, 6: 2, 5: 4}  # id of FORMAT.md: bit of the engine's mask
cdef int DEFLATE = 2, ANS = 3, ZSTD = 1
cdef int[3] ANS_TYPES = [1, 10, 9]  # nvcompType_t of u8, f16, fp8
cdef int[3] PLANES = [1, 2, 4]  # of each transform
cdef Py_ssize_t CHUNK_MOST = 64 << 20
ENGINE, NVCOMP = "decompression-engine", "nvcomp-cuda"
SCRATCH_CURE = "let codecs have less memory (--gpu-scratch), or free memory on that GPU (nvidia-smi shows who holds it)"
cdef int live = 0


class StoredMismatch(CkptpipeError):
    """The stored bytes have another checksum: no decoder has seen them."""

    def __init__(self, found, expected):
        super().__init__(f"stored bytes have the checksum {found:08x} instead of {expected:08x}")
        self.found = found
        self.expected = expected

    def __reduce__(self):
        return type(self), (self.found, self.expected)


class DecodeError(CkptpipeError):
    """A block was not decoded to what it must be, although its chunk's stored bytes have the right checksum."""

    def __init__(self, message, plane, block):
        super().__init__(message)
        self.plane = plane
        self.block = block

    def __reduce__(self):
        return type(self), (self.message, self.plane, self.block)


class DecoderUnavailableError(CkptpipeError):
    """The decoder, or the encoder, that was asked for cannot run here."""

    exit_code = 2


class ScratchTooSmallError(CkptpipeError):
    """The scratch memory does not hold one chunk. ``needed_bytes``: the least that would do."""

    def __init__(self, scratch_bytes, needed_bytes):
        super().__init__(f"{scratch_bytes} bytes of GPU scratch memory do not hold one chunk",
                         cure=f"allow at least {mib_text(needed_bytes)} (--gpu-scratch), or use smaller chunks")
        self.scratch_bytes = scratch_bytes
        self.needed_bytes = needed_bytes

    def __reduce__(self):
        return type(self), (self.scratch_bytes, self.needed_bytes)


class EncodePlan(NamedTuple):
    """How chunks are encoded; ids as in FORMAT.md. ``level`` of deflate and gdeflate: 0 to 5; ``ans_type``: 0 u8,
    1 f16, 2 fp8; ``transform``: 0 none, 1 planes2, 2 planes4; ``block_bytes`` 0: the codec's own."""

    codec_id: int
    level: int = 0
    ans_type: int = 0
    transform: int = 0
    block_bytes: int = 0


class Encoded(NamedTuple):
    """What the lease of an encoding holds: nothing (``zero``), the raw bytes (no ``planes``), or the stored planes one
    behind the other, each (codec, level, block_bytes, raw_bytes, stored_bytes, block_lengths)."""

    zero: bool
    raw_crc32c: int
    stored_bytes: int
    stored_crc32c: int
    transform: int
    planes: tuple


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


cdef class DeviceCodec:
    """The codecs of one GPU; made inside the running loop that it reports to, by `create`.

    The device range of a chunk must not change until its future is done. A chunk in flight holds its lease until
    the GPU is done with it, also when its future was cancelled; a cancelled one that had not begun never does.
    """

    def __cinit__(self):
        self.raw = NULL
        self.eventfd = -1
        self.owner_pid = getpid()

    def __init__(self):
        raise TypeError("a DeviceCodec comes from create()")

    @classmethod
    async def create(cls, int device, size_t context, *, scratch_bytes=SCRATCH_BYTES, nvcomp, chunk_bytes,
                     str decoder="auto", size_t stream=0, int lanes=0):
        """A codec of GPU ``device``.

        ``context``: its CUcontext, which the caller holds until `aclose`. ``scratch_bytes``: device memory for
        everything that does not fit elsewhere, allocated here, once. ``nvcomp``: from `nvcomp.load`; without it
        nothing is encoded, and only the decompression engine decodes. ``chunk_bytes``: the longest chunk. ``decoder``:
        "auto" takes the decompression engine for what it can do and nvCOMP for the rest; "decompression-engine" or
        "nvcomp-cuda" forces one. ``stream``: a CUstream of that context whose earlier work comes first.

        DecoderUnavailableError where a forced decoder cannot run here, CudaError where the driver refuses,
        KernelUnavailableError without NVRTC.
        """
        cdef DeviceCodec made = DeviceCodec.__new__(DeviceCodec)
        if context == 0:
            raise ValueError("a device codec needs a CUDA context")
        if not 4096 <= chunk_bytes <= CHUNK_MOST:
            raise ValueError(f"chunk_bytes is 4096 to {CHUNK_MOST}, not {chunk_bytes}")
        if scratch_bytes < 1 << 20:
            raise ValueError(f"scratch_bytes is at least 1 MiB, not {scratch_bytes}")
        if not 0 <= lanes <= MAX_LANES:
            raise ValueError(f"lanes is 0 (chosen here) to {MAX_LANES}, not {lanes}")
        if decoder not in ("auto", ENGINE, NVCOMP):
            raise ValueError(f"decoder is auto, {ENGINE} or {NVCOMP}, not {decoder!r}")
        loop = made.loop = asyncio.get_running_loop()
        made.thread = PyThread_get_thread_ident()
        made.driver = loaded()
        made.nvcomp = nvcomp
        made.device = device
        made.context = context
        made.scratch_bytes = scratch_bytes
        made.chunk_bytes = chunk_bytes
        made.lanes = lanes or max(1, min(LANES, scratch_bytes // (5 * chunk_bytes + (1 << 20))))
        made.plans = {}
        made.waiters = []
        opening = loop.run_in_executor(None, made._open, decoder, stream)
        try:
            await asyncio.shield(opening)
        except asyncio.CancelledError:
            await asyncio.wait([opening])
            if opening.exception() is None:
                made._stop_now()
            raise
        loop.add_reader(made.eventfd, made._reap)
        return made

    def _open(self, str decoder, size_t stream):
        """Blocking: kernels are compiled, memory is allocated, threads start."""
        global live
        cdef ck_codec_options options
        cdef const char* call = NULL
        cdef int error, mask = attribute(self.driver, self.device, ENGINE_MASK_ATTRIBUTE)
        cdef int longest = attribute(self.driver, self.device, ENGINE_LENGTH_ATTRIBUTE)
        if decoder == NVCOMP and self.nvcomp is None:
            raise DecoderUnavailableError("decoding by nvCOMP was asked for, and there is no nvCOMP",
                                          cure="pip install 'ckptpipe[gpu]'")
        self.why = engine_missing(self.driver, self.device, mask, longest)
        if decoder == ENGINE and self.why:
            raise DecoderUnavailableError(f"the decompression engine was asked for: {self.why}",
                                          cure="let the decoder be chosen (--decompress-backend auto)")
        if decoder == NVCOMP:
            self.why = "nvCOMP was asked for"
        cdef bytes image = kernels_for(self.driver, self.device)
        memset(&options, 0, sizeof(options))
        options.cuda = &self.driver.raw
        options.nvcomp = &self.nvcomp.raw if self.nvcomp is not None else NULL
        options.context = <cu_context>self.context
        options.stream = <cu_stream>stream
        options.image = <const char*>image
        options.scratch_bytes = self.scratch_bytes
        options.chunk_bytes = self.chunk_bytes
        options.lanes = self.lanes
        options.engine_mask = 0 if self.why else mask
        options.engine_longest = longest
        options.engine_forced = decoder == ENGINE
        with nogil:
            error = ck_codec_open(&self.raw, &options, &call)
        if error > 0:
            raise self.driver.failure(
                error, call.decode(), f"codec of GPU {self.device} with {mib_text(self.scratch_bytes)} of scratch memory",
                SCRATCH_CURE if error == 2 else "",
            )
        if error < 0:
            raise CkptpipeError(
                f"cannot start a codec of GPU {self.device}: {call.decode()}: {os.strerror(-error)}",
                cure="raise the limits on processes and files (ulimit -u, ulimit -n, pids cgroup)",
            )
        self.eventfd = ck_codec_eventfd(self.raw)
        live += 1
        if not self.why and not ck_codec_engine_memory(self.raw):
            self.why = "the driver says that memory of cuMemAlloc is nothing for the decompression engine"
            if decoder == ENGINE:
                self._stop_now()
                raise DecoderUnavailableError(f"the decompression engine was asked for: {self.why}",
                                              cure="let the decoder be chosen (--decompress-backend auto)")
        self.name_backends(0 if self.why else mask, decoder)

    def name_backends(self, int mask, str decoder):
        formats = self.nvcomp.formats if self.nvcomp is not None else ()
        engine = [number for number, bit in ENGINE_FORMATS.items() if mask & bit]
        self.backend = NVCOMP if formats else ""
        self.encodes = tuple([number for number in formats if number != ZSTD])
        self.decodes = tuple(sorted({*engine, *(() if decoder == ENGINE else formats)}))
        self.decoder = ENGINE if mask & ENGINE_DEFLATE else NVCOMP if formats else ""

    @property
    def decoded_by(self):
        """Chunks by who decoded them; of one with planes in several formats, the slower."""
        found = {}
        if self.by_engine:
            found[ENGINE] = self.by_engine
        if self.by_nvcomp:
            found[NVCOMP] = self.by_nvcomp
        return found

    @property
    def simulated(self):
        """Driver or nvCOMP is a simulation for tests."""
        return self.driver.raw.simulated != 0 or (self.nvcomp is not None and self.nvcomp.simulated)

    @property
    def inflight(self):
        """Chunks accepted and not yet answered."""
        return self.accepted

    @property
    def running(self):
        """Chunks that lanes have begun."""
        return ck_codec_running(self.raw) if self.raw != NULL else 0

    @property
    def closed(self):
        return self.raw == NULL

    # -- what callers ask for ----------------------------------------------------------------------------

    async def prepare(self, plan):
        """Check a plan, off the loop: ValueError where it is none, ScratchTooSmallError where a chunk does not fit."""
        self.check_usable()
        self.plans[plan, False] = await asyncio.to_thread(self._measured, plan)

    def encode(self, Lease lease not None, Py_ssize_t nbytes, size_t device_address, plan):
        """Store ``nbytes`` of device memory in the lease, encoded; a future of Encoded.

        The lease has room for the raw bytes: a chunk that does not shrink by 5 % is copied as it is, as is a plane.
        """
        self.check_usable()
        check_range(device_address, nbytes, self.chunk_bytes)
        cdef Plan measured = self.plan_of(plan, nbytes & 1)
        cdef Job job = Job.__new__(Job)
        job.raw.kind = CK_JOB_ENCODE
        job.raw.plan = &measured.raw
        job.raw.device = device_address
        job.raw.raw = nbytes
        job.raw.host = lease.ptr
        job.raw.lengths = <uint32_t*>calloc(ck_plan_blocks(&measured.raw, nbytes), sizeof(uint32_t))
        if job.raw.lengths == NULL:
            raise MemoryError
        lease.hold_destination(nbytes)
        job.plan = measured
        job.lease = lease
        self.submit(job)
        return job.future

    def decode(self, Lease lease not None, Py_ssize_t stored_bytes, uint32_t stored_crc32c, Py_ssize_t raw_bytes,
               int transform, planes, size_t device_address):
        """Decode the lease's first ``stored_bytes`` to device memory; a future of the CRC32C of what came out.

        ``planes`` as in Encoded (or PlaneRecords). The future has StoredMismatch where the stored bytes have another
        checksum than ``stored_crc32c`` (no decoder has seen them), DecodeError where a block is not what it must be:
        the destination's contents are then undefined.
        """
        self.check_usable()
        check_range(device_address, raw_bytes, self.chunk_bytes)
        if not 1 <= stored_bytes <= raw_bytes:
            raise ValueError(f"{stored_bytes} stored bytes of a chunk of {raw_bytes}")
        cdef Job job = Job.__new__(Job)
        job.raw.kind = CK_JOB_DECODE
        job.raw.device = device_address
        job.raw.raw = raw_bytes
        job.raw.stored = stored_bytes
        job.raw.expected_crc = stored_crc32c
        job.raw.host = lease.ptr
        set_planes(&job.raw, transform, tuple(planes))
        lease.hold_source(stored_bytes)
        job.lease = lease
        self.submit(job)
        return job.future

    async def drain(self):
        """Wait until nothing is in flight. Finishes when cancelled, and is cancelled then."""
        cancelled = None
        while self.accepted:
            waiter = self.loop.create_future()
            self.waiters.append(waiter)
            try:
                await asyncio.shield(waiter)
            except asyncio.CancelledError as error:
                cancelled = error  # the GPU still writes into leased memory: go on, then say so
        if cancelled is not None:
            try:
                raise cancelled
            finally:
                cancelled = None

    async def aclose(self):
        """Refuse new chunks, wait for those under way, give scratch memory, streams and threads back. Idempotent;
        finishes when cancelled."""
        if self.raw == NULL or getpid() != self.owner_pid:
            return
        self.closing = True
        cancelled = None
        try:
            await self.drain()
        except asyncio.CancelledError as error:
            cancelled = error
        while self.raw != NULL:
            if self.ended is None:
                self.ended = self.loop.create_future()
                ck_codec_stop(self.raw)
            try:
                await asyncio.shield(self.ended)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            try:
                raise cancelled
            finally:
                cancelled = None

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc):
        await self.aclose()

    # -- from the call to the future ---------------------------------------------------------------------

    cdef int check_usable(self) except -1:
        if getpid() != self.owner_pid:
            raise CkptpipeError(
                f"this device codec belongs to process {self.owner_pid}, and this is process {getpid()}",
                cure="start processes with spawn: CUDA does not work in a forked child",
            )
        if self.raw == NULL or self.closing:
            raise RuntimeError("the device codec is closed")
        if self.thread != PyThread_get_thread_ident():
            raise CkptpipeError(
                "this device codec belongs to another thread",
                cure="use it in the thread of its event loop (asyncio.run_coroutine_threadsafe)",
            )
        return 0

    cdef Plan plan_of(self, object plan, bint odd):
        # ANS of 2-byte elements takes no odd number of bytes: such a chunk, a stream's last, is coded as bytes.
        odd = odd and plan.codec_id == ANS and plan.ans_type == 1
        found = self.plans.get((plan, odd))
        if found is None:
            found = self.plans[plan, odd] = self.measured(plan, odd)
        return found

    def _measured(self, plan):
        return self.measured(plan, False)

    cdef Plan measured(self, object plan, bint odd):
        cdef Plan made = new_plan(self, plan, odd)
        cdef const char* call = NULL
        cdef int error = 0, failure
        cdef cu_context popped
        with nogil:
            failure = self.driver.raw.context_push(<cu_context>self.context)
        if failure != CU_OK:
            raise self.driver.failure(failure, "cuCtxPushCurrent", f"codec of GPU {self.device}")
        with nogil:
            failure = ck_plan_measure(self.raw, &made.raw, &error, &call)
            self.driver.raw.context_pop(&popped)
        if failure == CK_FAIL_SCRATCH:
            raise ScratchTooSmallError(self.scratch_bytes, made.raw.need * self.lanes)
        if failure != CK_FAIL_NONE:
            raise nvcomp_failure(self.nvcomp, made.raw.format, call.decode(), error)
        return made

    cdef int submit(self, Job job) except -1:
        job.raw.token = <void*>job
        job.future = self.loop.create_future()
        job.future.add_done_callback(job._abandon)
        Py_INCREF(job)
        job.flying = True
        self.accepted += 1
        ck_codec_submit(self.raw, &job.raw)
        return 0

    def _reap(self):
        self.reap()
        if self.raw != NULL and self.ended is not None and ck_codec_ended(self.raw):
            self.finish()

    cdef int reap(self) except -1:
        cdef ck_codec_job* done
        cdef Job job
        if self.raw == NULL:
            return 0
        done = ck_codec_reap(self.raw)
        while done != NULL:
            job = <Job>done.token
            done = done.next
            self.settle(job)
        return 0

    cdef int settle(self, Job job) except -1:
        cdef bint heard = not self.loop.is_closed()  # else nobody can be told, but the memory goes back
        cdef bint good = job.raw.failure == CK_FAIL_NONE
        future = job.future
        Py_DECREF(job)
        job.flying = False
        job.future = None  # the callback and the future hold each other
        self.accepted -= 1
        job.lease.unhold()
        if good and not future.cancelled():
            if job.raw.kind == CK_JOB_ENCODE:
                self.encoded += job.raw.raw
                self.fetched += job.raw.stored
            elif job.raw.decoder == CK_DECODER_ENGINE:
                self.by_engine += 1
            elif job.raw.decoder == CK_DECODER_NVCOMP:
                self.by_nvcomp += 1
        if heard and not future.done():
            if not good:
                future.set_exception(self.failure_of(job))
            elif job.raw.kind == CK_JOB_ENCODE:
                future.set_result(encoded_of(&job.raw))
            else:
                future.set_result(job.raw.raw_crc)
        if heard and self.accepted == 0 and self.waiters:
            waiters, self.waiters = self.waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
        return 0

    cdef object failure_of(self, Job job):
        cdef ck_codec_job* raw = &job.raw
        words = f"{raw.raw} bytes of GPU {self.device} at {raw.device:#x}"
        if raw.failure == CK_FAIL_DRIVER:
            return self.driver.failure(raw.error, raw.call.decode(), words)
        if raw.failure == CK_FAIL_NVCOMP:
            number = raw.plan.format if raw.kind == CK_JOB_ENCODE else 0
            return nvcomp_failure(self.nvcomp, number, raw.call.decode(), raw.error, words)
        if raw.failure == CK_FAIL_STORED:
            return StoredMismatch(raw.stored_crc, raw.expected_crc)
        if raw.failure == CK_FAIL_BLOCK:
            name = ck_formats[raw.plane[raw.at_plane].format].name.decode()
            told = "" if raw.error == 0 else f", {self.nvcomp.status_text(raw.error)}"
            size = "" if raw.found == raw.wanted else f": {raw.found} bytes instead of {raw.wanted}"
            return DecodeError(f"block {raw.at_block} of plane {raw.at_plane} does not decode ({name}{told}){size}",
                               raw.at_plane, raw.at_block)
        if raw.failure == CK_FAIL_SCRATCH:
            return ScratchTooSmallError(self.scratch_bytes, raw.need * self.lanes)
        if raw.failure == CK_FAIL_DECODER:
            return DecoderUnavailableError(f"a chunk cannot be decoded on GPU {self.device}: {raw.call.decode()}",
                                           cure="let the decoder be chosen (--decompress-backend auto)")
        return MemoryError("a device codec found no host memory")

    # -- the end -----------------------------------------------------------------------------------------

    cdef int finish(self) except -1:
        """The lanes have ended, or are about to: join them, free all."""
        global live
        cdef ck_codec* codec = self.raw
        if not self.loop.is_closed():
            self.loop.remove_reader(self.eventfd)
        with nogil:
            ck_codec_join(codec)
        self.reap()
        self.raw = NULL
        self.eventfd = -1
        live -= 1
        ck_codec_free(codec)
        if self.ended is not None and not self.ended.done() and not self.loop.is_closed():
            self.ended.set_result(None)
        return 0

    def _stop_now(self):
        self.closing = True
        ck_codec_stop(self.raw)
        self.finish()

    def __del__(self):
        global live
        if self.raw == NULL:
            return
        if getpid() != self.owner_pid:
            ck_codec_abandon(self.raw)
            self.raw = NULL
            live -= 1
            return
        warnings.warn(f"a DeviceCodec of GPU {self.device} was not closed", ResourceWarning, source=self)
        self._stop_now()

    def __repr__(self):
        if self.raw == NULL:
            return "<DeviceCodec closed>"
        return (f"<DeviceCodec GPU {self.device}, {self.lanes} lanes, {mib_text(self.scratch_bytes)} of scratch, "
                f"{self.accepted} in flight>")


cdef Plan new_plan(DeviceCodec codec, object plan, bint odd):
    """A plan as the lanes read it, not yet measured. ValueError where it makes no sense."""
    cdef Plan made = Plan.__new__(Plan)
    cdef int number = plan.codec_id, level = plan.level
    if codec.nvcomp is None:
        raise DecoderUnavailableError("a GPU encodes with nvCOMP, and there is none", cure="pip install 'ckptpipe[gpu]'")
    if number not in codec.encodes:
        raise ValueError(f"codec {number} is none that a GPU writes")
    if plan.transform not in (0, 1, 2):
        raise ValueError(f"transform is 0, 1 or 2, not {plan.transform}")
    if plan.ans_type not in (0, 1, 2):
        raise ValueError(f"ans_type is 0 (u8), 1 (f16) or 2 (fp8), not {plan.ans_type}")
    if number == ANS:  # planes and odd chunks are bytes
        level = 0 if odd or plan.transform else plan.ans_type
    elif not 0 <= level < max(ck_formats[number].levels, 1):
        raise ValueError(f"{ck_formats[number].name.decode()} has no level {level}")
    made.raw.format = number
    made.raw.level = level
    made.raw.transform = plan.transform
    made.raw.planes = PLANES[made.raw.transform]
    made.raw.block_bytes = plan.block_bytes or ck_formats[number].block
    if not 4096 <= made.raw.block_bytes <= ck_formats[number].largest:
        raise ValueError(f"blocks of {ck_formats[number].name.decode()} have 4096 to {ck_formats[number].largest} bytes, "
                         f"not {plan.block_bytes}")
    if made.raw.block_bytes % 16:
        raise ValueError(f"blocks have a multiple of 16 bytes, not {plan.block_bytes}")
    made.raw.options = ck_formats[number].compress
    if number == ANS:
        made.raw.options.word[1] = ANS_TYPES[level]
    elif ck_formats[number].levels:
        made.raw.options.word[0] = level
    # What a sample of the bytes says about a plane: nothing of types that are not bytes; of codecs that find
    # repeats, only that noise stays noise.
    if number == ANS and level:
        made.raw.tried_below = 9.0
    elif ck_formats[number].entropy_only >> level & 1:
        made.raw.tried_below = 7.62
    else:
        made.raw.tried_below = 7.97
    return made


cdef int set_planes(ck_codec_job* job, int transform, tuple planes) except -1:
    """Checks planes against what a chunk can be (FORMAT.md), and lays them down for the lanes."""
    cdef Py_ssize_t raw = 0, stored = 0, blocks = 0, length, total
    cdef int p = 0, count
    cdef uint32_t at = 0
    if transform not in (0, 1, 2) or len(planes) != PLANES[transform]:
        raise ValueError(f"{len(planes)} planes of transform {transform}")
    count = PLANES[transform]
    for plane in planes:
        blocks += len(plane[5])
    job.lengths = <uint32_t*>calloc(max(blocks, 1), sizeof(uint32_t))
    if job.lengths == NULL:
        raise MemoryError
    for number, level, block_bytes, raw_bytes, stored_bytes, lengths in planes:
        if not 0 <= number < CK_FORMATS:
            raise ValueError(f"plane {p} has codec {number}, which is not known here")
        if raw_bytes != (job.raw + count - 1 - p) // count:
            raise ValueError(f"plane {p} of {job.raw} bytes has {raw_bytes}")
        if number == 0 and (lengths or stored_bytes != raw_bytes):
            raise ValueError(f"plane {p} is raw, with {len(lengths)} blocks and {stored_bytes} stored bytes of {raw_bytes}")
        if number and not (min(raw_bytes, 4096) <= block_bytes <= raw_bytes
                           and len(lengths) == (raw_bytes + block_bytes - 1) // block_bytes):
            raise ValueError(f"plane {p} has {len(lengths)} blocks of {block_bytes} bytes in {raw_bytes}")
        total = 0
        job.plane[p].first = at
        for length in lengths:
            if not 1 <= length <= stored_bytes:
                raise ValueError(f"plane {p} has a block of {length} stored bytes")
            job.lengths[at] = length
            at += 1
            total += length
        if number and total != stored_bytes:
            raise ValueError(f"plane {p} has {stored_bytes} stored bytes and blocks of {total}")
        job.plane[p].format = number
        job.plane[p].level = level
        job.plane[p].block_bytes = block_bytes
        job.plane[p].raw = raw_bytes
        job.plane[p].stored = stored_bytes
        job.plane[p].blocks = len(lengths)
        raw += raw_bytes
        stored += stored_bytes
        p += 1
    if raw != job.raw or stored != job.stored:
        raise ValueError(f"planes of {raw} bytes, {stored} stored, in a chunk of {job.raw}, {job.stored} stored")
    job.planes = count
    job.transform = transform
    return 0


cdef object encoded_of(const ck_codec_job* job):
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


cdef int check_range(size_t address, Py_ssize_t nbytes, Py_ssize_t most) except -1:
    if not 1 <= nbytes <= most:
        raise ValueError(f"a chunk has 1 to {most} bytes here, not {nbytes}")
    if address == 0 or address > (<size_t>-1) - <size_t>nbytes:
        raise ValueError(f"no device memory range: {nbytes} bytes at {address:#x}")
    return 0


cdef object nvcomp_failure(Nvcomp nvcomp, int number, str call, int status, str detail=""):
    """``call`` has … in place of the format's name."""
    name = ck_formats[number].name.decode() if 0 < number < CK_FORMATS else "nvCOMP"
    words = f"{call.replace('…', name.capitalize() if number else '')}: {nvcomp.status_text(status)}"
    return CkptpipeError(f"{name}: {words}: {detail}" if detail else f"{name}: {words}")


cdef int attribute(Driver driver, int device, int which) noexcept:
    """0 where the driver does not know it."""
    cdef int value = 0
    return value if driver.raw.device_attribute(&value, which, device) == CU_OK else 0


cdef str engine_missing(Driver driver, int device, int mask, int longest):
    """Why the decompression engine cannot be used, "" where it can."""
    if not mask or longest <= 0:
        return f"GPU {device} has none"
    if not driver.has("cuMemBatchDecompressAsync"):
        return f"this driver ({driver.version_text()}) does not serve it"
    return ""


cdef str mib_text(object nbytes):
    return f"{-(-nbytes // (1 << 20))} MiB"


cdef bytes kernels_for(Driver driver, int device):
    """The compiled kernels for that GPU; KernelUnavailableError where they cannot be had."""
    cdef int major = attribute(driver, device, CU_COMPUTE_MAJOR), minor = attribute(driver, device, CU_COMPUTE_MINOR)
    if driver.raw.simulated:
        return cuda_kernel.text_of(cuda_kernel.CODEC_SOURCES) + b"\0"  # a simulation knows kernels by name
    return cuda_kernel.compiled(major, minor, cuda_kernel.CODEC_SOURCES)


def live_codecs():
    """Codecs that hold threads, streams and scratch memory in this process now."""
    return live
