"""What a sink's failure means: required ones end the save and undo it everywhere, best-effort ones do not."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Literal, Self

import pytest

import ckptpipe
from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.errors import ImageExists, SaveFailed, UsageError
from ckptpipe.pipeline.sink_places import check_sinks
from ckptpipe.pipeline.sinks import image as image_sink
from ckptpipe.pipeline.spec import SinkSpec
from ckptpipe.storage_backends import registry
from ckptpipe.storage_backends.abc import BackendContext
from ckptpipe.storage_backends.errors import BadUrl, NoSpace, StorageError, UnknownScheme
from ckptpipe.storage_backends.memory import MemoryBackend
from ckptpipe.storage_backends.wrappers.faulty import Faults
from tests.pipeline.runs import MIB, break_sink, in_context, memory_dir, run
from tests.pipeline.trees import Entry, look, write

__all__ = ["break_sink", "memory_dir"]

# Chunks that are not gathered: each is an append.
LARGE = ckptpipe.Settings(chunk_bytes=MIB, ring_bytes=8 * MIB, workers=2)
SIZE = 6 * MIB + 1

Plan = Callable[[str, Faults], Faults]

# Where a save can fail, by the call of its backend that fails: put_atomic 1 is the live lease object, 2 the
# index, 3 the manifest.
POINTS = {
    "check": ("check", 1),
    "begin": ("put_atomic", 1),
    "create": ("create", 1),
    "first bytes": ("append", 1),
    "middle": ("append", 5),
    "finish": ("finish", 1),
    "index": ("put_atomic", 2),
    "commit": ("put_atomic", 3),
}


# Each call refused; and, for those that the store might have done all the same, its answer lost.
FAILURES = [(point, False) for point in POINTS] + [(point, True) for point in ("begin", "index", "commit")]


@pytest.fixture
def source(workdir: Path) -> Path:
    return write(workdir / "file", os.urandom(SIZE))


def old_images(workdir: Path, source: Path) -> dict[str, dict[bytes, Entry]]:
    """An image of other content at both places, and what lies there."""
    other = write(workdir / "older" / "file", os.urandom(100_000))
    run(ckptpipe.save(other, to=[workdir / "one", workdir / "two"], name="i", settings=LARGE))
    return {place: kept(workdir / place) for place in ("one", "two")}


def kept(place: Path) -> dict[bytes, Entry]:
    """What lies there; the time of a manifest is not part of it: it may have been put back."""
    return {path: replace(entry, mtime_ns=0) for path, entry in look(place).items()}


@pytest.mark.parametrize("overwrite", [False, True], ids=["first", "overwrite"])
@pytest.mark.parametrize(("point", "after"), FAILURES)
def test_a_required_sink_that_fails_undoes_everything(
    workdir: Path, source: Path, break_sink: Plan, point: str, overwrite: bool, after: bool
) -> None:
    before = old_images(workdir, source) if overwrite else {"one": {}, "two": {}}
    operation, nth = POINTS[point]
    break_sink("two", Faults().fail(operation, nth, StorageError("broken on purpose"), after=after))  # type: ignore[arg-type]
    with pytest.raises(StorageError, match="broken on purpose"):
        run(
            ckptpipe.save(
                source, to=[workdir / "one", workdir / "two"], name="i", overwrite=overwrite, settings=LARGE
            )
        )
    for place, content in before.items():
        assert kept(workdir / place) == content
        if overwrite:
            run(ckptpipe.verify(str(workdir / place / "i"), settings=LARGE))


@pytest.mark.parametrize("overwrite", [False, True], ids=["first", "overwrite"])
@pytest.mark.parametrize(("point", "after"), FAILURES)
def test_a_best_effort_sink_that_fails_is_given_up(
    workdir: Path, source: Path, break_sink: Plan, point: str, overwrite: bool, after: bool
) -> None:
    before = old_images(workdir, source) if overwrite else {"one": {}, "two": {}}
    operation, nth = POINTS[point]
    break_sink("two", Faults().fail(operation, nth, StorageError("broken on purpose"), after=after))  # type: ignore[arg-type]
    to = [ckptpipe.SinkSpec(str(workdir / "two"), policy="best-effort"), workdir / "one"]
    result = run(ckptpipe.save(source, to=to, name="i", overwrite=overwrite, settings=LARGE))
    failed, stood = result.sinks
    assert not failed.ok and "broken on purpose" in failed.error and failed.policy == "best-effort"
    assert stood.ok and not stood.error
    checked = run(ckptpipe.verify(stood.image_url, settings=LARGE))
    assert checked.raw_bytes == SIZE and checked.digest == stood.digest
    assert kept(workdir / "two") == before["two"]


@pytest.mark.parametrize("operation", ["list", "delete", "abort", "remove_if_empty"])
def test_a_best_effort_sink_that_cannot_even_clean_up(
    workdir: Path, source: Path, break_sink: Plan, operation: str
) -> None:
    faults = Faults().fail("append", 3, StorageError("broken on purpose"))
    break_sink("two", faults.fail(operation, 0, lambda: StorageError("cannot clean up")))  # type: ignore[arg-type]
    to = [workdir / "one", ckptpipe.SinkSpec(str(workdir / "two"), policy="best-effort")]
    result = run(ckptpipe.save(source, to=to, name="i", settings=LARGE))
    assert [sink.ok for sink in result.sinks] == [True, False]
    assert any("cannot clean up" in note for note in result.facts.notes)


def test_a_required_sink_that_cannot_clean_up_reports_the_first_error(
    workdir: Path, source: Path, break_sink: Plan
) -> None:
    faults = Faults().fail("append", 3, StorageError("the reason"))
    break_sink("two", faults.fail("list", 0, lambda: StorageError("cannot clean up")))
    with pytest.raises(StorageError, match="the reason"):
        run(ckptpipe.save(source, to=[workdir / "two", workdir / "one"], name="i", settings=LARGE))
    assert look(workdir / "one") == {}


def test_every_sink_failing_fails_the_save(workdir: Path, source: Path, break_sink: Plan) -> None:
    break_sink("one", Faults().fail("append", 2, NoSpace("first reason")))
    break_sink("two", Faults().fail("finish", 1, StorageError("second reason")))
    to = [ckptpipe.SinkSpec(str(workdir / name), policy="best-effort") for name in ("one", "two")]
    with pytest.raises(SaveFailed) as caught:
        run(ckptpipe.save(source, to=to, name="i", settings=LARGE))
    assert "first reason" in str(caught.value) and "second reason" in str(caught.value)
    assert look(workdir / "one") == look(workdir / "two") == {}


def slow_stage(
    workdir: Path, source: Path, *, deadline: float, policies: tuple[str, str]
) -> ckptpipe.GraphSpec:
    return ckptpipe.GraphSpec(
        ckptpipe.SourceSpec("files", {"paths": [source]}),
        (
            ckptpipe.SinkSpec(str(workdir / "one"), policy=policies[0], deadline=deadline),  # type: ignore[arg-type]
            ckptpipe.SinkSpec(str(workdir / "two"), policy=policies[1], deadline=deadline),  # type: ignore[arg-type]
        ),
        image_name="i",
    )


@pytest.mark.parametrize(
    "point",
    [
        ("check", 1),
        ("put_atomic", 1),
        ("create", 1),
        ("append", 3),
        ("finish", 1),
        ("put_atomic", 2),
        ("put_atomic", 3),
    ],
    ids=lambda point: f"{point[0]} {point[1]}",
)
def test_a_best_effort_laggard_is_dropped(
    workdir: Path, source: Path, break_sink: Plan, point: tuple[str, int]
) -> None:
    faults = Faults()
    held = faults.hold(*point)  # type: ignore[arg-type]
    break_sink("two", faults)
    write(source, os.urandom(24 * MIB))  # more than edges and ring hold
    spec = slow_stage(workdir, source, deadline=0.3, policies=("required", "best-effort"))
    result = run(ckptpipe.run_graph(spec, settings=LARGE))
    assert isinstance(result, ckptpipe.SaveResult)
    assert held.reached.is_set()
    assert [sink.ok for sink in result.sinks] == [True, False]
    assert result.sinks[1].error
    run(ckptpipe.verify(result.sinks[0].image_url, settings=LARGE))
    assert look(workdir / "two") == {}


def test_a_required_laggard_is_waited_for(workdir: Path, source: Path, break_sink: Plan) -> None:
    faults = Faults()
    held = faults.hold("append", 3)
    break_sink("two", faults)
    write(source, os.urandom(24 * MIB))
    spec = slow_stage(workdir, source, deadline=0.01, policies=("required", "required"))

    async def main() -> None:
        looks = 0

        def told(progress: ckptpipe.Progress) -> None:
            nonlocal looks
            looks += held.reached.is_set()
            if looks > 3:
                held.release.set()

        result = await ckptpipe.run_graph(spec, settings=LARGE, progress=told)
        assert isinstance(result, ckptpipe.SaveResult)
        assert [sink.ok for sink in result.sinks] == [True, True]

    run(main())


def test_the_only_sink_is_not_dropped_for_being_slow(workdir: Path, source: Path) -> None:
    write(source, os.urandom(4 * MIB))
    spec = ckptpipe.GraphSpec(
        ckptpipe.SourceSpec("files", {"paths": [source]}),
        (ckptpipe.SinkSpec(str(workdir / "one"), reads="slow", policy="best-effort", deadline=0.05),),
        (ckptpipe.StageSpec("slow", "limit", params={"rate": 5 * MIB}),),
        image_name="i",
    )
    result = run(ckptpipe.run_graph(spec, settings=LARGE))
    assert isinstance(result, ckptpipe.SaveResult) and result.sinks[0].ok


def test_a_stage_that_fails_takes_only_best_effort_sinks_with_it(
    workdir: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptpipe.pipeline.codecs.pool import CodecPool

    compress, calls = CodecPool.compress, 0

    async def broken(self: CodecPool, *arguments: object) -> int:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise StorageError("the codec broke")
        return await compress(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(CodecPool, "compress", broken)
    spec = ckptpipe.GraphSpec(
        ckptpipe.SourceSpec("files", {"paths": [source]}),
        (
            ckptpipe.SinkSpec(str(workdir / "one")),
            ckptpipe.SinkSpec(str(workdir / "two"), reads="zstd", policy="best-effort"),
            ckptpipe.SinkSpec(str(workdir / "three"), reads="zstd", policy="best-effort"),
        ),
        (ckptpipe.StageSpec("zstd", "compress", params={"codec": "zstd"}),),
        image_name="i",
    )
    result = run(ckptpipe.run_graph(spec, settings=LARGE))
    assert isinstance(result, ckptpipe.SaveResult)
    assert [sink.ok for sink in result.sinks] == [True, False, False]
    assert look(workdir / "two") == look(workdir / "three") == {}
    run(ckptpipe.verify(result.sinks[0].image_url, settings=LARGE))


@pytest.mark.parametrize("operation", ["delete", "list"])
def test_an_old_image_that_cannot_be_removed_does_not_undo_the_new_one(
    workdir: Path, source: Path, break_sink: Plan, operation: str
) -> None:
    old_images(workdir, source)
    break_sink("one", Faults().fail(operation, 0, lambda: StorageError("not now")))  # type: ignore[arg-type]
    result = run(ckptpipe.save(source, to=workdir / "one", name="i", overwrite=True, settings=LARGE))
    assert result.sinks[0].ok
    assert any("not now" in note for note in result.facts.notes)
    assert run(ckptpipe.verify(str(workdir / "one" / "i"), settings=LARGE)).raw_bytes == SIZE
    collected = run(ckptpipe.gc(str(workdir / "one"), older_than=0))
    assert any(item.removed for item in collected.items)
    run(ckptpipe.verify(str(workdir / "one" / "i"), settings=LARGE))


def test_somebody_elses_image_of_the_same_moment_stays(workdir: Path, source: Path, break_sink: Plan) -> None:
    faults = Faults()
    held = faults.hold("put_atomic", 3)
    break_sink("one", faults)
    other = write(workdir / "other", b"quicker")

    async def main() -> None:
        slow = asyncio.create_task(ckptpipe.save(source, to=workdir / "one", name="i", settings=LARGE))
        await held.reached.wait()
        quick = await ckptpipe.save(other, to=f"nvme:{workdir}/./one", name="i", settings=LARGE)
        assert quick.sinks[0].ok
        held.release.set()
        with pytest.raises(ImageExists, match="somebody else"):
            await slow
        assert (await ckptpipe.verify(quick.sinks[0].image_url, settings=LARGE)).raw_bytes == 7

    faults.calls["put_atomic"] = 0
    saves = {"count": 0}
    opened = image_sink.open_backend

    async def only_the_first(*arguments: object) -> object:
        """The second save gets a sound backend."""
        saves["count"] += 1
        backend = await opened(*arguments)  # type: ignore[arg-type]
        return backend if saves["count"] == 1 else backend.inner  # type: ignore[attr-defined]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_sink, "open_backend", only_the_first)
        run(main())


def test_two_sinks_on_one_image_are_refused(workdir: Path, source: Path) -> None:
    with pytest.raises(UsageError, match="two sinks"):
        run(ckptpipe.save(source, to=[workdir / "one", f"nvme:{workdir}/one/"], name="i", settings=LARGE))
    assert look(workdir / "one") == {}


def test_a_stage_that_nobody_reads_is_refused(workdir: Path, source: Path) -> None:
    spec = ckptpipe.GraphSpec(
        ckptpipe.SourceSpec("files", {"paths": [source]}),
        (ckptpipe.SinkSpec(str(workdir / "one")),),
        (ckptpipe.StageSpec("zstd", "compress", params={"codec": "zstd"}),),
    )
    with pytest.raises(UsageError, match="nothing reads from stage 'zstd'"):
        run(ckptpipe.run_graph(spec, settings=LARGE))


def test_a_stage_that_fails_with_every_sink_behind_it(
    workdir: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptpipe.pipeline.codecs.pool import CodecPool

    async def broken(self: CodecPool, *arguments: object) -> int:
        raise StorageError("the codec broke")

    monkeypatch.setattr(CodecPool, "compress", broken)
    to = [ckptpipe.SinkSpec(str(workdir / name), policy="best-effort") for name in ("one", "two")]
    with pytest.raises(SaveFailed, match="the codec broke"):
        run(ckptpipe.save(source, to=to, name="i", compress="zstd", settings=LARGE))
    required = [workdir / "one", to[1]]
    with pytest.raises(StorageError, match="the codec broke"):
        run(ckptpipe.save(source, to=required, name="i", compress="zstd", settings=LARGE))
    assert look(workdir / "one") == look(workdir / "two") == {}


@pytest.mark.parametrize(
    ("sink", "message"),
    [
        (("gs://bucket/x", {}), 'no storage backend is called "gs"'),
        (("nvme:", {}), "a directory is missing"),
        (("s3://", {}), "is not the name of a bucket"),
        (("", {}), "the URL is empty"),
        (("two", {"directt": "on"}), 'nvme has no option "directt"; did you mean "direct"'),
        (("two", {"direct": "perhaps"}), "option \"direct\": 'perhaps' is not one of auto, on, off"),
        (("s3://bucket/x", {"endpoint_url": "http://"}), "names no host"),
    ],
)
def test_a_mistake_in_a_best_effort_sink_ends_the_save(
    workdir: Path, source: Path, sink: tuple[str, dict[str, str]], message: str
) -> None:
    url, options = sink
    url = str(workdir / url) if url == "two" else url
    sinks = [SinkSpec(str(workdir / "one")), SinkSpec(url, policy="best-effort", options=options)]
    with pytest.raises((BadUrl, UnknownScheme), match=message) as caught:
        run(ckptpipe.save(source, to=sinks, name="i", settings=LARGE))
    assert caught.value.exit_code == 2
    assert not (workdir / "one").exists() and not (workdir / "two").exists()


class TheirBackend(MemoryBackend):
    """Of somebody else, who alone knows what its URLs and options may be."""

    scheme = "theirs"

    @classmethod
    async def open(cls, url: str, context: BackendContext, options: Mapping[str, object]) -> Self:
        if "?" in url:
            raise BadUrl(f"{url}: a question is no place", cure="write theirs:NAME")
        if "far" in options:
            raise UsageError("the option far needs a name")
        if "down" in url:
            raise StorageError(f"{url}: nobody answers")
        return await super().open(url, context, options)


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("theirs", f"{__name__}:TheirBackend", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    monkeypatch.setattr(TheirBackend, "options_type", None)


@pytest.mark.usefixtures("theirs")
@pytest.mark.parametrize(
    ("sink", "message"),
    [
        (("theirs:?", {}), "a question is no place"),
        (("theirs:x", {"far": "on"}), "the option far needs a name"),
    ],
)
def test_a_mistake_that_only_the_backend_sees_ends_the_save_too(
    workdir: Path, source: Path, sink: tuple[str, dict[str, str]], message: str
) -> None:
    url, options = sink
    mistaken = SinkSpec(url, policy="best-effort", options=options)
    for sinks in ([SinkSpec(str(workdir / "one")), mistaken], [mistaken, SinkSpec(str(workdir / "one"))]):
        with pytest.raises((BadUrl, UsageError), match=message) as caught:
            run(ckptpipe.save(source, to=sinks, name="i", settings=LARGE))
        assert caught.value.exit_code == 2
        assert look(workdir / "one") == {}


@pytest.mark.usefixtures("theirs")
def test_a_failure_of_the_same_backend_does_not(workdir: Path, source: Path) -> None:
    sinks = [SinkSpec(str(workdir / "one")), SinkSpec("theirs:down", policy="best-effort")]
    result = run(ckptpipe.save(source, to=sinks, name="i", settings=LARGE))
    assert [sink.ok for sink in result.sinks] == [True, False]
    assert "nobody answers" in result.sinks[1].error


POLICIES: tuple[Literal["required", "best-effort"], ...] = ("required", "best-effort")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("below", ["", "new/er"])
def test_two_names_of_one_place_are_one_sink_too_many(
    workdir: Path, source: Path, below: str, policy: Literal["required", "best-effort"]
) -> None:
    (workdir / "real").mkdir()
    (workdir / "also").symlink_to("real")
    one, two = workdir / "real" / below, workdir / "also" / below
    for other in (one, two, f"file://{two}", f"nvme:{workdir}/else,{two}"):
        with pytest.raises(UsageError, match="two sinks write to") as caught:
            sinks = [SinkSpec(str(one)), SinkSpec(str(other), policy=policy)]
            run(ckptpipe.save(source, to=sinks, name="i", settings=LARGE))
        assert caught.value.cure == "give each a URL of its own"
    assert list((workdir / "real").iterdir()) == [] and not (workdir / "else").exists()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("other", "options"),
    [
        ("S3://bkt/x", {}),
        ("s3://bkt//x", {}),
        ("s3://bkt/x/", {}),
        ("s3://bkt/x", {"endpoint_url": "http://One.example:80/"}),
        ("s3://bkt/x", {"part_bytes": "8MiB"}),
    ],
)
def test_two_spellings_of_one_place_in_s3(
    other: str,
    options: dict[str, str],
    policy: Literal["required", "best-effort"],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://one.example")
    with pytest.raises(UsageError, match="two sinks write to") as caught:
        check_sinks([SinkSpec("s3://bkt/x"), SinkSpec(other, policy=policy, options=options)])
    assert caught.value.cure == "give each a URL of its own"


def test_one_s3_url_on_two_services_is_two_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://one.example")
    elsewhere = {"endpoint_url": "http://two.example"}
    check_sinks([SinkSpec("s3://bkt/x"), SinkSpec("s3://bkt/x", options=elsewhere), SinkSpec("s3://bkt/X")])
    with pytest.raises(UsageError, match="two sinks write to"):
        check_sinks([SinkSpec("s3://bkt/x", options=elsewhere), SinkSpec("s3://bkt//x", options=elsewhere)])


def test_an_image_is_claimed_by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://one.example")

    async def body(context: GraphContext) -> None:
        assert context.claim("s3://bkt/x/i", {})
        assert context.claim("s3://bkt/x/i", {"endpoint_url": "http://two.example"})
        assert not context.claim("s3://bkt/x/i", {"endpoint_url": "http://one.example/"})
        assert context.claim("memory:x/i") and not context.claim("memory:x/i")

    in_context(body)


def test_places_that_only_look_alike(workdir: Path, source: Path) -> None:
    sinks = [
        SinkSpec("null:a"),
        SinkSpec("null:b"),
        SinkSpec(str(workdir / "a")),
        SinkSpec(str(workdir / "a" / "b")),
    ]
    assert len(run(ckptpipe.save(source, to=sinks, name="i", settings=LARGE)).sinks) == 4


def test_a_sink_of_one_directory_under_two_names(workdir: Path, source: Path) -> None:
    (workdir / "real").mkdir()
    (workdir / "also").symlink_to("real")
    for policy in POLICIES:
        sink = SinkSpec(f"nvme:{workdir}/real,{workdir}/also", policy=policy)
        with pytest.raises(BadUrl, match=r"real,.*also: a directory is named twice"):
            run(ckptpipe.save(source, to=[workdir / "else", sink], name="i", settings=LARGE))
    assert list((workdir / "real").iterdir()) == [] and not (workdir / "else").exists()
