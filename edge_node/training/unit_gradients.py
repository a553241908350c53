"""One gradient vector per privacy unit, in the same backward pass as the loss.

For a LoRA matrix the gradient of row b is outerᵀ(grad_output_b, input_b): a batched
matrix product of rank-r size. The forward of every trainable linear layer is
replaced by one whose backward writes these products straight into a flat
`[units, D]` buffer, and leaves `weight.grad` empty. Exact, and as fast as
non-private training; ghost clipping is twice as slow for LoRA.

Fails closed: a trainable parameter that is not a plain linear weight is refused
at construction; one that received no gradient, or a gradient that reached the
ordinary `.grad`, stops the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.errors import PrivacyError


class _UnitLinear(torch.autograd.Function):
    """y = x Wᵀ, whose backward adds the per-unit gradients of W to the engine's buffer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, index: int, engine: UnitGradients) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.index, ctx.engine = index, engine
        return functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        ctx.engine._accumulate(ctx.index, x, grad_output)
        grad_input = grad_output @ weight.to(grad_output.dtype) if ctx.needs_input_grad[0] else None
        return grad_input, None, None, None


class UnitGradients:
    """Collects per-unit gradients of a model's trainable linear weights.

    Attributes:
        parameters: the trainable weights by name, in sorted order of names; the
            columns of the `[U, D]` gradient follow this order.
    Raises:
        PrivacyError: a trainable parameter is not the weight of a plain linear layer.
    """

    def __init__(self, model: nn.Module) -> None:
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        layers: dict[str, nn.Linear] = {}
        for name, module in model.named_modules():
            if type(module) is nn.Linear and f"{name}.weight" in trainable:
                layers[f"{name}.weight"] = module
        uncovered = sorted(set(trainable) - set(layers))
        if uncovered:
            raise PrivacyError(
                f"{uncovered[0]} is trainable but is not a plain linear weight; its gradient would not be clipped"
            )
        self.parameters = {name: trainable[name] for name in sorted(layers)}
        self._sizes = [p.numel() for p in self.parameters.values()]
        self._views: list[Tensor] | None = None
        self._unit_of_row: Tensor | None = None
        for index, name in enumerate(self.parameters):
            layers[name].forward = self._forward_of(layers[name], index)  # type: ignore[assignment]

    @property
    def dimension(self) -> int:
        return sum(self._sizes)

    @contextmanager
    def collect(self, unit_of_row: Tensor, units: int) -> Iterator[Tensor]:
        """Yield a zeroed `[units, D]` buffer that the backward pass inside the block fills.

        Args:
            unit_of_row: int64 [rows]; which unit each row of the batch belongs to.
        Raises:
            PrivacyError: some parameter got no per-unit gradient, or a gradient leaked past it.
        """
        parameters = list(self.parameters.values())
        gradients_UD = torch.zeros(units, self.dimension, device=parameters[0].device)
        self._views = [
            part.view(units, *p.shape)
            for part, p in zip(gradients_UD.split(self._sizes, dim=1), parameters, strict=True)
        ]
        self._unit_of_row = unit_of_row
        self._touched = [False] * len(parameters)
        for p in parameters:
            p.grad = None
        try:
            yield gradients_UD
        finally:
            self._views = self._unit_of_row = None
        if not all(self._touched):
            missing = list(self.parameters)[self._touched.index(False)]
            raise PrivacyError(f"{missing} received no per-unit gradient")
        if any(p.grad is not None for p in parameters):
            raise PrivacyError("a gradient reached .grad without being clipped")

    def _forward_of(self, layer: nn.Linear, index: int) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            if self._views is not None and torch.is_grad_enabled():
                return _UnitLinear.apply(x, layer.weight, index, self)
            return functional.linear(x, layer.weight)

        return forward

    def _accumulate(self, index: int, x_BTI: Tensor, grad_BTO: Tensor) -> None:
        if self._views is None or self._unit_of_row is None:
            raise PrivacyError("a backward pass ran outside collect()")
        self._touched[index] = True
        gradient_BOI = torch.bmm(grad_BTO.float().transpose(1, 2), x_BTI.float())
        self._views[index].index_add_(0, self._unit_of_row, gradient_BOI)
