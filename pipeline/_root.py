"""ckptpipe: checkpoint images from files and memory to NVMe, FUSE and S3, and back.

    import ckptpipe

    result = await ckptpipe.save("/data/model", to="s3://bucket/images", name="a")
    await ckptpipe.restore("s3://bucket/images/a", to="/data/restored")

Each coroutine has a blocking twin (`save_blocking`, …) for scripts without an event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptpipe.pipeline.blocking import (
    copy_blocking,
    delete_blocking,
    gc_blocking,
    list_images_blocking,
    recompress_blocking,
    recover_blocking,
    restore_blocking,
    run_graph_blocking,
    save_blocking,
    show_blocking,
    verify_blocking,
)
from ckptpipe.pipeline.cuda.errors import (
    CaptureFailed,
    CaptureUnavailable,
    CheckpointMismatch,
    TargetBusy,
    TargetError,
    TargetGone,
)
from ckptpipe.pipeline.cuda.recovery import RecoverResult, TargetState, recover, target_state
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
from ckptpipe.pipeline.operations import copy, restore, run_graph, save, verify
from ckptpipe.pipeline.progress import Progress
from ckptpipe.pipeline.recompress import recompress
from ckptpipe.pipeline.result import GcResult, ImageSummary, ReadResult, SaveResult, SinkResult
from ckptpipe.pipeline.settings import Settings
from ckptpipe.pipeline.spec import GraphSpec, SinkSpec, SourceSpec, StageSpec
from ckptpipe.pipeline.stored_images import delete, gc, list_images, show
from ckptpipe.pipeline.version import __version__
from ckptpipe.pyx.errors import CkptpipeError, IoError
from ckptpipe.storage_backends.errors import StorageError

if TYPE_CHECKING:
    from ckptpipe.pipeline.config.pipeline import Pipeline
    from ckptpipe.pipeline.controller.controller import Controller, Where

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


def __getattr__(name: str) -> object:
    if name == "Pipeline":  # YAML and its validation are loaded when they are first used
        from ckptpipe.pipeline.config.pipeline import Pipeline

        return Pipeline
    if name in ("Controller", "Where"):
        from ckptpipe.pipeline.controller import controller

        return getattr(controller, name)
    raise AttributeError(f"module 'ckptpipe' has no attribute {name!r}")
