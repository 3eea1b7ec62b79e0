"""A sink that writes streams as files below a directory: the end of a restore."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from ckptpipe.pipeline.chunk import Chunk
from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.direct_io import take_direct
from ckptpipe.pipeline.edge import Edge
from ckptpipe.pipeline.errors import RestoreConflict, SaveFailed
from ckptpipe.pipeline.image.entries import TreeEntry
from ckptpipe.pipeline.image.layout import padded
from ckptpipe.pipeline.image.names import relative_path, unescape
from ckptpipe.pipeline.parallel import in_parallel
from ckptpipe.pipeline.result import SinkResult
from ckptpipe.pipeline.sinks.abc import Sink
from ckptpipe.pipeline.sinks.parent import Parent
from ckptpipe.pipeline.sinks.targets import OpenTargets, Target
from ckptpipe.pipeline.sources.abc import Source
from ckptpipe.pyx.copy import data_ranges
from ckptpipe.pyx.errors import io_error
from ckptpipe.pyx.files import free_space, rename_noreplace
from ckptpipe.storage_backends.abc import Landing
from ckptpipe.storage_backends.errors import NoSpace
from ckptpipe.storage_backends.open_limit import open_error, room_for_files
from ckptpipe.storage_backends.quantities import format_bytes
from ckptpipe.storage_backends.shielded import in_thread, shielded

STAGING_PREFIX = ".ckptpipe-restore-"
WRITERS = 8  # chunks written side by side
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
PERMISSIONS = 0o777  # set-id and sticky bits are never restored


class FilesSink(Sink):
    """Restores streams as files below ``directory``: ``files/<path>`` at its path, others under their name.

    Files are written under a staging directory inside ``directory`` and renamed to their place when all of
    them are whole, so that a failed or killed restore leaves no half file. So chunks that need no decoder may land
    there before their checksum is known (`landing`): a file is given its name only when all of its chunks have come
    with the right ones. Nothing outside ``directory`` is
    written whatever the names are and whatever links lie there (openat2 with RESOLVE_BENEATH and
    RESOLVE_NO_SYMLINKS).
    """

    name = "files"

    def __init__(self, directory: str | os.PathLike[str], context: GraphContext, *, overwrite: bool) -> None:
        self.directory = Path(directory)
        self.url = os.fspath(directory)
        self._context = context
        self._overwrite = overwrite
        self._root = -1
        self._staging = -1
        self._spare = -1  # a descriptor to clean up with, where there are no others
        self._staging_name = ""
        self._made_root: list[Path] = []
        self._targets: list[Target] = []
        self._open = OpenTargets(WRITERS, self._open_target, self._where)
        self._undo_steps: list[Callable[[], None]] = []
        self._known: set[bytes] = set()  # directories that are there: found, or made by this restore
        self._direct_files = 0

    async def check(self, source: Source) -> None:
        try:
            await in_thread(self._check, source)
        except OSError as error:
            raise io_error(error.errno or errno.EIO, "look at", self.url) from error

    def _check(self, source: Source) -> None:
        if os.path.lexists(self.directory) and not os.path.isdir(self.directory):
            raise RestoreConflict(f"{self.url} is not a directory", cure="name a directory with --to")
        paths = [relative_path(stream.name) for stream in source.streams]
        paths += [unescape(entry.path) for entry in source.tree if entry.kind == "symlink"]
        if len(set(paths)) != len(paths):
            twice = next(path for number, path in enumerate(paths) if path in paths[:number])
            raise RestoreConflict(
                f"two streams of this image would become the file {os.fsdecode(twice)}",
                cure="restore them one by one with --stream",
            )
        if not self._overwrite:
            base = os.fsencode(self.directory)
            conflicts = [path for path in paths if os.path.lexists(os.path.join(base, path))]
            if conflicts:
                more = f" and {len(conflicts) - 1} more" if len(conflicts) > 1 else ""
                raise RestoreConflict(
                    f"{self.url} holds {os.fsdecode(conflicts[0])}{more} already",
                    cure="restore into an empty directory, or replace files with --overwrite",
                )
        else:
            self._refuse_directories(paths)
        parent = self.directory
        while not os.path.isdir(parent):
            parent = parent.parent
        free, need = free_space(os.fspath(parent)), source.total_bytes or 0
        if need > free and not any(stream.sparse for stream in source.streams):
            raise NoSpace(
                f"{self.url} has {format_bytes(free)} free, the restore needs {format_bytes(need)}",
                cure="free space there or restore elsewhere",
            )

    def _refuse_directories(self, paths: list[bytes]) -> None:
        """Files are replaced; a directory that stands where a file is to go is the user's to remove."""
        for path in paths:
            there = os.path.join(os.fsencode(self.directory), path)
            if os.path.isdir(there) and not os.path.islink(there):
                raise RestoreConflict(
                    f"{os.fsdecode(there)} is a directory, and the image has a file there: --overwrite replaces files only",
                    cure="remove the directory, or restore into another one",
                )

    async def begin(self, source: Source) -> None:
        self._source = source
        await in_thread(self._begin)

    def _begin(self) -> None:
        try:
            self._make_root()
            self._root = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            _remove_stale(self._root)
            self._staging_name = STAGING_PREFIX + secrets.token_hex(6)
            os.mkdir(self._staging_name, 0o700, dir_fd=self._root)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            self._staging = os.open(self._staging_name, flags, dir_fd=self._root)
            fcntl.flock(self._staging, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._spare = os.dup(self._staging)
        except OSError as error:
            raise open_error(error, "create files in", self.url) from error
        self._open = OpenTargets(max(WRITERS, room_for_files()), self._open_target, self._where)
        step = self._context.chunk_bytes
        for position, stream in enumerate(self._source.streams):
            chunks = -(-stream.nbytes // step)
            self._targets.append(Target(stream, str(position), relative_path(stream.name), chunks))

    async def run(self, edge: Edge) -> None:
        async def write() -> None:
            while (chunk := await edge.get()) is not None:
                try:
                    await self._write(chunk)
                finally:
                    chunk.release()
                self.done_bytes += chunk.raw_bytes

        await in_parallel(WRITERS, write)
        for target in self._targets:
            if target.chunks:
                raise SaveFailed(f"{self.url}: stream {target.stream.name} lacks {target.chunks} chunks")
            if target.stream.nbytes == 0:
                await self._close(target)

    async def landing(self, stream: int, number: int, nbytes: int) -> Landing | None:
        """None for a file that is written past the page cache, which takes whole slots, for one that was sparse, in
        which holes are left, and where too many files are waited for already."""
        target = self._targets[stream]
        if target.stream.sparse or target.direct or not self._open.has_room(target):
            return None
        await self._open.hold(target)
        if target.direct:
            self._open.let_go(target)
            return None
        target.landing.add(number)
        return Landing(nbytes, target.fd, number * self._context.chunk_bytes, self._where(target))

    async def _write(self, chunk: Chunk) -> None:
        target = self._targets[chunk.stream]
        if chunk.lease is not None:
            await self._open.hold(target)
            path = self._where(target)
            start = chunk.number * self._context.chunk_bytes
            for at, nbytes in await self._ranges(target, chunk):
                # A direct write has whole pages; what is behind the end of the file is cut off at the end.
                size = padded(nbytes) if target.direct else nbytes
                with chunk.lease.slice(at, size) as part:
                    await self._context.io.write(target.fd, part, size, start + at, path)
            self._open.let_go(target)
        if chunk.number in target.landing:
            target.landing.remove(chunk.number)
            self._open.let_go(target)
        target.chunks -= 1
        if target.chunks == 0:
            await self._close(target)

    async def _ranges(self, target: Target, chunk: Chunk) -> list[tuple[int, int]]:
        """What of the chunk is written: all of it, or, of a file that was sparse, its pages with data."""
        if not target.stream.sparse:
            return [(0, chunk.raw_bytes)]
        assert chunk.lease is not None
        with memoryview(chunk.lease) as view, view[: chunk.raw_bytes] as raw:
            return await in_thread(data_ranges, raw, 4096)

    def _open_target(self, target: Target) -> int:
        """Make it, the first time."""
        flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_DIRECT if target.direct else 0)
        flags |= 0 if target.made else os.O_CREAT
        try:
            fd = os.open(target.staged, flags, 0o600, dir_fd=self._staging)
        except OSError as error:
            raise open_error(error, "open" if target.made else "create", self._where(target)) from error
        try:
            if not target.made:
                self._make(target, fd)
        except OSError as error:
            os.close(fd)
            raise io_error(error.errno or errno.EIO, "make room for", self._where(target)) from error
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _make(self, target: Target, fd: int) -> None:
        nbytes, wanted = target.stream.nbytes, self._context.settings.target_direct
        os.ftruncate(fd, nbytes)
        why_not = take_direct(fd, os.path.join(self.url, self._staging_name), wanted, nbytes)
        if why_not and wanted == "on":
            raise RestoreConflict(
                f"{self._where(target)} cannot be written with direct I/O: {why_not}",
                cure="set target_direct to auto",
            )
        target.direct = not why_not
        if target.direct and not target.stream.sparse:
            _preallocate(fd, nbytes)
        target.made = True

    async def _close(self, target: Target) -> None:
        await self._open.hold(target)  # one of zeros alone was not opened so far
        await in_thread(self._finish_file, target, self._open.take(target))

    def _finish_file(self, target: Target, fd: int) -> None:
        stream = target.stream
        try:
            if target.direct:
                os.ftruncate(fd, stream.nbytes)
                self._direct_files += 1
            os.fchmod(fd, 0o600 if stream.mode is None else stream.mode & PERMISSIONS)
            if stream.mtime_ns is not None:
                os.utime(fd, ns=(stream.mtime_ns, stream.mtime_ns))
        finally:
            try:
                os.close(fd)
            except OSError as error:
                raise io_error(error.errno or errno.EIO, "close", self._where(target)) from error

    def _where(self, target: Target) -> str:
        return os.path.join(self.url, os.fsdecode(target.path))

    def _make_root(self) -> None:
        missing = []
        path = self.directory
        while not os.path.lexists(path):
            missing.append(path)
            path = path.parent
        for path in reversed(missing):
            path.mkdir(0o700)
            self._made_root.append(path)

    async def commit(self) -> None:
        await in_thread(self._commit)

    def _commit(self) -> None:
        directories = [entry for entry in self._source.tree if entry.kind == "directory"]
        for entry in directories:
            self._make_directories(unescape(entry.path))
        for target in self._targets:
            self._place(os.fsencode(target.staged), target.path)
        for entry in self._source.tree:
            if entry.kind == "symlink":
                os.symlink(unescape(entry.target), b"link", dir_fd=self._staging)
                if entry.mtime_ns is not None:
                    times = (entry.mtime_ns, entry.mtime_ns)
                    os.utime(b"link", ns=times, dir_fd=self._staging, follow_symlinks=False)
                self._place(b"link", unescape(entry.path))
        # Nothing is put into a directory any more: as with tar and cp -a, its times and mode become the image's, also
        # where it was there before. The deepest first: a mode may close the way to what is below.
        for entry in sorted(directories, key=lambda entry: -entry.path.count("/")):
            self._finish_directory(entry)

    def _place(self, staged: bytes, path: bytes) -> None:
        """Rename a staged file or link to its place. What it replaces is kept in the staging directory."""
        where = os.path.join(self.url, os.fsdecode(path))
        head, _, name = path.rpartition(b"/")
        if head:
            self._make_directories(head)
        with Parent(self._root, head, self.url) as parent:
            try:
                if self._overwrite:
                    kept = self._keep(parent, name)
                    os.rename(staged, name, src_dir_fd=self._staging, dst_dir_fd=parent)
                else:
                    kept = b""
                    rename_noreplace(self._staging, staged, parent, name)
            except FileExistsError as error:
                raise RestoreConflict(
                    f"{where} appeared while the restore ran", cure="restore into an empty directory"
                ) from error
            except OSError as error:
                raise io_error(error.errno or errno.EIO, "rename to", where) from error

        def undo() -> None:
            with Parent(self._root, head, self.url) as parent:
                if kept:
                    os.rename(kept, name, src_dir_fd=self._staging, dst_dir_fd=parent)
                else:
                    os.unlink(name, dir_fd=parent)

        self._undo_steps.append(undo)

    def _keep(self, parent: int, name: bytes) -> bytes:
        """One more name, in the staging directory, for the file that is about to be replaced."""
        kept = b"old-%d" % len(self._undo_steps)
        try:
            os.link(name, kept, src_dir_fd=parent, dst_dir_fd=self._staging, follow_symlinks=False)
        except FileNotFoundError:
            return b""
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return b""  # a directory (the rename says so), or a file system without links: replaced for good
        return kept

    def _make_directories(self, path: bytes) -> None:
        done = b""
        for component in path.split(b"/"):
            self._make_directory(done, component)
            done = os.path.join(done, component)

    def _make_directory(self, head: bytes, name: bytes) -> None:
        with Parent(self._root, head, self.url) as parent:
            try:
                os.mkdir(name, 0o700, dir_fd=parent)
            except FileExistsError:
                self._keep_times(os.path.join(head, name))
                return
            except OSError as error:
                where = os.path.join(self.url, os.fsdecode(os.path.join(head, name)))
                raise io_error(error.errno or errno.EIO, "create the directory", where) from error

        def undo() -> None:
            with Parent(self._root, head, self.url) as parent:
                os.rmdir(name, dir_fd=parent)

        self._known.add(os.path.join(head, name))
        self._undo_steps.append(undo)

    def _keep_times(self, path: bytes) -> None:
        """Of a directory that was there before, for the undoing: what is put into it changes them."""
        if path in self._known:
            return
        self._known.add(path)
        with Parent(self._root, path, self.url) as directory:
            before = os.fstat(directory)

        def undo() -> None:
            with Parent(self._root, path, self.url) as directory:
                os.utime(directory, ns=(before.st_atime_ns, before.st_mtime_ns))

        self._undo_steps.append(undo)

    def _finish_directory(self, entry: TreeEntry) -> None:
        path = unescape(entry.path)
        with Parent(self._root, path, self.url) as directory:
            before = os.fstat(directory)
            try:
                if entry.mtime_ns is not None:
                    os.utime(directory, ns=(entry.mtime_ns, entry.mtime_ns))
                os.fchmod(directory, 0o700 if entry.mode is None else entry.mode & PERMISSIONS)
            except OSError as error:
                where = os.path.join(self.url, os.fsdecode(path))
                raise io_error(error.errno or errno.EIO, "set mode and times of", where) from error

        def undo() -> None:
            with Parent(self._root, path, self.url) as directory:
                os.fchmod(directory, stat.S_IMODE(before.st_mode))

        self._undo_steps.append(undo)

    async def settle(self) -> None:
        await shielded(in_thread(self._leave))

    async def abort(self) -> None:
        for target in self._open.left():
            await self._context.io.drain(target.fd)
            os.close(self._open.take(target))
        await shielded(in_thread(self._undo))

    def _undo(self) -> None:
        """The directory is as it was, as far as it can be; the first thing that could not be undone is raised."""
        errors = []
        self._give_spare()
        while self._undo_steps:
            try:
                self._undo_steps.pop()()
            except FileNotFoundError:
                continue
            except (OSError, RestoreConflict) as error:
                errors.append(error)
        self._leave()
        while self._made_root:
            try:
                os.rmdir(self._made_root.pop())
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
                    raise
        if errors:
            raise errors[0]

    def _give_spare(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    def _leave(self) -> None:
        self._give_spare()
        if self._staging >= 0:
            with suppress(OSError):  # what stays is removed by the next restore
                for name in os.listdir(self._staging):  # files and links only
                    os.unlink(name, dir_fd=self._staging)
            os.close(self._staging)
            self._staging = -1
        if self._staging_name:
            with suppress(OSError):
                os.rmdir(self._staging_name, dir_fd=self._root)
            self._staging_name = ""
        if self._root >= 0:
            os.close(self._root)
            self._root = -1

    async def aclose(self) -> None:
        return

    def result(self) -> SinkResult:
        direct = "on" if self._direct_files else "off"
        count = f"{self._direct_files} of {len(self._targets)} files written with direct I/O"
        return SinkResult(
            url=self.url,
            image_url="",
            policy=self.policy,
            ok=True,
            direct=direct,
            notes=[count] if self._direct_files else [],
        )


def _preallocate(fd: int, nbytes: int) -> None:
    """Direct writes into blocks that are there run side by side; extending ones do not (ext4)."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise


def _remove_stale(root: int) -> None:
    """Staging directories of restores that were killed: nobody holds their lock."""
    for name in _staging_names(root):
        try:
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)
        except OSError:
            continue  # not a directory of ours, or gone meanwhile
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(name, dir_fd=root)
        except BlockingIOError:
            pass  # a restore that runs now
        finally:
            os.close(fd)


def _staging_names(root: int) -> Iterator[str]:
    with os.scandir(root) as entries:
        names = [entry.name for entry in entries if entry.name.startswith(STAGING_PREFIX)]
    for name in names:
        if stat.S_ISDIR(os.stat(name, dir_fd=root, follow_symlinks=False).st_mode):
            yield name
