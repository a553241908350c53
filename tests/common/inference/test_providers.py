"""What is asked for is effective, or nothing starts. No accelerator is needed: the runtime's answers are replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest
import torch

from common.errors import ConfigError
from common.inference import providers
from common.inference.engine import Engine
from common.inference.model_folder import ModelFolder
from common.inference.providers import check_effective, provider_list, refuse_two_runtimes

EVERYTHING = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]


class Session:
    """A session that says what it runs on."""

    asked: list[Any]

    def __init__(self, effective: list[str]) -> None:
        self.effective = effective

    def __call__(self, graph: Path, options: ort.SessionOptions, *, providers: list[Any]) -> Session:
        self.asked = providers
        return self

    def get_providers(self) -> list[str]:
        return self.effective


@pytest.fixture
def gpu_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: EVERYTHING)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_a_provider_the_runtime_lacks_fails_at_start(model: ModelFolder) -> None:
    with pytest.raises(ConfigError, match=r"cuda is required but the runtime offers .*headwater\[gpu\]"):
        Engine(model, provider="cuda", precision="float16", context_tokens=32, threads=1)


@pytest.mark.parametrize("provider", ["cuda", "tensorrt"])
def test_a_silent_fall_back_to_the_cpu_fails_at_start(
    model: ModelFolder, gpu_runtime: None, monkeypatch: pytest.MonkeyPatch, provider: str
) -> None:
    monkeypatch.setattr(ort, "InferenceSession", Session(["CPUExecutionProvider"]))
    with pytest.raises(ConfigError, match=f"{provider} is required but CPUExecutionProvider is effective"):
        Engine(model, provider=provider, precision="float16", context_tokens=32, threads=1)


def test_tensorrt_that_falls_back_to_cuda_fails_too(model: ModelFolder) -> None:
    with pytest.raises(ConfigError, match="CUDAExecutionProvider is effective"):
        check_effective(Session(["CUDAExecutionProvider", "CPUExecutionProvider"]), "tensorrt")


def test_the_session_is_asked_in_order_with_options(
    model: ModelFolder, gpu_runtime: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    session = Session(EVERYTHING)
    monkeypatch.setattr(ort, "InferenceSession", session)
    engine = Engine(
        model,
        provider="tensorrt",
        precision="float16",
        context_tokens=32,
        threads=1,
        provider_options={"trt_max_workspace_size": "1000", "trt_layer_norm_fp32_fallback": "0"},
        engine_cache=tmp_path / "engines",
    )
    assert engine.provider == "TensorrtExecutionProvider"
    assert [name for name, _ in session.asked] == EVERYTHING
    options = session.asked[0][1]
    assert options["trt_fp16_enable"] == "1"
    assert options["trt_engine_cache_path"] == options["trt_timing_cache_path"] == str(tmp_path / "engines")
    assert (tmp_path / "engines").stat().st_mode & 0o777 == 0o700
    assert options["trt_max_workspace_size"] == "1000"
    assert options["trt_layer_norm_fp32_fallback"] == "0"
    assert "trt_fp16_enable" not in session.asked[1][1]


def test_an_accelerator_that_torch_does_not_see_fails_at_start(
    model: ModelFolder, gpu_runtime: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch"):
        Engine(model, provider="cuda", precision="float16", context_tokens=32, threads=1)


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_a_precision_without_kernels_is_refused(gpu_runtime: None, precision: Any) -> None:
    with pytest.raises(ConfigError, match="float16 only"):
        provider_list("cuda", precision=precision, engine_cache=None, options={})


def test_an_unknown_provider_is_named() -> None:
    with pytest.raises(ConfigError, match="'rocm'"):
        provider_list("rocm", precision="float32", engine_cache=None, options={})


def test_the_cpu_is_effective_here(engine: Engine) -> None:
    assert engine.provider == "CPUExecutionProvider"


@pytest.mark.parametrize(
    ("names", "refused"),
    [
        (["onnxruntime", "onnxruntime-gpu"], True),
        (["onnxruntime-gpu", None, "Onnxruntime"], True),
        (["onnxruntime-gpu", "numpy"], False),
        (["onnxruntime", "onnxruntime-genai"], False),
    ],
)
def test_two_runtime_packages_are_refused(
    monkeypatch: pytest.MonkeyPatch, names: list[str | None], refused: bool
) -> None:
    class Installed:
        def __init__(self, name: str | None) -> None:
            self.metadata = {"Name": name}

    monkeypatch.setattr(providers, "distributions", lambda: map(Installed, names))
    if refused:
        with pytest.raises(ConfigError, match="uninstall both"):
            refuse_two_runtimes()
    else:
        refuse_two_runtimes()
