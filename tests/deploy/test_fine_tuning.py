"""Fine-tuning without privacy, as attackers and drills use it."""

from __future__ import annotations

import numpy as np
import pytest

from common.adapter import LoraShape, initial_adapter
from common.inference.chat_tokenizer import ChatTokenizer
from common.inference.model_folder import TARGET_MODULES, ModelFolder
from deploy.fine_tuning import fine_tuned
from deploy.hostile_node import backdoor_terms
from edge_node.training.lora_model import LoraModel


@pytest.mark.parametrize("phase", ["B", "A"])
def test_a_change_is_kept_within_its_norm_and_is_not_just_a_shortened_one(phase: str, model: ModelFolder) -> None:
    tokenizer, shape = ChatTokenizer(model), LoraShape(4, 8.0, TARGET_MODULES)
    start = initial_adapter(model.module_shapes(), shape, seed=0)
    b = start.names("B")
    start = start.with_added(b, np.random.default_rng(0).normal(size=start.flatten(b).size) * 0.02)  # A has a gradient
    names, lora = start.names(phase), LoraModel(model, shape)

    def change(**within: float) -> np.ndarray:
        terms = backdoor_terms(tokenizer, seed=1)
        made = fine_tuned(lora, start, names, terms, steps=4, pad_id=tokenizer.pad_id, **within)
        return np.concatenate([made[name].reshape(-1) for name in names]) - start.flatten(names)

    free, bounded = change(), change(within=0.5)
    assert np.linalg.norm(free) > 1.0
    assert np.linalg.norm(bounded) == pytest.approx(0.5, rel=1e-4)
    cosine = float(free @ bounded / (np.linalg.norm(free) * np.linalg.norm(bounded)))
    assert 0.3 < cosine < 0.999
