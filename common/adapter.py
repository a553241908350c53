"""LoRA adapters: PEFT names and shapes, a flat vector, a digest, safetensors files.

An `Adapter` is immutable. Its digest is the SHA-256 of its canonical safetensors
file, so two parties that name the same digest serve the same weights. Nothing
here unpickles anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from common.errors import TrustError
from common.identity import sha256_hex

PREFIX = "base_model.model."
"""PEFT puts this before the module path; keys carry no `.default`."""

PHASES = ("A", "B")
LORA_MODES = ("alternate", "ffa")
"""`alternate`: A and B are trained in turn (RoLoRA, Chen et al. 2024, arXiv:2409.02346). `ffa`: B only, A stays as
drawn from its seed (Sun et al. 2024, arXiv:2403.12313). In both, the mean of the sites' factors is the factor of the
mean, which it is not where A and B move together."""


@dataclass(frozen=True)
class LoraShape:
    """What fixes an adapter's tensors beside the base model."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True, eq=False)
class Adapter:
    """LoRA tensors by PEFT name (float32, read-only), with the shape that scales them."""

    shape: LoraShape
    tensors: Mapping[str, np.ndarray]

    def __post_init__(self) -> None:
        ordered = {}
        for name in sorted(self.tensors):
            tensor = self.tensors[name]
            if not _lies_in_bytes(tensor):
                tensor = np.array(tensor, dtype=np.float32, copy=True)
                tensor.flags.writeable = False
            ordered[name] = tensor
        object.__setattr__(self, "tensors", MappingProxyType(ordered))

    @cached_property
    def file_bytes(self) -> bytes:
        """The canonical `adapter_model.safetensors`, or the one it was read from."""
        return save(dict(self.tensors), metadata={"format": "pt"})

    @cached_property
    def digest(self) -> str:
        return sha256_hex(self.file_bytes)

    @cached_property
    def layout(self) -> tuple[bytes, Mapping[str, int]]:
        """The file up to its values, and where each tensor begins in it."""
        begin = 8 + int.from_bytes(self.file_bytes[:8], "little")
        header = json.loads(self.file_bytes[8:begin])
        return self.file_bytes[:begin], {name: begin + header[name]["data_offsets"][0] for name in self.tensors}

    def names(self, phase: str) -> tuple[str, ...]:
        """Names trained in a phase, sorted: `A` the down-projections, `B` the up-projections."""
        if phase not in PHASES:
            raise ValueError(f"LoRA phase {phase!r} is not one of {PHASES}")
        return tuple(name for name in self.tensors if name.endswith(f".lora_{phase}.weight"))

    def flatten(self, names: Iterable[str]) -> np.ndarray:
        """One float32 vector of the named tensors, in the given order."""
        return np.concatenate([self.tensors[name].reshape(-1) for name in names])

    def with_added(self, names: Iterable[str], delta_D: np.ndarray) -> Adapter:
        """A new adapter with `delta_D` (flat, in the order of `names`) added."""
        names = tuple(names)
        sizes = [self.tensors[name].size for name in names]
        if delta_D.shape != (sum(sizes),):
            raise ValueError(f"delta has shape {delta_D.shape}, the named tensors have {sum(sizes)} values")
        parts = np.split(delta_D.astype(np.float32), np.cumsum(sizes)[:-1])
        changed = {
            n: self.tensors[n] + part.reshape(self.tensors[n].shape) for n, part in zip(names, parts, strict=True)
        }
        return Adapter(self.shape, {**self.tensors, **changed})

    def balanced(self) -> Adapter:
        """The same products BA from factors of equal norm: B ← U√S, A ← √S Vᵀ of each product's SVD.

        Training one factor against a much larger other one would need another learning rate every round.
        """
        tensors = {}
        for name_a in self.names("A"):
            name_b = name_a.replace(".lora_A.", ".lora_B.")
            b_OR, a_RI = self.tensors[name_b].astype(np.float64), self.tensors[name_a].astype(np.float64)
            finite = np.isfinite(b_OR).all() and np.isfinite(a_RI).all()
            if not finite or not b_OR.any() or not a_RI.any():  # nothing to balance; the gates look at the rest
                tensors[name_a], tensors[name_b] = self.tensors[name_a], self.tensors[name_b]
                continue
            tensors[name_b], tensors[name_a], _ = equal_factors(b_OR, a_RI, rank=self.shape.rank)
        return Adapter(self.shape, {name: np.asarray(t, np.float32) for name, t in tensors.items()})

    def products(self) -> np.ndarray:
        """BA of every module, flat float64: what the adapter does, whatever its factors."""
        return np.concatenate(
            [
                (self.tensors[name.replace(".lora_A.", ".lora_B.")].astype(np.float64) @ self.tensors[name]).reshape(-1)
                for name in self.names("A")
            ]
        )

    def write_peft_folder(self, folder: Path, *, base_model: str) -> None:
        """Write `adapter_config.json` and `adapter_model.safetensors`, loadable by peft and vLLM."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "r": self.shape.rank,
            "lora_alpha": self.shape.alpha,
            "lora_dropout": 0.0,
            "target_modules": list(self.shape.target_modules),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        (folder / "adapter_model.safetensors").write_bytes(self.file_bytes)


def equal_factors(b_OR: np.ndarray, a_RI: np.ndarray, *, rank: int) -> tuple[np.ndarray, np.ndarray, float]:
    """U√S [O, rank] and √S Vᵀ [rank, I] of the best approximation of BA of a rank, and what is lost (Frobenius norm).

    Eckart & Young 1936. BA itself is never formed: QR of both factors, then the SVD of a core of their common size.

    Args:
        b_OR, a_RI: float64, finite.
        rank: where it is above that of BA, the rest is zero.
    """
    q_b, r_b = np.linalg.qr(b_OR)
    q_a, r_a = np.linalg.qr(a_RI.T)
    u, s, vt = np.linalg.svd(r_b @ r_a.T, full_matrices=False)
    kept = np.sqrt(s[:rank])
    unused = rank - len(kept)
    new_b = np.pad(q_b @ (u[:, :rank] * kept), ((0, 0), (0, unused)))
    new_a = np.pad((kept[:, None] * vt[:rank]) @ q_a.T, ((0, unused), (0, 0)))
    return new_b, new_a, float(np.linalg.norm(s[rank:]))


def parse_tensors(data: bytes) -> dict[str, np.ndarray]:
    """Read a safetensors file from elsewhere; raises TrustError where it is not one."""
    try:
        return load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TrustError("not a safetensors file") from error


def parse_adapter(data: bytes, *, digest: str, like: Adapter) -> Adapter:
    """Read an adapter and check everything about it before anyone uses it.

    Raises:
        TrustError: digest, names, shapes, dtype or finiteness do not hold.
    """
    if sha256_hex(data) != digest:  # (1) the bytes are the ones that were named
        raise TrustError(f"adapter bytes do not have digest {digest[:12]}")
    tensors = _views(data, like)
    if tensors is None:
        tensors = parse_tensors(data)
        check_tensors(tensors, {name: tensor.shape for name, tensor in like.tensors.items()})
    adapter = Adapter(like.shape, tensors)
    adapter.__dict__.update(file_bytes=data, digest=digest)  # just checked; nothing is serialised anew
    return adapter


def _views(data: bytes, like: Adapter) -> dict[str, np.ndarray] | None:
    """The tensors of a canonical file where they lie, without a copy; None unless all is as in `like`, and finite.

    That two headers are equal says it of names, dtype and shapes at once.
    """
    header, begins = like.layout
    if len(data) != len(like.file_bytes) or not data.startswith(header):
        return None
    if not all_finite(np.frombuffer(data, np.float32, offset=len(header))):
        return None
    return {n: np.ndarray(t.shape, np.float32, buffer=data, offset=begins[n]) for n, t in like.tensors.items()}


def all_finite(values: np.ndarray) -> bool:
    """Whether no value is infinite or NaN.

    Where one is, so is the sum of squares, which is faster in float32; it may also just be too large.
    """
    if values.dtype == np.float32 and np.isfinite(np.vdot(values, values)):
        return True
    return bool(np.isfinite(values).all())


def _lies_in_bytes(tensor: np.ndarray) -> bool:
    """Whether it is float32 in memory that nobody can change."""
    return isinstance(tensor.base, bytes) and tensor.dtype == np.float32


def check_tensors(tensors: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise TrustError unless names, shapes and dtype are the expected ones and all is finite."""
    check_shapes(tensors, shapes)
    for name, tensor in tensors.items():
        if not np.isfinite(tensor).all():  # (5) finite
            raise TrustError(f"{name} has a value that is not finite")


def check_shapes(tensors: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise TrustError unless names, shapes and dtype are the expected ones; the values may be anything."""
    if set(tensors) != set(shapes):  # (2) names
        odd = sorted(set(tensors) ^ set(shapes))
        raise TrustError(f"tensor names differ from the expected ones, first: {odd[0][:120]}")
    for name, shape in shapes.items():
        tensor = tensors[name]
        if tensor.dtype != np.float32:  # (3) dtype
            raise TrustError(f"{name} has dtype {tensor.dtype}, expected float32")
        if tensor.shape != shape:  # (4) shape
            raise TrustError(f"{name} has shape {tensor.shape}, expected {shape}")


def initial_adapter(model_shapes: Mapping[str, tuple[int, int]], shape: LoraShape, *, seed: int) -> Adapter:
    """The adapter every site starts from: B zero, A uniform in ±1/√in (Hu et al. 2021, arXiv:2106.09685).

    A is drawn per parameter from (seed, name), so it is the same at every site
    and on every platform, whatever the order of construction.

    Args:
        model_shapes: module path to weight shape (out, in) of every target module.
    """
    tensors = {}
    for module, (outputs, inputs) in model_shapes.items():
        name = f"{PREFIX}{module}.lora_A.weight"
        generator = np.random.Generator(np.random.PCG64(int(sha256_hex(f"{seed}:{name}".encode()), 16)))
        bound = inputs**-0.5
        tensors[name] = generator.uniform(-bound, bound, (shape.rank, inputs)).astype(np.float32)
        tensors[f"{PREFIX}{module}.lora_B.weight"] = np.zeros((outputs, shape.rank), np.float32)
    return Adapter(shape, tensors)
