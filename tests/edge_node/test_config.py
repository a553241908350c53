"""Settings of a node: alone with none, in a federation with all of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from edge_node.config import EdgeConfig

KEY = "ab" * 32
MEMBER = {"federation": "f", "hub": "/hub", "hub_key": KEY, "aggregator_key": KEY}


def test_a_node_needs_no_setting_at_all() -> None:
    config = EdgeConfig()
    assert config.membership is None
    assert config.on_loopback
    assert (config.data_dir, config.policy) == (Path("headwater-data"), Path("policy.toml"))


def test_a_member_has_the_whole_of_its_membership() -> None:
    membership = EdgeConfig.model_validate(MEMBER).membership
    assert membership is not None
    assert membership.hub_public == membership.aggregator_public == bytes.fromhex(KEY)


@pytest.mark.parametrize("missing", MEMBER)
def test_half_a_membership_is_refused_by_name(missing: str) -> None:
    given = {name: value for name, value in MEMBER.items() if name != missing}
    with pytest.raises(ValidationError, match=rf"{missing} is not; to follow a federation set all of them"):
        EdgeConfig.model_validate(given)


@pytest.mark.parametrize(
    "variants",
    [
        {"stable": {"version": "v1", "share": 0.1}},
        {"B": {"version": "v1", "share": 0.1}},
        {"a": {"version": "v1", "share": 0.6}, "b": {"version": "v2", "share": 0.6}},
        {"a": {"version": "v1", "share": 0}},
        {"a": {"version": "v1"}},
    ],
)
def test_variants_that_cannot_be_are_refused(variants: dict) -> None:
    with pytest.raises(ValidationError):
        EdgeConfig.model_validate({"variants": variants})


@pytest.mark.parametrize("limits", [{"body_bytes": 0}, {"choices": 17}, {"waiting": 0}, {"header_timeout_s": "nan"}])
def test_limits_that_are_none_are_refused(limits: dict) -> None:
    with pytest.raises(ValidationError):
        EdgeConfig.model_validate({"limits": limits})
