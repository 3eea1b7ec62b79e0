"""ckptpipe: checkpoint images from files and memory to NVMe, FUSE and S3, and back.

    import ckptpipe

    result = await ckptpipe.save("/data/model", to="s3://bucket/images", name="a")
    await ckptpipe.restore("s3://bucket/images/a", to="/data/restored")

Each coroutine has a blocking twin (`save_blocking`, …) for scripts without an event loop.
"""

from __future__ import annotations

import importlib

from ckptpipe.pipeline.version import __version__

TYPE_CHECKING = False  # as type checkers know it; typing itself is not needed
if TYPE_CHECKING:
    from ckptpipe.pipeline.config.pipeline import Pipeline
    from ckptpipe.pipeline.controller.controller import Controller, Where
    from ckptpipe.pipeline.cuda.errors import (
        CaptureFailed,
        CaptureUnavailable,
        CheckpointMismatch,
        TargetBusy,
        TargetError,
        TargetGone,
    )
    from ckptpipe.pipeline.cuda.recovery import (
        RecoverResult,
        TargetState,
        recover,
        recover_blocking,
        target_state,
    )
    from ckptpipe.pipeline.errors import (
        ConfigError,
        DigestMismatch,
        ImageCorrupt,
        ImageExists,
        ImageIncomplete,
        ImageNotFound,
        ImageReplaced,
        RestoreConflict,
        SaveFailed,
        SourceChanged,
        SourceError,
        UnsupportedImage,
        UsageError,
    )
    from ckptpipe.pipeline.operations import (
        copy,
        copy_blocking,
        restore,
        restore_blocking,
        run_graph,
        run_graph_blocking,
        save,
        save_blocking,
        verify,
        verify_blocking,
    )
    from ckptpipe.pipeline.progress import Progress
    from ckptpipe.pipeline.recompress import recompress, recompress_blocking
    from ckptpipe.pipeline.result import GcResult, ImageSummary, ReadResult, SaveResult, SinkResult
    from ckptpipe.pipeline.settings import Settings
    from ckptpipe.pipeline.spec import GraphSpec, SinkSpec, SourceSpec, StageSpec
    from ckptpipe.pipeline.stored_images import (
        delete,
        delete_blocking,
        gc,
        gc_blocking,
        list_images,
        list_images_blocking,
        show,
        show_blocking,
    )
    from ckptpipe.pyx.errors import CkptpipeError, IoError
    from ckptpipe.storage_backends.errors import StorageError

__all__ = [
    "CaptureFailed",
    "CaptureUnavailable",
    "CheckpointMismatch",
    "CkptpipeError",
    "ConfigError",
    "Controller",
    "DigestMismatch",
    "GcResult",
    "GraphSpec",
    "ImageCorrupt",
    "ImageExists",
    "ImageIncomplete",
    "ImageNotFound",
    "ImageReplaced",
    "ImageSummary",
    "IoError",
    "Pipeline",
    "Progress",
    "ReadResult",
    "RecoverResult",
    "RestoreConflict",
    "SaveFailed",
    "SaveResult",
    "Settings",
    "SinkResult",
    "SinkSpec",
    "SourceChanged",
    "SourceError",
    "SourceSpec",
    "StageSpec",
    "StorageError",
    "TargetBusy",
    "TargetError",
    "TargetGone",
    "TargetState",
    "UnsupportedImage",
    "UsageError",
    "Where",
    "__version__",
    "copy",
    "copy_blocking",
    "delete",
    "delete_blocking",
    "gc",
    "gc_blocking",
    "list_images",
    "list_images_blocking",
    "recompress",
    "recompress_blocking",
    "recover",
    "recover_blocking",
    "restore",
    "restore_blocking",
    "run_graph",
    "run_graph_blocking",
    "save",
    "save_blocking",
    "show",
    "show_blocking",
    "target_state",
    "verify",
    "verify_blocking",
]

_NAMES = {
    "pipeline.config.pipeline": "Pipeline",
    "pipeline.controller.controller": "Controller Where",
    "pipeline.cuda.errors": (
        "CaptureFailed CaptureUnavailable CheckpointMismatch TargetBusy TargetError TargetGone"
    ),
    "pipeline.cuda.recovery": "RecoverResult TargetState recover recover_blocking target_state",
    "pipeline.errors": (
        "ConfigError DigestMismatch ImageCorrupt ImageExists ImageIncomplete ImageNotFound "
        "ImageReplaced RestoreConflict SaveFailed SourceChanged SourceError UnsupportedImage "
        "UsageError"
    ),
    "pipeline.operations": (
        "copy copy_blocking restore restore_blocking run_graph run_graph_blocking save save_blocking "
        "verify verify_blocking"
    ),
    "pipeline.progress": "Progress",
    "pipeline.recompress": "recompress recompress_blocking",
    "pipeline.result": "GcResult ImageSummary ReadResult SaveResult SinkResult",
    "pipeline.settings": "Settings",
    "pipeline.spec": "GraphSpec SinkSpec SourceSpec StageSpec",
    "pipeline.stored_images": (
        "delete delete_blocking gc gc_blocking list_images list_images_blocking show show_blocking"
    ),
    "pyx.errors": "CkptpipeError IoError",
    "storage_backends.errors": "StorageError",
}
"""Modules and their public names, as type checkers have them above: a name is imported when it is first used, so that
`import ckptpipe`, and a command line that only imports what its command needs, do not wait for all of it."""
_MODULES = {name: f"ckptpipe.{module}" for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
