"""Restore processes on a machine with their GPUs: from an image's chunks, or from what the driver left in each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.cuda import eviction
from ckptpipe.pipeline.cuda.choice import candidates
from ckptpipe.pipeline.cuda.device_map import GpuUnsuitable, check_free_memory, plan_gpus
from ckptpipe.pipeline.cuda.driver import CudaDriver
from ckptpipe.pipeline.cuda.early_start import restore_early
from ckptpipe.pipeline.cuda.gpu_decoding import GpuDecoding, leave_to_cpu, plan_decoding
from ckptpipe.pipeline.cuda.links import Links
from ckptpipe.pipeline.cuda.live_image import verify_live_image
from ckptpipe.pipeline.cuda.loading import loadable
from ckptpipe.pipeline.cuda.process_facts import SavedProcess
from ckptpipe.pipeline.cuda.put_back import put_back
from ckptpipe.pipeline.cuda.save import restore_all
from ckptpipe.pipeline.cuda.session import ProcessSession
from ckptpipe.pipeline.cuda.target import while_alive
from ckptpipe.pipeline.errors import UsageError
from ckptpipe.pipeline.image.reader import ImageReader
from ckptpipe.pipeline.progress import ProgressCallback
from ckptpipe.pipeline.sources.image import Counts
from ckptpipe.storage_backends.shielded import shielded


@dataclass(frozen=True, slots=True)
class Restoration:
    """The processes that an image was ``saved`` from, as ``sessions`` in the same order, and where each GPU is now
    (``mapped``: old UUID to new UUID)."""

    cuda: CudaDriver
    context: GraphContext
    reader: ImageReader
    saved: Sequence[SavedProcess]
    sessions: Sequence[ProcessSession]
    mapped: Mapping[str, str]
    progress: ProgressCallback | None

    async def from_custom_storage(self) -> Counts:
        """Their memory is in the image alone: the driver asks for it, and gets it."""
        again = [session for session in self.sessions if session.operation is not None]
        if again and self.mapped:
            raise UsageError(
                f"{again[0]} is RESTORING already, onto the GPUs that were chosen then",
                cure="leave out --device-map",
            )
        gpus, pairs = await plan_gpus(self.cuda, self.saved, self.mapped)
        if again:
            gpus = list(
                {gpu.uuid: gpu for gpu in [*gpus, *(m.gpu for s in again for m in s.memory)]}.values()
            )
        for session in self.sessions:
            session.gpus = session.gpus or tuple(gpus)
            await session.retain(tuple(gpus))
        async with Links(self.cuda) as links:
            await links.open(self.context, gpus)
            decoding = await self._plan_decoding(links)
            for session in self.sessions:
                session.start_pause()
            return await shielded(
                put_back(
                    self.sessions,
                    self.reader,
                    self.context,
                    links,
                    pairs=pairs,
                    decoding=decoding,
                    progress=self.progress,
                )
            )

    async def _plan_decoding(self, links: Links) -> GpuDecoding:
        """Who decodes, with memory left on the GPUs for the processes that are not back on them yet."""
        loads = (await loadable(self.reader)).some
        if loads:
            await links.open_loaders(self.context)
        # Before free memory is looked at: it takes some.
        decoding = await plan_decoding(links, self.context, self.reader, loads=loads)
        both = zip(self.saved, self.sessions, strict=True)
        waiting = [process for process, session in both if session.operation is None]
        try:
            await check_free_memory(self.cuda, waiting, self.mapped, self.context.gpu_scratch_bytes)
        except GpuUnsuitable as error:
            without = await leave_to_cpu(links, self.context, self.reader, error)
            if without is None:
                raise
            await check_free_memory(self.cuda, waiting, self.mapped)
            return without
        return decoding

    async def from_driver_image(self, *, early_start: bool) -> Counts:
        """The image is in each process's own memory or pool still: compare it, bring back what was evicted of it, then
        let the driver restore from it."""
        _, pairs = await plan_gpus(self.cuda, self.saved, self.mapped)
        devices = await self.cuda.devices()
        for session in self.sessions:
            session.gpus = candidates(session, devices)
            if session.evicted:
                await eviction.reached(session)
            elif session.pooled:
                await session.find_pool()
            assert session.record is not None
            if session.pool is None or len(session.record.mappings) > len(session.pooled):
                session.target.require_readable()
        targets = [session.target for session in self.sessions]
        counts = await while_alive(targets, verify_live_image(self.sessions, self.reader, self.context))
        if evicted := [session for session in self.sessions if session.evicted]:
            for session in evicted:
                session.touched = True
            # A driver that was asked before may still be at it: it gets a whole image, not one that is fed to it in step.
            begun = any(eviction.is_being_restored(session) for session in evicted)
            if early_start and len(evicted) == len(self.sessions) and not begun:
                for session in self.sessions:
                    session.start_pause()
                arrived = await shielded(
                    restore_early(self.sessions, pairs, self.reader, self.context, self.progress)
                )
                return _together(counts, arrived)
            arrived = await while_alive(
                targets, eviction.refill(evicted, self.reader, self.context, self.progress)
            )
            counts = _together(counts, arrived)
        for session in self.sessions:
            session.start_pause()
        await shielded(restore_all(self.sessions, pairs))
        return counts


def _together(compared: Counts, arrived: Counts) -> Counts:
    compared.chunks += arrived.chunks
    compared.zero_chunks += arrived.zero_chunks
    for backend, chunks in arrived.decoded_by.items():
        compared.count_decoded(backend, chunks)
    compared.stored_bytes += arrived.stored_bytes
    return compared
