"""Compression before the bytes leave a GPU: which stages of a graph a GPU does, and how each stream is coded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ckptpipe.pipeline.build import encoding_of
from ckptpipe.pipeline.codecs import DECODABLE, CodecChoice, Encoding
from ckptpipe.pipeline.codecs.decision import decide
from ckptpipe.pipeline.codecs.encoding import TRANSFORM_AUTO
from ckptpipe.pipeline.codecs.rates import gpu_rates
from ckptpipe.pipeline.codecs.sampling import SampleFacts, pick_transform, sample_facts
from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.cuda import codec_device
from ckptpipe.pipeline.cuda.links import Link, Links
from ckptpipe.pipeline.decoding import CPU, NVCOMP
from ckptpipe.pipeline.errors import UsageError
from ckptpipe.pipeline.settings import Settings
from ckptpipe.pipeline.spec import SOURCE, GraphSpec, StageSpec
from ckptpipe.pipeline.stages.encoded import EncodedStage

if TYPE_CHECKING:
    from ckptpipe.pipeline.sources.device import DeviceRange
    from ckptpipe.pyx.device_codec import EncodePlan

PIECE_BYTES = 256 << 20
"""Of a stream, that are coded alike: a GPU's memory holds weights and states side by side."""
SAMPLE_PART = 64 << 10  # bytes; less where a slot is smaller
SAMPLE_PARTS = 4  # of a piece, evenly spread
SAMPLERS = 8  # pieces that are looked at side by side
LINK_RATE = 55e9  # bytes a second that a GPU's link carries: PCIe 5 x16, pinned


@dataclass(frozen=True, slots=True)
class Coding:
    """What a compress stage asks for. Stages that ask for the same are served by the same chunks; each ``auto`` has
    a ``stage`` of its own, since it serves its own sinks."""

    encoding: Encoding
    allow_gpu_only: bool = False
    stage: str = ""


@dataclass(slots=True)
class TakenStages:
    """The stages that the GPUs do, by name, each with what its edge wants; how each of these forms is coded."""

    stages: dict[str, tuple[EncodedStage, object]] = field(default_factory=dict)
    coders: dict[object, Coder] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


async def take_stages(
    spec: GraphSpec, links: Links, context: GraphContext, *, comes_back: bool = False
) -> TakenStages:
    """Open codecs on the GPUs of ``links`` for the stages that can be done there, if there are any.

    A stage whose codec the CPU has too stays with the CPU where the GPUs lack what they need, and a note says so.
    CkptpipeError where no CPU has it, or the GPU's memory does not hold the scratch. Nothing is touched yet.
    ``comes_back``: what is stored is decoded again at the end, so that the decoder must have the codec too.
    """
    taken = TakenStages()
    wanted = {
        stage.name: _coding(stage, context.settings) for stage in spec.stages if stage.kind == "compress"
    }
    wanted = {name: coding for name, coding in wanted.items() if _for_gpus(coding.encoding.codec)}
    here = [stage.name for stage in spec.stages if stage.reads == SOURCE and stage.name in wanted]
    for name in sorted(wanted.keys() - set(here)):
        taken.notes.append(f"stage {name} is the CPU's work: what it reads is not the source itself")
    if not here:
        return taken
    reason = await asyncio.to_thread(codec_device.why_no_encoder)
    if reason is not None:
        for name in here:
            choice = wanted[name].encoding.codec
            if choice.needs_gpu:
                raise reason
            taken.notes.append(f"{choice} is the CPU's work: {reason}")
        return taken
    asked = context.settings.decompress_backend
    await links.open_codecs(context, "auto" if asked == CPU else asked)
    for name in here:
        for plan in _possible(wanted[name]):
            for link in links:
                assert link.codec is not None, "codecs are open"
                await link.codec.prepare(plan)
                reads = DECODABLE if asked == CPU else link.codec.decodes
                if comes_back and plan.codec_id not in reads:
                    raise UsageError(
                        f"{wanted[name].encoding.codec} cannot be put back by {asked}, which was asked for",
                        cure="leave out decompress_backend, or take another codec",
                    )
    backend = codec_device.shown([NVCOMP], links.simulated)
    for name in here:
        coding = wanted[name]
        stage = EncodedStage(name, coding.encoding.codec, backend)
        taken.stages[name] = stage, coding
        taken.coders.setdefault(coding, Coder(coding, links)).stages.append(stage)
    raw = any(stage.reads == SOURCE and stage.name not in here for stage in spec.stages)
    raw = raw or any(sink.reads == SOURCE for sink in spec.sinks)
    for _ in range(len(taken.coders) + raw - 1):
        await links.add_rings(context)
    return taken


def expect_codecs(spec: GraphSpec, context: GraphContext) -> None:
    """Before a source's rings are made: they are larger where GPUs encode."""
    if any(
        stage.kind == "compress" and _for_gpus(encoding_of(stage, context.settings).codec)
        for stage in spec.stages
    ):
        context.expect_gpu_codecs()


def _for_gpus(choice: CodecChoice) -> bool:
    return choice.auto or choice.name in codec_device.WRITES


def _coding(stage: StageSpec, settings: Settings) -> Coding:
    encoding = encoding_of(stage, settings)
    return Coding(encoding, settings.allow_gpu_only, stage.name) if encoding.codec.auto else Coding(encoding)


def _possible(coding: Coding) -> list[EncodePlan]:
    """What `DeviceCodec` may be asked for, so that what it refuses is refused before anything is touched."""
    encoding = coding.encoding
    choices = [encoding.codec]
    if encoding.codec.auto:
        choices = [CodecChoice("deflate", 0), CodecChoice("deflate", 1)]
        choices += [CodecChoice("ans", number) for number in range(2)] if coding.allow_gpu_only else []
    transforms = [0, 1, 2] if encoding.transform == TRANSFORM_AUTO else [encoding.transform]
    return [codec_device.encode_plan(Encoding(choice, each)) for choice in choices for each in transforms]


@dataclass(slots=True)
class Plans:
    """How each piece of ``chunks`` chunks of each stream is coded; None where it is better left as it is."""

    chunks: int
    pieces: list[list[EncodePlan | None]]

    def of(self, stream: int, chunk: int) -> EncodePlan | None:
        return self.pieces[stream][chunk // self.chunks]


class Coder:
    """Decides how each stream is coded, piece by piece, from a little of it that is copied out of the GPU's memory.

    ``stages``: that take what is coded so.
    """

    def __init__(self, coding: Coding, links: Links) -> None:
        self.stages: list[EncodedStage] = []
        self._coding = coding
        self._links = links

    async def plans(self, ranges: Sequence[DeviceRange], chunk_bytes: int) -> Plans:
        """For all of ``ranges``, by their positions. The samples together are a thousandth of what they are of."""
        plans = Plans(max(1, PIECE_BYTES // chunk_bytes), [])
        step = plans.chunks * chunk_bytes
        work: list[tuple[int, int, DeviceRange, int]] = []
        for position, each in enumerate(ranges):
            starts = range(0, each.nbytes, step)
            plans.pieces.append([None] * len(starts))
            work += [(position, number, each, start) for number, start in enumerate(starts)]
        left = iter(work)

        async def decide_some() -> None:
            for position, number, each, start in left:
                nbytes = min(step, each.nbytes - start)
                encoding = await self._encoding(position, number * plans.chunks, each, start, nbytes)
                if encoding.codec.compresses:
                    plans.pieces[position][number] = codec_device.encode_plan(encoding)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(SAMPLERS, len(work))):
                group.create_task(decide_some())
        for stage in self.stages:
            stage.piece_chunks = plans.chunks
        return plans

    async def _encoding(
        self, position: int, chunk: int, each: DeviceRange, start: int, nbytes: int
    ) -> Encoding:
        encoding = self._coding.encoding
        if not encoding.codec.auto and encoding.transform != TRANSFORM_AUTO:
            return encoding
        sample = await self._sample(self._links[each.ordinal], each.address + start, nbytes)
        facts = await asyncio.to_thread(sample_facts, sample)
        if encoding.codec.auto:
            return self._decide(position, chunk, facts)
        return replace(encoding, transform=pick_transform(facts, encoding.codec))

    def _decide(self, position: int, chunk: int, facts: SampleFacts) -> Encoding:
        """By what the sinks behind the stage take; of a sink of which nothing is known, that it is slower."""
        coding = self._coding
        (stage,) = self.stages
        decision = decide(
            facts,
            [
                rate
                for rate in gpu_rates(facts, allow_gpu_only=coding.allow_gpu_only)
                if coding.encoding.transform in (TRANSFORM_AUTO, rate.encoding.transform)
            ],
            stage.sink_rate(),
            allow_gpu_only=coding.allow_gpu_only,
            home="gpu",
            link_rate=LINK_RATE,
        )
        stage.decided(position, chunk, decision)
        return decision.encoding

    async def _sample(self, link: Link, address: int, nbytes: int) -> bytearray:
        """Parts of a range, one behind the other, each from a multiple of 4 KiB."""
        with await link.ring.acquire() as slot:
            part = min(SAMPLE_PART, slot.nbytes // SAMPLE_PARTS, nbytes)
            last = nbytes - part
            starts = sorted({last * k // (SAMPLE_PARTS - 1) & ~4095 for k in range(SAMPLE_PARTS)})
            sample = bytearray(len(starts) * part)
            for number, start in enumerate(starts):
                with slot.slice(number * part, part) as lease:
                    scan = await link.queue.fetch(lease, part, address + start)
                    if not scan.zero:  # zeros are not copied
                        with memoryview(lease) as view:
                            sample[number * part : (number + 1) * part] = view
        return sample
