"""What one update gives away about a text, bare, clipped, and with the noise that is charged.

The attacker is given more than a real one has: one text alone in the batch, the
adapter, the claimed noise level, the threshold that separates best without noise, and for
ranking the number of tokens. Only made-up texts are used, no record of the site.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from common.adapter import Adapter, LoraShape, initial_adapter
from common.inference.chat_tokenizer import ChatTokenizer
from common.inference.model_folder import ModelFolder
from edge_node.auditing.mechanism import AuditedMechanism
from edge_node.auditing.span import Recovery, Released, distances, recover, threshold
from edge_node.auditing.statement import Check, Figure, Statement
from edge_node.training.lora_model import LoraModel
from edge_node.training.noise import SecureRandom
from edge_node.training.private_step import ClippedSum

TEXTS = (
    "What is 47+85?",
    "Anna Meyer owes 250 euro.",
    "Please transfer 250 euro to Anna Meyer, IBAN DE89 3704.",
)
SMALL_NOISES = (0.0, 1e-4, 1e-3, 1e-2, 1e-1)
"""Noise multipliers on the way to the actual one; 0 is clipping alone."""

_MODULES = tuple(f"base_model.model.model.layers.0.self_attn.{module}_proj" for module in ("k", "q", "v"))
_TRAINED_SCALE = 0.05
"""Of the B factors: an adapter that has trained. With B = 0 lora_A has no gradient."""
_STANDARD_ERRORS = 5.0
_TOKENS_OF_A_WORKING_ATTACK = 0.9

Case = Mapping[str, Any]
"""One text, factor and protection, as `audit.json` has it."""


class Victim:
    """A model and adapter whose one-step updates are attacked.

    Args:
        phase: the LoRA factor that trains, `A` or `B`.
    """

    def __init__(self, folder: ModelFolder, model: LoraModel, adapter: Adapter, phase: str) -> None:
        self.phase = phase
        self._model = model
        self._names = adapter.names(phase)
        self._shapes = [adapter.tensors[name].shape for name in self._names]
        model.start(adapter, self._names)
        inputs_VH = first_layer_inputs(folder)
        if phase == "A":
            self._candidates: tuple[np.ndarray, ...] = (inputs_VH,)
        else:
            downs = [adapter.tensors[f"{module}.lora_A.weight"] for module in _MODULES]
            self._candidates = tuple(inputs_VH @ down.T.astype(np.float64) for down in downs)

    @property
    def vocabulary(self) -> int:
        return len(self._candidates[0])

    def gradient(self, ids: Sequence[int]) -> torch.Tensor:
        """Gradient [D] of the mean negative log-likelihood of one text, over the whole factor."""
        network = self._model.peft_model
        trainable = {name.replace(".default", ""): p for name, p in network.named_parameters() if p.requires_grad}
        ids_1T = torch.tensor([list(ids)], device=self._model.device)
        with torch.enable_grad():
            logps_TV = network(input_ids=ids_1T).logits[0, :-1].float().log_softmax(-1)
            loss = -logps_TV.gather(-1, ids_1T[0, 1:, None]).mean()
            parts = torch.autograd.grad(loss, [trainable[name] for name in self._names])
        return torch.cat([part.reshape(-1) for part in parts]).cpu()

    def seen(self, release_D: np.ndarray, noise_scale: float) -> Released:
        """The attacker's view of a release: lora_A's blocks share one input, lora_B's have one each."""
        sizes = [math.prod(shape) for shape in self._shapes]
        parts = np.split(release_D.astype(np.float64), np.cumsum(sizes)[:-1])
        named = dict(zip(self._names, zip(parts, self._shapes, strict=True), strict=True))
        blocks = []
        for module in _MODULES:
            part, shape = named[f"{module}.lora_{self.phase}.weight"]
            blocks.append(part.reshape(shape))
        together = (np.concatenate(blocks),) if self.phase == "A" else tuple(blocks)
        return Released(together, self._candidates, noise_scale)


def first_layer_inputs(folder: ModelFolder) -> np.ndarray:
    """What each token of the vocabulary puts into the first layer's projections, [V, hidden], float64."""
    weights = folder.weights()
    embedded_VH = weights["model.embed_tokens.weight"].astype(np.float64)
    mean_square_V1 = np.square(embedded_VH).mean(axis=1, keepdims=True)
    normed_VH = embedded_VH / np.sqrt(mean_square_V1 + folder.dimensions.norm_epsilon)
    return normed_VH * weights["model.layers.0.input_layernorm.weight"]


def attack(
    victim: Victim, ids: Sequence[int], mechanism: AuditedMechanism, *, noises: Sequence[float], draws: int
) -> list[Case]:
    """The attack on one text: unprotected, and clipped with each noise.

    Args:
        draws: releases per noise, at least 2; figures are means over them, beside what
            the same attack finds in as many releases that hold no text.
    """
    present = frozenset(ids[:-1])  # nothing follows the last token, so it has no part in the loss
    gradient_D = victim.gradient(ids)
    limit = threshold(distances(victim.seen(gradient_D.numpy(), 0.0)), present)

    def found_in(vector_D: torch.Tensor, noise: float, times: int) -> list[Recovery]:
        scale = noise * mechanism.clip_norm
        releases = [_release(vector_D, mechanism.clip_norm, noise) for _ in range(times)]
        return [recover(distances(victim.seen(release_D, scale)), present, limit) for release_D in releases]

    def case(protection: str, noise: float, found: list[Recovery], blind: list[Recovery]) -> Case:
        return {
            "factor": victim.phase,
            "protection": protection,
            "noise_multiplier": noise,
            "present": len(present),
            "vocabulary": victim.vocabulary,
            "recovered": _mean([len(each.recovered) for each in found]),
            "false_positives": _mean([each.false_positives for each in found]),
            "ranked": _mean([len(each.ranked) for each in found]),
            "ranked_without_text": _mean([len(each.ranked) for each in blind]) if blind else None,
            "beyond_chance": _beyond_chance(found, blind) if blind else None,
            "named": sorted(found[0].ranked),
        }

    bare = recover(distances(victim.seen(gradient_D.numpy(), 0.0)), present, limit)
    cases = [case("none", 0.0, [bare], [])]
    for noise in noises:
        if noise == 0:
            cases.append(case("clip", 0.0, found_in(gradient_D, 0.0, 1), []))
        else:
            text, nothing = (found_in(vector, noise, draws) for vector in (gradient_D, torch.zeros_like(gradient_D)))
            cases.append(case("clip and noise", noise, text, nothing))
    return cases


def _release(vector_D: torch.Tensor, clip_norm: float, noise: float) -> np.ndarray:
    total = ClippedSum(len(vector_D), clip_norm=clip_norm, noise_multiplier=noise)
    total.add(vector_D[None])
    released = total.release(SecureRandom()) if noise > 0 else total.unsafe_release_without_noise()
    return released.numpy()


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values)


def _beyond_chance(found: Sequence[Recovery], blind: Sequence[Recovery]) -> float:
    """z-score of the ranked tokens against the same attack on releases without a text."""
    with_text, without = (np.array([len(r.ranked) for r in each], dtype=np.float64) for each in (found, blind))
    variance = (with_text.var(ddof=1) + without.var(ddof=1)) / len(with_text)
    smallest = 1 / len(with_text) ** 2  # one token more in one release
    return float((with_text.mean() - without.mean()) / math.sqrt(max(variance, smallest)))


def trained(adapter: Adapter) -> Adapter:
    """An adapter as it is after a while: B is not zero any more."""
    rng = np.random.default_rng(0)
    changed = {
        name: rng.normal(0, _TRAINED_SCALE, tensor.shape) if name.endswith("lora_B.weight") else tensor
        for name, tensor in adapter.tensors.items()
    }
    return Adapter(adapter.shape, changed)


def audit_inversion(
    folder: ModelFolder,
    shape: LoraShape,
    mechanism: AuditedMechanism,
    *,
    draws: int,
    texts: Sequence[str] = TEXTS,
    noises: Sequence[float] = SMALL_NOISES,
) -> Statement:
    """Attack updates of every text in both phases, up to the mechanism's own noise, and say what is left."""
    tokenizer = ChatTokenizer(folder)
    model = LoraModel(folder, shape)
    adapter = trained(initial_adapter(folder.module_shapes(), shape, seed=0))
    actual = mechanism.event.noise_multiplier
    demonstration: list[Case] = []
    for phase in ("A", "B"):
        victim = Victim(folder, model, adapter, phase)
        for text in texts:
            ids = tokenizer.encode_text(text)
            for case in attack(victim, ids, mechanism, noises=(*noises, actual), draws=draws):
                named = frozenset(case["named"])
                shown = [{"text": tokenizer.decode([token]), "named": token in named} for token in ids]
                charged = case["noise_multiplier"] == actual
                demonstration.append({"text": text, **case, "tokens": shown, "charged": charged})
    return Statement(
        kind="inversion",
        subject={
            "model": folder.path.name,
            "base_digest": folder.digest,
            "lora_rank": shape.rank,
            "noise_multiplier": actual,
            "clip_norm": mechanism.clip_norm,
            "releases_per_noise": draws,
        },
        checks=(_without_protection(demonstration), _at_the_charged_noise(demonstration)),
        demonstration=tuple(demonstration),
    )


def _without_protection(demonstration: Sequence[Case]) -> Check:
    bare = [case for case in demonstration if case["protection"] == "none" and case["factor"] == "A"]
    best = max(case["recovered"] / case["present"] for case in bare)
    return Check(
        code="I1",
        title="Without differential privacy, does an update give the text away?",
        tested="The gradient of one made-up text was taken as it is. Every token of the vocabulary was tested: does "
        "its embedding lie in the space that the first layer's gradient spans (DAGER, Petrov et al. 2024)?",
        meaning="Yes, it does: the attack works, so what it finds under noise can be believed.",
        not_proven="What better attacks find, such as the order of the tokens, or what many steps give away together.",
        figures=(
            Figure("share of a text's tokens recovered from lora_A, best text", best, _TOKENS_OF_A_WORKING_ATTACK, 1.0),
        ),
    )


def _at_the_charged_noise(demonstration: Sequence[Case]) -> Check:
    figures = tuple(
        Figure(
            f"tokens of “{case['text']}” named from lora_{case['factor']} beyond chance, z-score",
            case["beyond_chance"],
            None,
            _STANDARD_ERRORS,
        )
        for case in demonstration
        if case["charged"]
    )
    return Check(
        code="I2",
        title="With the noise that is charged, is anything left of it?",
        tested="The same text, alone in its batch, was clipped and noised by the code that trains. The attacker names "
        "as many tokens as the text has; the same was done with releases that hold no text.",
        meaning="The attack does no better than on pure noise.",
        not_proven="That no other attack does: ε bounds all of them, and the privacy audit checks the mechanism behind "
        "it. What many records share may be learned: differential privacy hides a record, not a fact.",
        figures=figures,
    )
