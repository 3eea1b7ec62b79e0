"""Device buffers of the calling process: saved as streams ``device/<name>``, and restored into such buffers."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from ckptpipe.pipeline import build
from ckptpipe.pipeline.context import GraphContext, graph_context
from ckptpipe.pipeline.cuda.choice import shown
from ckptpipe.pipeline.cuda.coding import expect_codecs
from ckptpipe.pipeline.cuda.device_array import DeviceArray, device_array
from ckptpipe.pipeline.cuda.driver import CudaDriver, Gpu, borrowed
from ckptpipe.pipeline.cuda.gpu_decoding import plan_decoding
from ckptpipe.pipeline.cuda.links import Links
from ckptpipe.pipeline.cuda.loading import loadable
from ckptpipe.pipeline.errors import UsageError
from ckptpipe.pipeline.graph_run import read_graph, save_graph
from ckptpipe.pipeline.image.names import device_stream
from ckptpipe.pipeline.opening import reading
from ckptpipe.pipeline.progress import ProgressCallback
from ckptpipe.pipeline.result import ReadResult, SaveResult
from ckptpipe.pipeline.settings import Settings
from ckptpipe.pipeline.sinks.buffers import names_of
from ckptpipe.pipeline.sinks.device import DeviceSink
from ckptpipe.pipeline.sources.device import DeviceMemory, DeviceRange, DeviceSource
from ckptpipe.pipeline.sources.image import ImageSource
from ckptpipe.pipeline.spec import GraphSpec, SourceSpec
from ckptpipe.pyx.cuda import CudaError

KIND = "device-buffers"


class DeviceBuffers(DeviceMemory):
    """``arrays``: by stream name. What their producers have enqueued is waited for when they are checked."""

    def __init__(self, driver: CudaDriver, arrays: Mapping[str, DeviceArray], links: Links) -> None:
        self.kind = shown(KIND, driver.simulated)
        self.links = links
        self._driver = driver
        self._arrays = dict(arrays)

    async def open(self, context: GraphContext) -> list[DeviceRange]:
        gpus = {gpu.ordinal: gpu for gpu in await self._driver.devices()}
        placed = [
            (stream, array, await self._gpu(stream, array, gpus)) for stream, array in self._arrays.items()
        ]
        await self.links.open(context, {gpu.ordinal: gpu for _, _, gpu in placed}.values())
        for ordinal, stream in dict.fromkeys((gpu.ordinal, array.stream) for _, array, gpu in placed):
            await self._driver.synchronize(self.links[ordinal].context, stream)
        self._ranges = [
            DeviceRange(stream, "gpu", gpu.ordinal, array.address, array.nbytes)
            for stream, array, gpu in placed
        ]
        return self._ranges

    async def _gpu(self, stream: str, array: DeviceArray, gpus: Mapping[int, Gpu]) -> Gpu:
        ordinal = array.device
        if array.nbytes:
            try:
                ordinal = await self._driver.device_of_address(array.address)
            except CudaError as error:
                raise UsageError(
                    f"{stream}: {array.address:#x} is no memory of a GPU: {error.message}",
                    cure="pass an array that lies on a GPU of this process",
                ) from error
            if array.device not in (None, ordinal):
                raise UsageError(f"{stream} says device {array.device}, its memory is on device {ordinal}")
        if ordinal is None:
            ordinal = 0  # an empty array is nowhere
        if ordinal not in gpus:
            raise UsageError(f"{stream} is on device {ordinal}, this process has {len(gpus)} GPUs")
        return gpus[ordinal]

    async def begin(self) -> list[DeviceRange]:
        return self._ranges


async def save_device_buffers(
    buffers: Mapping[str, Any],
    *,
    to: object,
    name: str = "",
    compress: str = "none",
    overwrite: bool = False,
    driver: CudaDriver | None = None,
    settings: Settings | None = None,
    progress: ProgressCallback | None = None,
) -> SaveResult:
    """Save device arrays, by name, as one image. See `operations.save`."""
    stages, sinks = build.sink_specs(to, compress)
    arrays = {_stream(given): device_array(given, value) for given, value in buffers.items()}
    if not arrays:
        raise UsageError("no device buffer to save", cure="pass {name: array}")
    spec = GraphSpec(SourceSpec("device", {"names": list(buffers)}), sinks, stages, name, overwrite)
    async with (
        borrowed(driver) as cuda,
        graph_context(settings or Settings()) as context,
        Links(cuda) as links,
    ):
        expect_codecs(spec, context)
        source = DeviceSource(DeviceBuffers(cuda, arrays, links))
        result = await save_graph(spec, source, context, "save", progress)
    result.facts.notes.extend(links.problems)
    return result


async def restore_device_buffers(
    url: str,
    buffers: Mapping[str, Any],
    *,
    expect_digest: str = "",
    options: Mapping[str, object] | None = None,
    driver: CudaDriver | None = None,
    settings: Settings | None = None,
    progress: ProgressCallback | None = None,
) -> ReadResult:
    """Restore streams of an image into device arrays of exactly their size. See `operations.restore`."""
    given = {name: device_array(name, value) for name, value in buffers.items()}
    for name, array in given.items():
        if array.readonly:
            raise UsageError(f"device buffer {name!r} is read-only", cure="pass a writable array")
    _require_apart(given)
    async with reading(url, options, settings, expect_digest) as (reader, context):
        known = {name: s.name for s in reader.manifest.streams for name in names_of(s.name)}
        arrays = {known.get(name, name): array for name, array in given.items()}
        if len(arrays) != len(given):
            raise UsageError(
                "two device buffers are named after one stream", cure="give one buffer for each stream"
            )
        _require_sizes(ImageSource(reader, decode=True, streams=list(arrays)), arrays)
        local = await loadable(reader)
        async with borrowed(driver) as cuda, Links(cuda, rings=not local.all) as links:
            memory = DeviceBuffers(cuda, arrays, links)
            ranges = await memory.open(context)
            if local.some:
                await links.open_loaders(context)
            decoding = await plan_decoding(links, context, reader, list(arrays), loads=local.some)
            if local.all and not decoding.needs_ring:
                context.expect_no_ring()
            else:
                await links.open_rings(context)
            source = ImageSource(
                reader,
                decode=True,
                streams=list(arrays),
                sink=DeviceSink.work(ranges, links, decoding),
            )
            sink = DeviceSink(ranges, links, context)
            result = await read_graph(source, sink, context, "restore", progress)
            result.facts.capture = memory.kind
            result.facts.notes.extend(memory.notes())
            return result


def _stream(name: str) -> str:
    try:
        return device_stream(name.removeprefix("device/"))
    except ValueError as error:
        raise UsageError(
            f"{name!r} cannot name a stream: {error}", cure="take a relative path without .."
        ) from error


def _require_sizes(source: ImageSource, arrays: Mapping[str, DeviceArray]) -> None:
    for stream in source.streams:
        if arrays[stream.name].nbytes != stream.nbytes:
            raise UsageError(
                f"{stream.name} has {stream.nbytes} bytes in the image, its buffer has {arrays[stream.name].nbytes}",
                cure="restore into a buffer of exactly the size that was saved",
            )


def _require_apart(arrays: Mapping[str, DeviceArray]) -> None:
    ordered = sorted((array.address, array.nbytes, name) for name, array in arrays.items() if array.nbytes)
    for (start, nbytes, first), (following, _, second) in pairwise(ordered):
        if start + nbytes > following:
            raise UsageError(
                f"device buffers {first!r} and {second!r} overlap", cure="restore into memory of their own"
            )
