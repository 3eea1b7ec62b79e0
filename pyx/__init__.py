"""The engine: memory, threads, the kernel's I/O interfaces. Knows nothing of stores, images or graphs."""
