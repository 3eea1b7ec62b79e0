"""The shipped conformance suite against every local backend, engine, stripe count and wrapper."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import uvloop

from ckptpipe.pyx.io_engine import EngineName
from ckptpipe.storage_backends.abc import Backend, BackendContext
from ckptpipe.storage_backends.fuse import FuseBackend
from ckptpipe.storage_backends.memory import MemoryBackend, forget
from ckptpipe.storage_backends.null import NullBackend
from ckptpipe.storage_backends.nvme import NvmeBackend
from ckptpipe.storage_backends.testing import Case, OpenBackend, conformance_cases, run_case, run_conformance
from ckptpipe.storage_backends.wrappers.faulty import FaultyBackend
from ckptpipe.storage_backends.wrappers.limit import LimitBackend
from ckptpipe.storage_backends.wrappers.retry import RetryBackend
from tests.pyx.engines import ENGINES, REFUSED
from tests.pyx.loop_disk import NoLoopDisk, loop_disk
from tests.services.mounts import start_bindfs
from tests.services.process import ServiceMissing

every_case = pytest.mark.parametrize("case", conformance_cases(), ids=str)


@pytest.fixture(autouse=True)
def _empty_memory() -> Iterator[None]:
    yield
    forget()


def striped(folder: Path, stripes: int, **options: object) -> OpenBackend:
    async def open_nvme(context: BackendContext, where: str) -> Backend:
        paths = ",".join(str(folder / f"stripe-{index}" / where) for index in range(stripes))
        return await NvmeBackend.open(f"nvme:{paths}", context, options)

    return open_nvme


async def open_memory(context: BackendContext, where: str) -> Backend:
    return await MemoryBackend.open(f"memory:{where}", context, {})


@every_case
def test_memory(case: Case) -> None:
    run_case(case, open_memory)


@pytest.mark.parametrize("case", conformance_cases(readable=False), ids=str)
def test_null(case: Case) -> None:
    async def open_null(context: BackendContext, where: str) -> Backend:
        return await NullBackend.open(f"null:{where}", context, {})

    run_case(case, open_null, readable=False)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("direct", "stripes"), [("on", 1), ("off", 2)])
@every_case
def test_nvme(case: Case, engine: EngineName, direct: str, stripes: int, workdir: Path) -> None:
    if engine in REFUSED:
        pytest.skip(f"{engine}: {REFUSED[engine]}")
    run_case(case, striped(workdir, stripes, direct=direct), io_engine=engine)


@pytest.mark.parametrize("options", [{}, {"preallocate": 0, "lanes": 2}], ids=["defaults", "unreserved"])
@every_case
def test_nvme_striped_direct(case: Case, options: Mapping[str, object], workdir: Path) -> None:
    run_case(case, striped(workdir, 2, **options))


@every_case
def test_nvme_under_uvloop(case: Case, workdir: Path) -> None:
    run_case(case, striped(workdir, 2), loop_factory=uvloop.new_event_loop)


@pytest.fixture(scope="module")
def sectors_of_4096(disk: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=disk) as folder:
        try:
            mounted = loop_disk(Path(folder), nbytes=256 << 20)
            with mounted as mount:
                yield mount
        except NoLoopDisk as error:
            pytest.skip(str(error))


@every_case
def test_nvme_with_sectors_of_4096(case: Case, sectors_of_4096: Path) -> None:
    run_case(case, striped(sectors_of_4096 / case.name, 1, direct="on", preallocate="16MiB"))


@pytest.fixture(scope="module")
def fuse_mount(disk: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=disk) as folder:
        try:
            mounted = start_bindfs(folder, disk)
        except ServiceMissing as error:
            pytest.skip(str(error))
        with mounted as mount:
            yield mount.path


@pytest.mark.fuse
@every_case
def test_fuse(case: Case, fuse_mount: Path) -> None:
    async def open_fuse(context: BackendContext, where: str) -> Backend:
        return await FuseBackend.open(f"fuse:{fuse_mount}/{where}", context, {})

    run_case(case, open_fuse)


@every_case
def test_retry(case: Case) -> None:
    async def open_retry(context: BackendContext, where: str) -> Backend:
        return await RetryBackend.open(f"memory:{where}", context, {"attempts": 3})

    run_case(case, open_retry)


@every_case
def test_limit(case: Case) -> None:
    async def open_limit(context: BackendContext, where: str) -> Backend:
        return await LimitBackend.open(f"memory:{where}", context, {"rate": "4GB/s"})

    run_case(case, open_limit)


@every_case
def test_faulty(case: Case) -> None:
    async def open_faulty(context: BackendContext, where: str) -> Backend:
        return await FaultyBackend.open(f"memory:{where}", context, {})

    run_case(case, open_faulty)


def test_the_suite_runs_by_one_call() -> None:
    most = run_conformance(open_memory, skip=["inflight_bytes_are_respected"])
    assert most == len(conformance_cases()) - 1


def test_the_suite_finds_faults() -> None:
    """A suite that passes everything proves nothing."""

    async def open_damaged(context: BackendContext, where: str) -> Backend:
        backend = FaultyBackend(await open_memory(context, where))
        backend.faults.flip("read_into", 0).truncate("read_bytes", 0, 1)
        return backend

    with pytest.raises(ExceptionGroup) as caught:
        run_conformance(open_damaged)
    found = {note.rpartition(" ")[2] for error in caught.value.exceptions for note in error.__notes__}
    assert {"bytes_and_checksum", "ranged_reads", "small_objects", "put_if_absent"} <= found
    assert "missing_objects" not in found


def test_unknown_cases_cannot_be_skipped() -> None:
    with pytest.raises(ValueError, match="no such cases: nonsense"):
        run_conformance(open_memory, skip=["nonsense"])
