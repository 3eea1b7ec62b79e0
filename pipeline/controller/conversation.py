"""One connection of a controller: the greeting, then one request after another, each followed to its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptpipe.pipeline.controller import peer, places
from ckptpipe.pipeline.controller.actions import HeldTarget, close_all
from ckptpipe.pipeline.controller.channel import Channel, Received
from ckptpipe.pipeline.controller.errors import ControllerBusy, ProtocolError
from ckptpipe.pipeline.controller.failures import to_frame
from ckptpipe.pipeline.controller.greeting import check_hello, greeting
from ckptpipe.pipeline.controller.jobs import Job
from ckptpipe.pipeline.controller.named_process import pid_of
from ckptpipe.pipeline.controller.records import to_json
from ckptpipe.pipeline.controller.requests import (
    CancelRequest,
    JobsRequest,
    Request,
    StateRequest,
    opened,
)
from ckptpipe.pipeline.controller.target_report import TargetReport
from ckptpipe.pyx.errors import CkptpipeError
from ckptpipe.storage_backends.shielded import in_thread

if TYPE_CHECKING:
    from ckptpipe.pipeline.controller.server import Server

FRAME_SECONDS = 10.0  # for a frame to come whole, once it has begun
REPORT_SECONDS = 30.0  # for a client to take its answer


class Conversation:
    """``reporting``: a job of this client runs, or its outcome is being told."""

    def __init__(self, server: Server, connection: socket.socket, *, full: bool) -> None:
        self.reporting = False
        self._server = server
        self._channel = Channel(connection)
        self._full = full
        self._client = 0

    def close(self) -> None:
        self._channel.close()

    async def run(self) -> None:
        """Never raises but CancelledError: what went wrong is told to the client, and to the log."""
        try:
            await self._converse()
        except (ProtocolError, TimeoutError) as error:
            self._server.say(f"client {self._client} is cut off: {error or 'it did not go on'}")
            if isinstance(error, ProtocolError):
                await self._try_tell(error)
        except OSError:  # the client has gone
            pass
        except CkptpipeError as error:
            self._server.say(f"client {self._client} is refused: {error}")
            await self._try_tell(error)
        except Exception as error:  # a defect ends this connection, and never the others
            self._server.defect(error)
            await self._try_tell(error)

    async def _try_tell(self, error: BaseException) -> None:
        with contextlib.suppress(OSError):
            await self._send(to_frame(error))

    async def _converse(self) -> None:
        who = peer.peer_of(self._channel.socket)
        self._client = who.pid
        peer.check_client(who)
        if self._full:
            raise ControllerBusy("the controller has too many connections", cure="try again in a moment")
        hello = await self._receive(at_once=True)
        if hello is None:
            return
        with hello:
            check_hello(hello.values)
        await self._send(greeting("welcome"))
        while not self._server.stopping:
            received = await self._receive()
            if received is None:
                return
            with received:
                if received.values.get("type") == "cancel":
                    continue  # it crossed the answer: there is nothing left to cancel
                await self._answer(received)

    async def _receive(self, *, at_once: bool = False) -> Received | None:
        if not at_once:
            await self._channel.readable()
        async with asyncio.timeout(FRAME_SECONDS):
            return await self._channel.receive()

    async def _send(self, values: dict[str, Any]) -> None:
        async with asyncio.timeout(REPORT_SECONDS):
            await self._channel.send(values)

    # -- requests ----------------------------------------------------------------------------------------

    async def _answer(self, received: Received) -> None:
        """A request that cannot be taken is refused, and the conversation goes on; one that is no request ends it."""
        if received.values.get("type") != "request":
            raise ProtocolError("a frame that is no request")
        request, said, detached = opened(received.values)
        try:
            await in_thread(places.check_portable, request)
            targets = self._targets(received, said)
            try:
                if not request.claims:
                    await self._send(await self._look(request, targets))
                    return
                job = self._server.start(request, targets, self._client, detached=detached)
                targets = ()  # the job's from here on
            finally:
                close_all(targets)
        except ProtocolError:
            raise
        except CkptpipeError as error:
            await self._send(to_frame(error))
            return
        await self._follow(job)

    def _targets(self, received: Received, said: tuple[int, ...]) -> tuple[HeldTarget, ...]:
        """The processes of the pidfds that came; the pids in the request are for messages only."""
        descriptors = received.take()
        try:
            if len(descriptors) != len(said):
                raise ProtocolError(f"{len(said)} processes with {len(descriptors)} descriptors")
            found = [pid_of(fd, pid) for fd, pid in zip(descriptors, said, strict=True)]
            if len(set(found)) != len(found):
                raise ProtocolError("one process twice in a request")
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        return tuple(HeldTarget(pid, fd) for pid, fd in zip(found, descriptors, strict=True))

    async def _look(self, request: Request, targets: tuple[HeldTarget, ...]) -> dict[str, Any]:
        """The answer to what needs no job, as a frame."""
        try:
            return {"type": "result", "value": to_json(await self._found(request, targets))}
        except Exception as error:
            self._server.defect(error)
            return to_frame(error)

    async def _found(self, request: Request, targets: tuple[HeldTarget, ...]) -> object:
        jobs = self._server.jobs
        if isinstance(request, JobsRequest):
            return tuple(job.summary() for job in jobs.all())
        if isinstance(request, CancelRequest):
            job = jobs.find(request.job)
            job.cancel(f"client {self._client} asked for it")
            await job.ended()
            return job.summary()
        assert isinstance(request, StateRequest)
        reports = await self._server.actions.perform(request, targets, lambda _: None, lambda _: None)
        return tuple(self._with_job(report) for report in reports)

    def _with_job(self, report: TargetReport) -> TargetReport:
        job = self._server.jobs.holder(report.pid)
        return (
            report
            if job is None
            else replace(report, busy=str(job), advice=f"ckptpipe cancel {job.number} ends it")
        )

    # -- a job -------------------------------------------------------------------------------------------

    async def _follow(self, job: Job) -> None:
        """Tell the client of its job until that is over; where the client goes, so does a job that is not detached."""
        self.reporting = True
        try:
            await self._send({"type": "job", "job": job.number})
            async with asyncio.TaskGroup() as group:
                listening = group.create_task(self._listen(job))
                while not job.over and not listening.done():
                    await job.changed()
                    self._try_report(job)
                listening.cancel()
            if not job.over:
                return  # the client has gone; the job is cancelled or detached
            for text in job.take_notes():
                await self._send({"type": "note", "text": text})
            if job.error is not None:
                await self._send(to_frame(job.error))
            else:
                await self._send({"type": "result", "value": to_json(job.result)})
        except OSError:
            self._gone(job)
            raise
        finally:
            self.reporting = False

    async def _listen(self, job: Job) -> None:
        """Cancel the job where its client asks for it, has gone, or says what makes no sense."""
        try:
            while True:
                received = await self._channel.receive()
                if received is None:
                    self._gone(job)
                    return
                with received:
                    if received.values.get("type") != "cancel":
                        raise ProtocolError("a request before the last one was answered")
                    job.cancel("its client asked for it")
        except ProtocolError as error:
            self._server.say(f"client {self._client}: {error}")
            self._gone(job)
        except OSError:
            self._gone(job)
        finally:
            job.poke()

    def _gone(self, job: Job) -> None:
        if not job.detached:
            job.cancel("its client has gone")

    def _try_report(self, job: Job) -> None:
        """News of a job, as far as the client takes them now: a client that is stopped holds nothing up."""
        latest = job.take_progress()
        if latest is not None:
            self._channel.try_send({"type": "progress", **to_json(latest)})
        notes = job.take_notes()
        for number, text in enumerate(notes):
            if not self._channel.try_send({"type": "note", "text": text}):
                job.keep_notes(notes[number:])
                return
