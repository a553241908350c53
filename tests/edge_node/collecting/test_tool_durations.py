"""Durations on their way from the agent to the record."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_node.collecting.tool_durations import LONGEST_VALUE, read, written


@given(st.dictionaries(st.text(max_size=80), st.floats(0, 1e6)))
def test_what_is_written_is_read_and_fits(durations: dict[str, float]) -> None:
    value = written(durations)
    assert len(value) <= LONGEST_VALUE
    got = read(value)
    assert list(got) == list(durations)[len(durations) - len(got) :]  # the latest
    assert all(got[k] == pytest.approx(durations[k], abs=1e-4) for k in got)


def test_as_many_as_fit_are_written() -> None:
    assert len(read(written({f"call_{i:024x}": 1.25 for i in range(100)}))) == 13


@pytest.mark.parametrize(
    "value",
    ["", "x", "[]", "3", "null", "{", '{"a": "b"}', '{"a": NaN}', '{"a": Infinity}', '{"a": -1}', '{"a": true}',
     '{"a": 1e300}', "[" * 500, '{"a": 1}' + " " * 600],
)  # fmt: skip
def test_what_is_not_ours_is_nothing(value: str) -> None:
    assert read(value) == {}


@given(st.text())
def test_reading_never_fails(value: str) -> None:
    read(value)
