"""What ckptpipe does, as coroutines: save, restore, verify, copy, and the care of stored images."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptpipe.pipeline import build
from ckptpipe.pipeline.blocking import blocking
from ckptpipe.pipeline.codecs import parse_compress
from ckptpipe.pipeline.context import graph_context
from ckptpipe.pipeline.decoding import decoding_for_host, decoding_for_verify
from ckptpipe.pipeline.errors import ImageCorrupt, UsageError
from ckptpipe.pipeline.graph_run import read_graph, save_graph
from ckptpipe.pipeline.image.damage import Damage
from ckptpipe.pipeline.opening import Options, reading
from ckptpipe.pipeline.progress import ProgressCallback
from ckptpipe.pipeline.result import ReadResult, SaveResult
from ckptpipe.pipeline.settings import DecompressBackend, Settings, TransformName
from ckptpipe.pipeline.sink_places import check_sinks, require_directory
from ckptpipe.pipeline.sinks.abc import Sink
from ckptpipe.pipeline.sinks.buffers import BuffersSink, names_of
from ckptpipe.pipeline.sinks.files import FilesSink
from ckptpipe.pipeline.sinks.nothing import NothingSink
from ckptpipe.pipeline.sources.image import ImageSource
from ckptpipe.pipeline.sources.verified import VerifiedImage
from ckptpipe.pipeline.spec import LOCK_TIMEOUT, Capture, GraphSpec, Leave, SinkSpec, SourceSpec
from ckptpipe.storage_backends.shielded import in_thread

if TYPE_CHECKING:
    from ckptpipe.pipeline.controller.controller import Where
    from ckptpipe.pipeline.cuda.choice import PlanCallback
    from ckptpipe.pipeline.cuda.driver import CudaDriver


async def save(
    sources: object = None,
    *,
    to: str | os.PathLike[str] | SinkSpec | Sequence[str | os.PathLike[str] | SinkSpec],
    name: str = "",
    compress: str = "none",
    transform: TransformName | None = None,
    allow_gpu_only: bool = False,
    overwrite: bool = False,
    pid: int | None = None,
    processes: Sequence[int] = (),
    leave: Leave = "running",
    evict: bool = False,
    capture: Capture = "auto",
    lock_timeout: float = LOCK_TIMEOUT,
    device_buffers: Mapping[str, Any] | None = None,
    on_plan: PlanCallback | None = None,
    driver: CudaDriver | None = None,
    where: Where = "auto",
    settings: Settings | None = None,
    progress: ProgressCallback | None = None,
) -> SaveResult:
    """Save ``sources`` as one image at every URL of ``to``, in one pass.

    ``sources``: a path or several, {name: buffer}, ``"-"`` for standard input, or a `SourceSpec`.
    ``name``: of the image; UTC time and a random part by default. ``compress``: ``none``, ``zstd[:level]``,
    ``deflate[:level]``, of GPU memory ``ans[:type]``, or ``auto``: what gets each stream stored soonest, of the
    codecs that can be read without a GPU (of all with ``allow_gpu_only``); what was chosen, and why, is in the
    result. ``transform``: auto, none, planes2 or planes4 before the codec, in place of the settings'.
    Raises UsageError, SourceError, ImageExists, StorageError, or SaveFailed; nothing is left behind then.

    In place of sources, the GPU state of a live process (``pid``) or of several that belong together
    (``processes``), which is left as ``leave`` says: running again, or checkpointed with its GPUs free.
    ``evict``: checkpointed, and of a process that `ckptpipe launch` started neither the GPUs nor host memory
    hold what is in the image; `restore` brings it back from there.
    ``capture``: auto, custom-storage, launch or driver-image; ``on_plan`` hears what was chosen before anything is
    touched. ``lock_timeout``: seconds that its work may take to come to a halt. Raises TargetError before the
    process is touched; a failure after that brings it back to RUNNING, or is a CaptureFailed that names the
    state it is in and what to do. Or ``device_buffers``: {name: array on a GPU of this process}, each with
    ``__cuda_array_interface__`` or DLPack. ``driver``: one that the caller keeps open; default: one of its own.
    ``where``: a process is saved by the controller (`ckptpipe serve`) where one runs (auto), by it or not at all
    (controller), or by this process (here; also where ``driver`` or ``on_plan`` is given).
    """
    settings = _encoded_by(compress, transform, allow_gpu_only, settings)
    pids = [*([pid] if pid is not None else []), *processes]
    if sum(given is not None for given in (sources, pids or None, device_buffers)) != 1:
        raise UsageError(
            "a save is of sources, of a process or of device buffers",
            cure="give one of sources, pid= (or processes=) and device_buffers=",
        )
    stages, sinks = build.sink_specs(to, compress)
    common: dict[str, Any] = {
        "to": to, "name": name, "compress": compress, "overwrite": overwrite, "settings": settings, "progress": progress
    }  # fmt: skip
    if pids or device_buffers is not None:
        await in_thread(check_sinks, sinks)
    if pids:
        from ckptpipe.pipeline.controller.controller import Controller
        from ckptpipe.pipeline.cuda.save import save_processes

        own = driver is not None or on_plan is not None
        controller = await Controller.running("here" if own else where, pids)
        if controller is not None:
            return await controller.save(
                pids, leave=leave, evict=evict, capture=capture, lock_timeout=lock_timeout, **common
            )
        return await save_processes(
            pids,
            leave=leave,
            evict=evict,
            capture=capture,
            lock_timeout=lock_timeout,
            on_plan=on_plan,
            driver=driver,
            **common,
        )
    if device_buffers is not None:
        from ckptpipe.pipeline.cuda.buffers import save_device_buffers

        return await save_device_buffers(device_buffers, driver=driver, **common)
    spec = GraphSpec(build.source_spec(sources), sinks, stages, name, overwrite)
    result = await run_graph(spec, settings=settings, progress=progress)
    assert isinstance(result, SaveResult)
    return result


async def run_graph(
    spec: GraphSpec, *, settings: Settings | None = None, progress: ProgressCallback | None = None
) -> SaveResult | ReadResult:
    """Run a whole graph: a save or copy where its sinks are images, a restore where its sink is files."""
    if not spec.sinks:
        raise UsageError("a graph without a sink does nothing", cure="add a sink")
    await in_thread(check_sinks, spec.sinks)
    if spec.source.kind == "image":
        return await _run_from_image(spec, settings or Settings(), progress)
    source = build.make_source(spec.source)
    async with graph_context(settings or Settings()) as context:
        return await save_graph(spec, source, context, "save", progress)


async def restore(
    url: str,
    *,
    to: str | os.PathLike[str] | None = None,
    buffers: Mapping[str, Any] | None = None,
    streams: Sequence[str] | None = None,
    expect_digest: str = "",
    overwrite: bool = False,
    pid: int | None = None,
    processes: Sequence[int] = (),
    device_map: Mapping[str, str] | None = None,
    early_start: bool = False,
    device_buffers: Mapping[str, Any] | None = None,
    driver: CudaDriver | None = None,
    where: Where = "auto",
    decompress_backend: DecompressBackend | None = None,
    options: Options | None = None,
    settings: Settings | None = None,
    progress: ProgressCallback | None = None,
) -> ReadResult:
    """Restore the image at ``url`` into files below ``to``, or into ``buffers`` {stream name: writable buffer}.

    ``streams``: only these, by name (``files/`` and ``host/`` may be left out). ``expect_digest``: refuse any
    other image. Files appear under their names only when all of them are whole and verified.
    Raises ImageNotFound, ImageCorrupt and its kinds, RestoreConflict, UsageError, StorageError.

    Or into the live, checkpointed process ``pid`` (``processes``) whose present checkpoint it is, which runs
    again then; ``device_map``: {GPU's old UUID: new UUID}. CheckpointMismatch where image and process do not
    belong together, CaptureFailed where the process could not be brought back. ``early_start``: the driver begins
    while the rest of an evicted image still arrives; faster, but what then stays bad ends the process, where it
    would otherwise stay checkpointed. Or into ``device_buffers``
    {stream name: array on a GPU of this process}. ``where``: as for `save`.

    ``decompress_backend``: who decodes, in place of the settings': auto is the first of decompression-engine,
    nvcomp-cuda and cpu that can, chunk by chunk (for files and buffers, the CPU where it can). One that is named and
    cannot is an error, as is an image that nobody here decodes, before anything is touched.
    """
    settings = _decoded_by(decompress_backend, settings)
    pids = [*([pid] if pid is not None else []), *processes]
    if sum(given is not None for given in (to, buffers, pids or None, device_buffers)) != 1:
        raise UsageError(
            "a restore goes to a directory, into buffers, into device buffers or into a process",
            cure="give one of to=, buffers=, device_buffers= and pid=",
        )
    if to is not None:
        require_directory(os.fspath(to))
    common: dict[str, Any] = {
        "expect_digest": expect_digest, "options": options, "settings": settings, "progress": progress
    }  # fmt: skip
    if pids:
        from ckptpipe.pipeline.controller.controller import Controller
        from ckptpipe.pipeline.cuda.restore import restore_processes

        controller = await Controller.running("here" if driver is not None else where, pids)
        if controller is not None:
            return await controller.restore(
                url, pids, device_map=device_map, early_start=early_start, **common
            )
        return await restore_processes(
            url, pids, device_map=device_map, early_start=early_start, driver=driver, **common
        )
    if device_map:
        raise UsageError(
            "a device map is for restoring into a process", cure="give pid= too, or leave it out"
        )
    if device_buffers is not None:
        from ckptpipe.pipeline.cuda.buffers import restore_device_buffers

        return await restore_device_buffers(url, device_buffers, driver=driver, **common)
    async with reading(url, options, settings, expect_digest) as (reader, context):
        if buffers is not None:
            known = {name: s.name for s in reader.manifest.streams for name in names_of(s.name)}
            streams = [known.get(name, name) for name in buffers]
        async with decoding_for_host(reader, context, streams) as decoder:
            source = ImageSource(reader, decode=True, streams=streams, decoder=decoder)
            sink: Sink
            if buffers is not None:
                sink = BuffersSink(buffers, context)
            else:
                assert to is not None
                sink = FilesSink(to, context, overwrite=overwrite)
            return await read_graph(source, sink, context, "restore", progress)


async def verify(
    url: str,
    *,
    expect_digest: str = "",
    decompress_backend: DecompressBackend | None = None,
    options: Options | None = None,
    settings: Settings | None = None,
    progress: ProgressCallback | None = None,
) -> ReadResult:
    """Read the whole image at ``url`` as a restore would, and write nothing; what pads its chunks must be zeros, too.
    Only dead space (FORMAT.md, "Data objects"), which belongs to no chunk, is not read. Raises as `restore` does, but
    after everything was read: the error's ``found`` lists what is damaged, its ``count`` is how much.

    Chunks of codecs that need a GPU, where there is none: the checksums of their stored bytes are verified, and the
    result says that they were not decoded (``chunks_not_decoded``, and a note).
    """
    settings = _decoded_by(decompress_backend, settings)
    async with reading(url, options, settings, expect_digest) as (reader, context):
        damage = Damage(reader.url)
        try:
            await asyncio.to_thread(reader.check_object_checksums)
        except ImageCorrupt as error:
            damage.add(error)
        async with decoding_for_verify(reader, context) as (decoder, left):
            source = VerifiedImage(reader, decode=True, decoder=decoder, not_decoded=left, damage=damage)
            result = await read_graph(source, NothingSink(), context, "verify", progress)
        damage.raise_found()
        return result


async def copy(
    url: str,
    *,
    to: str | os.PathLike[str] | SinkSpec | Sequence[str | os.PathLike[str] | SinkSpec],
    name: str = "",
    compress: str = "",
    transform: TransformName | None = None,
    overwrite: bool = False,
    options: Options | None = None,
    settings: Settings | None = None,
    progress: ProgressCallback | None = None,
) -> SaveResult:
    """Copy the image at ``url`` to other URLs, verified on the way.

    ``compress`` "" keeps the stored bytes as they are; otherwise chunks are decoded and encoded anew, with
    ``transform`` as for `save`.
    ``name`` "" keeps the image's name. The copy is an image of its own, with its own save id and digest.
    """
    settings = _encoded_by(compress or "none", transform, False, settings)
    stages, sinks = build.sink_specs(to, compress or "none")
    params = {"url": url, "options": dict(options or {}), "decode": bool(compress)}
    spec = GraphSpec(SourceSpec("image", params), sinks, stages, name, overwrite)
    result = await run_graph(spec, settings=settings, progress=progress)
    assert isinstance(result, SaveResult)
    return result


async def _run_from_image(
    spec: GraphSpec, settings: Settings, progress: ProgressCallback | None
) -> SaveResult | ReadResult:
    params = spec.source.params
    digest = params.get("expect_digest", "")
    async with reading(params["url"], params.get("options"), settings, digest) as (reader, context):
        files = [sink for sink in spec.sinks if sink.kind == "files"]
        decode = bool(files) or params.get("decode", any(stage.kind == "compress" for stage in spec.stages))
        streams = params.get("streams")
        async with AsyncExitStack() as stack:
            decoder = None
            if decode:
                decoder = await stack.enter_async_context(decoding_for_host(reader, context, streams))
            source = ImageSource(reader, decode=decode, streams=streams, decoder=decoder)
            if len(files) == len(spec.sinks) == 1 and not spec.stages:
                sink = FilesSink(files[0].url, context, overwrite=spec.overwrite)
                return await read_graph(source, sink, context, "restore", progress)
            named = spec if spec.image_name else replace(spec, image_name=reader.manifest.name)
            return await save_graph(named, source, context, "copy", progress)


def _decoded_by(backend: DecompressBackend | None, settings: Settings | None) -> Settings | None:
    return settings if backend is None else replace(settings or Settings(), decompress_backend=backend)


def _encoded_by(
    compress: str, transform: TransformName | None, allow_gpu_only: bool, settings: Settings | None
) -> Settings | None:
    if transform not in (None, "auto", "none") and not parse_compress(compress).compresses:
        raise UsageError(
            f"transform {transform} is of no use without a codec", cure="name a codec too: compress='zstd'"
        )
    if transform is None and not allow_gpu_only:
        return settings
    settings = settings or Settings()
    allowed = allow_gpu_only or settings.allow_gpu_only
    return replace(settings, transform=transform or settings.transform, allow_gpu_only=allowed)


save_blocking = blocking(save)
run_graph_blocking = blocking(run_graph)
restore_blocking = blocking(restore)
verify_blocking = blocking(verify)
copy_blocking = blocking(copy)
