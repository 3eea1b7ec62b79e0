"""Mappings: what the kernel says of them (smaps, numa_maps, status) against what they report."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ckptpipe.pyx import memory
from ckptpipe.pyx.errors import CkptpipeError
from ckptpipe.pyx.memory import Mapping, MappingError

MIB = 1 << 20


def smaps(mapping: Mapping) -> dict[str, str]:
    """The smaps entry of the VMA that starts at the mapping."""
    entry: dict[str, str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace").splitlines():
        key, _, value = line.partition(" ")
        if not key.endswith(":"):
            inside = int(key.split("-")[0], 16) == mapping.address
            if inside:
                entry["range"] = key
        elif inside:
            entry[key.rstrip(":")] = value.strip()
    return entry


def kib(text: str) -> int:
    return int(text.split()[0]) << 10


def locked_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return next(kib(line.split(":")[1]) for line in status.splitlines() if line.startswith("VmLck:"))


def script(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)], capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize("threads", [0, 1, 3, 64])
@pytest.mark.parametrize("nbytes", [4096, 3 * MIB, 8 * MIB + 4096])
def test_every_page_is_there_before_the_first_touch(nbytes: int, threads: int) -> None:
    with Mapping(nbytes, prefault_threads=threads) as mapping:
        entry = smaps(mapping)
        assert kib(entry["Size"]) == nbytes
        assert kib(entry["Rss"]) == nbytes
        assert bytes(mapping) == bytes(nbytes)


@pytest.mark.parametrize("huge_pages", ["auto", "thp", "off"])
def test_page_size_is_what_the_kernel_gave(huge_pages: memory.HugePages) -> None:
    with Mapping(8 * MIB, huge_pages=huge_pages) as mapping:
        huge = kib(smaps(mapping)["AnonHugePages"])
        assert mapping.requested == huge_pages
        assert mapping.huge_bytes == huge
        assert mapping.huge_pages == ("thp" if huge else "off")
        if huge == 8 * MIB:
            assert mapping.page_size == memory.transparent_page_size()
            assert mapping.why == ""
        else:
            assert mapping.page_size == os.sysconf("SC_PAGESIZE")
            assert huge_pages == "off" or "thp" in mapping.why
        if huge_pages == "off":
            assert huge == 0
            assert mapping.why == ""
        elif memory.transparent_page_size():
            assert mapping.address % memory.transparent_page_size() == 0


def test_less_than_a_huge_page_gets_base_pages_and_says_why() -> None:
    with Mapping(4096) as mapping:
        assert mapping.huge_pages == "off"
        assert mapping.page_size == os.sysconf("SC_PAGESIZE")
        assert "thp" in mapping.why
    with pytest.raises(MappingError, match="no huge pages"):
        Mapping(4096, require_huge_pages=True)


def free_hugetlb_pages() -> int:
    file = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
    return int(file.read_text(encoding="ascii")) if file.exists() else 0


def test_hugetlb_or_a_fallback_with_the_reason() -> None:
    with Mapping(4 * MIB, huge_pages="hugetlb") as mapping:
        if mapping.huge_pages == "hugetlb":
            assert mapping.why == ""
            assert mapping.page_size == 2 * MIB
            assert "ht" in smaps(mapping)["VmFlags"].split()
        else:
            assert "hugetlb" in mapping.why
            assert "vm.nr_hugepages" in mapping.why
            assert kib(smaps(mapping)["AnonHugePages"]) == mapping.huge_bytes


def test_hugetlb_that_must_be_is_refused_with_the_cure() -> None:
    nbytes = (free_hugetlb_pages() + 1) * 2 * MIB
    with pytest.raises(MappingError, match=rf"sysctl vm.nr_hugepages={nbytes // (2 * MIB)}") as caught:
        Mapping(nbytes, huge_pages="hugetlb", require_huge_pages=True)
    assert caught.value.errno
    assert isinstance(caught.value, CkptpipeError)


def test_memory_reaches_neither_core_dumps_nor_children() -> None:
    with Mapping(2 * MIB) as mapping:
        flags = smaps(mapping)["VmFlags"].split()
        assert "dd" in flags  # not dumped
        assert "dc" in flags  # not copied on fork


def test_a_forked_child_faults_and_unmaps_nothing() -> None:
    done = script("""
        import mmap, os, signal
        from ckptpipe.pyx.memory import Mapping
        mapping = Mapping(4096)
        view = memoryview(mapping)
        child = os.fork()
        if child == 0:
            view[0]
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
        view.release()
        child = os.fork()
        if child == 0:
            address = mapping.address
            import ctypes
            libc = ctypes.CDLL(None, use_errno=True)
            libc.mmap.restype = ctypes.c_void_p
            libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
            fixed = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10
            assert libc.mmap(address, 4096, mmap.PROT_READ | mmap.PROT_WRITE, fixed, -1, 0) == address
            mapping.close()
            ctypes.memset(address, 1, 4096)  # what the child mapped there is still there
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        mapping.close()
    """)
    assert done.returncode == 0, done.stderr


def test_guard_pages_on_both_sides() -> None:
    with Mapping(2 * MIB) as mapping:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        ranges = [line.split()[0:2] for line in lines]
        index = next(
            i for i, (span, _) in enumerate(ranges) if int(span.split("-")[0], 16) == mapping.address
        )
        before, own, after = ranges[index - 1 : index + 2]
        assert [mode for _, mode in (before, own, after)] == ["---p", "rw-p", "---p"]
        assert before[0].split("-")[1] == own[0].split("-")[0]
        assert own[0].split("-")[1] == after[0].split("-")[0]


def test_close_is_refused_while_a_view_exists() -> None:
    mapping = Mapping(4096)
    view = memoryview(mapping)
    part = view[10:20]
    with pytest.raises(BufferError, match="1 views"):
        mapping.close()
    part[:] = b"0123456789"
    assert bytes(view[8:12]) == b"\0\x0001"
    part.release()
    view.release()
    mapping.close()
    mapping.close()
    assert mapping.closed
    with pytest.raises(ValueError, match="closed"):
        _ = mapping.address
    with pytest.raises(BufferError, match="closed"):
        memoryview(mapping)


def test_close_and_collection_unmap() -> None:
    before = memory.live_mappings()
    mapping = Mapping(2 * MIB)
    assert memory.live_mappings() == before + 1
    address = f"{mapping.address:x}-"
    mapping.close()
    assert memory.live_mappings() == before
    assert address not in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    mapping = Mapping(2 * MIB)
    del mapping
    assert memory.live_mappings() == before


@pytest.mark.parametrize("nbytes", [0, -1])
def test_sizes_that_are_none(nbytes: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        Mapping(nbytes)


def test_a_size_beyond_the_address_space_says_so() -> None:
    before = memory.live_mappings()
    with pytest.raises(MappingError, match="cannot map"):
        Mapping(1 << 61, huge_pages="off")
    assert memory.live_mappings() == before


def test_unknown_words_are_refused() -> None:
    with pytest.raises(ValueError, match="huge_pages is one of auto, thp, hugetlb, off"):
        Mapping(4096, huge_pages="gigantic")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prefault_threads"):
        Mapping(4096, prefault_threads=-1)


def test_lock_and_unlock() -> None:
    before = locked_bytes()
    with Mapping(2 * MIB, lock=True) as mapping:
        assert mapping.locked
        assert locked_bytes() == before + 2 * MIB
    assert locked_bytes() == before


def test_a_lock_beyond_the_limit_names_it_and_leaves_nothing() -> None:
    # A process that may lock without limit (root, CAP_IPC_LOCK) becomes one that may not.
    done = script("""
        import os, resource
        from ckptpipe.pyx import memory
        from ckptpipe.pyx.staging import StagingRing
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
        if os.geteuid() == 0:
            os.setresuid(65534, 65534, 65534)
        maps = lambda: sum(1 for line in open("/proc/self/status") if line.split() == ["VmLck:", "0", "kB"])
        for make in (lambda: memory.Mapping(4 << 20, lock=True), lambda: StagingRing(2, 2 << 20, lock=True)):
            try:
                make()
            except memory.MappingError as error:
                print(error)
            else:
                raise SystemExit("it was locked")
            assert memory.live_mappings() == 0
            assert maps() == 1
    """)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in done.stdout.splitlines():
        assert "cannot lock 4194304 bytes" in line
        assert "RLIMIT_MEMLOCK is 1048576 bytes" in line
        assert "ulimit -l" in line
    assert len(done.stdout.splitlines()) == 2


def test_an_unknown_numa_node_is_named_with_the_known_ones() -> None:
    with pytest.raises(MappingError, match=r"NUMA node 4711 does not exist .*use one of 0"):
        Mapping(4096, numa_node=4711)


def test_binding_to_a_node_is_what_numa_maps_says() -> None:
    node = memory.numa_nodes()[-1]
    try:
        mapping = Mapping(4 * MIB, numa_node=node)
    except MappingError as error:
        pytest.skip(f"this machine forbids mbind: {error}")
    with mapping:
        assert mapping.numa_node == node
        if not Path("/proc/self/numa_maps").exists():
            pytest.skip("this kernel has no numa_maps to compare with")
        policies = dict(
            line.split()[:2]
            for line in Path("/proc/self/numa_maps")
            .read_text(encoding="utf-8", errors="replace")
            .splitlines()
        )
        assert policies[f"{mapping.address:08x}"] == f"bind:{node}"


def test_both_ways_to_ask_for_huge_pages_agree() -> None:
    """PAGEMAP_SCAN where the kernel has it, and smaps, which walks all memory of the process."""
    with Mapping(6 * MIB, huge_pages="thp") as huge, Mapping(6 * MIB, huge_pages="off") as small:
        for mapping in (huge, small):
            slow = memory.huge_bytes_of_smaps(mapping.address, mapping.nbytes)
            if slow is None:
                pytest.skip("smaps cannot be read here")
            assert memory.anonymous_huge_bytes(mapping.address, mapping.nbytes) == slow == mapping.huge_bytes
        assert memory.anonymous_huge_bytes(small.address, small.nbytes) == 0
