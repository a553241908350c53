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


def test_ids_and_names_a_caller_chose_are_cleaned_too() -> None:
    made = trajectory()
    made.task_id = "for jane@example.org"
    made.messages[0].name = "password=hunter2"
    assert Redactor(Redaction()).redact(made)
    assert "jane" not in str(made)
    assert "hunter2" not in str(made)


def test_what_was_cleaned_is_not_counted_again() -> None:
    made = trajectory()
    made.messages[0].content = 'password: hunter2\n"token": "abc"'
    redactor = Redactor(Redaction())
    assert redactor.redact(made)
    before = dict(made.redactions)
    assert not redactor.redact(made)
    assert dict(made.redactions) == before


@pytest.mark.parametrize("text", ["a" * 200_000, "password" * 20_000, "a." * 100_000 + "@", "token is " * 20_000])
def test_no_text_makes_redaction_slow(text: str) -> None:
    """A pattern that backtracks would take minutes, not the seconds this allows."""
    import multiprocessing

    made = trajectory()
    made.messages[0].content = text
    process = multiprocessing.get_context("fork").Process(target=Redactor(Redaction()).redact, args=(made,))
    process.start()
    process.join(timeout=30)
    finished = process.exitcode == 0
    process.kill()
    assert finished


def test_a_sites_own_patterns_apply() -> None:
    made = trajectory()
    made.messages[0].content = "order 12-345 please"
    Redactor(Redaction(fields=(), patterns={"order": r"\d{2}-\d{3}"})).redact(made)
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
    redactor = Redactor(Redaction())
    assert redactor.redact(made)
    assert secret not in str(made) and "abc" not in str(made)
    assert made.selection.metadata["channel"] == "chat" and len(made.selection.metadata) == 2
    assert made.selection.labels[0] == "good"
    before = made.SerializeToString(deterministic=True)
    assert not redactor.redact(made)
    assert made.SerializeToString(deterministic=True) == before
