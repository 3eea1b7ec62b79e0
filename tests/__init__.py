"""Tests. Run from the project's folder: `make test`, or `python -m pytest`."""
