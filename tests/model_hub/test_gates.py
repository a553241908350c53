"""What a candidate must be before any traffic, and what may be published in its place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from common.adapter import Adapter
from common.identity import SigningKey
from model_hub.gates import NORM_ALLOWANCE, not_the_same_function, refusal
from model_hub.hub import Hub
from model_hub.rollout import Stage
from model_hub.version import Lineage
from tests.conftest import changed


@pytest.fixture
def hub(tmp_path: Path, start: Adapter) -> Iterator[Hub]:
    key = SigningKey(Ed25519PrivateKey.generate())
    hub = Hub(tmp_path, key, base_model="embedded", clock=lambda: 0.0)
    hub.found(start, base_digest="b" * 64)
    yield hub
    hub.close()


@pytest.fixture(scope="module")
def candidate(start: Adapter) -> Adapter:
    return changed(start, seed=1)


def one_off(adapter: Adapter, factor: str, change: float) -> Adapter:
    """One value of one factor changed by so much of the factor's largest."""
    name = adapter.names(factor)[0]
    tensor = np.array(adapter.tensors[name])
    tensor[0, 0] += change * np.abs(tensor).max()
    return Adapter(adapter.shape, {**adapter.tensors, name: tensor})


def moved(start: Adapter, length: float) -> Adapter:
    names = start.names("B")
    direction = np.ones(start.flatten(names).size, np.float32)
    return start.with_added(names, direction * np.float32(length / np.linalg.norm(direction)))


@pytest.mark.parametrize(("length", "passes"), [(0.0, True), (1.0, True), (1.04, True), (1.06, False), (1e30, False)])
def test_a_release_moves_no_further_than_a_round_can(start: Adapter, length: float, passes: bool) -> None:
    assert NORM_ALLOWANCE == 1.05
    reason = refusal(moved(start, 3.0 * length), start, largest_change=3.0)
    assert (reason is None) is passes
    assert passes or reason.startswith("norm: the change from its parent is")  # type: ignore[union-attr]


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_one_number_that_is_none_is_enough(start: Adapter, wrong: float) -> None:
    reason = refusal(one_off(start, "A", wrong), start, largest_change=1e9)
    assert reason == "finite: a weight is not a finite number"


def test_another_shape_or_name_is_refused_before_anything_is_computed(start: Adapter) -> None:
    fewer = Adapter(start.shape, dict(list(start.tensors.items())[1:]))
    more = Adapter(start.shape, {**start.tensors, "x": np.zeros(1)})
    cut = Adapter(start.shape, {name: tensor[:, :1] for name, tensor in start.tensors.items()})
    for other, expected in ((fewer, "names"), (more, "names"), (cut, "shapes")):
        assert expected in str(refusal(other, start, largest_change=1e9))


def test_the_same_function_in_other_factors_passes(candidate: Adapter) -> None:
    twice = Adapter(
        candidate.shape,
        {name: tensor * (2 if ".lora_A." in name else 0.5) for name, tensor in candidate.tensors.items()},
    )
    for published in (candidate, candidate.balanced(), twice):
        assert not_the_same_function(candidate, published) is None
    assert candidate.balanced().digest != candidate.digest


def test_another_function_is_refused(candidate: Adapter, start: Adapter) -> None:
    signs = Adapter(candidate.shape, {name: -t if ".lora_A." in name else t for name, t in candidate.tensors.items()})
    scaled = Adapter(candidate.shape, {name: t * np.float32(1.001) for name, t in candidate.tensors.items()})
    for published in (
        start,
        signs,
        scaled,
        changed(start, seed=2),
        one_off(candidate, "B", 1.0),
        one_off(candidate.balanced(), "A", 1.0),
        one_off(candidate, "A", float("nan")),
        one_off(candidate, "B", float("inf")),
    ):
        reason = not_the_same_function(candidate, published)
        assert reason is not None
        assert reason.startswith("factors: the published products differ from the candidate's by ")


def test_only_nothing_is_the_same_as_nothing(candidate: Adapter, start: Adapter) -> None:
    """The initial adapter's products are zero: no relative difference to it is small."""
    again = Adapter(start.shape, {name: t * 2 if ".lora_A." in name else t for name, t in start.tensors.items()})
    assert not_the_same_function(start, again) is None
    assert not_the_same_function(start, candidate) is not None


def test_the_hub_publishes_other_factors_only_of_the_candidate_itself(
    hub: Hub, candidate: Adapter, start: Adapter
) -> None:
    lineage = Lineage("b" * 64)
    bad = hub.submit(candidate, lineage=lineage, largest_change=100.0, published=changed(start, seed=2).balanced())
    assert bad.stage is Stage.REJECTED
    assert bad.reason.startswith("factors: ")
    with pytest.raises(ValueError, match="cannot go from rejected"):
        hub.start_canary(bad)
    good = hub.submit(candidate, lineage=lineage, largest_change=100.0, published=candidate.balanced())
    assert good.stage is Stage.GATED
    assert good.digest == hub.adapter(good.id).digest == candidate.balanced().digest


def test_the_change_is_that_of_the_candidate_not_of_its_published_factors(hub: Hub, start: Adapter) -> None:
    """Balanced factors lie far from the parent's; a change that is too long is refused whatever they are."""
    lineage, short = Lineage("b" * 64), moved(start, 1.0)
    names = list(start.tensors)
    assert np.linalg.norm(short.balanced().flatten(names) - start.flatten(names)) > 3.0
    assert hub.submit(short, lineage=lineage, largest_change=1.0, published=short.balanced()).stage is Stage.GATED
    long = moved(start, 2.0)
    refused = hub.submit(long, lineage=lineage, largest_change=1.0, published=long.balanced())
    assert refused.stage is Stage.REJECTED
    assert refused.reason.startswith("norm: ")
