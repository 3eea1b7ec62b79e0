"""Errors on the wire: the client raises the class that the controller raised, with its message and cure."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Mapping
from typing import Any

from ckptpipe.pipeline.controller.errors import ControllerFault, JobCancelled, ProtocolError
from ckptpipe.pipeline.controller.records import from_json
from ckptpipe.pipeline.cuda.errors import CaptureFailed
from ckptpipe.pipeline.cuda.states import ProcessState
from ckptpipe.pipeline.essential_error import EssentialError
from ckptpipe.pyx.errors import CkptpipeError, IoError, io_error

_TEXT_MAX = 8 << 10  # characters of one message
_NOTES_MAX = 16
_PACKAGE = "ckptpipe."


def to_frame(error: BaseException) -> dict[str, Any]:
    """Of a group only the essential error, with the others as notes. Never a traceback, never arguments."""
    essential, also = EssentialError.of(error)
    frame = _described(essential)
    notes = [*getattr(essential, "__notes__", ()), *also]
    frame["notes"] = [text[:_TEXT_MAX] for text in notes[:_NOTES_MAX]]
    return frame


def is_expected(error: BaseException) -> bool:
    """An error that ckptpipe raised on purpose, or a cancellation: no defect."""
    essential = EssentialError.of(error).error
    return isinstance(essential, CkptpipeError | asyncio.CancelledError | MemoryError)


def _described(error: BaseException) -> dict[str, Any]:
    if isinstance(error, asyncio.CancelledError):
        error = JobCancelled("the job was cancelled")
    elif not isinstance(error, CkptpipeError):
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if isinstance(error, MemoryError):
            fault = ControllerFault(
                "the controller is out of memory", cure="take a smaller ring (--ring-size)"
            )
        else:
            fault = ControllerFault(
                f"internal error in the controller: {text}",
                cure="this is a defect of ckptpipe; the controller's standard error says where",
            )
        error = fault
    kind: type[CkptpipeError] = IoError if isinstance(error, IoError) else type(error)
    details: dict[str, Any] = {
        key: value
        for key, value in getattr(error, "__dict__", {}).items()
        if key not in ("message", "cure")
        and not key.startswith("_")
        and (value is None or isinstance(value, bool | int | str))
    }
    if isinstance(error, CaptureFailed):
        details["states"] = [[pid, state] for pid, state in error.states.items()]
    if isinstance(error, IoError):
        details |= {"errno": error.errno, "filename": str(error.filename), "operation": error.operation}
    return {
        "type": "error",
        "module": kind.__module__,
        "class": kind.__qualname__,
        "message": error.message[:_TEXT_MAX],
        "cure": error.cure[:_TEXT_MAX],
        "exit_code": error.exit_code,
        "details": details,
    }


def from_frame(frame: Mapping[str, Any]) -> CkptpipeError:
    """The error of a frame; ControllerFault where its class is not known here."""
    message, cure = _text(frame, "message"), _text(frame, "cure")
    details = frame.get("details")
    if type(details) is not dict:
        raise ProtocolError("an error without details")
    kind = _class(_text(frame, "module"), _text(frame, "class"))
    error: CkptpipeError
    if kind is None:
        error = ControllerFault(message, cure=cure)
    elif issubclass(kind, IoError):
        error = _io_error(details, cure)
    else:
        # Not through __init__: each class has its own arguments, and the message is made already.
        error = kind.__new__(kind, message)
        error.args = (message,)
        error.message, error.cure = message, cure
        for key, value in details.items():
            if value is None or isinstance(value, bool | int | str):
                setattr(error, key, value)
        if isinstance(error, CaptureFailed):
            error.states = _states(details.get("states"))
    for text in from_json(tuple[str, ...], frame.get("notes", []), "notes"):
        error.add_note(text)
    return error


def _io_error(details: Mapping[str, Any], cure: str) -> IoError:
    number, operation, filename = (details.get(key) for key in ("errno", "operation", "filename"))
    if type(number) is not int or type(operation) is not str or type(filename) is not str:
        raise ProtocolError("an I/O error without errno, operation or file")
    return io_error(number, operation, filename, cure=cure)


def _states(found: object) -> dict[int, ProcessState | None]:
    pairs = from_json(tuple[tuple[int, int | None], ...], found, "states")
    try:
        return {pid: None if state is None else ProcessState(state) for pid, state in pairs}
    except ValueError:
        raise ProtocolError("a process state that is not known") from None


def _class(module: str, name: str) -> type[CkptpipeError] | None:
    if not module.startswith(_PACKAGE) or not all(part.isidentifier() for part in module.split(".")):
        return None
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
    return found if isinstance(found, type) and issubclass(found, CkptpipeError) else None


def _text(frame: Mapping[str, Any], key: str) -> str:
    found = frame.get(key)
    if type(found) is not str:
        raise ProtocolError(f"an error without {key}")
    return found
