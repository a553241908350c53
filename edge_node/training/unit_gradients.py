"""One gradient vector per privacy unit.

Two engines give the same numbers. `FlatGradients` computes all units of a group in
the backward pass of their summed loss: for a LoRA matrix the gradient of one unit
is outerᵀ(grad_output, input) over its rows, a batched product of rank-r size that is
written straight into a flat `[units, D]` buffer. Exact, and as fast as non-private
training; ghost clipping is twice as slow for LoRA. `OneUnitGradients` runs one
backward pass per unit: slower where units are short, but it needs half the memory
and takes any adapter, because nothing but autograd is involved.

Both fail closed: a trainable parameter the engine does not cover is refused at
construction; one that received no gradient, or a gradient that reached the
ordinary `.grad` of the flat engine, stops the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter, functional

from common.errors import PrivacyError
from edge_node.training.batch import PassLimit, Term

Losses = Callable[[Sequence[Term]], Tensor]
"""One loss per term, [E], with its graph; computed in one forward pass."""


class GradientEngine(Protocol):
    """Per-unit gradients of a model's trainable parameters, whose columns follow `parameters`."""

    @property
    def parameters(self) -> Mapping[str, Parameter]: ...

    def gradients(self, terms: Sequence[Term], units: int, losses: Losses) -> Iterator[Tensor]:
        """Gradients of `units` units as blocks of rows `[u, D]`, in any order of units.

        Args:
            terms: all examples of these units; `term.unit` is within 0..units - 1.
        Raises:
            PrivacyError: some parameter got no per-unit gradient, or a gradient leaked past it.
        """
        ...


class _UnitLinear(torch.autograd.Function):
    """y = x Wᵀ, whose backward adds the per-unit gradients of W to the engine's buffer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, index: int, engine: FlatGradients) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.index, ctx.engine = index, engine
        return functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        ctx.engine._accumulate(ctx.index, x, grad_output)
        grad_input = grad_output @ weight.to(grad_output.dtype) if ctx.needs_input_grad[0] else None
        return grad_input, None, None, None


class FlatGradients:
    """All units of a group at once.

    Args:
        limit: what one forward pass may hold; halved where memory runs out.
        loss_scale: public constant the loss is multiplied by in the backward pass, for float16 bases.
    Raises:
        PrivacyError: a trainable parameter is not the weight of a plain linear layer.
    """

    def __init__(self, model: nn.Module, *, limit: PassLimit | None = None, loss_scale: float = 1.0) -> None:
        trainable = _trainable(model)
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
        self.limit = limit or PassLimit()
        self._loss_scale = loss_scale
        self._sizes = [p.numel() for p in self.parameters.values()]
        self._views: list[Tensor] | None = None
        self._unit_of_row: Tensor | None = None
        self._neighbours: tuple[int, int, int] | None = None
        for index, name in enumerate(self.parameters):
            layers[name].forward = self._forward_of(layers[name], index)  # type: ignore[assignment]

    @property
    def dimension(self) -> int:
        return sum(self._sizes)

    def gradients(self, terms: Sequence[Term], units: int, losses: Losses) -> Iterator[Tensor]:
        ordered = sorted(terms, key=lambda term: term.longest) if len(terms) == units else list(terms)
        if len(terms) == units:  # one example each: any numbering of the units will do, so rows stay neighbours
            ordered = [_renumbered(term, unit) for unit, term in enumerate(ordered)]
        gradients_UD, self.limit = with_less_memory(self.limit, partial(self._group, ordered, units, losses))
        yield gradients_UD if self._loss_scale == 1.0 else gradients_UD.div_(self._loss_scale)

    def _group(self, terms: Sequence[Term], units: int, losses: Losses, limit: PassLimit) -> Tensor:
        with self.collect(units) as gradients_UD:
            for part in limit.passes(terms):
                self.rows_belong_to([term.unit for term in part for _ in term.rows])
                loss_E = losses(part)
                weight_E = torch.tensor([term.weight for term in part], device=loss_E.device)
                (loss_E * weight_E).sum().mul(self._loss_scale).backward()
        return gradients_UD

    @contextmanager
    def collect(self, units: int) -> Iterator[Tensor]:
        """Yield a zeroed `[units, D]` buffer that the backward passes inside the block add to."""
        parameters = list(self.parameters.values())
        gradients_UD = torch.zeros(units, self.dimension, device=parameters[0].device, dtype=parameters[0].dtype)
        self._views = [
            part.view(units, *p.shape)
            for part, p in zip(gradients_UD.split(self._sizes, dim=1), parameters, strict=True)
        ]
        self._touched = [False] * len(parameters)
        for p in parameters:
            p.grad = None
        try:
            yield gradients_UD
        finally:
            self._views = self._unit_of_row = self._neighbours = None
        if not all(self._touched):
            missing = list(self.parameters)[self._touched.index(False)]
            raise PrivacyError(f"{missing} received no per-unit gradient")
        if any(p.grad is not None for p in parameters):
            raise PrivacyError("a gradient reached .grad without being clipped")

    def rows_belong_to(self, unit_of_row: Sequence[int]) -> None:
        """Say which unit each row of the next forward pass belongs to."""
        device = next(iter(self.parameters.values())).device
        self._unit_of_row = torch.tensor(unit_of_row, device=device)
        first, units = unit_of_row[0], unit_of_row[-1] - unit_of_row[0] + 1
        rows = len(unit_of_row) // max(units, 1)
        regular = units > 0 and list(unit_of_row) == [first + row // rows for row in range(units * rows)]
        self._neighbours = (first, units, rows) if regular else None

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
        view_UOI = self._views[index]
        x_BTI, grad_BTO = x_BTI.to(view_UOI.dtype), grad_BTO.to(view_UOI.dtype)
        if self._neighbours is None:
            view_UOI.index_add_(0, self._unit_of_row, torch.bmm(grad_BTO.transpose(1, 2), x_BTI))
            return
        first, units, rows = self._neighbours  # a unit's rows are one longer row: one product, added in place
        x_uSI, grad_uSO = (t.reshape(units, rows * t.shape[1], t.shape[2]) for t in (x_BTI, grad_BTO))
        view_UOI[first : first + units].baddbmm_(grad_uSO.transpose(1, 2), x_uSI)


class OneUnitGradients:
    """One unit after the other; any trainable parameters."""

    def __init__(self, model: nn.Module, *, limit: PassLimit | None = None, loss_scale: float = 1.0) -> None:
        self.parameters = dict(sorted(_trainable(model).items()))
        self.limit = limit or PassLimit()
        self._loss_scale = loss_scale

    def gradients(self, terms: Sequence[Term], units: int, losses: Losses) -> Iterator[Tensor]:
        for unit in range(units):
            own = [term for term in terms if term.unit == unit]
            gradient_1D, self.limit = with_less_memory(self.limit, partial(self._one, own, losses))
            yield gradient_1D / self._loss_scale

    def _one(self, terms: Sequence[Term], losses: Losses, limit: PassLimit) -> Tensor:
        for p in self.parameters.values():
            p.grad = None
        for part in limit.passes(terms):
            loss_E = losses(part)
            weight_E = torch.tensor([term.weight for term in part], device=loss_E.device)
            (loss_E * weight_E).sum().mul(self._loss_scale).backward()
        flat = []
        for name, p in self.parameters.items():
            if p.grad is None:
                raise PrivacyError(f"{name} received no per-unit gradient")
            flat.append(p.grad.detach().reshape(-1))
            p.grad = None
        return torch.cat(flat)[None]


def _trainable(model: nn.Module) -> dict[str, Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _renumbered(term: Term, unit: int) -> Term:
    return Term(term.example, unit, term.weight, term.start_logps)


Result = TypeVar("Result")


def with_less_memory(limit: PassLimit, work: Callable[[PassLimit], Result]) -> tuple[Result, PassLimit]:
    """Run `work`, halving its passes while memory is short; what it gives, and the passes that fitted."""
    while True:
        try:
            return work(limit), limit
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if limit.smallest or not is_out_of_memory(error):
                raise
        limit = limit.halved()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed; PyTorch says so on the CPU with a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
