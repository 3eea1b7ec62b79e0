# kernels: codec_lane codec_plan codec_encode codec_decode codec_setup nvcomp_api
"""Chunks of device memory, compressed by the GPU into leased host memory, and decompressed from there.

Everything between the call and the future runs in the codec's lanes, without the GIL
(kernels/device_codec.h). On the way out: checksum and zero test, byte planes, nvCOMP, packing, checksum of
what is stored, and only then the copy over the link. On the way in: the copy, the checksum of what was
stored (before a decoder sees a byte), the decompression engine or nvCOMP, the planes put together, the
checksum of the result.
"""

import asyncio
import os

from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.string cimport memset

from ckptpipe.pyx.codec_errors import DecodeError, DecoderUnavailableError
from ckptpipe.pyx.codec_errors import ScratchTooSmallError, StoredMismatch
from ckptpipe.pyx.encode_plan import Encoded, EncodePlan
from ckptpipe.pyx.errors import CkptpipeError

from ckptpipe.pyx.codec_abilities cimport engine_longest, engine_mask, engine_missing, kernels_for
from ckptpipe.pyx.codec_job cimport (
    CK_DECODER_ENGINE,
    CK_DECODER_NVCOMP,
    CK_FAIL_NONE,
    CK_FAIL_SCRATCH,
    CK_JOB_ENCODE,
    Job,
    Plan,
    ck_codec_job,
    decoding,
    encoded_of,
    encoding,
    failure_of,
    new_plan,
    nvcomp_failure,
)
from ckptpipe.pyx.cuda_driver cimport CU_OK, cu_context, cu_stream, loaded
from ckptpipe.pyx.loop_work cimport LoopWork
from ckptpipe.pyx.staging cimport Lease

__all__ = ["DecodeError", "DecoderUnavailableError", "DeviceCodec", "EncodePlan", "Encoded",
           "ScratchTooSmallError", "StoredMismatch", "live_codecs"]

SCRATCH_BYTES = 512 << 20
LANES = 3
cdef int MAX_LANES = 8
cdef int ENGINE_DEFLATE = 1
cdef dict ENGINE_FORMATS = {2: 1, 6: 2, 5: 4}  # id of FORMAT.md: bit of the engine's mask
cdef int ZSTD = 1, ANS = 3
cdef Py_ssize_t CHUNK_MOST = 64 << 20
ENGINE, NVCOMP = "decompression-engine", "nvcomp-cuda"
SCRATCH_CURE = "let codecs have less (--gpu-scratch), or free memory on that GPU (see nvidia-smi)"
cdef int live = 0


cdef class DeviceCodec(LoopWork):
    """The codecs of one GPU; made inside the running loop that it reports to, by `create`.

    The device range of a chunk must not change until its future is done. A chunk in flight holds its lease
    until the GPU is done with it, also when its future was cancelled; a cancelled one that had not begun
    never does.
    """

    def __cinit__(self):
        self.raw = NULL

    def __init__(self):
        raise TypeError("a DeviceCodec comes from create()")

    @classmethod
    async def create(cls, int device, size_t context, *, scratch_bytes=SCRATCH_BYTES, nvcomp, chunk_bytes,
                     str decoder="auto", size_t stream=0, int lanes=0, int links=0):
        """A codec of GPU ``device``.

        ``context``: its CUcontext, which the caller holds until `aclose`. ``scratch_bytes``: device memory
        for all that does not fit elsewhere, allocated here, once. ``nvcomp``: from `nvcomp.load`; without
        it nothing is encoded, and only the decompression engine decodes. ``chunk_bytes``: the longest
        chunk. ``decoder``: "auto" takes the decompression engine for what it can do and nvCOMP for the
        rest; "decompression-engine" or "nvcomp-cuda" forces one. ``stream``: a CUstream of that context
        whose earlier work comes first. ``lanes``: batches that are worked on at a time; ``links``: copies to
        the host that are under way at a time; 0 for as many as are good.

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
        if not 0 <= links <= CK_LINKS:
            raise ValueError(f"links is 0 (chosen here) to {CK_LINKS}, not {links}")
        if decoder not in ("auto", ENGINE, NVCOMP):
            raise ValueError(f"decoder is auto, {ENGINE} or {NVCOMP}, not {decoder!r}")
        made.belong()
        made.driver = loaded()
        made.nvcomp = nvcomp
        made.device = device
        made.context = context
        made.scratch_bytes = scratch_bytes
        made.chunk_bytes = chunk_bytes
        made.lanes = lanes or max(1, min(LANES, scratch_bytes // (5 * chunk_bytes + (1 << 20))))
        made.links = links or CK_LINKS
        made.plans = {}
        opening = made.loop.run_in_executor(None, made._open, decoder, stream)
        try:
            await asyncio.shield(opening)
        except asyncio.CancelledError:
            await asyncio.wait([opening])
            if opening.exception() is None:
                made.stop_now()
            raise
        made.watch(ck_codec_eventfd(made.raw))
        return made

    def _open(self, str decoder, size_t stream):
        """Blocking: kernels are compiled, memory is allocated, threads start."""
        global live
        cdef ck_codec_options options
        cdef const char* call = NULL
        cdef int error, mask = engine_mask(self.driver, self.device)
        cdef int longest = engine_longest(self.driver, self.device)
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
        options.links = self.links
        options.engine_mask = 0 if self.why else mask
        options.engine_longest = longest
        options.engine_forced = decoder == ENGINE
        with nogil:
            error = ck_codec_open(&self.raw, &options, &call)
        if error > 0:
            raise self.driver.failure(
                error, call.decode(),
                f"codec of GPU {self.device} with {mib_text(self.scratch_bytes)} of scratch memory",
                SCRATCH_CURE if error == 2 else "",
            )
        if error < 0:
            raise CkptpipeError(
                f"cannot start a codec of GPU {self.device}: {call.decode()}: {os.strerror(-error)}",
                cure="raise the limits on processes and files (ulimit -u, ulimit -n, pids cgroup)",
            )
        live += 1
        if not self.why and not ck_codec_engine_memory(self.raw):
            self.why = "the driver says that memory of cuMemAlloc is nothing for the decompression engine"
            if decoder == ENGINE:
                self.stop_now()
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
    def running(self):
        """Chunks that lanes have begun."""
        return ck_codec_running(self.raw) if self.raw != NULL else 0

    @property
    def batches(self):
        """Batches that lanes have begun: the chunks of one are worked on side by side."""
        return ck_codec_batches(self.raw) if self.raw != NULL else 0

    # -- what callers ask for ----------------------------------------------------------------------------

    async def prepare(self, plan):
        """Check a plan, off the loop: ValueError, ScratchTooSmallError where not even one chunk fits."""
        self.check_usable()
        self.plans[plan, False] = await asyncio.to_thread(self._measured, plan)

    def encode(self, Lease lease not None, Py_ssize_t nbytes, size_t device_address, plan):
        """Store ``nbytes`` of device memory in the lease, encoded; a future of Encoded.

        The lease has room for the raw bytes: a chunk that does not shrink by 5 % is copied as it is, as is a
        plane of one.
        """
        self.check_usable()
        check_range(device_address, nbytes, self.chunk_bytes)
        return self.submit(encoding(self.plan_of(plan, nbytes & 1), lease, nbytes, device_address))

    def decode(self, Lease lease not None, Py_ssize_t stored_bytes, uint32_t stored_crc32c,
               Py_ssize_t raw_bytes, int transform, planes, size_t device_address):
        """Decode the lease's first ``stored_bytes`` to device memory; a future of the CRC32C of what came
        out.

        ``planes`` as in Encoded (or PlaneRecords). The future has StoredMismatch where the stored bytes have
        another checksum than ``stored_crc32c`` (no decoder has seen them), DecodeError where a block is not
        what it must be: the destination's contents are then undefined.
        """
        self.check_usable()
        check_range(device_address, raw_bytes, self.chunk_bytes)
        return self.submit(decoding(lease, 0, stored_bytes, stored_crc32c, raw_bytes, transform,
                                    tuple(planes), device_address))

    def decode_loaded(self, size_t loaded_address, Py_ssize_t stored_bytes, uint32_t stored_crc32c,
                      Py_ssize_t raw_bytes, int transform, planes, size_t device_address):
        """As `decode`, of stored bytes that lie on the device already, from a multiple of 256 on."""
        self.check_usable()
        check_range(device_address, raw_bytes, self.chunk_bytes)
        check_range(loaded_address, stored_bytes, self.chunk_bytes)
        if loaded_address % 256:
            raise ValueError(f"stored bytes at {loaded_address:#x}, which is no multiple of 256")
        return self.submit(decoding(None, loaded_address, stored_bytes, stored_crc32c, raw_bytes, transform,
                                    tuple(planes), device_address))

    # -- from the call to the future ---------------------------------------------------------------------

    cdef Plan plan_of(self, object plan, bint odd):
        # ANS of 2-byte elements takes no odd number of bytes: such a chunk, a stream's last, is coded as u8.
        odd = odd and plan.codec_id == ANS and plan.ans_type == 1
        found = self.plans.get((plan, odd))
        if found is None:
            found = self.plans[plan, odd] = self.measured(plan, odd)
        return found

    def _measured(self, plan):
        return self.measured(plan, False)

    cdef Plan measured(self, object plan, bint odd):
        cdef Plan made
        cdef const char* call = NULL
        cdef int error = 0, failure
        cdef cu_context popped
        if self.nvcomp is None:
            raise DecoderUnavailableError("a GPU encodes with nvCOMP, and there is none",
                                          cure="pip install 'ckptpipe[gpu]'")
        if plan.codec_id not in self.encodes:
            raise ValueError(f"codec {plan.codec_id} is none that a GPU writes")
        made = new_plan(plan, odd)
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

    cdef object submit(self, Job job):
        job.raw.token = <void*>job
        job.future = self.loop.create_future()
        job.future.add_done_callback(job._abandon)
        Py_INCREF(job)
        job.flying = True
        self.accepted += 1
        future = job.future  # it may be answered before this returns
        ck_codec_submit(self.raw, &job.raw)
        return future

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
        if job.lease is not None:
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
            future.remove_done_callback(job._abandon)  # or it would be one more call of the loop's
            if not good:
                future.set_exception(failure_of(job, self.driver, self.nvcomp, self.device,
                                                self.scratch_bytes, self.lanes))
            elif job.raw.kind == CK_JOB_ENCODE:
                future.set_result(encoded_of(&job.raw))
            else:
                future.set_result(job.raw.raw_crc)
        if heard and self.accepted == 0 and self.waiters:
            self.tell_idle()
        return 0

    # -- the end -----------------------------------------------------------------------------------------

    cdef str noun(self):
        return "device codec"

    cdef bint is_gone(self) noexcept:
        return self.raw == NULL

    cdef int stop(self) except -1:
        ck_codec_stop(self.raw)
        return 0

    cdef bint has_ended(self) noexcept:
        return ck_codec_ended(self.raw) != 0

    cdef int join(self) except -1:
        with nogil:
            ck_codec_join(self.raw)
        return 0

    cdef int free(self, bint forked) except -1:
        global live
        cdef ck_codec* codec = self.raw
        self.raw = NULL
        live -= 1
        if forked:
            ck_codec_abandon(codec)
        else:
            ck_codec_free(codec)
        return 0

    def __repr__(self):
        if self.raw == NULL:
            return "<DeviceCodec closed>"
        scratch = mib_text(self.scratch_bytes)
        return f"<DeviceCodec GPU {self.device}, {self.lanes} lanes, {scratch}, {self.accepted} in flight>"


cdef int check_range(size_t address, Py_ssize_t nbytes, Py_ssize_t most) except -1:
    if not 1 <= nbytes <= most:
        raise ValueError(f"a chunk has 1 to {most} bytes here, not {nbytes}")
    if address == 0 or address > (<size_t>-1) - <size_t>nbytes:
        raise ValueError(f"no device memory range: {nbytes} bytes at {address:#x}")
    return 0


cdef str mib_text(object nbytes):
    return f"{-(-nbytes // (1 << 20))} MiB"


def live_codecs():
    """Codecs that hold threads, streams and scratch memory in this process now."""
    return live
