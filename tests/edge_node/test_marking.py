from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_node.marking import LONGEST_ID, Mark, read_header, read_metadata

_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
_marks = st.builds(
    Mark,
    labels=st.lists(_text.filter(bool), max_size=16).map(tuple),
    metadata=st.dictionaries(st.from_regex(r"[A-Za-z0-9_.-]{1,64}", fullmatch=True), _text, max_size=16),
    task_id=_text,
    run_id=_text,
)


@given(_marks)
def test_a_header_holds_a_mark_whole_in_ascii(mark: Mark) -> None:
    header = mark.header()
    assert header.isascii() and header.isprintable()
    assert read_header(header) == mark


@pytest.mark.parametrize(
    ("header", "mark"),
    [
        ("", Mark()),
        ("{}", Mark()),
        ("good, reviewed ,", Mark(("good", "reviewed"))),
        ('{"labels": ["good"], "task_id": null}', Mark(("good",))),
        ('{"task_id": "t", "run_id": "r", "metadata": {"k": "v"}}', Mark((), {"k": "v"}, "t", "r")),
    ],
)
def test_headers_people_write(header: str, mark: Mark) -> None:
    assert read_header(header) == mark


@pytest.mark.parametrize(
    "header",
    [
        "{",
        '{"labels": "good"}',
        '{"labels": [1]}',
        '{"label": ["good"]}',
        '{"metadata": {"a b": "x"}}',
        '{"metadata": {"a": 1}}',
        '{"labels": [""]}',
        '{"task_id": "\\ud800"}',
        json.dumps({"task_id": "x" * (LONGEST_ID + 1)}),
        json.dumps({"labels": ["x"] * 17}),
        "x" * 65,
        ",".join("abcdefghijklmnopq"),
        "x," * 10_000,
        '{"metadata":' * 1000,
    ],
)
def test_what_is_no_mark_is_refused_without_its_text(header: str) -> None:
    with pytest.raises(ValueError) as refused:
        read_header(header)
    assert "xxxx" not in str(refused.value) and len(str(refused.value)) < 200


def test_a_mark_in_a_requests_metadata() -> None:
    metadata = {"headwater_mark": "good,reviewed", "task_id": "t", "channel": "chat"}
    assert read_metadata(metadata) == Mark(("good", "reviewed"), {"channel": "chat"}, "t", "")
    assert read_metadata({"task_id": "t", "channel": "chat"}) is None
    assert read_metadata({"headwater_mark": ""}) == Mark()
    with pytest.raises(ValueError, match="labels"):
        read_metadata({"headwater_mark": "x" * 65})
