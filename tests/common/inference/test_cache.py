"""Both memories of a lane behave alike; the accelerator's is tried on the CPU, which needs no other code."""

from __future__ import annotations

import functools
import gc

import numpy as np
import psutil
import pytest

from common.adapter import Adapter
from common.inference import engine as engine_module
from common.inference.cache import DeviceCache, HostCache
from common.inference.engine import Engine, Lane
from tests.conftest import changed

ON_CPU = functools.partial(DeviceCache, device="cpu")


def stepped(engine: Engine, adapter: Adapter) -> np.ndarray:
    """Logits after rows joined, ended, were read in chunks and decoded."""
    lane = Lane(engine, engine.load(adapter))
    lane.prefill([[5, 60, 70], [9] * 20, [8, 8]])
    lane.prefill_chunk([30, 31, 32], start=0)
    lane.drop(0)
    lane.prefill_chunk([33], start=3)
    lane.join(4)
    return np.concatenate([lane.decode(np.array([7, 8, 9])).copy() for _ in range(3)])


def test_the_accelerators_memory_holds_what_the_hosts_does(
    engine: Engine, start: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = changed(start, seed=1)
    expected = stepped(engine, adapter)
    monkeypatch.setattr(engine_module, "HostCache", ON_CPU)
    np.testing.assert_array_equal(stepped(engine, adapter), expected)


@pytest.mark.parametrize("kind", [HostCache, ON_CPU])
def test_moving_a_row_moves_its_positions_and_nothing_else(kind: type[HostCache]) -> None:
    cache = kind(["a", "b"], (3, 2, 5, 4), np.float16)
    arrays = cache.arrays if isinstance(cache, HostCache) else {n: t.numpy() for n, t in cache.tensors.items()}
    for index, array in enumerate(arrays.values()):
        array[...] = np.arange(array.size).reshape(array.shape) + index
    before = {name: array.copy() for name, array in arrays.items()}
    cache.move(2, 0, 3)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array[0, :, :3], before[name][2, :, :3])
        np.testing.assert_array_equal(array[0, :, 3:], before[name][0, :, 3:])
        np.testing.assert_array_equal(array[1:], before[name][1:])
        assert cache.pointer(name, 1) - cache.pointer(name, 0) == array[0].nbytes


def test_memory_is_taken_as_it_is_written_and_given_back() -> None:
    process, mebibyte = psutil.Process(), 2**20
    before = process.memory_info().rss
    cache = HostCache(["a", "b"], (8, 1, mebibyte, 4), np.float32)  # 256 MiB
    assert process.memory_info().rss - before < 8 * mebibyte
    cache.arrays["b"][3, 0] = 1.0  # 16 MiB
    assert 12 * mebibyte < process.memory_info().rss - before < 24 * mebibyte
    del cache
    gc.collect()
    assert process.memory_info().rss - before < 8 * mebibyte
