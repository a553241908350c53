"""One ONNX session in memory; adapters as bound inputs; a KV cache written in place.

A `Lane` holds the rows that run on one adapter. Rows are contiguous, so a decode
step is one call for all of them; a row that ends is replaced by the last one. A
long prompt is read in chunks on the last place, and moved when it is complete.
Adapters are bound with `bind_ortvalue_input`, because the runtime's own adapter
objects are silently ignored by runs with IO binding.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort

from common.adapter import Adapter
from common.errors import ConfigError, TransportError
from common.inference.cache import Cache, DeviceCache, HostCache
from common.inference.export import Precision, build_graph, dtype_of
from common.inference.model_folder import ModelFolder
from common.inference.packed_adapter import graph_inputs
from common.inference.providers import check_effective, provider_list, refuse_two_runtimes


class GenerationFailed(TransportError):
    """This answer could not be produced; the server goes on."""


class LoadedAdapter:
    """An adapter's tensors as runtime values; immutable, shared by all lanes that serve it."""

    def __init__(self, inputs: dict[str, np.ndarray], digest: str, *, device: str) -> None:
        self.digest = digest
        self._owners = inputs  # on the CPU the values point into these arrays, which must live as long
        self.values = {name: ort.OrtValue.ortvalue_from_numpy(array, device, 0) for name, array in inputs.items()}


class Engine:
    """Runs the base model with any loaded adapter.

    Args:
        provider: `cpu`, `cuda` or `tensorrt`.
        precision: of the base model's weights; see `export.Precision`.
        slots: rows a lane can hold at once.
        context_tokens: prompt and answer together, at most the model's own limit.
        threads: of the runtime, for one operator.
        provider_options: the runtime's own, for this provider.
        engine_cache: folder for what TensorRT builds.
    Raises:
        ConfigError: both runtime packages are installed, or the provider is not effective.
    """

    def __init__(
        self,
        model: ModelFolder,
        *,
        provider: str = "cpu",
        precision: Precision = "float32",
        slots: int = 8,
        context_tokens: int,
        threads: int,
        provider_options: Mapping[str, str] | None = None,
        engine_cache: Path | None = None,
    ) -> None:
        refuse_two_runtimes()
        providers = provider_list(
            provider, precision=precision, engine_cache=engine_cache, options=provider_options or {}
        )
        self.device = "cpu" if provider == "cpu" else "cuda"
        if self.device != "cpu":
            _check_torch_sees_the_device()
        self.model = model
        self.slots = slots
        self.context_tokens = min(context_tokens, model.dimensions.context_tokens)
        self.precision = precision
        self.dtype = dtype_of(precision)
        with tempfile.TemporaryDirectory(prefix="headwater-graph-") as folder:
            graph = build_graph(model, Path(folder), precision=precision, context_tokens=self.context_tokens)
            self.session = ort.InferenceSession(graph, _session_options(threads), providers=providers)
        self.provider = check_effective(self.session, provider)

    @property
    def lane_bytes(self) -> int:
        """Most memory that one lane's cache can take: keys and values of every slot's whole context."""
        d = self.model.dimensions
        row = d.layers * 2 * d.kv_heads * d.head_dim * self.context_tokens
        return self.slots * row * np.dtype(self.dtype).itemsize

    def load(self, adapter: Adapter) -> LoadedAdapter:
        """An adapter ready to serve, of any rank and target modules.

        Raises:
            TrustError: it is not a whole and finite adapter of this model.
        """
        return LoadedAdapter(graph_inputs(adapter, self.model, self.dtype), adapter.digest, device=self.device)


class Lane:
    """Rows that decode together on one adapter.

    The cache is taken from the system as it is written, so a lane costs what its rows have used
    since it was made, at most `Engine.lane_bytes`.
    """

    def __init__(self, engine: Engine, adapter: LoadedAdapter) -> None:
        d = engine.model.dimensions
        self.engine = engine
        self.adapter = adapter
        self.lengths = np.zeros(0, np.int64)
        shape = (engine.slots, d.kv_heads, engine.context_tokens, d.head_dim)
        self._names = [f"{layer}.{part}" for layer in range(d.layers) for part in "kv"]
        self._row_shape = shape[1:]
        where = HostCache if engine.device == "cpu" else DeviceCache
        self.cache: Cache = where(self._names, shape, engine.dtype)
        self._decode_bindings: dict[int, tuple[ort.IOBinding, np.ndarray]] = {}
        self._chunk_binding: tuple[ort.IOBinding, np.ndarray] | None = None

    def prefill(self, prompts: list[list[int]]) -> np.ndarray:
        """Add one row per prompt; returns the logits [n, V] after each prompt's last token."""
        count, longest = len(prompts), max(map(len, prompts))
        ids = np.zeros((count, longest), np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = prompt
        lengths = np.array([len(prompt) for prompt in prompts], np.int64)
        binding, logits = self._bind(len(self.lengths), count)
        self._run(binding, ids, last=lengths - 1, total=longest, positions=lengths - 1)
        self.lengths = np.concatenate([self.lengths, lengths])
        return logits

    def prefill_chunk(self, chunk: list[int], *, start: int) -> np.ndarray:
        """Read the next tokens of one prompt on the last place; returns the logits [1, V] after them.

        Args:
            start: how many of the prompt's tokens were read before. Until `join` the last place must stay free.
        """
        if self._chunk_binding is None:
            self._chunk_binding = self._bind(self.engine.slots - 1, 1)
        binding, logits = self._chunk_binding
        end = start + len(chunk)
        self._run(
            binding,
            np.array([chunk], np.int64),
            last=np.array([end - 1]),
            total=end,
            positions=np.array([len(chunk) - 1]),
        )
        return logits

    def join(self, length: int) -> None:
        """Make the prompt that was read in chunks the last row."""
        self._move(self.engine.slots - 1, len(self.lengths), length)
        self.lengths = np.append(self.lengths, length)

    def decode(self, tokens_N: np.ndarray) -> np.ndarray:
        """Append one token to every row; returns the next logits [n, V], valid until the next call."""
        count = len(self.lengths)
        if count not in self._decode_bindings:
            self._decode_bindings[count] = self._bind(0, count)
        binding, logits = self._decode_bindings[count]
        self._run(
            binding,
            tokens_N[:, None],
            last=self.lengths,
            total=int(self.lengths.max()) + 1,
            positions=np.zeros(count, np.int64),
        )
        self.lengths = self.lengths + 1
        return logits

    def drop(self, row: int) -> None:
        """End a row: the last row takes its place."""
        last = len(self.lengths) - 1
        self._move(last, row, int(self.lengths[last]))
        self.lengths[row] = self.lengths[last]
        self.lengths = self.lengths[:last]

    def _move(self, source: int, target: int, length: int) -> None:
        if source != target:
            self.cache.move(source, target, length)

    def _bind(self, first: int, count: int) -> tuple[ort.IOBinding, np.ndarray]:
        binding = self.engine.session.io_binding()
        shape = (count, *self._row_shape)
        for name in self._names:
            place = (self.cache.device, 0, self.engine.dtype, shape, self.cache.pointer(name, first))
            binding.bind_input(f"past.{name}", *place)
            binding.bind_output(f"present.{name}", *place)
        for name, value in self.adapter.values.items():
            binding.bind_ortvalue_input(name, value)
        logits = np.empty((count, self.engine.model.dimensions.vocabulary), np.float32)
        binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        return binding, logits

    def _run(
        self, binding: ort.IOBinding, ids: np.ndarray, *, last: np.ndarray, total: int, positions: np.ndarray
    ) -> None:
        feeds = {
            "input_ids": np.ascontiguousarray(ids, np.int64),
            "seqlens_k": last.astype(np.int32),
            "total_seq": np.array(total, np.int32),
            "logit_idx": positions,
        }
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        self.engine.session.run_with_iobinding(binding)


def _session_options(threads: int) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def _check_torch_sees_the_device() -> None:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("an accelerator is required, but torch, which holds the cache there, does not see one")
