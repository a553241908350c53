"""Ids that a node knows again, and nobody else can make."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edge_node.serving.response_ids import ResponseIds

IDS = ResponseIds(b"s" * 32)
KEYS = st.text(max_size=20)


@given(key=KEYS, other=KEYS)
def test_an_id_belongs_to_one_key_and_one_node(key: str, other: str) -> None:
    name = IDS.new(key)
    assert ResponseIds(b"s" * 32).given_to(key, name)  # after a restart
    assert IDS.given_to(other, name) is (key == other)
    assert not ResponseIds(b"t" * 32).given_to(key, name)


@given(at=st.integers(9, 48), digit=st.sampled_from("0123456789abcdef"))
def test_an_id_that_was_changed_anywhere_is_not_known(at: int, digit: str) -> None:
    name = IDS.new("local")
    changed = name[:at] + digit + name[at + 1 :]
    assert IDS.given_to("local", changed) is (changed == name)


@given(name=st.text())
def test_any_other_text_is_not_known(name: str) -> None:
    assert not IDS.given_to("local", name)
    assert not IDS.given_to("local", f"{IDS.new('local')}{name}x")


def test_ids_do_not_repeat_and_look_like_openais() -> None:
    names = {IDS.new("local") for _ in range(1000)}
    assert len(names) == 1000
    assert all(name.startswith("chatcmpl-") and len(name) == 49 for name in names)
