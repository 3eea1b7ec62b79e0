"""Benchmarks and the demo. Each file answers one question; README.md has the method."""
