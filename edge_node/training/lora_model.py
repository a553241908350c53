"""The base model with one trainable LoRA factor, and log-probabilities under it."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from common.adapter import Adapter, LoraShape
from common.errors import ConfigError, PrivacyError
from common.inference.model_folder import ModelFolder
from edge_node.training.batch import Batch
from edge_node.training.noise import SecureRandom

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

Precision = Literal["float32", "bfloat16", "float16"]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_LOADING = threading.Lock()
"""transformers builds models under process-wide state; two loads at once corrupt each other."""


@dataclass(frozen=True)
class TokenLogps:
    """Per completion token, [B, K], zero beyond an answer's last; `values_BK` where a value head is trained."""

    logps_BK: Tensor
    values_BK: Tensor | None


class SecretDropout(nn.Module):
    """Dropout whose masks nobody can know: were they known, one unit more would shift those of all others.

    Attributes:
        rate: share of values set to zero; 0 for none.
        random: where masks are drawn from; set before every step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rate = 0.0
        self.random = SecureRandom()

    def forward(self, x: Tensor) -> Tensor:
        if self.rate == 0.0 or not self.training:
            return x
        kept = torch.from_numpy(self.random.bernoulli(1.0 - self.rate, x.numel())).view(x.shape)
        return x * kept.to(x.device, x.dtype) / (1.0 - self.rate)


class LoraModel:
    """Loads the base once; `start` sets an adapter and the factor to train.

    The adapter and its gradients are float32 whatever the base is.

    Args:
        precision: of the frozen base.
        checkpointing: recompute activations in the backward pass; less memory, a third more time.
    """

    def __init__(
        self,
        folder: ModelFolder,
        shape: LoraShape,
        *,
        device: str = "cpu",
        precision: Precision = "float32",
        checkpointing: bool = False,
    ) -> None:
        from peft import LoraConfig, get_peft_model
        from peft.tuners.lora import LoraLayer

        base = _load_base(folder, _DTYPES[precision])
        config = LoraConfig(
            r=shape.rank,
            lora_alpha=shape.alpha,
            lora_dropout=0.0,
            target_modules=list(shape.target_modules),
            task_type="CAUSAL_LM",
        )
        self.peft_model = get_peft_model(base, config).to(device)
        if checkpointing:
            self.peft_model.gradient_checkpointing_enable({"use_reentrant": False})
        self.device = torch.device(device)
        self.loss_scale = 1024.0 if precision == "float16" else 1.0
        self._parameters = {
            name.replace(".default", ""): parameter
            for name, parameter in self.peft_model.named_parameters()
            if ".lora_" in name
        }
        self.dropout = SecretDropout()
        for module in self.peft_model.modules():
            if isinstance(module, LoraLayer):
                module.lora_dropout["default"] = self.dropout
        self._checkpointing = checkpointing
        self.peft_model.train()  # checkpointing only works then; every source of dropout is ours
        self.value_head: nn.Linear | None = None

    def start(
        self, adapter: Adapter, names: tuple[str, ...], *, dropout: float = 0.0, value_head: bool = False
    ) -> None:
        """Load `adapter`; exactly the parameters in `names` become trainable, and a value head where asked for.

        Args:
            dropout: on the adapters' inputs, from `dropout.random`.
        Raises:
            PrivacyError: dropout with checkpointing, whose second pass would draw other masks.
        """
        if dropout > 0 and self._checkpointing:
            raise PrivacyError(
                "the plan trains with dropout, which gradient_checkpointing does not repeat; switch one of them off",
                public="this site cannot train with dropout",
            )
        if set(self._parameters) != set(adapter.tensors):
            raise ValueError("the adapter's tensors are not those of this model")
        for name, parameter in self._parameters.items():
            parameter.data.copy_(torch.from_numpy(adapter.tensors[name].copy()))
            parameter.requires_grad_(name in names)
        self.dropout.rate = dropout
        if hasattr(self.peft_model, "value_head"):
            del self.peft_model.value_head
        self.value_head = None
        if value_head:
            self.value_head = nn.Linear(self.peft_model.config.hidden_size, 1, bias=False, device=self.device)
            nn.init.zeros_(self.value_head.weight)
            self.peft_model.value_head = self.value_head

    @property
    def largest_weight(self) -> float:
        """Largest absolute value of the adapter as it is now; made of public weights and released sums."""
        return max(float(parameter.detach().abs().max()) for parameter in self._parameters.values())

    def tensors(self, names: tuple[str, ...]) -> Mapping[str, np.ndarray]:
        """Current values of the named parameters, float32 copies."""
        return {name: self._parameters[name].detach().to("cpu", torch.float32).numpy().copy() for name in names}

    def token_logps(self, batch: Batch) -> TokenLogps:
        """Log-probability of each completion token at its answer's temperature; nothing else reaches the head."""
        base = self.peft_model.get_base_model()
        hidden_RTH = base.get_decoder()(
            input_ids=batch.ids_RT.to(self.device),
            position_ids=None if batch.positions_RT is None else batch.positions_RT.to(self.device),
            attention_mask=None if batch.sees_R1TT is None else batch.sees_R1TT.to(self.device),
            use_cache=False,
        ).last_hidden_state
        source_N, place_N = batch.source_N.to(self.device), batch.place_N.to(self.device)
        logits_NV = base.get_output_embeddings()(hidden_RTH.flatten(0, 1)[source_N])
        logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        shape = batch.written_BK.shape
        if bool((batch.temperature_B != 1.0).any()):
            logits_NV = logits_NV / batch.temperature_B.to(self.device)[place_N // shape[1], None]
        logps_N = -nn.functional.cross_entropy(logits_NV, batch.target_N.to(self.device), reduction="none")

        def placed(values_N: Tensor) -> Tensor:
            return values_N.new_zeros(shape.numel()).index_copy(0, place_N, values_N).view(shape)

        values_BK = None
        if self.value_head is not None:
            values_RT1 = self.value_head(hidden_RTH.detach().to(logits_NV.dtype))  # whole rows: they say whose it is
            values_BK = placed(values_RT1.flatten()[source_N])
        return TokenLogps(placed(logps_N), values_BK)


def _load_base(folder: ModelFolder, dtype: torch.dtype) -> nn.Module:
    """The base model without dropout; raises ConfigError where a weight was missing and would be random."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    with _LOADING:
        model, loading = AutoModelForCausalLM.from_pretrained(
            folder.path,
            local_files_only=True,
            use_safetensors=True,
            dtype=dtype,
            attention_dropout=0.0,
            attn_implementation="sdpa",  # masks of shared rows are boolean, which others may add as numbers
            output_loading_info=True,
        )
    wrong = sorted([*loading["missing_keys"], *loading["mismatched_keys"]])
    if wrong:
        raise ConfigError(f"the model in {folder.path} lacks usable weights for {wrong[0]}")
    return model
