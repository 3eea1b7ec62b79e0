"""The manifest's ``process``: which processes an image is of, and of which checkpoint; written and believed here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ckptpipe.pipeline.cuda.errors import CheckpointMismatch
from ckptpipe.pipeline.cuda.session import CUSTOM, DRIVER_IMAGE, LAUNCH, ProcessSession
from ckptpipe.pipeline.errors import ImageCorrupt, UsageError
from ckptpipe.pipeline.image.manifest import Manifest

PROCESSES_MAX = 4096


@dataclass(frozen=True, slots=True)
class SavedGpu:
    uuid: str
    name: str
    memory_bytes: int
    nbytes: int | None  # of the process on it; None where that is not known


@dataclass(frozen=True, slots=True)
class SavedProcess:
    """One entry of the manifest's ``process.processes``, checked."""

    k: int
    pid: int
    name: str
    start_time: int
    boot_id: str
    capture: str
    nonce: str
    gpus: tuple[SavedGpu, ...]

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.name})"


def process_facts(
    sessions: Sequence[ProcessSession], driver_version: str, bytes_of: Mapping[int, Mapping[str, int | None]]
) -> dict[str, Any]:
    """For a manifest. ``bytes_of``: of each session (by k), bytes by GPU."""
    made = []
    for session in sessions:
        assert session.record is not None
        gpus = {gpu.uuid: gpu for gpu in (*session.gpus, *(each.gpu for each in session.memory))}
        made.append(
            {
                "k": session.k,
                "pid": session.pid,
                "name": session.target.name,
                "start_time": session.target.start_time,
                "capture": session.record.capture,
                "nonce": session.record.nonce,
                "gpus": [
                    {
                        "uuid": uuid,
                        "name": gpus[uuid].name,
                        "memory_bytes": gpus[uuid].memory_bytes,
                        "bytes": nbytes,
                    }
                    for uuid, nbytes in bytes_of[session.k].items()
                ],
                "driver_version": driver_version,
                "time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            }
        )
    return {"boot_id": sessions[0].target.boot_id, "processes": made}


def saved_processes(manifest: Manifest, url: str) -> list[SavedProcess]:
    """The processes of an image. UsageError where it is not of a process, ImageCorrupt where it is not clear."""
    if manifest.process is None:
        raise UsageError(
            f"{url} is not the image of a process",
            cure="restore its streams with --to DIR, or name an image that save --pid made",
        )
    facts = manifest.process
    try:
        boot_id, listed = _text(facts["boot_id"]), facts["processes"]
        if not isinstance(listed, list) or not 0 < len(listed) <= PROCESSES_MAX:
            raise ValueError("no list of processes")
        found = [_process(each, boot_id) for each in listed]
        if len({each.k for each in found}) != len(found) or len({each.pid for each in found}) != len(found):
            raise ValueError("a process appears twice")
        _check_streams(manifest, found)
    except (KeyError, TypeError, ValueError) as error:
        raise ImageCorrupt(
            f"{url}: the manifest's facts about the process are bad: {error}",
            cure="restore from another copy of the image",
        ) from error
    return found


def _process(facts: Any, boot_id: str) -> SavedProcess:
    capture = _text(facts["capture"])
    if capture not in (CUSTOM, LAUNCH, DRIVER_IMAGE):
        raise ValueError(f"capture {capture!a} is not known")
    return SavedProcess(
        k=_number(facts["k"]),
        pid=_number(facts["pid"]),
        name=_text(facts["name"]),
        start_time=_number(facts["start_time"]),
        boot_id=boot_id,
        capture=capture,
        nonce=_text(facts["nonce"]),
        gpus=tuple(
            SavedGpu(
                _text(gpu["uuid"]),
                _text(gpu["name"]),
                _number(gpu["memory_bytes"]),
                None if gpu["bytes"] is None else _number(gpu["bytes"]),
            )
            for gpu in facts["gpus"]
        ),
    )


def _check_streams(manifest: Manifest, processes: Sequence[SavedProcess]) -> None:
    """With custom storage, the streams of a process are exactly its GPUs, with their sizes."""
    for process in processes:
        prefix = f"proc/{process.k}/"
        streams = {each.name: each.bytes for each in manifest.streams if each.name.startswith(prefix)}
        if process.capture == CUSTOM:
            wanted = {f"{prefix}gpu/{gpu.uuid}": gpu.nbytes for gpu in process.gpus}
        else:
            wanted = {f"{prefix}driver/{n}": streams.get(f"{prefix}driver/{n}") for n in range(len(streams))}
        if streams != wanted:
            raise ValueError(f"the streams of process {process.k} are not what it says of its GPUs")


def check_same(saved: SavedProcess, session: ProcessSession) -> None:
    """CheckpointMismatch unless the image was made at the process's present checkpoint."""
    target, record = session.target, session.record
    if (saved.pid, saved.start_time, saved.boot_id) != (target.pid, target.start_time, target.boot_id):
        what = "before this machine was booted" if saved.boot_id != target.boot_id else "of another process"
        raise CheckpointMismatch(
            f"the image is of {saved}, {what}, not of {target}: the memory of a process that has ended fits no other",
            cure="restore it into the process that was saved; one that has exited needs its CPU side back first (CRIU)",
        )
    if record is None:
        raise CheckpointMismatch(
            f"there is no record of the present checkpoint of {target}, so nobody knows whether this image fits it",
            cure="run as the user who saved it, with the same XDG_RUNTIME_DIR",
        )
    if record.nonce != saved.nonce:
        raise CheckpointMismatch(
            f"{target} is in another checkpoint than the one that this image was made of: "
            "its memory would be from another moment than its program",
            cure="restore the image of the present checkpoint"
            + (f": {record.images[0]}" if record.images else ""),
        )


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > 1024:
        raise ValueError("a text is missing or too long")
    return value


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError("a number is missing or out of range")
    return value
