"""Drivers that are built and behave in other ways than the simulated one."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from ckptpipe.pipeline.launch import Handover, LaunchOptions, PoolSize, environment
from ckptpipe.pipeline.launch.relocations import relocated_symbols
from ckptpipe.pyx.control_page import ControlPage
from tests.preload.launched import FIXED, MIB, PIECE, POOL, mapping

PROGRAMS = Path(__file__).resolve().parent / "programs"
VARIANTS = {
    "bound at once": ("-Wl,-z,now", "-Wl,-z,relro"),
    "bound lazily": ("-Wl,-z,lazy", "-Wl,-z,norelro"),
    "partly read-only": ("-Wl,-z,lazy", "-Wl,-z,relro"),
    "without a PLT": ("-fno-plt", "-Wl,-z,now", "-Wl,-z,relro"),
    "fortified": ("-D_FORTIFY_SOURCE=2", "-Wl,-z,now"),
}


def built(folder: Path, *options: str) -> Path:
    folder.mkdir(exist_ok=True)
    library = folder / "libcuda.so.1"
    command = ["cc", "-std=gnu11", "-O1", "-Wall", "-fPIC", "-shared", "-fvisibility=hidden", *options]
    if "-D_FORTIFY_SOURCE=2" not in options:
        command.append("-fno-builtin")
    subprocess.run([*command, "-o", library, PROGRAMS / "tiny_driver.c", "-pthread", "-ldl"], check=True)
    return library


class Tiny:
    """programs/tiny_target.py on a driver of tiny_driver.c."""

    def __init__(self, driver: Path, options: LaunchOptions = FIXED, *, encoded: str = "") -> None:
        base = dict(os.environ) | {"LD_LIBRARY_PATH": str(driver.parent)}
        variables = environment(options, base) | ({"CKPTPIPE_LAUNCH": encoded} if encoded else {})
        self._child = subprocess.Popen(
            [sys.executable, PROGRAMS / "tiny_target.py"], env=variables, stdin=-1, stdout=-1, text=True
        )
        self.pid = self._child.pid
        assert self._child.stdout is not None
        assert self._child.stdout.readline() == f"ready {self.pid}\n"

    def __enter__(self) -> Self:
        self.handover = Handover.connect(self.pid)
        self.handover.prepare(0) if self._has_pool() else None
        self.pool, self._control = self.handover.attach()
        self.page = ControlPage(self._control)
        return self

    def _has_pool(self) -> bool:
        pool, control = self.handover.attach()
        with ControlPage(control) as page:
            gone = page.pool().state == "gone"
        os.close(control)
        if pool is not None:
            os.close(pool)
        return not gone

    def __exit__(self, *_: object) -> None:
        self._child.kill()
        self._child.wait()
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.close()
        self._child.stdout.close()
        self.page.close()
        self.handover.close()
        os.close(self._control)
        if self.pool is not None:
            os.close(self.pool)

    def call(self, what: str, *numbers: int) -> str:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(f"{what} {' '.join(map(str, numbers))}\n")
        self._child.stdin.flush()
        return self._child.stdout.readline().strip()

    def map(self, nbytes: int, *, address: int = 0, fixed: bool = False, own_thread: bool = True) -> int:
        return int(self.call("map", address, nbytes, int(fixed), int(own_thread)))

    def write(self, address: int, nbytes: int, value: int) -> None:
        assert self.call("write", address, nbytes, value) == "True"

    def read(self, address: int, nbytes: int) -> bytes:
        return bytes.fromhex(self.call("read", address, nbytes))


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Tiny]:
    with Tiny(built(tmp_path / "driver")) as it:
        yield it


@pytest.mark.parametrize("variant", VARIANTS)
def test_its_entries_are_redirected_however_it_was_linked(tmp_path: Path, variant: str) -> None:
    library = built(tmp_path / "driver", *VARIANTS[variant])
    symbols = relocated_symbols(library)
    assert symbols is not None and {"mmap", "munmap", "pthread_create"} <= symbols
    with Tiny(library) as it:
        for value in (1, 2):
            address = it.map(4 * MIB)
            assert "ckptpipe-pool" in mapping(it.pid, address)
            it.write(address, 3 * MIB, value)
            (image,) = it.page.images()
            assert (image.watermark, image.high, image.written) == (3 * MIB,) * 3
            assert it.read(address + MIB, 64) == bytes([value]) * 64
            assert it.call("unmap", address, 4 * MIB) == "0"
        pool = it.page.pool()
        assert (pool.hook, pool.library) == ("relocations", str(library))
        assert pool.hooked >= 4
        assert (pool.served, pool.returned, pool.fallbacks) == (2, 2, 0)


def test_one_without_such_entries_needs_symbols(tmp_path: Path) -> None:
    library = built(tmp_path / "driver", "-DBY_DLSYM")
    symbols = relocated_symbols(library)
    assert symbols is not None and "dlsym" in symbols and not {"mmap", "memcpy"} & symbols
    with Tiny(library) as it:
        assert "libckptpipe_preload_symbols.so" in Path(f"/proc/{it.pid}/maps").read_text(encoding="utf-8")
        address = it.map(4 * MIB)
        it.write(address, 4 * MIB, 7)
        assert it.page.images()[0].watermark == 4 * MIB
        assert it.read(address, 4096) == b"\x07" * 4096
        assert it.call("unmap", address, 4 * MIB) == "0"
        pool = it.page.pool()
        assert (pool.hook, pool.served, pool.returned) == ("symbols", 1, 1)


def test_where_neither_way_works_the_driver_goes_its_own(tmp_path: Path) -> None:
    library = built(tmp_path / "driver", "-DBY_DLSYM")
    options = LaunchOptions(pool=PoolSize(nbytes=POOL), hook="relocations")
    with Tiny(library, options) as it:
        address = it.map(4 * MIB)
        assert "rw-p" in mapping(it.pid, address)
        pool = it.page.pool()
        assert (pool.hook, pool.fallback_reason) == ("none", "hook")
        assert "--hook symbols" in pool.fallback_text
        assert it.call("unmap", address, 4 * MIB) == "0"


def test_what_a_thread_of_the_program_maps_is_no_image(tiny: Tiny) -> None:
    """As a driver does that pins host memory for its caller: the same size, flags and call site."""
    address = tiny.map(8 * MIB, own_thread=False)
    assert "rw-p" in mapping(tiny.pid, address)
    pool = tiny.page.pool()
    assert (pool.served, pool.fallbacks, pool.fallback_reason) == (0, 1, "not expected")
    assert tiny.call("unmap", address, 8 * MIB) == "0"
    tiny.handover.arm()
    address = tiny.map(8 * MIB, own_thread=False)
    assert "ckptpipe-pool" in mapping(tiny.pid, address)
    tiny.handover.disarm()
    assert tiny.call("unmap", address, 8 * MIB) == "0"
    assert "rw-p" in mapping(tiny.pid, tiny.map(8 * MIB, own_thread=False))


def test_a_thread_that_the_driver_made_while_it_was_loaded(tmp_path: Path) -> None:
    with Tiny(built(tmp_path / "driver", "-DEARLY", "-Wl,-z,now")) as it:
        assert "rw-p" in mapping(it.pid, it.map(4 * MIB, own_thread=False))
        address = it.map(4 * MIB)
        assert "ckptpipe-pool" in mapping(it.pid, address)
        it.write(address, 4 * MIB, 3)
        assert it.read(address, 4096) == b"\x03" * 4096
        assert it.call("unmap", address, 4 * MIB) == "0"


def test_several_images_at_a_time(tiny: Tiny) -> None:
    sizes = [4 * MIB, 3 * MIB, 8 * MIB]
    addresses = [tiny.map(nbytes) for nbytes in sizes]
    for k, (address, nbytes) in enumerate(zip(addresses, sizes, strict=True)):
        tiny.write(address, nbytes, k + 1)
    images = tiny.page.images()
    assert [image.nbytes for image in images] == sizes
    spans = sorted((image.offset, image.offset + image.nbytes) for image in images)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert all(tiny.read(address, 4096) == bytes([k + 1]) * 4096 for k, address in enumerate(addresses))
    assert tiny.call("unmap", addresses[0], sizes[0]) == "0"
    again = tiny.map(2 * MIB)  # where the first one was
    tiny.write(again, 2 * MIB, 9)
    assert tiny.read(addresses[1], 4096) == b"\x02" * 4096
    assert len({image.generation for image in tiny.page.images()}) == 3


def test_a_ninth_image_is_the_drivers(tiny: Tiny) -> None:
    addresses = [tiny.map(2 * MIB) for _ in range(9)]
    assert "rw-p" in mapping(tiny.pid, addresses[8])
    assert tiny.page.pool().fallback_reason == "too small"
    assert all(tiny.call("unmap", address, 2 * MIB) == "0" for address in addresses)
    assert tiny.page.pool().returned == 8


def test_an_image_that_is_unmapped_in_parts(tiny: Tiny) -> None:
    address = tiny.map(8 * MIB)
    tiny.write(address, 8 * MIB, 5)
    assert tiny.call("unmap", address, 2 * MIB) == "0"
    with pytest.raises(LookupError):
        mapping(tiny.pid, address)
    assert tiny.read(address + 4 * MIB, 4096) == b"\x05" * 4096
    assert tiny.call("unmap", address + 2 * MIB, 6 * MIB) == "0"
    assert not tiny.page.images()
    with pytest.raises(LookupError):
        mapping(tiny.pid, address + 4 * MIB)
    address = tiny.map(8 * MIB)  # the kept mapping is not whole any more: another one of the pool
    assert "ckptpipe-pool" in mapping(tiny.pid, address)
    tiny.write(address, 8 * MIB, 6)
    assert tiny.read(address + 4 * MIB, 4096) == b"\x06" * 4096
    assert tiny.call("unmap", address, 8 * MIB) == "0"
    assert tiny.page.pool().fallbacks == 0


def test_a_wish_for_an_address_that_is_taken(tiny: Tiny) -> None:
    taken = tiny.map(4 * MIB)
    address = tiny.map(4 * MIB, address=taken)
    assert address != taken
    assert "ckptpipe-pool" in mapping(tiny.pid, address)


def test_copies_of_any_size_and_place(tiny: Tiny) -> None:
    address = tiny.map(6 * MIB)
    tiny.write(address, 6 * MIB, 0)
    model = bytearray(6 * MIB)
    value = 1
    for start, nbytes in (
        (0, 1),
        (1, 63),
        (100, 4096),
        (PIECE - 3, 7),
        (12345, 300_001),
        (MIB + 1, 3 * MIB + 17),
    ):
        tiny.write(address + start, nbytes, value)
        model[start : start + nbytes] = bytes([value]) * nbytes
        value += 1
    assert tiny.call("move", address + 5 * MIB, address + MIB, 700_000) == "True"
    model[5 * MIB : 5 * MIB + 700_000] = model[MIB : MIB + 700_000]
    assert tiny.call("move", address + 2 * MIB + 5, address + 2 * MIB, 600_000) == "True"  # overlapping
    model[2 * MIB + 5 : 2 * MIB + 600_005] = model[2 * MIB : 2 * MIB + 600_000]
    assert tiny.read(address, 6 * MIB) == bytes(model)
    (image,) = tiny.page.images()
    assert image.late_count == 8
