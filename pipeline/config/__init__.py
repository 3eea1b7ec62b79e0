"""Pipelines in YAML: reading, checking, and what they turn into."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptpipe.pipeline.config.pipeline import Pipeline

__all__ = ["Pipeline"]


def __getattr__(name: str) -> object:
    if name == "Pipeline":  # the command line uses parts of this package before it needs a YAML parser
        from ckptpipe.pipeline.config.pipeline import Pipeline

        return Pipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
