"""One ONNX session in memory; adapters as bound inputs; a KV cache written in place.

A `Lane` holds the rows that run on one adapter. Rows are contiguous, so a decode
step is one call for all of them; a row that ends is replaced by the last one.
Adapters are bound with `bind_ortvalue_input`, because the runtime's own adapter
objects are silently ignored by runs with IO binding.
"""

from __future__ import annotations

import tempfile
from importlib.metadata import distributions
from pathlib import Path

import numpy as np
import onnxruntime as ort

from common.adapter import Adapter
from common.errors import ConfigError, TransportError
from common.inference.export import Precision, build_graph, dtype_of
from common.inference.model_folder import ModelFolder
from common.inference.packed_adapter import graph_inputs

PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}


class GenerationFailed(TransportError):
    """This answer could not be produced; the server goes on."""


class LoadedAdapter:
    """An adapter's tensors as runtime values; immutable, shared by all lanes that serve it."""

    def __init__(self, inputs: dict[str, np.ndarray], digest: str) -> None:
        self.digest = digest
        self._owners = inputs  # the runtime keeps raw pointers: the arrays must outlive the values
        self.values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in inputs.items()}


class Engine:
    """Runs the base model with any loaded adapter.

    Args:
        precision: of the base model's weights; see `export.Precision`.
        slots: rows a lane can hold at once.
        context_tokens: prompt and answer together, at most the model's own limit.
        threads: of the runtime, for one operator.
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
    ) -> None:
        _refuse_two_runtimes()
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self.model = model
        self.slots = slots
        self.context_tokens = min(context_tokens, model.dimensions.context_tokens)
        self.precision = precision
        self.dtype = dtype_of(precision)
        with tempfile.TemporaryDirectory(prefix="headwater-graph-") as folder:
            graph = build_graph(model, Path(folder), precision=precision, context_tokens=self.context_tokens)
            self.session = ort.InferenceSession(graph, options, providers=[PROVIDERS[provider]])
        effective = self.session.get_providers()[0]
        if effective != PROVIDERS[provider]:
            raise ConfigError(f"provider {provider} is required but the runtime offers {effective}")
        self.provider = effective

    def load(self, adapter: Adapter) -> LoadedAdapter:
        """An adapter ready to serve, of any rank and target modules.

        Raises:
            TrustError: it is not a whole and finite adapter of this model.
        """
        return LoadedAdapter(graph_inputs(adapter, self.model, self.dtype), adapter.digest)


class Lane:
    """Rows that decode together on one adapter."""

    def __init__(self, engine: Engine, adapter: LoadedAdapter) -> None:
        d = engine.model.dimensions
        self.engine = engine
        self.adapter = adapter
        self.lengths = np.zeros(0, np.int64)
        shape = (engine.slots, d.kv_heads, engine.context_tokens, d.head_dim)
        self._cache = {f"{layer}.{part}": np.zeros(shape, engine.dtype) for layer in range(d.layers) for part in "kv"}
        self._decode_bindings: dict[int, tuple[ort.IOBinding, np.ndarray]] = {}

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
        if row != last:
            length = self.lengths[last]
            for cache in self._cache.values():
                cache[row, :, :length] = cache[last, :, :length]
            self.lengths[row] = length
        self.lengths = self.lengths[:last]

    def _bind(self, first: int, count: int) -> tuple[ort.IOBinding, np.ndarray]:
        binding = self.engine.session.io_binding()
        for name, whole in self._cache.items():
            rows = whole[first : first + count]
            for bind, direction in ((binding.bind_input, "past"), (binding.bind_output, "present")):
                bind(f"{direction}.{name}", "cpu", 0, self.engine.dtype, rows.shape, rows.ctypes.data)
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


def _refuse_two_runtimes() -> None:
    installed = {d.metadata["Name"].lower() for d in distributions() if d.metadata["Name"]}
    both = {"onnxruntime", "onnxruntime-gpu"} & installed
    if len(both) == 2:
        raise ConfigError(
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other; "
            "uninstall both, then install the extra you need: headwater[cpu] or headwater[gpu]"
        )
