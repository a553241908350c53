import pytest

from model_hub.rollout import NEXT, Stage, advance


def test_only_the_tables_arrows_exist() -> None:
    for stage in Stage:
        for to in Stage:
            if to in NEXT[stage]:
                assert advance(stage, to) is to
            else:
                with pytest.raises(ValueError, match="cannot go"):
                    advance(stage, to)


def test_nothing_is_served_before_its_gates() -> None:
    assert Stage.CANARY not in NEXT[Stage.CANDIDATE]
    assert Stage.STABLE not in NEXT[Stage.CANDIDATE] | NEXT[Stage.GATED]


def test_bad_versions_stay_bad() -> None:
    assert not NEXT[Stage.REJECTED]
    assert not NEXT[Stage.ROLLED_BACK]
