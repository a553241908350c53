from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from edge_node.serving.router import Arms, Router, ServedVersion


@dataclass
class NoAdapter:
    digest: str = "d"


def version(name: str) -> ServedVersion:
    adapter: Any = NoAdapter()
    return ServedVersion(name, adapter)


def test_the_share_of_conversations_goes_to_the_canary() -> None:
    router = Router(Arms(version("v1"), version("v2"), 0.05))
    arms = [router.choose(f"conversation {i}").arm for i in range(20_000)]
    assert abs(arms.count("canary") / len(arms) - 0.05) < 0.006


@given(st.text())
def test_a_conversation_stays_on_its_arm(conversation: str) -> None:
    router = Router(Arms(version("v1"), version("v2"), 0.5))
    assert router.choose(conversation) == router.choose(conversation)


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
