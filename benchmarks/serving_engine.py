"""Generation by the serving engine against Hugging Face and llama.cpp, on one thread.

python benchmarks/serving_engine.py FILE.gguf [--tokens N] [--repeats N]

The GGUF file is imported, so that everybody has the same weights; llama.cpp gets
them in its own 8 bits (Q8_0), and takes part where `cyllama` can be imported.
A token's cost is the difference between an answer of N tokens and one of a single
token. Times are CPU seconds, which other programs on the machine disturb least,
the least of some turns; wall-clock times of the same turns are beside them. Eight
at once have short prompts, which are read in one step, as has the one they are
compared with.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.update({"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TRANSFORMERS_VERBOSITY": "error"})

import gguf
import numpy as np
import torch
from peft import PeftModel
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from common.adapter import Adapter, LoraShape, initial_adapter
from common.inference.batching import Batcher, GenerationRequest
from common.inference.chat_tokenizer import ChatTokenizer
from common.inference.engine import Engine, Lane
from common.inference.export import Precision
from common.inference.gguf_import import import_gguf
from common.inference.model_folder import TARGET_MODULES, ModelFolder
from common.inference.sampling import SamplingParameters

PROMPT_TOKENS, SHORT_TOKENS = 200, 16
KL_TOKENS = 160
PRECISIONS: tuple[Precision, ...] = ("float32", "int8")
RIVAL = "Hugging Face float32 + PEFT"
SHAPE = LoraShape(8, 16.0, TARGET_MODULES)
TEXT = Path(__file__).parent.parent / "LICENSE"

Answer = Callable[[int], None]
"""Generates that many tokens after the prompt; of every prompt, where there are several."""


@dataclass(frozen=True)
class Cost:
    """Seconds to the first token and for each further one; of CPU and of wall-clock time."""

    first_cpu: float
    token_cpu: float
    token_wall: float


def cost(answers: dict[str, Answer], *, tokens: int, repeats: int) -> dict[str, Cost]:
    """The least of some turns, in which the contenders take part one after the other."""
    least: dict[tuple[str, int], tuple[float, float]] = {}
    for turn in range(repeats + 1):
        for name, answer in answers.items():
            for length in (1, tokens):
                cpu, wall = time.process_time(), time.perf_counter()
                answer(length)
                took = time.process_time() - cpu, time.perf_counter() - wall
                if turn:  # the first turn warms up
                    before = least.get((name, length), took)
                    least[name, length] = min(before[0], took[0]), min(before[1], took[1])
    return {
        name: Cost(
            least[name, 1][0],
            (least[name, tokens][0] - least[name, 1][0]) / (tokens - 1),
            (least[name, tokens][1] - least[name, 1][1]) / (tokens - 1),
        )
        for name in answers
    }


def hugging_face(folder: ModelFolder, adapter: Adapter, prompt: list[int], scratch: Path) -> Answer:
    adapter.write_peft_folder(scratch, base_model="base")
    base = AutoModelForCausalLM.from_pretrained(folder.path, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, scratch).eval()
    ids = torch.tensor([prompt])

    def answer(tokens: int) -> None:
        made = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
        assert made.shape[1] == len(prompt) + tokens

    return answer


def ours(engine: Engine, batcher: Batcher, adapter: Adapter, prompts: list[list[int]]) -> Answer:
    loaded = engine.load(adapter)
    endless = SamplingParameters(0.0, logit_bias=tuple((end, -1e9) for end in sorted(engine.model.end_tokens)))

    def answer(tokens: int) -> None:
        futures = [batcher.submit(GenerationRequest(prompt, tokens, endless), loaded) for prompt in prompts]
        assert all(len(future.result().token_ids) == tokens for future in futures)

    return answer


class LlamaCpp:
    """llama.cpp through cyllama."""

    def __init__(self, file: Path, vocabulary: int) -> None:
        from cyllama.llama import llama_cpp

        class Model(llama_cpp.LlamaModel):  # its reading of logits asks for this
            n_vocab = vocabulary

        llama_cpp.disable_logging()
        parameters = llama_cpp.LlamaContextParams()
        parameters.n_ctx, parameters.n_threads, parameters.n_threads_batch = 1024, 1, 1
        self._llama = llama_cpp
        self._context = llama_cpp.LlamaContext(Model(str(file)), parameters)

    def read(self, ids: list[int], start: int) -> np.ndarray:
        """The logits after the last of some tokens."""
        batch = self._llama.LlamaBatch(n_tokens=len(ids), embd=0, n_seq_max=1)
        for offset, token in enumerate(ids):
            batch.add(token, start + offset, [0], offset + 1 == len(ids))
        self._context.decode(batch)
        return np.array(self._context.get_logits_ith(-1), np.float32)

    def answer(self, prompt: list[int], tokens: int) -> None:
        self._context.kv_cache_clear()
        logits = self.read(prompt, 0)
        for position in range(tokens - 1):
            logits = self.read([int(logits.argmax())], len(prompt) + position)

    def followed(self, ids: list[int]) -> np.ndarray:
        """Logits after each of the last tokens."""
        self._context.kv_cache_clear()
        logits = [self.read(ids[:-KL_TOKENS], 0)]
        return np.array(logits + [self.read([t], PROMPT_TOKENS + i) for i, t in enumerate(ids[-KL_TOKENS:])])


def requantized(file: Path, target: Path) -> Path:
    """The same model with every matrix in Q8_0."""
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            kinds = field.types
            writer.add_key_value(name, field.contents(), kinds[0], sub_type=kinds[-1] if len(kinds) > 1 else None)
    for tensor in reader.tensors:
        array = gguf.dequantize(tensor.data, tensor.tensor_type)
        kind = gguf.GGMLQuantizationType.Q8_0 if array.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def divergence(expected: np.ndarray, found: np.ndarray) -> tuple[float, float]:
    """Mean KL of `found` from `expected` in nats, and how often both have the same likeliest token; logits [T, V]."""
    p, q = (x - np.log(np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True)) - x.max(1, keepdims=True)
            for x in (expected.astype(np.float64), found.astype(np.float64)))  # fmt: skip
    same = (expected.argmax(1) == found.argmax(1)).mean()
    return float((np.exp(p) * (p - q)).sum(1).mean()), float(same)


def followed(engine: Engine, ids: list[int]) -> np.ndarray:
    """Logits of the base model after each of the last tokens, one by one as when generating."""
    lane = Lane(engine, engine.load(initial_adapter(engine.model.module_shapes(), SHAPE, seed=0)))
    logits = [lane.prefill([ids[:-KL_TOKENS]])[0].copy()]
    return np.array(logits + [lane.decode(np.array([token]))[0].copy() for token in ids[-KL_TOKENS:]])


def open_engine(folder: ModelFolder, precision: Precision) -> Engine:
    return Engine(folder, precision=precision, slots=8, context_tokens=1024, threads=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--tokens", type=int, default=33)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        run(arguments.gguf, Path(scratch), tokens=arguments.tokens, repeats=arguments.repeats)


def run(file: Path, scratch: Path, *, tokens: int, repeats: int) -> None:
    folder = import_gguf(file, scratch / "model")
    text = ChatTokenizer(folder).encode_text(TEXT.read_text())
    prompt = text[:PROMPT_TOKENS]
    together = [text[i * 50 : i * 50 + SHORT_TOKENS] for i in range(8)]
    rng = np.random.default_rng(0)
    start = initial_adapter(folder.module_shapes(), SHAPE, seed=0)
    drawn = {n: rng.normal(0, 0.01, t.shape) if "lora_B" in n else t for n, t in start.tensors.items()}
    adapter = Adapter(SHAPE, drawn)
    engines = {precision: open_engine(folder, precision) for precision in PRECISIONS}
    batchers = {precision: Batcher(engine) for precision, engine in engines.items()}
    alone: dict[str, Answer] = {RIVAL: hugging_face(folder, adapter, prompt, scratch / "peft")}
    crowd: dict[str, Answer] = {}
    for precision, engine in engines.items():
        batcher = batchers[precision]
        alone[f"ours {precision} + LoRA"] = ours(engine, batcher, adapter, [prompt])
        crowd[f"{precision}, one"] = ours(engine, batcher, adapter, together[:1])
        crowd[f"{precision}, eight"] = ours(engine, batcher, adapter, together)
    llama = None
    if importlib.util.find_spec("cyllama"):
        llama = LlamaCpp(requantized(file, scratch / "q8.gguf"), folder.dimensions.vocabulary)
        alone["llama.cpp Q8_0, no adapter"] = lambda length: llama.answer(prompt, length)
    show_costs(cost(alone, tokens=tokens, repeats=repeats))
    show_crowds(cost(crowd, tokens=tokens, repeats=repeats))
    for batcher in batchers.values():
        batcher.close()
    show_quality(engines, llama, text[400 : 400 + PROMPT_TOKENS + KL_TOKENS])


def show_costs(costs: dict[str, Cost]) -> None:
    table = Table(
        f"{PROMPT_TOKENS} tokens of prompt", "first token, CPU ms", "each further, CPU ms", "wall ms", "× rival"
    )
    for name, found in costs.items():
        milliseconds = (found.first_cpu * 1e3, found.token_cpu * 1e3, found.token_wall * 1e3)
        table.add_row(
            name, *(f"{each:.1f}" for each in milliseconds), f"{costs[RIVAL].token_cpu / found.token_cpu:.1f}"
        )
    Console(width=110).print(table)


def show_crowds(costs: dict[str, Cost]) -> None:
    table = Table("answers at once", "one step, CPU ms", "wall ms", "tokens per CPU second", "× one")
    for name, found in costs.items():
        rows = 8 if name.endswith("eight") else 1
        one = costs[name.replace("eight", "one")]
        rate = rows / found.token_cpu
        step = f"{found.token_cpu * 1e3:.1f}", f"{found.token_wall * 1e3:.1f}"
        table.add_row(name, *step, f"{rate:.0f}", f"{rate * one.token_cpu:.1f}")
    Console(width=110).print(table)


def show_quality(engines: dict[Precision, Engine], llama: LlamaCpp | None, ids: list[int]) -> None:
    expected = followed(engines["float32"], ids)
    rivals = {"ours int8": followed(engines["int8"], ids)}
    if llama is not None:
        rivals["llama.cpp Q8_0"] = llama.followed(ids)
    table = Table("against ours float32", "KL, nats", "same likeliest token")
    for name, logits in rivals.items():
        kl, same = divergence(expected, logits)
        table.add_row(name, f"{kl:.4f}", f"{same:.1%}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
