import pytest

from edge_node.collecting.selection import SamplingRate


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_rate_outside_zero_to_one_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="within"):
        SamplingRate(rate)


@pytest.mark.parametrize("rate", [0.0, 0.1, 1.0])
def test_requests_are_selected_at_the_rate_with_a_reason(rate: float) -> None:
    decisions = [SamplingRate(rate).decide() for _ in range(5000)]
    assert abs(sum(d.accepted for d in decisions) / 5000 - rate) < 0.03
    assert {d.reason for d in decisions} == {"sampling-rate"}
    assert all(d.labels == (("sampled",) if d.accepted else ("not-sampled",)) for d in decisions)
