from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_node.serving.router import Arms, Router, ServedVersion, Variant


@dataclass
class NoAdapter:
    digest: str = "d"


def version(name: str) -> ServedVersion:
    adapter: Any = NoAdapter()
    return ServedVersion(name, adapter)


def arms_of(router: Router, conversations: int) -> list[str]:
    return [router.choose(f"conversation {i}").arm for i in range(conversations)]


def test_the_share_of_conversations_goes_to_the_canary() -> None:
    arms = arms_of(Router(Arms(version("v1"), version("v2"), 0.05)), 20_000)
    assert abs(arms.count("canary") / len(arms) - 0.05) < 0.006


def test_variants_share_what_the_canary_leaves() -> None:
    variants = (Variant("a", version("v3"), 0.3), Variant("b", version("v4"), 0.2))
    arms = arms_of(Router(Arms(version("v1"), version("v2"), 0.1, variants)), 20_000)
    for name, share in (("canary", 0.1), ("a", 0.27), ("b", 0.18), ("stable", 0.45)):
        assert abs(arms.count(name) / len(arms) - share) < 0.015


@given(st.text())
def test_a_conversation_stays_on_its_arm(conversation: str) -> None:
    variants = (Variant("a", version("v3"), 0.5),)
    router = Router(Arms(version("v1"), version("v2"), 0.5, variants))
    assert router.choose(conversation) == router.choose(conversation)


def test_a_canary_takes_nobody_from_one_variant_to_another() -> None:
    variants = (Variant("a", version("v3"), 0.5),)
    before = arms_of(Router(Arms(version("v1"), None, 0.0, variants)), 2000)
    after = arms_of(Router(Arms(version("v1"), version("v2"), 0.2, variants)), 2000)
    assert all(new in (old, "canary") for old, new in zip(before, after, strict=True))


def test_no_user_is_always_first() -> None:
    def canaries(name: str) -> set[int]:
        router = Router(Arms(version("v1"), version(name), 0.2))
        return {i for i in range(500) if router.choose(str(i)).arm == "canary"}

    assert len(canaries("v2") & canaries("v3")) < 0.5 * len(canaries("v2"))


def test_without_a_canary_everything_is_stable_and_named_arms_are_honest() -> None:
    router = Router(Arms(version("v1"), None, 0.9))
    assert {router.choose(str(i)).arm for i in range(100)} == {"stable"}
    assert router.arm("canary") is None
    assert router.arm("nonsense") is None
    stable = router.arm("stable")
    assert stable is not None
    assert stable.version.id == "v1"


def test_the_last_three_versions_can_be_gone_back_to() -> None:
    versions = [version(f"v{i}") for i in range(7)]
    router = Router(Arms(versions[0]))
    for number in range(1, 6):
        router.arms = Arms(versions[number])
    assert [v.id for v in router.previous] == ["v4", "v3", "v2"]
    assert router.pinned("v1") is None
    kept = router.pinned("v3")
    assert kept is not None
    assert kept.arm == "pinned"
    router.arms = Arms(versions[3], versions[6], 0.1)  # rolled back to a kept one, beside a new canary
    assert [v.id for v in router.previous] == ["v5", "v4", "v2"]
    assert {v.id for v in router.versions} == {"v3", "v6", "v5", "v4", "v2"}
    router.arms = Arms(versions[6])  # the canary becomes stable
    assert [v.id for v in router.previous] == ["v3", "v5", "v4"]


def test_variants_that_cannot_be_are_refused() -> None:
    for variants in (
        (Variant("stable", version("v2"), 0.1),),
        (Variant("a", version("v2"), 0.1), Variant("a", version("v3"), 0.1)),
        (Variant("a", version("v2"), 0.6), Variant("b", version("v3"), 0.6)),
        (Variant("a", version("v2"), -0.1),),
    ):
        with pytest.raises(ValueError, match=r"arms|shares"):
            Arms(version("v1"), variants=variants)
