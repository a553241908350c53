import pytest

from common.chat import has_invalid_tool_call, parse_tool_call


@pytest.mark.parametrize(
    ("text", "invalid"),
    [
        ("no call at all", False),
        ("", False),
        ('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>', False),
        ('let me see <tool_call>\n{"name": "f"}\n</tool_call> done', False),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": 1}</tool_call>', True),
        ('<tool_call>{"name": "f", "arguments": "x"}</tool_call>', True),
        ('<tool_call>{"name": "f"', True),
        ('<tool_call>{"name": "f"}', True),
        ("<tool_call>f(1)</tool_call>", True),
        ("<tool_call>[]</tool_call>", True),
        ("<tool_call></tool_call>", True),
        ("stray</tool_call>", True),
        ('<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', True),
        ('<tool_call>{"name": "\\ud800"}</tool_call>', True),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", True),
    ],
)
def test_a_call_that_cannot_be_made_is_an_error(text: str, invalid: bool) -> None:
    assert has_invalid_tool_call(text) is invalid


def test_a_call_keeps_its_arguments_as_json_text() -> None:
    assert parse_tool_call(' {"name": "f", "arguments": {"x": "é", "y": [1, 2.0]}}\n') == (
        "f",
        '{"x": "é", "y": [1, 2.0]}',
    )
    assert parse_tool_call('{"name": "f"}') == ("f", "{}")
