"""Onto which GPUs a restore goes, and whether they can hold it: refused before the target is touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckptpipe.pipeline.cuda.driver import CudaDriver, Gpu, by_uuid, uuid_bytes, uuid_text
from ckptpipe.pipeline.cuda.process_facts import SavedProcess
from ckptpipe.pipeline.cuda.session import CUSTOM
from ckptpipe.pipeline.errors import UsageError
from ckptpipe.pyx.errors import CkptpipeError


class GpuUnsuitable(CkptpipeError):
    """A GPU is not there, is of another kind, or has too little memory free for what should be restored onto it."""


def parse_device_map(given: Mapping[str, str] | None) -> dict[str, str]:
    """{old UUID: new UUID} in the usual spelling. UsageError where a GPU is named twice, or is none."""
    mapped = {uuid_text(uuid_bytes(old)): uuid_text(uuid_bytes(new)) for old, new in (given or {}).items()}
    if len(mapped) != len(given or {}) or len(set(mapped.values())) != len(mapped):
        raise UsageError("the device map names a GPU twice", cure="map each old GPU to a new one of its own")
    return mapped


async def plan_gpus(
    driver: CudaDriver, saved: Sequence[SavedProcess], mapped: Mapping[str, str]
) -> tuple[list[Gpu], dict[int, dict[str, str]]]:
    """The GPUs to restore onto, and for each process (by k) the pairs for the driver ({} without a map).

    Where custom storage made the image, its GPUs are known and a map must list them all; a driver image
    knows only which GPUs the process had open, and the driver itself has the last word.
    """
    there = by_uuid(await driver.devices())
    listed = {gpu.uuid: gpu for process in saved for gpu in process.gpus}
    exact = all(process.capture == CUSTOM for process in saved)
    unknown = [old for old in mapped if old not in listed]
    if unknown:
        raise UsageError(
            f"the device map names {', '.join(unknown)}, which the image was not on",
            cure=f"its GPUs are {', '.join(listed)}",
        )
    missing = [uuid for uuid in listed if uuid not in mapped]
    if mapped and exact and missing:
        raise UsageError(
            f"the device map lacks {', '.join(missing)}: it must list every GPU of the image",
            cure=" ".join(f"add --device-map {uuid}={uuid}" for uuid in missing),
        )
    needed: dict[str, int] = {}
    for process in saved:
        for gpu in process.gpus:
            new = mapped.get(gpu.uuid, gpu.uuid)
            if new not in there:
                if not exact and not mapped:
                    continue
                raise GpuUnsuitable(
                    f"{new} is not in this machine, or not visible here",
                    cure="map it to one that is: --device-map OLD=NEW (nvidia-smi -L lists them)",
                )
            if there[new].name != gpu.name:
                raise GpuUnsuitable(
                    f"{new} is a {there[new].name}, the image is of a {gpu.name}",
                    cure="restore onto a GPU of the same kind",
                )
            needed[new] = needed.get(new, 0) + (gpu.nbytes or 0)
    for uuid, nbytes in needed.items():
        if nbytes > there[uuid].memory_bytes:
            raise _too_small(there[uuid], nbytes, there[uuid].memory_bytes)
    pairs = {
        process.k: {gpu.uuid: mapped[gpu.uuid] for gpu in process.gpus if gpu.uuid in mapped}
        for process in saved
    }
    return [there[uuid] for uuid in needed], pairs


async def check_free_memory(
    driver: CudaDriver, saved: Sequence[SavedProcess], mapped: Mapping[str, str], scratch: int = 0
) -> None:
    """GpuUnsuitable where a GPU has not enough free memory for what goes onto it, our own context counted.
    ``scratch``: bytes that codecs have taken of it already."""
    there = by_uuid(await driver.devices())
    needed: dict[str, int] = {}
    for process in saved:
        for gpu in process.gpus:
            new = mapped.get(gpu.uuid, gpu.uuid)
            needed[new] = needed.get(new, 0) + (gpu.nbytes or 0)
    for uuid, nbytes in needed.items():
        context = await driver.retain(there[uuid].ordinal)
        try:
            free, _ = await driver.memory(context)
        finally:
            await driver.release(there[uuid].ordinal)
        if free < nbytes:
            raise _too_small(there[uuid], nbytes, free, scratch)


def _too_small(gpu: Gpu, needed: int, there: int, scratch: int = 0) -> GpuUnsuitable:
    beside = f" beside the {scratch} that codecs take (--gpu-scratch)" if scratch else ""
    return GpuUnsuitable(
        f"{gpu.uuid} ({gpu.name}) has {there} bytes of memory free{beside}, the image needs {needed}",
        cure="free memory on it (nvidia-smi shows who holds it), or map the image to another GPU: --device-map OLD=NEW",
    )
