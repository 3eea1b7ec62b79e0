"""Capture of live GPU processes: the driver's control path, targets, and what has to stay true of them."""
