"""Real servers and mounts on loopback, for tests, the demo and benchmarks: plain Python, start and stop."""
