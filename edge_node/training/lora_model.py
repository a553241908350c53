"""The base model with one trainable LoRA factor, and log-probabilities under it."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from common.adapter import Adapter, LoraShape
from common.errors import ConfigError
from common.inference.model_folder import ModelFolder
from edge_node.training.dataset import PairBatch

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

_LOADING = threading.Lock()
"""transformers builds models under process-wide state; two loads at once corrupt each other."""


class LoraModel:
    """Loads the base once; `start` sets an adapter and the phase to train.

    Dropout is off: per-unit gradients must be functions of the unit alone.
    """

    def __init__(self, folder: ModelFolder, shape: LoraShape, *, device: str = "cpu") -> None:
        from peft import LoraConfig, get_peft_model

        base = _load_base(folder)
        config = LoraConfig(
            r=shape.rank,
            lora_alpha=shape.alpha,
            lora_dropout=0.0,
            target_modules=list(shape.target_modules),
            task_type="CAUSAL_LM",
        )
        self.peft_model = get_peft_model(base, config).to(device).eval()
        self.device = torch.device(device)
        self._parameters = {
            name.replace(".default", ""): parameter
            for name, parameter in self.peft_model.named_parameters()
            if ".lora_" in name
        }

    def start(self, adapter: Adapter, names: tuple[str, ...]) -> None:
        """Load `adapter`; exactly the parameters in `names` become trainable."""
        if set(self._parameters) != set(adapter.tensors):
            raise ValueError("the adapter's tensors are not those of this model")
        for name, parameter in self._parameters.items():
            parameter.data.copy_(torch.from_numpy(adapter.tensors[name].copy()))
            parameter.requires_grad_(name in names)

    def tensors(self, names: tuple[str, ...]) -> Mapping[str, np.ndarray]:
        """Current values of the named parameters, float32 copies."""
        return {name: self._parameters[name].detach().to("cpu", torch.float32).numpy().copy() for name in names}

    def completion_logps(self, batch: PairBatch) -> Tensor:
        """Summed log-probability of each row's completion, [2U]; only the completions reach the head."""
        ids_BT = batch.ids_BT.to(self.device)
        kept = ids_BT.shape[1] - batch.shortest_prompt + 1
        logits_BKV = self.peft_model(input_ids=ids_BT, logits_to_keep=kept).logits[:, :-1]
        targets_BK = ids_BT[:, -(kept - 1) :]
        logps_BK = logits_BKV.float().log_softmax(-1).gather(-1, targets_BK[..., None])[..., 0]
        return (logps_BK * batch.completion_mask_BT[:, -(kept - 1) :].to(self.device)).sum(1)


def _load_base(folder: ModelFolder) -> torch.nn.Module:
    """The base model in float32; raises ConfigError where a weight was missing and would be random."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    with _LOADING:
        model, loading = AutoModelForCausalLM.from_pretrained(
            folder.path, local_files_only=True, use_safetensors=True, dtype=torch.float32, output_loading_info=True
        )
    wrong = sorted([*loading["missing_keys"], *loading["mismatched_keys"]])
    if wrong:
        raise ConfigError(f"the model in {folder.path} lacks usable weights for {wrong[0]}")
    return model
