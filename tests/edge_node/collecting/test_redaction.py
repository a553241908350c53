from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_node.collecting.redaction import Redactor, email_addresses, values_of
from edge_node.collecting.trajectory_pb2 import Trajectory
from edge_node.policy import BUILT_IN_PATTERNS, Redaction
from tests.edge_node.collecting.exchanges import decode

SECRETS = [
    ("my password: hunter2 ok", "hunter2", "password"),
    ("PASSWORD=hunter2", "hunter2", "password"),
    ('{"password": "hunter 2 three"}', "hunter 2 three", "password"),
    ("{'token':'abc,def'}", "abc,def", "token"),
    ("the password is hunter2.", "hunter2", "password"),
    ("access_token=abc123", "abc123", "token"),
    ('{"api_token": "s3cret"}', "s3cret", "token"),
    ("user_password: hunter2", "hunter2", "password"),
    (r"{\"password\": \"hunter2\"}", "hunter2", "password"),
    ("--password hunter2", "hunter2", "password"),
    ("<password>hunter2</password>", "hunter2", "password"),
    ("password is: hunter2", "hunter2", "password"),
    ("password == hunter2", "hunter2", "password"),
    ("password := hunter2", "hunter2", "password"),
    ("password => hunter2", "hunter2", "password"),
    ("password=ab,cd;ef", "cd;ef", "password"),
    (r'password: "ab\"cd"', "cd", "password"),
    ("password: correct horse battery", "horse", "password"),
    ("to a@b.my-company.com now", "company", "email"),
    ("write to jane.doe+x@mail.example.org now", "jane.doe", "email"),
]


def redactor_of(**rules: Any) -> Redactor:
    return Redactor(Redaction(**rules), decode=decode)


def trajectory() -> Trajectory:
    made = Trajectory(id="t", prompt_token_ids=[1, 2], completion_token_ids=[3], logprobs=[-0.5], assistant_mask=[True])
    made.messages.add(role="user", content="hello")
    made.messages.add(role="assistant", content="hi")
    return made


@pytest.mark.parametrize(("text", "secret", "pattern"), SECRETS)
@pytest.mark.parametrize("place", ["content", "reasoning", "arguments", "result", "feedback", "edit"])
def test_secrets_are_removed_everywhere_and_counted(text: str, secret: str, pattern: str, place: str) -> None:
    made = trajectory()
    message = made.messages[0]
    if place in ("content", "reasoning"):
        setattr(message, place, text)
    elif place in ("arguments", "result"):
        call = message.tool_calls.add(name="f")
        setattr(call, place, text)
    else:
        feedback = made.feedback.add()
        setattr(feedback, "text" if place == "feedback" else "edited_text", text)
    redactor_of().redact(made)
    assert secret not in str(made)
    assert f"[redacted:{pattern}]" in str(made)
    assert made.redactions[pattern] == 1


def test_token_ids_would_spell_what_was_removed_so_they_go_too() -> None:
    made = trajectory()
    made.messages[0].content = "password: hunter2"
    redactor_of().redact(made)
    assert not made.prompt_token_ids
    assert not made.completion_token_ids
    assert not made.logprobs
    assert not made.assistant_mask


def test_text_without_secrets_stays_as_it_is() -> None:
    made, before = trajectory(), trajectory()
    made.messages[0].content = before.messages[0].content = "What is 23+45? The passwords table has no tokens."
    redactor_of().redact(made)
    assert made == before


def test_ids_and_names_a_caller_chose_are_cleaned_too() -> None:
    made = trajectory()
    made.task_id = "for jane@example.org"
    made.messages[0].name = "password=hunter2"
    assert redactor_of().redact(made)
    assert "jane" not in str(made)
    assert "hunter2" not in str(made)


def test_what_was_cleaned_is_not_counted_again() -> None:
    made = trajectory()
    made.messages[0].content = 'password: hunter2\n"token": "abc"'
    redactor = redactor_of()
    assert redactor.redact(made)
    before = dict(made.redactions)
    assert not redactor.redact(made)
    assert dict(made.redactions) == before


LONG = {
    "one letter": "a" * 1_000_000,
    "a field's name": "password" * 125_000,
    "flags": "--password-" * 90_000,
    "assignments": "token is " * 111_000,
    "half assignments": "password    " * 80_000,
    "backslashes": "password" + "\\" * 1_000_000,
    "a flag and lines": "--password" + "\n" * 1_000_000,
    "open quotes": 'password:"' * 100_000,
    "signs": "@" * 1_000_000,
    "almost addresses": "a." * 500_000 + "@",
    "addresses": "x@a.b " * 166_000,
}


@pytest.mark.parametrize("name", LONG)
def test_no_text_makes_redaction_slow(name: str) -> None:
    """A megabyte takes well below a second; patterns that look back or try again took up to half a minute."""
    made = trajectory()
    made.messages[0].content = LONG[name]
    began_s = time.process_time()
    redactor_of().redact(made)
    assert time.process_time() - began_s < 3


PIECES = [
    "password",
    "Token",
    "x",
    "-",
    "_",
    " ",
    "\n",
    ":",
    "=",
    ">",
    " is ",
    "was",
    '"',
    "'",
    "\\",
    "a@b.c",
    "@",
    ".",
]


@settings(max_examples=300)
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_rules_find_what_the_patterns_they_replace_say(text: str) -> None:
    """As a regular expression, which is clear and slow: what it removes is removed, whatever else is."""
    key, assigns = r"[\w-]{0,40}token[\w-]{0,40}", r"""\\*["']?\s{0,4}(?:(?:[:=>]|\bis\b|\bwas\b)[\s:=>]{0,6}){1,3}"""
    quoted = r"""\"(?:\\.|[^"\\\n])*\"|'(?:\\.|[^'\\\n])*'"""
    field = re.compile(rf"(?i)(?P<kept>{key}{assigns}|--{key}\s+)(?:{quoted}|[^\n]+)")
    removed = {at for start, end in values_of("token")(text) for at in range(start, end)}
    for match in field.finditer(text):
        assert {at for at in range(match.end("kept"), match.end()) if not text[at].isspace()} <= removed
    assert list(email_addresses(text)) == [m.span() for m in re.finditer(BUILT_IN_PATTERNS["email"], text)]


def test_the_answers_to_one_request_are_read_once() -> None:
    read: list[Sequence[int]] = []

    def counted(token_ids: Sequence[int]) -> str:
        read.append(token_ids)
        return ""

    made = [trajectory() for _ in range(16)]
    assert not Redactor(Redaction(), decode=counted).redact_all(made)
    assert len(read) == 2  # the prompt and the completion, which is the same for all here


@pytest.mark.parametrize("place", ["prompt_token_ids", "completion_token_ids"])
def test_what_only_the_token_ids_spell_takes_them_away(place: str) -> None:
    made = trajectory()
    getattr(made, place)[:] = [*map(ord, "tools: mail jane@example.org")]
    redactor = redactor_of()
    assert redactor.redact(made)
    assert not made.prompt_token_ids and not made.completion_token_ids and not made.logprobs and not made.assistant_mask
    assert dict(made.redactions) == {"email": 1}
    assert [message.content for message in made.messages] == ["hello", "hi"]
    assert not redactor.redact(made)


def test_ids_of_tool_calls_are_cleaned_and_still_match() -> None:
    made = trajectory()
    made.messages[1].tool_calls.add(id="call_jane@example.org", name="f", arguments="{}")
    made.messages.add(role="tool", content="ok", tool_call_id="call_jane@example.org")
    assert redactor_of().redact(made)
    assert "jane" not in str(made)
    assert made.messages[1].tool_calls[0].id == made.messages[2].tool_call_id


def test_a_sites_own_patterns_apply() -> None:
    made = trajectory()
    made.messages[0].content = "order 12-345 please"
    redactor_of(fields=(), patterns={"order": r"\d{2}-\d{3}"}).redact(made)
    assert made.messages[0].content == "order [redacted:order] please"


@pytest.mark.parametrize(
    ("key", "value", "secret"),
    [
        ("password", "hunter2", "hunter2"),
        ("api_token", "a=b c", "a=b"),
        ("note", "ask jane@example.org", "jane"),
        ("jane@example.org", "x", "jane"),
        ("note", "two lines\nthe password is hunter2", "hunter2"),
    ],
)
def test_marks_are_cleaned_and_their_keys_name_their_values(key: str, value: str, secret: str) -> None:
    made = trajectory()
    made.selection.metadata[key] = value
    made.selection.metadata["channel"] = "chat"
    made.selection.labels.extend(["good", "token: abc"])
    redactor = redactor_of()
    assert redactor.redact(made)
    assert secret not in str(made) and "abc" not in str(made)
    assert made.selection.metadata["channel"] == "chat" and len(made.selection.metadata) == 2
    assert made.selection.labels[0] == "good"
    before = made.SerializeToString(deterministic=True)
    assert not redactor.redact(made)
    assert made.SerializeToString(deterministic=True) == before
