from __future__ import annotations

import pytest

from edge_node.collecting.redaction import Redactor
from edge_node.collecting.trajectory_pb2 import Trajectory
from edge_node.policy import Redaction

SECRETS = [
    ("my password: hunter2 ok", "hunter2", "password"),
    ("PASSWORD=hunter2", "hunter2", "password"),
    ('{"password": "hunter 2 three"}', "hunter 2 three", "password"),
    ("{'token':'abc,def'}", "abc,def", "token"),
    ("the password is hunter2.", "hunter2", "password"),
    ("write to jane.doe+x@mail.example.org now", "jane.doe", "email"),
]


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
    Redactor(Redaction()).redact(made)
    assert secret not in str(made)
    assert f"[redacted:{pattern}]" in str(made)
    assert made.redactions[pattern] == 1


def test_token_ids_would_spell_what_was_removed_so_they_go_too() -> None:
    made = trajectory()
    made.messages[0].content = "password: hunter2"
    Redactor(Redaction()).redact(made)
    assert not made.prompt_token_ids
    assert not made.completion_token_ids
    assert not made.logprobs
    assert not made.assistant_mask


def test_text_without_secrets_stays_as_it_is() -> None:
    made, before = trajectory(), trajectory()
    made.messages[0].content = before.messages[0].content = "What is 23+45? The passwords table has no tokens."
    Redactor(Redaction()).redact(made)
    assert made == before


def test_a_sites_own_patterns_apply() -> None:
    made = trajectory()
    made.messages[0].content = "order 12-345 please"
    Redactor(Redaction(fields=(), patterns={"order": r"\d{2}-\d{3}"})).redact(made)
    assert made.messages[0].content == "order [redacted:order] please"
