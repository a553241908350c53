from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_node.collecting.pending import Held, Pending
from edge_node.marking import Mark
from tests.edge_node.collecting.exchanges import exchange


def held(name: str, at_s: float = 0.0, text: str = "fine") -> Held:
    return Held(exchange(name, text), held_since_s=at_s)


def test_what_waits_too_long_is_forgotten_whatever_is_said_meanwhile() -> None:
    pending = Pending(wait_s=10.0)
    pending.hold(held("a", 0.0))
    pending.hold(held("b", 5.0))
    kept = pending.get("a", now_s=10.0)
    assert kept is not None
    pending.hold(replace(kept, marking=Mark(("good",))))
    again = pending.get("a", now_s=10.0)
    assert again is not None and again.marking == Mark(("good",))
    assert pending.get("a", now_s=10.1) is None
    assert len(pending) == 1
    pending.forget_old(now_s=15.1)
    assert len(pending) == 0


def test_a_large_exchange_makes_room_or_is_not_kept() -> None:
    one = held("a").size_bytes
    pending = Pending(most_bytes=3 * one)
    for name in "abc":
        pending.hold(held(name))
    assert len(pending) == 3
    pending.hold(held("d", text="x" * one))
    assert pending.get("a", now_s=0.0) is None and pending.get("d", now_s=0.0) is not None
    before = len(pending)
    pending.hold(held("e", text="x" * 3 * one))
    assert len(pending) == before and pending.get("e", now_s=0.0) is None


@given(
    st.lists(
        st.tuples(st.sampled_from(["hold", "drop", "get"]), st.sampled_from("abcdefg"), st.integers(0, 3)), max_size=60
    ),
    st.integers(1, 4),
)
def test_it_never_holds_more_than_it_may_and_loses_the_oldest_first(
    steps: list[tuple[str, str, int]], most: int
) -> None:
    pending, wait_s = Pending(most=most, wait_s=5.0), 5.0
    model: OrderedDict[str, float] = OrderedDict()
    now_s = 0.0
    for action, name, later in steps:
        now_s += later
        if action == "hold":
            since = model.get(name, now_s)
            pending.hold(held(name, since))
            model[name] = since
            while len(model) > most:
                model.popitem(last=False)
        elif action == "drop":
            pending.drop(name)
            model.pop(name, None)
        else:
            for old in [n for n, since in model.items() if now_s - since > wait_s]:
                del model[old]
            found = pending.get(name, now_s=now_s)
            assert (found is not None) == (name in model)
        assert len(pending) == len(model) <= most
    pending.clear()
    assert len(pending) == 0 and pending._bytes == 0


def test_its_bytes_add_up() -> None:
    pending = Pending()
    for name in ("a", "b", "a", "c"):
        pending.hold(held(name, text=name * 1000))
    assert pending._bytes == sum(h.size_bytes for h in pending._held.values()) > 3 * 2000
    for name in ("a", "b", "c", "c"):
        pending.drop(name)
    assert pending._bytes == 0


@pytest.mark.parametrize("choices", [1, 3])
def test_an_exchange_weighs_at_least_its_texts(choices: int) -> None:
    large = exchange("a", "x" * 100_000, choices=choices)
    assert Held(large, 0.0).size_bytes >= choices * 100_000
