"""The version: of the package, and as the writer of an image."""

__version__ = "0.1.0"
