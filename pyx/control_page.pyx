# kernels: crc32c crc32c_native
"""The control page of a launched process, as the controller maps it.

The layout, who writes what and the order of release are in preload/control.h. What is read here was written
by another process: numbers are checked before they are used, and memory that could shrink is refused.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.errno cimport errno
from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from typing import NamedTuple

from ckptpipe.pyx.errors import CkptpipeError, io_error

cdef extern from "string.h" nogil:
    size_t strnlen(const char* text, size_t most)

cdef extern from "control.h" nogil:
    const uint64_t CKPT_CONTROL_MAGIC
    const uint32_t CKPT_CONTROL_VERSION
    const uint64_t CKPT_PIECE_BYTES
    const uint64_t CKPT_PIECES_OFFSET
    const uint64_t CKPT_CONTROL_BYTES
    const uint32_t CKPT_IMAGES
    const uint32_t CKPT_LATE
    const uint32_t CKPT_PIECES
    const uint32_t CKPT_TEXT
    const uint32_t CKPT_PHASE_FREE
    const uint32_t CKPT_GATE_OPEN
    const uint32_t CKPT_GATE_CLOSED
    const uint32_t CKPT_GATE_FAILED
    const uint32_t CKPT_IMAGE_SETTLED
    const uint32_t CKPT_IMAGE_MOVED
    const uint32_t CKPT_IMAGE_SUMMED

    struct ckpt_image:
        uint64_t generation, address, offset, bytes
        uint64_t map_ns

    struct ckpt_late:
        uint64_t generation, start, bytes, serial

    struct ckpt_control:
        uint64_t magic
        uint32_t version, header_bytes
        uint64_t control_bytes
        int32_t pid
        uint32_t hook
        uint64_t hooked
        char* library
        uint32_t pool_pages
        uint64_t pool_bytes, page_bytes
        int32_t numa_node
        uint32_t workers
        char* stores
        uint64_t budget_bytes, budget_used
        uint64_t fallback_bytes
        uint32_t fallback_reason, pool_reason
        char* fallback_text
        char* pool_text
        char* failure
        ckpt_late* late
        ckpt_image* image

cdef extern from "control_atomics.h" nogil:
    uint32_t ckpt_load32(const void* word)
    uint32_t ckpt_image_phase(const ckpt_image* image)
    uint32_t ckpt_image_gate(const ckpt_image* image)
    uint64_t ckpt_image_ready(const ckpt_image* image)
    uint64_t ckpt_image_consumed(const ckpt_image* image)
    uint64_t ckpt_image_window(const ckpt_image* image)
    uint32_t ckpt_image_readers(const ckpt_image* image)
    uint32_t ckpt_image_waiting(const ckpt_image* image)
    uint64_t ckpt_image_base(const ckpt_image* image)
    uint64_t ckpt_image_watermark(const ckpt_image* image)
    uint64_t ckpt_image_high(const ckpt_image* image)
    uint64_t ckpt_image_written(const ckpt_image* image)
    uint64_t ckpt_image_read(const ckpt_image* image)
    uint32_t ckpt_image_flags(const ckpt_image* image)
    uint32_t ckpt_image_late_count(const ckpt_image* image)
    uint32_t ckpt_image_gate_waits(const ckpt_image* image)
    void ckpt_set_gate(ckpt_control* page, ckpt_image* image, uint32_t gate)
    void ckpt_set_window(ckpt_image* image, uint64_t window)
    void ckpt_set_base(ckpt_image* image, uint64_t base)
    void ckpt_set_ready(ckpt_control* page, ckpt_image* image, uint64_t ready)
    uint32_t ckpt_events(const ckpt_control* page)
    void ckpt_wait_events(ckpt_control* page, uint32_t seen, unsigned timeout_ms)
    void ckpt_set_deadlines(ckpt_control* page, uint32_t deadline_ms, uint32_t orphan_ms)
    void ckpt_set_holes(ckpt_control* page)
    uint32_t ckpt_pool_state(const ckpt_control* page)
    uint64_t ckpt_pool_warm(const ckpt_control* page)
    uint64_t ckpt_pool_huge(const ckpt_control* page)
    uint64_t ckpt_generation(const ckpt_control* page)
    uint32_t ckpt_feeders(const ckpt_control* page)
    uint32_t ckpt_armed(const ckpt_control* page)
    uint32_t ckpt_waiters(const ckpt_control* page)
    uint64_t ckpt_served(const ckpt_control* page)
    uint64_t ckpt_returned(const ckpt_control* page)
    uint64_t ckpt_fallbacks(const ckpt_control* page)
    uint64_t ckpt_late_serial(const ckpt_control* page)
    uint32_t ckpt_ended(const ckpt_control* page)
    int ckpt_sealed_bytes(int fd, uint64_t* nbytes)
    ckpt_control* ckpt_map_page(int fd)
    void ckpt_unmap_page(ckpt_control* page)

cdef extern from "block_sums.h" nogil:
    void ckpt_block_sums_prepare()
    int ckpt_block_sums(
        const ckpt_control* page, uint64_t start, uint64_t nbytes, uint64_t end, uint32_t* crc, int* zero)

ckpt_block_sums_prepare()

_HOOKS = ("none", "relocations", "symbols")
_POOL_STATES = ("absent", "warming", "ready", "gone")
_PAGES = ("auto", "small", "thp", "hugetlb")
_PHASES = ("free", "writing", "reading")
_GATES = ("open", "closed", "failed")
_REASONS = ("", "no pool", "too small", "budget", "memory", "place", "system", "not expected", "hook")


class ControlPageError(CkptpipeError):
    """What a process handed over is no control page of this version, or not sealed."""


class PoolState(NamedTuple):
    pid: int
    hook: str
    hooked: int
    library: str
    state: str
    nbytes: int
    warm: int
    huge: int
    page_bytes: int
    pages: str
    numa_node: int
    workers: int
    stores: str
    budget_bytes: int
    budget_used: int
    generation: int
    feeders: int
    armed: int
    gate_waiters: int
    served: int
    returned: int
    fallbacks: int
    fallback_bytes: int
    fallback_reason: str
    fallback_text: str
    reason: str
    text: str
    failure: str
    ended: bool
    late_serial: int


class ImageState(NamedTuple):
    slot: int
    generation: int
    phase: str
    gate: str
    address: int
    offset: int
    nbytes: int
    watermark: int
    high: int
    ready: int
    written: int
    read: int
    settled: bool
    moved: bool
    late_count: int
    gate_waits: int
    map_seconds: float


class LateRange(NamedTuple):
    serial: int
    generation: int
    start: int
    nbytes: int


def sealed_bytes(int fd):
    """Size of a memfd that can no longer shrink or grow; ControlPageError for any other descriptor: memory
    that its owner can take away would end its reader with SIGBUS."""
    cdef uint64_t nbytes = 0
    if ckpt_sealed_bytes(fd, &nbytes) != 0:
        raise ControlPageError(
            "the memory that the process handed over is not sealed against resizing",
            cure="start it again with ckptpipe launch of this version",
        )
    return nbytes


cdef str _text(const char* at, size_t room):
    return at[:strnlen(at, room)].decode("utf-8", "replace")


cdef object _word(tuple words, uint32_t i):
    return words[i] if i < <size_t>len(words) else f"unknown ({i})"


cdef class ControlPage:
    """Maps ``fd``, which stays the caller's. Not for two threads, but `wait` may run in its own."""

    cdef ckpt_control* _page
    cdef int _waiting

    def __cinit__(self, int fd):
        self._page = NULL
        if sealed_bytes(fd) != CKPT_CONTROL_BYTES:
            raise ControlPageError("the process handed over something else than a control page")
        self._page = ckpt_map_page(fd)
        if self._page == NULL:
            raise io_error(errno, "mmap", "control page")
        if (self._page.magic != CKPT_CONTROL_MAGIC or self._page.version != CKPT_CONTROL_VERSION
                or self._page.control_bytes != CKPT_CONTROL_BYTES):
            ckpt_unmap_page(self._page)
            self._page = NULL
            raise ControlPageError(
                "the process runs the capture library of another version",
                cure="start it again with ckptpipe launch of this version",
            )

    def __dealloc__(self):
        if self._page != NULL:
            ckpt_unmap_page(self._page)

    def close(self):
        """Idempotent. Never while `wait` runs."""
        if self._waiting:
            raise RuntimeError("the control page is being waited on")
        if self._page != NULL:
            ckpt_unmap_page(self._page)
            self._page = NULL

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    cdef ckpt_control* _open(self) except NULL:
        if self._page == NULL:
            raise ValueError("the control page is closed")
        return self._page

    cdef ckpt_image* _image(self, uint32_t slot, uint64_t generation) except NULL:
        cdef ckpt_control* page = self._open()
        if slot >= CKPT_IMAGES:
            raise IndexError(f"no image {slot}")
        cdef ckpt_image* image = &page.image[slot]
        if image.generation != generation or ckpt_image_phase(image) == CKPT_PHASE_FREE:
            raise LookupError(f"image {slot} of generation {generation} is not there any more")
        return image

    # ---- what the process says ----

    def pool(self):
        """PoolState: the pool, the library, what happened so far."""
        cdef ckpt_control* page = self._open()
        return PoolState(
            page.pid, _word(_HOOKS, page.hook), page.hooked, _text(page.library, CKPT_TEXT),
            _word(_POOL_STATES, ckpt_pool_state(page)), page.pool_bytes, ckpt_pool_warm(page),
            ckpt_pool_huge(page), page.page_bytes, _word(_PAGES, page.pool_pages), page.numa_node,
            page.workers, _text(page.stores, 16),
            page.budget_bytes, page.budget_used, ckpt_generation(page), ckpt_feeders(page), ckpt_armed(page),
            ckpt_waiters(page), ckpt_served(page), ckpt_returned(page), ckpt_fallbacks(page),
            page.fallback_bytes,
            _word(_REASONS, page.fallback_reason), _text(page.fallback_text, CKPT_TEXT),
            _word(_REASONS, page.pool_reason), _text(page.pool_text, CKPT_TEXT),
            _text(page.failure, CKPT_TEXT),
            ckpt_ended(page) != 0, ckpt_late_serial(page),
        )

    def images(self):
        """ImageState of every image that is mapped. ControlPageError for one outside of the pool."""
        cdef ckpt_control* page = self._open()
        cdef ckpt_image image_copy
        cdef ckpt_image* image
        cdef uint32_t i, phase, flags
        found = []
        for i in range(CKPT_IMAGES):
            image = &page.image[i]
            phase = ckpt_image_phase(image)
            if phase == CKPT_PHASE_FREE:
                continue
            memcpy(&image_copy, image, sizeof(image_copy))
            if (image_copy.offset % CKPT_PIECE_BYTES or image_copy.offset > page.pool_bytes
                    or image_copy.bytes > page.pool_bytes - image_copy.offset):
                raise ControlPageError(f"image {i} lies outside of the pool")
            flags = ckpt_image_flags(image)
            found.append(ImageState(
                i, image_copy.generation, _word(_PHASES, phase), _word(_GATES, ckpt_image_gate(image)),
                image_copy.address, image_copy.offset, image_copy.bytes,
                min(ckpt_image_watermark(image), image_copy.bytes),
                min(ckpt_image_high(image), image_copy.bytes), ckpt_image_ready(image),
                ckpt_image_written(image), ckpt_image_read(image),
                (flags & CKPT_IMAGE_SETTLED) != 0, (flags & CKPT_IMAGE_MOVED) != 0,
                ckpt_image_late_count(image), ckpt_image_gate_waits(image), image_copy.map_ns / 1e9,
            ))
        return found

    def watermark(self, uint32_t slot, uint64_t generation):
        """Bytes of the image that are written without a gap. LookupError once the image is gone."""
        cdef ckpt_image* image = self._image(slot, generation)
        return min(ckpt_image_watermark(image), image.bytes)

    def pieces(self, uint64_t first, uint64_t count):
        """``count`` pairs (started, finished) of 32-bit numbers, native order, from piece ``first``.

        Each number is read at once; take the bytes of a piece between two calls that answer alike for it.
        """
        cdef ckpt_control* page = self._open()
        if first > CKPT_PIECES or count > CKPT_PIECES - first:
            raise IndexError("no such pieces")
        cdef bytes result = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>(count * 8))
        cdef uint32_t* target = <uint32_t*><char*>result
        cdef const uint32_t* source = <const uint32_t*>(<const char*>page + CKPT_PIECES_OFFSET) + first * 2
        cdef uint64_t i
        with nogil:
            for i in range(count):
                # "finished" first: a write that begins between the two is seen as begun, never as over.
                target[2 * i + 1] = ckpt_load32(&source[2 * i + 1])
                target[2 * i] = ckpt_load32(&source[2 * i])
        return result

    def summed(self, uint32_t slot, uint64_t generation, uint64_t start, uint64_t nbytes):
        """(CRC32C, whether all is zero) of a range of the image, as its driver wrote it; None where the
        library does not know that, or the image is gone.

        Of what the driver writes later it says nothing: note `pieces` before, and compare them at the end."""
        cdef ckpt_control* page = self._open()
        cdef ckpt_image* image
        cdef uint64_t offset, end
        cdef uint32_t crc = 0
        cdef int zero = 0
        try:
            image = self._image(slot, generation)
        except LookupError:
            return None
        offset, end = image.offset, image.bytes
        if not ckpt_image_flags(image) & CKPT_IMAGE_SUMMED or not nbytes:
            return None
        if start > end or nbytes > end - start:
            raise IndexError("not in the image")
        if offset > CKPT_PIECES * CKPT_PIECE_BYTES or end > CKPT_PIECES * CKPT_PIECE_BYTES - offset:
            raise ControlPageError(f"image {slot} lies outside of the pool")
        if not ckpt_block_sums(page, offset + start, nbytes, offset + end, &crc, &zero):
            return None
        return crc, zero != 0

    def late(self, uint64_t after=0):
        """Late ranges with a serial above ``after``, oldest first, as far back as the list goes."""
        cdef ckpt_control* page = self._open()
        cdef uint64_t last = ckpt_late_serial(page), serial
        cdef ckpt_late entry
        found = []
        serial = max(after, last - CKPT_LATE if last > CKPT_LATE else 0)
        while serial < last:
            serial += 1
            entry = page.late[(serial - 1) % CKPT_LATE]
            if entry.serial == serial:
                found.append(LateRange(serial, entry.generation, entry.start, entry.bytes))
        return found

    @property
    def events(self):
        """Goes up with every change; the number that `wait` wants."""
        return ckpt_events(self._open())

    def wait(self, uint32_t seen, double timeout):
        """Sleep, without the GIL, until `events` is not ``seen``, at most ``timeout`` seconds; returns it."""
        cdef ckpt_control* page = self._open()
        cdef unsigned milliseconds = <unsigned>min(max(timeout * 1000, 1), 3600000)
        self._waiting += 1
        try:
            with nogil:
                ckpt_wait_events(page, seen, milliseconds)
        finally:
            self._waiting -= 1
        return ckpt_events(page)

    # ---- what the controller says ----

    def deadlines(self, *, double still, double orphaned):
        """Seconds that a driver waits at a gate: while ``ready`` stands still, and once nobody feeds it."""
        ckpt_set_deadlines(
            self._open(), <uint32_t>min(max(still * 1000, 1), 4e9),
            <uint32_t>min(max(orphaned * 1000, 1), 4e9),
        )

    def close_gate(self, uint32_t slot, uint64_t generation, *, uint64_t window=0):
        """From now on the driver may read nothing of the image, until `release`.

        ``window``: it is fed through so many bytes at the start of its place, over and over (`advance`)."""
        cdef ckpt_image* image = self._image(slot, generation)
        if window > image.bytes:
            raise ValueError(f"a window of {window} bytes for an image of {image.bytes}")
        ckpt_set_ready(self._page, image, 0)
        ckpt_set_base(image, 0)
        ckpt_set_window(image, window)
        ckpt_set_gate(self._page, image, CKPT_GATE_CLOSED)

    def release(self, uint32_t slot, uint64_t generation, uint64_t ready):
        """[0, ready) of the image is in the pool and verified."""
        cdef ckpt_image* image = self._image(slot, generation)
        if ready > image.bytes or ready < ckpt_image_ready(image):
            raise ValueError(f"cannot release up to {ready} of {image.bytes} bytes")
        ckpt_set_ready(self._page, image, ready)

    def consumed(self, uint32_t slot, uint64_t generation):
        """Of an image with a window: no copy under way needs bytes below this; a later one may."""
        return ckpt_image_consumed(self._image(slot, generation))

    def hungry(self, uint32_t slot, uint64_t generation):
        """Whether the driver waits for bytes of the image, or has read none yet."""
        cdef ckpt_image* image = self._image(slot, generation)
        return ckpt_image_waiting(image) > 0 or ckpt_image_read(image) == 0

    def advance(self, uint32_t slot, uint64_t generation, uint64_t base):
        """Of an image with a window: what is below ``base`` may be overwritten when this returns True.

        When False, a copy that needs it is under way: ask again, and `behind`."""
        cdef ckpt_image* image = self._image(slot, generation)
        if base > ckpt_image_ready(image):
            raise ValueError(f"cannot advance to {base}: it is not there yet")
        if base > ckpt_image_base(image):
            ckpt_set_base(image, base)
        return ckpt_image_consumed(image) >= base

    def behind(self, uint32_t slot, uint64_t generation):
        """Of an image with a window: where the driver is that went back to bytes which are not there any
        more, and waits; None where it did not. Then nothing reads the window, until `rewind`."""
        cdef ckpt_image* image = self._image(slot, generation)
        cdef uint32_t readers = ckpt_image_readers(image)
        cdef uint64_t consumed = ckpt_image_consumed(image)
        if readers and ckpt_image_waiting(image) == readers and consumed < ckpt_image_base(image):
            return consumed
        return None

    def rewind(self, uint32_t slot, uint64_t generation, uint64_t start):
        """Of an image with a window whose driver is `behind`: what comes next is at ``start``."""
        cdef ckpt_image* image = self._image(slot, generation)
        if start > ckpt_image_base(image):  # at no time may [base, ready) hold what is not there
            ckpt_set_base(image, start)
        ckpt_set_ready(self._page, image, start)
        ckpt_set_base(image, start)

    def open_gate(self, uint32_t slot, uint64_t generation):
        """All of the image is good, and lies in the pool from end to end."""
        cdef ckpt_image* image = self._image(slot, generation)
        if ckpt_image_window(image):
            raise ValueError("an image with a window is never there as a whole")
        ckpt_set_gate(self._page, image, CKPT_GATE_OPEN)

    def fail_gate(self, uint32_t slot, uint64_t generation, str why):
        """What is not released will never be good: a driver that wants it ends its process with ``why``."""
        cdef ckpt_image* image = self._image(slot, generation)
        cdef bytes text = why.encode("utf-8", "replace")[:CKPT_TEXT - 1]
        memset(self._page.failure, 0, CKPT_TEXT)
        memcpy(self._page.failure, <const char*>text, len(text))
        ckpt_set_gate(self._page, image, CKPT_GATE_FAILED)

    def punched(self):
        """Holes are about to be punched into the pool: fill it again before the next image."""
        ckpt_set_holes(self._open())
