"""Pipelines in YAML: reading, checking, and what they turn into."""

from ckptpipe.pipeline.config.pipeline import Pipeline

__all__ = ["Pipeline"]
