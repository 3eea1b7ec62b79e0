"""Files and directories as a source: one stream a file, read straight into the staging ring."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptpipe.pipeline.chunk import Chunk, FilePlace, released_on_error
from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.direct_io import DIRECT_MIN, take_direct
from ckptpipe.pipeline.edge import Outlet
from ckptpipe.pipeline.errors import SourceChanged, SourceError, UsageError
from ckptpipe.pipeline.image.entries import TreeEntry
from ckptpipe.pipeline.image.names import check_path, escape, file_stream
from ckptpipe.pipeline.parallel import in_parallel
from ckptpipe.pipeline.sources.abc import Source, Stream, fillers, scanned_chunk, zero_chunk
from ckptpipe.pyx.files import seek_data_ranges
from ckptpipe.storage_backends.filesystems import cached_share
from ckptpipe.storage_backends.held_file import HeldFile
from ckptpipe.storage_backends.open_limit import limit_cure, open_error, room_for_files
from ckptpipe.storage_backends.shielded import in_thread

CACHED_MAX = 0.25  # a file of which a larger share is cached is read through the cache
BY_PLACE_CACHED = 0.99  # share in the cache from which a file is not read where sinks can take it from there
BY_PLACE_MIN = 1 << 20  # bytes of a chunk; smaller ones are gathered in memory


@dataclass(slots=True)
class _Found:
    """A file as the walk saw it."""

    path: str
    stream: int
    seen: os.stat_result


@dataclass(slots=True)
class _Descriptor:
    """Of one file, closed when nobody holds it any more. ``placed``: of the files whose chunks go on by their place,
    those that are open."""

    path: str
    descriptor: int
    size: int
    placed: set[int]
    holds: int = 0

    def let_go(self) -> None:
        self.holds -= 1
        if self.holds == 0:
            self.placed.discard(self.descriptor)
            os.close(self.descriptor)


@dataclass(slots=True)
class _Open:
    """A file being read. ``left``: chunks not yet emitted; ``holes``: chunk numbers known to be zeros; ``by_place``:
    chunks are not read, where readers take that."""

    found: _Found
    hold: HeldFile
    direct: bool
    chunks: int
    left: int
    by_place: bool = False
    holes: set[int] = field(default_factory=set)
    next: int = 0


class FilesSource(Source):
    """``paths``: files and directories. Each regular file becomes the stream ``files/<path>``.

    A single directory is saved as its contents; of several paths each keeps its own last component. Modes,
    directories and symbolic links are kept (links inside a directory are not followed; a path that is itself
    a link is). CRIU image directories and gVisor checkpoint directories are directories like any other.
    A file that changes while it is read fails the save: half of a checkpoint is none.
    """

    kind = "files"

    def __init__(self, paths: Sequence[str | os.PathLike[str]]) -> None:
        self.paths = [os.fspath(path) for path in paths]
        if not self.paths:
            raise UsageError("no path to save", cure="name at least one file or directory")
        if "" in self.paths:
            raise UsageError("a path to save is empty", cure="name a file or directory: . is the current one")
        self.streams = []
        self.tree = []
        self._found: list[_Found] = []
        self._skipped: list[str] = []
        self._opened: list[_Open] = []
        self._direct_files = 0
        self._placed: set[int] = set()  # descriptors of files whose chunks go on by their place
        self._most_placed = 0

    async def open(self, context: GraphContext) -> None:
        self._context = context
        await in_thread(self._scan)
        self.total_bytes = sum(stream.nbytes for stream in self.streams)
        self._most_placed = room_for_files()
        self._work = iter(self._found)
        self._current: _Open | None = None
        self._lock = asyncio.Lock()

    # -- the walk ------------------------------------------------------------------------------------

    def _scan(self) -> None:
        alone = len(self.paths) == 1
        names: dict[str, str] = {}
        for path in self.paths:
            try:
                seen = os.stat(path)
            except (OSError, ValueError) as error:  # ValueError: a NUL byte
                raise SourceError(
                    f"{path} cannot be saved: {getattr(error, 'strerror', error)}",
                    cure="check the path and its permissions",
                ) from error
            if stat.S_ISDIR(seen.st_mode):
                prefix = "" if alone else Path(path).resolve().name
                if not alone and not prefix:
                    raise UsageError(f"{path} has no name of its own", cure="save it alone")
                if prefix:
                    self._claim(names, prefix, path)
                    self.tree.append(_directory(_spelled(prefix, path), seen))
                self._walk(path, prefix)
            elif stat.S_ISREG(seen.st_mode):
                name = Path(path).name
                self._claim(names, name, path)
                self._add(path, name, seen)
            else:
                raise SourceError(
                    f"{path} is {_kind_of(seen.st_mode)}",
                    cure="files and directories can be saved; pipe others in with -",
                )

    def _claim(self, names: dict[str, str], name: str, path: str) -> None:
        if name in names:
            raise UsageError(
                f"{names[name]} and {path} would both be called {name}",
                cure="save them one by one, or from a common parent directory",
            )
        names[name] = path

    def _walk(self, directory: str, prefix: str) -> None:
        """Everything below, directory by directory; trees can be deeper than Python's stack."""
        waiting = [(directory, prefix)]
        while waiting:
            directory, prefix = waiting.pop()
            below = []
            for entry in _entries(directory):
                name = os.path.join(prefix, entry.name)
                if self._take(entry, name):
                    below.append((entry.path, name))
            waiting.extend(reversed(below))

    def _take(self, entry: os.DirEntry[str], name: str) -> bool:
        """True where the entry is a directory, to be walked."""
        try:
            seen = entry.stat(follow_symlinks=False)
            if stat.S_ISLNK(seen.st_mode):
                target = escape(os.fsencode(os.readlink(entry.path)))
                self.tree.append(
                    TreeEntry(_spelled(name, entry.path), "symlink", None, target, seen.st_mtime_ns)
                )
                return False
        except FileNotFoundError as error:
            raise SourceChanged(
                f"{entry.path} disappeared while its directory was read: {error.strerror}",
                cure="save when nothing writes there",
            ) from error
        except OSError as error:
            raise SourceError(
                f"{entry.path} cannot be read: {error.strerror}",
                cure=limit_cure(error.errno or 0) or "check its permissions",
            ) from error
        if stat.S_ISDIR(seen.st_mode):
            self.tree.append(_directory(_spelled(name, entry.path), seen))
            return True
        if stat.S_ISREG(seen.st_mode):
            self._add(entry.path, name, seen)
        else:
            self._skipped.append(f"{entry.path} is {_kind_of(seen.st_mode)}: not saved")
        return False

    def _add(self, path: str, name: str, seen: os.stat_result) -> None:
        if not os.access(path, os.R_OK):
            raise SourceError(
                f"{path} cannot be read: {os.strerror(errno.EACCES)}", cure="check its permissions"
            )
        try:
            stream = file_stream(name)
        except ValueError as error:
            raise SourceError(f"{path} cannot be saved: {error}") from error
        sparse = seen.st_blocks * 512 < seen.st_size
        self._found.append(_Found(path, len(self.streams), seen))
        self.streams.append(Stream(stream, "file", seen.st_size, _mode(seen), seen.st_mtime_ns, sparse))

    # -- reading -------------------------------------------------------------------------------------

    async def run(self, outlet: Outlet) -> None:
        async def fill() -> None:
            while not outlet.dropped:
                work = await self._next()
                if work is None:
                    return
                file, number = work
                await self._emit(file, number, outlet)
                file.left -= 1
                if file.left == 0:
                    await self._close(file)

        await in_parallel(fillers(self._context), fill)

    async def _emit(self, file: _Open, number: int, outlet: Outlet) -> None:
        step = self._context.chunk_bytes
        stream, size = file.found.stream, file.found.seen.st_size
        nbytes = min(step, size - number * step)
        if number in file.holes:
            await outlet.emit(zero_chunk(stream, number, nbytes))
            return
        if file.by_place and nbytes == step and outlet.takes_places:
            await self._emit_place(file, number, outlet)
            return
        # A direct read must ask for whole pages; at the end of the file the kernel answers with what there is.
        want = -(-nbytes // 4096) * 4096 if file.direct else nbytes
        with released_on_error(await self._context.ring.acquire()) as slot:
            got = await self._context.io.read(file.hold.fileno(), slot, want, number * step, file.found.path)
            if got < nbytes:
                raise _shrank(file.found, number * step + got)
            chunk = await scanned_chunk(self._context, slot, stream, number, nbytes)
        await outlet.emit(chunk)

    async def _emit_place(self, file: _Open, number: int, outlet: Outlet) -> None:
        """A chunk that stays in the page cache: its sink sends it from there. Only its checksum is taken."""
        stream, step = file.found.stream, self._context.chunk_bytes
        offset = number * step
        try:
            scan = await self._context.workers.scan_file(file.hold, offset, step)
        except OSError as error:
            if error.errno != errno.ENODATA:
                raise
            size = (await in_thread(os.fstat, file.hold.fileno())).st_size
            raise _shrank(file.found, size) from error
        if scan.zero:
            await outlet.emit(zero_chunk(stream, number, step))
            return
        chunk = Chunk(stream, number, step, scan.crc32c, None)
        chunk.place = FilePlace(file.hold.share(), offset)
        chunk.stored_bytes, chunk.stored_crc32c = step, scan.crc32c
        await outlet.emit(chunk)

    async def _next(self) -> tuple[_Open, int] | None:
        """The next chunk to read: of the file that is open, or of the next one."""
        async with self._lock:
            while self._current is None:
                found = next(self._work, None)
                if found is None:
                    return None
                file = await in_thread(self._open_file, found, undo=lambda opened: opened.hold.release())
                if file.chunks == 0:
                    self._opened.append(file)
                    await self._close(file)
                    continue
                self._opened.append(file)
                self._current = file
            file, number = self._current, self._current.next
            file.next += 1
            if file.next == file.chunks:
                self._current = None
            return file, number

    def _open_file(self, found: _Found) -> _Open:
        try:
            fd = os.open(found.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY)
        except FileNotFoundError as error:
            raise SourceChanged(
                f"{found.path} disappeared before it was read", cure="save when nothing writes there"
            ) from error
        except OSError as error:
            raise open_error(error, "open", found.path) from error
        try:
            self._check_unchanged(fd, found)
            if found.seen.st_size == 0 and os.pread(fd, 1, 0):
                raise SourceError(
                    f"{found.path} says that it is empty, but has content (as files of /proc do)",
                    cure="pipe it in with -, or copy it to a disk first",
                )
            size, step = found.seen.st_size, self._context.chunk_bytes
            chunks = -(-size // step)
            holes = set[int]()
            if self.streams[found.stream].sparse:
                holes = _holes(seek_data_ranges(fd, size), size, step)
            cached = cached_share(fd, size) if size >= DIRECT_MIN or step >= BY_PLACE_MIN else 0.0
            direct = self._turn_direct(fd, found, cached)
            self._direct_files += direct
            # Such a file stays open until its chunks are stored, which can be long after the next ones were opened.
            by_place = (
                not direct
                and step >= BY_PLACE_MIN
                and cached * size >= BY_PLACE_CACHED * _stored(found)
                and len(self._placed) < self._most_placed
            )
            if by_place:
                self._placed.add(fd)
            hold = HeldFile(_Descriptor(found.path, fd, size, self._placed))
            return _Open(found, hold, direct, chunks, chunks, by_place, holes)
        except BaseException:
            os.close(fd)
            raise

    def _turn_direct(self, fd: int, found: _Found, cached: float) -> bool:
        """Direct I/O wins on files that are not cached and loses on those that are."""
        wanted, size = self._context.settings.source_direct, found.seen.st_size
        pays = wanted == "on" or size < DIRECT_MIN or cached <= CACHED_MAX
        why_not = take_direct(fd, found.path, wanted, size, pays=pays)
        if why_not and wanted == "on":
            raise SourceError(
                f"{found.path} cannot be read with direct I/O: {why_not}", cure="set source_direct to auto"
            )
        return not why_not

    def _check_unchanged(self, fd: int, found: _Found) -> None:
        change = _change(found, os.fstat(fd))
        if change:
            raise SourceChanged(
                f"{found.path} {change} while it was saved", cure="save when nothing writes to it"
            )

    async def _close(self, file: _Open) -> None:
        self._opened.remove(file)
        try:
            await in_thread(self._check_unchanged, file.hold.fileno(), file.found)
        finally:
            file.hold.release()

    async def aclose(self) -> None:
        for file in self._opened:
            await self._context.io.drain(file.hold.fileno())
            file.hold.release()
        self._opened.clear()

    @property
    def need_bytes(self) -> int:
        """Holes are not stored."""
        return sum(map(_stored, self._found))

    def facts(self) -> dict[str, Any]:
        return {"kind": self.kind, "paths": [escape(os.fsencode(path)) for path in self.paths]}

    def notes(self) -> list[str]:
        notes = list(self._skipped)
        if self._direct_files:
            notes.append(f"{self._direct_files} of {len(self._found)} source files read with direct I/O")
        return notes


def _change(found: _Found, now: os.stat_result) -> str:
    """What became of the file since the walk; "" where it is what it was. ``now``: of its descriptor."""
    seen = found.seen
    if not os.path.samestat(now, seen):
        return "was replaced by another file"
    if now.st_ctime_ns == seen.st_ctime_ns and now.st_size == seen.st_size and now.st_nlink:
        return ""
    try:
        # Who saves by writing a new file and renaming it leaves the old one as it is, and without its name.
        if not os.path.samestat(os.stat(found.path), seen):
            return "was replaced by another file"
    except FileNotFoundError:
        return "was renamed or deleted" if now.st_nlink else "was deleted"
    except OSError as error:
        return f"cannot be looked at any more ({error.strerror})"
    if now.st_size != seen.st_size:
        verb = "shrank" if now.st_size < seen.st_size else "grew"
        return f"{verb} from {seen.st_size} to {now.st_size} bytes"
    if now.st_mtime_ns != seen.st_mtime_ns:
        return "was written to"
    # Of who writes and then sets the time back, as `rsync --times --inplace` does. A changed mode looks the same.
    return "was changed (its content, mode, owner or times)"


def _stored(found: _Found) -> int:
    """Bytes of the file that are no holes."""
    return min(found.seen.st_size, found.seen.st_blocks * 512)


def _shrank(found: _Found, size: int) -> SourceChanged:
    return SourceChanged(
        f"{found.path} shrank while it was read: {size} bytes where there were {found.seen.st_size}",
        cure="save when nothing writes to it",
    )


def _spelled(name: str, path: str) -> str:
    """The path of a tree entry as manifests spell it."""
    try:
        return check_path(escape(os.fsencode(name)))
    except ValueError as error:
        raise SourceError(f"{path} cannot be saved: {error}") from error


def _entries(directory: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return sorted(entries, key=lambda entry: os.fsencode(entry.name))
    except OSError as error:
        raise SourceError(
            f"{directory} cannot be read: {error.strerror}",
            cure=limit_cure(error.errno or 0) or "check its permissions",
        ) from error


def _holes(data: Sequence[tuple[int, int]], size: int, step: int) -> set[int]:
    """Numbers of the chunks that lie in a hole as a whole."""
    touched = set(_touched(data, step))
    return {number for number in range(-(-size // step)) if number not in touched}


def _touched(data: Sequence[tuple[int, int]], step: int) -> Iterator[int]:
    for offset, nbytes in data:
        yield from range(offset // step, -(-(offset + nbytes) // step))


def _directory(path: str, seen: os.stat_result) -> TreeEntry:
    return TreeEntry(path, "directory", _mode(seen), mtime_ns=seen.st_mtime_ns)


def _mode(seen: os.stat_result) -> int:
    return stat.S_IMODE(seen.st_mode) & 0o777


def _kind_of(mode: int) -> str:
    kinds = (
        (stat.S_ISFIFO, "a named pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISBLK, "a block device"),
        (stat.S_ISCHR, "a character device"),
    )
    return next((name for test, name in kinds if test(mode)), "no regular file")
