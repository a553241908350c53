"""Which answered requests become training data; the decision and its reason are recorded.

A strategy is asked once when a request has been answered. Where it cannot say yet it
answers `UNDECIDED`; then it is asked again with every mark, reward and rating that arrives
for the answer, until it decides or the answer is forgotten. What is not selected leaves no
trace.
"""

from __future__ import annotations

import importlib
import inspect
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from common.errors import ConfigError

if TYPE_CHECKING:
    from edge_node.marking import Mark
    from edge_node.serving.exchange import Exchange

_PATH = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


@dataclass(frozen=True)
class Decision:
    """Whether a request is selected, and why."""

    accepted: bool
    reason: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Undecided:
    """It depends on what will be said about the answer."""


UNDECIDED: Final = Undecided()


@dataclass(frozen=True)
class Candidate:
    """What a strategy may look at.

    Attributes:
        exchange: the request and its answers, before redaction.
        marking: the caller's mark, with the request or since; None for none.
        rewards: what feedback gave the answers, by choice.
        ratings: what users think of them, by choice.
    """

    exchange: Exchange
    marking: Mark | None = None
    rewards: Mapping[int, float] = field(default_factory=dict)
    ratings: Mapping[int, float] = field(default_factory=dict)


class Said(Protocol):
    """What was said about an answer: all that the built-in strategies look at."""

    @property
    def marking(self) -> Mark | None: ...
    @property
    def rewards(self) -> Mapping[int, float]: ...
    @property
    def ratings(self) -> Mapping[int, float]: ...


class SelectionStrategy(Protocol):
    """Decides about one request at a time; asked from several threads."""

    def decide(self, candidate: Candidate) -> Decision | Undecided: ...


class SamplingRate:
    """Selects each request independently with a fixed probability.

    Raises:
        ValueError: the rate is outside [0, 1].
    """

    def __init__(self, rate: float) -> None:
        if not 0 <= rate <= 1:
            raise ValueError(f"sampling rate {rate} must be within [0, 1]")
        self.rate = rate

    def decide(self, candidate: Said) -> Decision:
        if random.random() < self.rate:
            return Decision(True, "sampling-rate", ("sampled",))
        return Decision(False, "sampling-rate", ("not-sampled",))


class ExplicitMarking:
    """Selects what its caller marked, with the request or afterwards."""

    def decide(self, candidate: Said) -> Decision | Undecided:
        return UNDECIDED if candidate.marking is None else Decision(True, "explicit-marking")


class OnFeedback:
    """Selects what somebody said something about: a reward, a rating, or a mark."""

    def decide(self, candidate: Said) -> Decision | Undecided:
        if candidate.marking is not None:
            return Decision(True, "explicit-marking")
        return Decision(True, "feedback") if candidate.rewards or candidate.ratings else UNDECIDED


SAMPLING_RATE, EXPLICIT_MARKING, ON_FEEDBACK = "sampling-rate", "explicit-marking", "feedback"


def strategy_of(name: str, *, rate: float) -> SelectionStrategy:
    """The strategy `edge.toml` names.

    Args:
        name: a built-in name, or `package.module:Class` of a class that is installed at this site and needs no
            arguments.
        rate: of `sampling-rate`.
    Raises:
        ConfigError: there is no such strategy, or it is none.
    """
    if name == SAMPLING_RATE:
        return SamplingRate(rate)
    if name == EXPLICIT_MARKING:
        return ExplicitMarking()
    if name == ON_FEEDBACK:
        return OnFeedback()
    return _imported(name)


def _imported(name: str) -> SelectionStrategy:
    if not _PATH.fullmatch(name):
        known = ", ".join((SAMPLING_RATE, EXPLICIT_MARKING, ON_FEEDBACK))
        raise ConfigError(f"selection {name!r} is none of {known} and not a path package.module:Class")
    module_name, _, class_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever a module raises when it is imported
        raise ConfigError(f"selection {name}: {module_name} cannot be imported: {_said(error)}") from error
    kind: Any = getattr(module, class_name, None)
    decide = getattr(kind, "decide", None)
    if not isinstance(kind, type) or not callable(decide):
        raise ConfigError(f"selection {name}: {module_name} has no class {class_name} with a method decide(candidate)")
    if inspect.iscoroutinefunction(decide):
        raise ConfigError(f"selection {name}: decide must be a plain method, not a coroutine")
    try:
        strategy: SelectionStrategy = kind()
    except Exception as error:  # whatever its constructor raises
        raise ConfigError(f"selection {name}: {class_name}() failed: {_said(error)}") from error
    return strategy


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
