"""Sinks: the ends of a graph's branches."""
