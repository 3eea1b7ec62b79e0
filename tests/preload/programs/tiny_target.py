"""Calls tiny_driver.c as it is told on stdin: a call a line, its answer a line."""

import ctypes
import os
import sys

library = ctypes.CDLL("libcuda.so.1")
for name in ("tiny_map", "tiny_copy", "tiny_move"):
    getattr(library, name).restype = ctypes.c_void_p
LONGS = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t)
library.tiny_map.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int)
library.tiny_unmap.argtypes = LONGS[:2]
library.tiny_copy.argtypes = library.tiny_move.argtypes = LONGS
assert library.cuInit(0) == 0
scratch = ctypes.create_string_buffer(16 << 20)
print("ready", os.getpid(), flush=True)
for line in sys.stdin:
    what, *numbers = line.split()
    first, *rest = map(int, numbers)
    if what == "map":
        print(library.tiny_map(first or None, *rest), flush=True)
    elif what == "unmap":
        print(library.tiny_unmap(first, *rest), flush=True)
    elif what == "move":
        print(library.tiny_move(first, *rest) == first, flush=True)
    elif what == "write":  # address, bytes, value
        ctypes.memset(scratch, rest[1], rest[0])
        print(library.tiny_copy(first, ctypes.addressof(scratch), rest[0]) == first, flush=True)
    elif what == "read":
        ctypes.memset(scratch, 0xAA, rest[0])
        library.tiny_copy(ctypes.addressof(scratch), first, rest[0])
        print(scratch.raw[: rest[0]].hex(), flush=True)
