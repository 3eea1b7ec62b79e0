"""Every error class goes over the wire and comes back as itself."""

from __future__ import annotations

import asyncio
import errno
import importlib
import json
import pkgutil

import pytest

import ckptpipe
from ckptpipe.pipeline.controller.channel import decode
from ckptpipe.pipeline.controller.errors import ControllerFault, JobCancelled, ProtocolError
from ckptpipe.pipeline.controller.failures import from_frame, to_frame
from ckptpipe.pipeline.cuda.errors import CaptureFailed, TargetBusy
from ckptpipe.pipeline.cuda.states import ProcessState
from ckptpipe.pipeline.errors import ConfigError, ConfigProblem, ImageExists
from ckptpipe.pyx.cuda_errors import cuda_error
from ckptpipe.pyx.errors import CkptpipeError, IoError, io_error


def there_and_back(error: BaseException) -> CkptpipeError:
    return from_frame(decode(json.dumps(to_frame(error)).encode()))


def _all_classes() -> list[type[CkptpipeError]]:
    for module in pkgutil.walk_packages(ckptpipe.__path__, "ckptpipe."):
        if module.name.endswith("errors"):
            importlib.import_module(module.name)
    todo, found = [CkptpipeError], list[type[CkptpipeError]]()
    while todo:
        kind = todo.pop()
        found.append(kind)
        todo.extend(kind.__subclasses__())
    return [
        kind for kind in found if not issubclass(kind, IoError) and kind.__module__.startswith("ckptpipe.")
    ]


@pytest.mark.parametrize("kind", _all_classes(), ids=lambda kind: kind.__name__)
def test_of_every_class(kind: type[CkptpipeError]) -> None:
    error = kind.__new__(kind, "what is wrong")
    error.args, error.message, error.cure = ("what is wrong",), "what is wrong", "what to do"
    if isinstance(error, CaptureFailed):
        error.states = {}
    again = there_and_back(error)
    assert type(again) is kind
    assert (again.message, again.cure, str(again)) == (
        "what is wrong",
        "what to do",
        "what is wrong; what to do",
    )
    assert (again.exit_code, again.retryable) == (kind.exit_code, kind.retryable)


def test_what_belongs_to_them() -> None:
    cuda = there_and_back(cuda_error(2, "cuMemAlloc", detail="8 GiB"))
    assert (cuda.code, cuda.name, cuda.call) == (2, "CUDA_ERROR_OUT_OF_MEMORY", "cuMemAlloc")  # type: ignore[attr-defined]
    busy = there_and_back(TargetBusy("in use", pid=7))
    assert isinstance(busy, TargetBusy)
    assert busy.pid == 7
    states = {7: ProcessState.CHECKPOINTING, 8: None}
    failed = there_and_back(CaptureFailed("stuck", states=states, cure="recover"))
    assert isinstance(failed, CaptureFailed)
    assert failed.states == states
    assert isinstance(failed.states[7], ProcessState)


def test_of_the_kernel() -> None:
    again = there_and_back(io_error(errno.ENOSPC, "write", "/images/a", cure="free some space"))
    assert isinstance(again, IoError)
    assert (again.errno, again.operation, again.filename) == (errno.ENOSPC, "write", "/images/a")
    denied = there_and_back(io_error(errno.EACCES, "open", "/images/a"))
    assert isinstance(denied, PermissionError)
    assert str(denied) == "open /images/a: Permission denied"


def test_of_a_config() -> None:
    again = there_and_back(ConfigError([ConfigProblem("a.yaml", 1, 2, "no such key")]))
    assert isinstance(again, ConfigError)
    assert again.exit_code == 2


def test_of_a_group_the_essential_one() -> None:
    group = ExceptionGroup(
        "g", [ValueError("x"), ExceptionGroup("h", [ImageExists("there", cure="other name")])]
    )
    again = there_and_back(group)
    assert isinstance(again, ImageExists)
    assert again.__notes__ == ["x"]


def test_notes_go_along() -> None:
    error = ImageExists("there")
    error.add_note("pid 7 is RUNNING again")
    assert there_and_back(error).__notes__ == ["pid 7 is RUNNING again"]


def test_of_no_class_of_ours() -> None:
    fault = there_and_back(KeyError("secret"))
    assert type(fault) is ControllerFault
    assert "defect" in fault.cure
    assert type(there_and_back(asyncio.CancelledError())) is JobCancelled
    assert "out of memory" in str(there_and_back(MemoryError()))


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("ckptpipe.pipeline.nowhere", "X"),
        ("ckptpipe.pipeline.errors", "Sequence"),
        ("ckptpipe.a-b", "X"),
    ],
)
def test_only_our_error_classes_are_made(module: str, name: str) -> None:
    frame = to_frame(ImageExists("there")) | {"module": module, "class": name}
    assert type(from_frame(frame)) is ControllerFault


@pytest.mark.parametrize("key", ["message", "cure", "module", "class", "details"])
def test_frames_that_lack_something(key: str) -> None:
    frame = to_frame(ImageExists("there"))
    del frame[key]
    with pytest.raises(ProtocolError):
        from_frame(frame)
