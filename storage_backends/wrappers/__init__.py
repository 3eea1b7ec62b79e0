"""Backends around a backend: `retry` tries again, `limit` slows down, `faulty` breaks on purpose.

A wrapper overrides every method of the interface; a test looks that none is forgotten.
"""
