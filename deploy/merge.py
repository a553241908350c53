"""An adapter merged into its base model: an ordinary model folder, checked by loading it again.

The check compares what other people's libraries compute: the merged folder loaded
by transformers against the base with the adapter loaded by peft, on public prompts.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from common.adapter import PREFIX, Adapter, LoraShape, check_tensors, parse_tensors
from common.chat import Message
from common.errors import ConfigError, TrustError
from common.inference.chat_tokenizer import ChatTokenizer
from common.inference.model_folder import ModelFolder, open_model
from common.merging import merged_weights
from common.tasks import math as task
from deploy.output import whole_folder

LARGEST_DIFFERENCE = 1e-4
"""Of a logit, relative to the largest one: float32 rounding of W + BA against W x + B (A x)."""

_PROMPTS = 8
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def merge(model: ModelFolder, adapter_folder: Path, target: Path) -> float:
    """Write the merged model; `target` appears, complete and checked, at the end. The largest relative difference.

    Raises:
        ConfigError: the adapter folder is no LoRA adapter of this model, or `target` cannot be made.
        TrustError: the merged model does not compute what base and adapter do; nothing is left behind.
    """
    adapter = read_adapter(adapter_folder, model)
    weights = merged_weights(model.weights(), adapter)
    with whole_folder(target) as folder:
        for file in model.path.iterdir():
            if file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES):
                shutil.copyfile(file, folder / file.name)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config.pop("torch_dtype", None)
        config["dtype"] = "float32"
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        difference = reload_difference(model, adapter_folder, open_model(folder))
        if not difference <= LARGEST_DIFFERENCE:
            raise TrustError(
                f"the merged model's logits differ from base and adapter by {difference:.1e}, "
                f"at most {LARGEST_DIFFERENCE:.0e} is rounding"
            )
    return difference


def reload_difference(model: ModelFolder, adapter_folder: Path, merged: ModelFolder) -> float:
    """Largest difference of a logit between base with adapter and merged model, relative to the largest logit."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    tokenizer = ChatTokenizer(model)
    stream = task.problems(task.Distribution(), task.Split.GOLDEN, seed=0)
    prompts = [tokenizer.encode([Message("user", next(stream).prompt)]) for _ in range(_PROMPTS)]
    base = AutoModelForCausalLM.from_pretrained(model.path, local_files_only=True, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, str(adapter_folder)).eval()
    alone = AutoModelForCausalLM.from_pretrained(merged.path, local_files_only=True, dtype=torch.float32).eval()
    largest, scale = 0.0, 0.0
    with torch.no_grad():
        for prompt in prompts:
            expected = adapted(torch.tensor([prompt])).logits
            found = alone(torch.tensor([prompt])).logits
            largest = max(largest, float((found - expected).abs().max()))
            scale = max(scale, float(expected.abs().max()))
    return largest / scale if scale and np.isfinite(scale) else np.inf


def read_adapter(folder: Path, model: ModelFolder) -> Adapter:
    """A PEFT folder of plain LoRA for this model.

    Raises:
        ConfigError: it is something else.
    """
    try:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        tensors = parse_tensors((folder / "adapter_model.safetensors").read_bytes())
        rank, alpha, modules = int(config["r"]), float(config["lora_alpha"]), config["target_modules"]
    except (OSError, ValueError, KeyError, TypeError, TrustError) as error:
        raise ConfigError(f"{folder} is no PEFT adapter folder: {error}") from error
    variants = ("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out")
    wrong = [name for name in variants if config.get(name)]
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or wrong:
        raise ConfigError(f"{folder} is not a plain LoRA adapter: {', '.join(wrong) or config.get('peft_type')}")
    if rank < 1 or not isinstance(modules, list) or not all(isinstance(module, str) for module in modules):
        raise ConfigError(f"{folder} is not a plain LoRA adapter: r = {rank}, target_modules = {modules!r}")
    shapes: dict[str, tuple[int, ...]] = {}
    for path, (outputs, inputs) in model.module_shapes().items():
        if path.rsplit(".", 1)[1] in modules:
            shapes[f"{PREFIX}{path}.lora_A.weight"] = (rank, inputs)
            shapes[f"{PREFIX}{path}.lora_B.weight"] = (outputs, rank)
    try:
        check_tensors(tensors, shapes)
    except TrustError as error:
        raise ConfigError(f"the adapter in {folder} does not fit the model: {error}") from error
    return Adapter(LoraShape(rank, alpha, tuple(modules)), tensors)
