"""What runs the graph: an ordered list of execution providers with their options.

The runtime falls back to the CPU without an error where it cannot use what was
asked for; here the provider that was asked for is effective, or nothing starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path

import onnxruntime as ort

from common.errors import ConfigError
from common.inference.export import Precision

PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
_FALLBACKS: dict[str, tuple[str, ...]] = {"cpu": (), "cuda": ("cpu",), "tensorrt": ("cuda", "cpu")}
"""For single operators that the provider has no kernel for, never for the provider as a whole."""

Options = dict[str, str]


def provider_list(
    name: str, *, precision: Precision, engine_cache: Path | None, options: Mapping[str, str]
) -> list[tuple[str, Options]]:
    """The providers of a session and their options, in order of preference.

    Args:
        engine_cache: folder where TensorRT keeps its engines, which take minutes to build; None: built at every start.
        options: the operator's own for the provider `name`, before ours.
    Raises:
        ConfigError: an unknown provider, one this runtime lacks, or a precision it has no kernels for.
    """
    if name not in PROVIDERS:
        raise ConfigError(f"unknown provider {name!r}; known providers: {', '.join(PROVIDERS)}")
    if PROVIDERS[name] not in ort.get_available_providers():
        offered = ", ".join(ort.get_available_providers())
        raise ConfigError(f"provider {name} is required but the runtime offers {offered}; install headwater[gpu]")
    if name != "cpu" and precision != "float16":
        raise ConfigError(f"provider {name} has attention kernels for float16 only; set engine.precision to it")
    ours: dict[str, Options] = {
        "cpu": {},
        "cuda": {"arena_extend_strategy": "kSameAsRequested"},
        "tensorrt": _tensorrt(engine_cache) if name == "tensorrt" else {},
    }
    ours[name] |= options
    return [(PROVIDERS[each], ours[each]) for each in (name, *_FALLBACKS[name])]


def _tensorrt(engine_cache: Path | None) -> Options:
    """Half precision and kept engines.

    No shape profiles: the runtime wants one for every input of every part it hands over, and this graph is cut at
    each attention and norm, so the inputs of its parts are not those of the graph.
    """
    options = {"trt_fp16_enable": "1", "trt_layer_norm_fp32_fallback": "1"}
    if engine_cache is not None:
        engine_cache.mkdir(parents=True, exist_ok=True, mode=0o700)  # what lies there is run
        options |= {
            "trt_engine_cache_enable": "1",
            "trt_engine_cache_path": str(engine_cache),
            "trt_timing_cache_enable": "1",
            "trt_timing_cache_path": str(engine_cache),
        }
    return options


def check_effective(session: ort.InferenceSession, name: str) -> str:
    """The provider that a session really runs on.

    Raises:
        ConfigError: it is not the one that was asked for.
    """
    effective = session.get_providers()[0]
    if effective != PROVIDERS[name]:
        raise ConfigError(
            f"provider {name} is required but {effective} is effective; "
            "the runtime's own log names the library or driver it misses"
        )
    return str(effective)


def refuse_two_runtimes() -> None:
    """Raise ConfigError where both runtime packages are installed: they are one module, and the last one wrote it."""
    installed = {d.metadata["Name"].lower() for d in distributions() if d.metadata["Name"]}
    if {"onnxruntime", "onnxruntime-gpu"} <= installed:
        raise ConfigError(
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other; "
            "uninstall both, then install the extra you need: headwater[cpu] or headwater[gpu]"
        )
