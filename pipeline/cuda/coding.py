"""Compression before the bytes leave a GPU: which stages of a graph a GPU does, and how each stream is coded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptpipe.pipeline.build import codec_of
from ckptpipe.pipeline.codecs import CodecChoice
from ckptpipe.pipeline.codecs.sampling import pick_transform, sample_facts
from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.cuda import codec_device
from ckptpipe.pipeline.cuda.links import Link, Links
from ckptpipe.pipeline.decoding import NVCOMP
from ckptpipe.pipeline.image.records import TRANSFORM_NAMES
from ckptpipe.pipeline.spec import SOURCE, GraphSpec, StageSpec
from ckptpipe.pipeline.stages.encoded import EncodedStage

if TYPE_CHECKING:
    from ckptpipe.pipeline.sources.device import DeviceRange
    from ckptpipe.pyx.device_codec import EncodePlan

SAMPLE_PIECE = 64 << 10  # bytes; less where a slot is smaller
SAMPLE_PIECES = 4  # of a stream, evenly spread
SAMPLERS = 8  # streams of which samples are copied at a time, a GPU


@dataclass(frozen=True, slots=True)
class Coding:
    """What a compress stage asks for. Stages that ask for the same are served by the same chunks."""

    choice: CodecChoice
    transform: str = "auto"


@dataclass(slots=True)
class TakenStages:
    """The stages that the GPUs do, by name, each with what its edge wants; how each of these forms is coded."""

    stages: dict[str, tuple[EncodedStage, Coding]] = field(default_factory=dict)
    coders: dict[object, Coder] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


async def take_stages(spec: GraphSpec, links: Links, context: GraphContext) -> TakenStages:
    """Open codecs on the GPUs of ``links`` for the stages that can be done there, if there are any.

    A stage whose codec the CPU has too stays with the CPU where the GPUs lack what they need, and a note says so.
    CkptpipeError where no CPU has it, or the GPU's memory does not hold the scratch. Nothing is touched yet.
    """
    taken = TakenStages()
    wanted = {stage.name: _coding(stage) for stage in spec.stages if stage.kind == "compress"}
    wanted = {name: coding for name, coding in wanted.items() if coding.choice.name in codec_device.WRITES}
    here = {stage.name for stage in spec.stages if stage.reads == SOURCE and stage.name in wanted}
    for name in wanted.keys() - here:
        taken.notes.append(
            f"{wanted[name].choice} of stage {name} is the CPU's work: what it reads is no GPU's memory"
        )
    if not here:
        return taken
    reason = await asyncio.to_thread(codec_device.why_no_encoder)
    if reason is not None:
        for name in here:
            if wanted[name].choice.needs_gpu:
                raise reason
            taken.notes.append(f"{wanted[name].choice} is the CPU's work: {reason}")
        return taken
    await links.open_codecs(context)
    backend = codec_device.shown([NVCOMP], links.simulated)
    for name in here:
        coding = wanted[name]
        taken.stages[name] = EncodedStage(name, coding.choice, backend), coding
        taken.coders.setdefault(coding, Coder(coding, links))
    raw = any(stage.reads == SOURCE and stage.name not in here for stage in spec.stages)
    raw = raw or any(sink.reads == SOURCE for sink in spec.sinks)
    for _ in range(len(taken.coders) + raw - 1):
        await links.add_rings(context)
    return taken


def _coding(stage: StageSpec) -> Coding:
    return Coding(codec_of(stage), stage.params.get("transform") or "auto")


class Coder:
    """Decides how each stream is coded, from a few pieces of it that are copied out of the GPU's memory."""

    def __init__(self, coding: Coding, links: Links) -> None:
        self._coding = coding
        self._links = links
        self._fixed = next((k for k, name in TRANSFORM_NAMES.items() if name == coding.transform), None)

    async def plans(self, ranges: Sequence[DeviceRange]) -> list[EncodePlan | None]:
        """One for each of ``ranges``; None where a stream is better left as it is."""
        plans: list[EncodePlan | None] = [None] * len(ranges)
        work = iter(enumerate(ranges))

        async def decide() -> None:
            for position, each in work:
                if each.nbytes:
                    plans[position] = await self._plan(each)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(SAMPLERS, len(ranges))):
                group.create_task(decide())
        return plans

    async def _plan(self, each: DeviceRange) -> EncodePlan:
        transform = self._fixed
        if transform is None:
            facts = sample_facts(await self._sample(self._links[each.ordinal], each))
            transform = pick_transform(facts, self._coding.choice)
        return codec_device.encode_plan(self._coding.choice, transform)

    async def _sample(self, link: Link, each: DeviceRange) -> bytearray:
        """Pieces of a stream, one behind the other, each from a multiple of 4 KiB."""
        with await link.ring.acquire() as slot:
            piece = min(SAMPLE_PIECE, slot.nbytes // SAMPLE_PIECES, each.nbytes)
            last = each.nbytes - piece
            starts = sorted({last * k // (SAMPLE_PIECES - 1) & ~4095 for k in range(SAMPLE_PIECES)})
            sample = bytearray(len(starts) * piece)
            for number, start in enumerate(starts):
                with slot.slice(number * piece, piece) as part:
                    scan = await link.queue.fetch(part, piece, each.address + start)
                    if not scan.zero:  # zeros are not copied
                        with memoryview(part) as view:
                            sample[number * piece : (number + 1) * piece] = view
        return sample
