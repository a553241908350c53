"""Random small models of every family against transformers and PEFT, in every precision."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

from common.adapter import Adapter, LoraShape, initial_adapter
from common.inference.engine import Engine, Lane
from common.inference.export import build_graph
from common.inference.model_folder import EMBEDDED, TARGET_MODULES, ModelFolder, open_model
from common.inference.quantization import dequantize, quantize
from tests.conftest import changed

TOLERANCE = 3e-4
CONTEXT = 48
SIZES = {
    "vocab_size": 280,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 1,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-untied": LlamaConfig(**SIZES, tie_word_embeddings=False, rms_norm_eps=1e-3, head_dim=32),
    "qwen2": Qwen2Config(
        **SIZES, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
    ),
    "qwen2-untied": Qwen2Config(**{**SIZES, "num_key_value_heads": 1}, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=False, head_dim=32),
    "qwen3-tied": Qwen3Config(**{**SIZES, "num_attention_heads": 6}, tie_word_embeddings=True, head_dim=16),
}
SHAPES = (LoraShape(8, 16.0, TARGET_MODULES), LoraShape(3, 1.0, ("q_proj", "v_proj", "down_proj")))


@dataclass
class Made:
    """A random model on disk, and two adapters of it beside none."""

    folder: ModelFolder
    adapters: list[Adapter | None]
    scratch: Path

    @cached_property
    def references(self) -> list[torch.nn.Module]:
        """The base as transformers opens it, and the same with each adapter in PEFT."""
        models: list[torch.nn.Module] = []
        for adapter in self.adapters:
            model = AutoModelForCausalLM.from_pretrained(self.folder.path, dtype=torch.float32)
            if adapter is not None:
                adapter.write_peft_folder(self.scratch / adapter.digest, base_model="base")
                model = PeftModel.from_pretrained(model, self.scratch / adapter.digest)
            models.append(model.eval())
        return models

    @torch.no_grad()
    def logits(self, index: int, ids: list[int]) -> np.ndarray:
        """All positions' logits [T, V] with the adapter of that index, the first being none."""
        return self.references[index](input_ids=torch.tensor([ids])).logits[0].numpy()


@pytest.fixture(scope="module", params=CONFIGS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(list(CONFIGS).index(request.param))
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param])
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # transformers' own start has no bias and every norm at one
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.15) + ("norm" in name))
    model.save_pretrained(path)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(EMBEDDED / file, path)
    folder = open_model(path)
    adapters: list[Adapter | None] = [None]
    for seed, shape in enumerate(SHAPES):
        trained = {n: s for n, s in folder.module_shapes().items() if n.rpartition(".")[2] in shape.target_modules}
        adapters.append(changed(initial_adapter(trained, shape, seed=seed), seed=seed, scale=0.2))
    return Made(folder, adapters, tmp_path_factory.mktemp("peft"))


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(6, 280, length).tolist() for length in (3, 17, 40)]


def lane(engine: Engine, made: Made, index: int) -> Lane:
    zero = initial_adapter(made.folder.module_shapes(), SHAPES[0], seed=0)
    return Lane(engine, engine.load(made.adapters[index] or zero))


def test_logits_are_those_of_transformers_and_peft(made: Made) -> None:
    """Base and two adapters of other ranks and targets; a ragged batch, at once and token by token."""
    engine = Engine(made.folder, slots=3, context_tokens=CONTEXT, threads=1)
    base = None
    for index in range(len(made.adapters)):
        expected = [made.logits(index, ids) for ids in prompts()]
        at_once = lane(engine, made, index).prefill(prompts())
        for found, wanted in zip(at_once, expected, strict=True):
            np.testing.assert_allclose(found, wanted[-1], atol=TOLERANCE, rtol=0)
        stepwise = lane(engine, made, index)
        found = stepwise.prefill([ids[: 1 + row] for row, ids in enumerate(prompts())])
        for step in range(2):
            for row, wanted in enumerate(expected):
                np.testing.assert_allclose(found[row], wanted[row + step], atol=TOLERANCE, rtol=0)
            found = stepwise.decode(
                np.array([ids[1 + row + step] if row + step + 1 < len(ids) else 7 for row, ids in enumerate(prompts())])
            )
        base = expected[2] if base is None else base
        assert index == 0 or np.abs(expected[2] - base).max() > 0.5


def test_eight_bits_are_the_rounded_weights_up_to_the_rounding_of_activations(made: Made) -> None:
    engine = Engine(made.folder, precision="int8", slots=3, context_tokens=CONTEXT, threads=1)
    assert {"MatMulNBits"} <= operators(made, "int8")
    index = 1
    found = lane(engine, made, index).prefill(prompts())
    for row, ids in zip(found, prompts(), strict=True):
        wanted = made.logits(index, ids)[-1]
        assert np.abs(row - wanted).max() < 0.1 * np.ptp(wanted)
        assert divergence(wanted, row) < 0.02


def test_half_precision_is_close_in_every_step(made: Made) -> None:
    engine = Engine(made.folder, precision="float16", slots=3, context_tokens=CONTEXT, threads=1)
    index = 2
    half = lane(engine, made, index)
    assert {array.dtype for array in half.cache.arrays.values()} == {np.dtype(np.float16)}
    found = half.prefill([ids[:-1] for ids in prompts()])
    assert found.dtype == np.float32
    found = half.decode(np.array([ids[-1] for ids in prompts()]))
    for row, ids in zip(found, prompts(), strict=True):
        wanted = made.logits(index, ids)[-1]
        assert np.abs(row - wanted).max() < 0.02 * np.ptp(wanted)
        assert divergence(wanted, row) < 1e-3


def divergence(wanted: np.ndarray, found: np.ndarray) -> float:
    """KL of the softmax of `found` from that of `wanted`, in nats."""
    p, q = (x - np.log(np.exp(x - x.max()).sum()) - x.max() for x in (wanted.astype(float), found.astype(float)))
    return float((np.exp(p) * (p - q)).sum())


def operators(made: Made, precision: str) -> set[str]:

    with TemporaryDirectory() as folder:
        file = build_graph(made.folder, Path(folder), precision=precision, context_tokens=CONTEXT)
        return {node.op_type for node in onnx.load(file, load_external_data=False).graph.node}


@settings(deadline=None, max_examples=50)
@given(arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 70)), elements=st.floats(-8, 8, width=32)))
def test_a_quantized_weight_is_off_by_half_a_level_at_most(weight: np.ndarray) -> None:
    levels, scales, zeros = quantize(weight)
    restored = dequantize(levels, scales, zeros, weight.shape[1])
    of_value = np.repeat(scales, 32, axis=1)[:, : weight.shape[1]]
    assert (np.abs(restored - weight) <= of_value * 0.502 + 1e-7).all()
    assert (restored[weight == 0] == 0).all()  # padding and dead weights stay exactly nothing
