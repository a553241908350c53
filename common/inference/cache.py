"""Where a lane keeps its keys and values: rows in a host's or an accelerator's memory, written in place.

Both hold `past` and `present` of every layer as one array [slots, kv_heads, context, head_dim], so
the runtime reads and writes a range of rows without a copy.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from typing import Protocol

import numpy as np

Shape = tuple[int, int, int, int]


class Cache(Protocol):
    """Arrays of equal shape by name.

    Attributes:
        device: as the runtime calls it.
    """

    device: str

    def pointer(self, name: str, row: int) -> int:
        """Address of the first value of a row."""

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a row to another."""


class HostCache:
    """One private mapping: its pages are taken as they are written, and given back when the cache is.

    The allocator's own arrays may be neither: a large block that it uses again is cleared, which takes all of it.
    """

    device = "cpu"

    def __init__(self, names: Iterable[str], shape: Shape, dtype: type[np.floating]) -> None:
        names = list(names)
        memory = mmap.mmap(-1, len(names) * _bytes(shape, dtype), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = np.frombuffer(memory, dtype).reshape(len(names), *shape)
        self.arrays = dict(zip(names, whole, strict=True))

    def pointer(self, name: str, row: int) -> int:
        return int(self.arrays[name][row:].ctypes.data)

    def move(self, source: int, target: int, length: int) -> None:
        for array in self.arrays.values():
            array[target, :, :length] = array[source, :, :length]


class DeviceCache:
    """The accelerator's memory, through torch, which must see the same device as the runtime."""

    def __init__(self, names: Iterable[str], shape: Shape, dtype: type[np.floating], *, device: str = "cuda") -> None:
        import torch

        self.device = device
        kind = {np.float16: torch.float16, np.float32: torch.float32}[dtype]
        self.tensors = {name: torch.zeros(shape, dtype=kind, device=device) for name in names}
        self._finish = torch.cuda.synchronize if device == "cuda" else lambda: None
        self._finish()  # the runtime has a stream of its own

    def pointer(self, name: str, row: int) -> int:
        return int(self.tensors[name][row:].data_ptr())

    def move(self, source: int, target: int, length: int) -> None:
        for tensor in self.tensors.values():
            tensor[target, :, :length] = tensor[source, :, :length]
        self._finish()


def _bytes(shape: Shape, dtype: type[np.floating]) -> int:
    return int(np.prod(shape)) * np.dtype(dtype).itemsize
