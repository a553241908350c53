from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from trl.data_utils import extract_prompt, unpair_preference_dataset

from common.chat import Message
from common.errors import ConfigError
from common.inference.chat_tokenizer import ChatTokenizer
from edge_node.collecting.importing import import_lines
from edge_node.collecting.trajectory_pb2 import Trajectory
from edge_node.training.dataset import DatasetSettings, build_dataset
from edge_node.training.noise import SecureRandom
from edge_node.training.units import ExampleKind, Unit

NOW = 1_767_225_600.0
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is it?"}]


def answered(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def encode(text: str) -> list[int]:
    if "<end>" in text:
        raise ValueError("message text contains the model's control token <end>")
    return [byte + 1 for byte in text.encode()]


def encode_prompt(messages: Sequence[Message]) -> list[int]:
    return encode("".join(f"{m.role}:{m.content}\n" for m in messages))


def pseudonym(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), key=b"the site's").digest()


def imported(*lines: Any) -> list[Trajectory]:
    return import_lines(
        [line if isinstance(line, str) else json.dumps(line) for line in lines],
        encode_prompt=encode_prompt,
        encode_answer=lambda text: [*encode(text), 0],
        pseudonym=pseudonym,
        model_version="v3",
        now_s=NOW,
    )


def units(kind: ExampleKind, records: Sequence[Trajectory]) -> tuple[Unit, ...]:
    settings = DatasetSettings(kind=kind, unit="trajectory", examples_per_user=4, group_size=2, current_version=3)
    found = build_dataset(
        records, settings, encode_answer=lambda text: tuple(encode(text)), random=SecureRandom(), vocabulary=300
    )
    return found.units


def test_a_chat_is_an_answer_with_its_prompt() -> None:
    line = {
        "messages": [*ASKED, *answered("It.")],
        "reward": 0.75,
        "rating": -1,
        "user": "jo",
        "task_id": "t",
        "score": 3,
    }
    [made] = imported(line)
    assert [(m.role, m.content) for m in made.messages] == [
        ("system", "Be brief."),
        ("user", "What is it?"),
        ("assistant", "It."),
    ]
    assert list(made.prompt_token_ids) == encode("system:Be brief.\nuser:What is it?\n")
    assert list(made.completion_token_ids) == [*encode("It."), 0]
    assert list(made.assistant_mask) == [True] * 4 and not made.logprobs
    assert [r.value for r in made.rewards] == [0.75]
    assert [f.rating for f in made.feedback] == [-1.0]
    assert (made.id, made.choice_index, made.task_id, made.collected_at_s) == (made.request_id, 0, "t", NOW)
    assert (made.user_pseudonym, made.model_version, made.adapter_digest) == (pseudonym("jo"), "v3", "")
    assert made.selection.accepted and made.sampling.temperature == 1.0
    assert b"jo" not in made.SerializeToString().replace(pseudonym("jo"), b"")
    assert units("answers", [made])[0].examples[0][0].reward == 0.75


def test_a_chat_without_judgement_has_none() -> None:
    [made] = imported({"messages": [*ASKED, *answered("It.")]})
    assert not made.feedback and not made.rewards and not made.user_pseudonym


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": "What is it?", "chosen": "This.", "rejected": "That."},
        {"prompt": ASKED, "chosen": answered("This."), "rejected": answered("That.")},
        {"chosen": [*ASKED, *answered("This.")], "rejected": [*ASKED, *answered("That.")]},
    ],
)
def test_a_preference_is_a_request_with_a_pick(line: dict[str, Any]) -> None:
    records = imported(line)
    first, second = records
    assert first.request_id == second.request_id
    assert [r.id for r in records] == [f"{first.request_id}-0", f"{first.request_id}-1"]
    assert [r.messages[-1].content for r in records] == ["This.", "That."]
    [unit] = units("pairs", records)
    chosen, rejected = unit.examples[0]
    assert (list(chosen.completion_ids), list(rejected.completion_ids)) == (
        [*encode("This."), 0],
        [*encode("That."), 0],
    )


@pytest.mark.parametrize("label", [True, False])
@pytest.mark.parametrize("prompt", ["What is it?", ASKED])
def test_an_unpaired_preference_is_a_thumb(label: bool, prompt: object) -> None:
    records = imported({"prompt": prompt, "completion": "It.", "label": label})
    [unit] = units("thumbs", records)
    assert unit.examples[0][0].reward == (1.0 if label else -1.0)


def test_a_logged_exchange_is_an_answer_per_choice() -> None:
    choices = [{"index": i, "message": {"role": "assistant", "content": f"It {i}."}} for i in (1, 0)]
    request = {"model": "m", "messages": ASKED, "temperature": 0.5, "user": "jo", "metadata": {"task_id": "t"}, "n": 2}
    first, second = imported({"request": request, "response": {"id": "x", "choices": choices}})
    assert [t.messages[-1].content for t in (first, second)] == ["It 0.", "It 1."]
    assert (first.sampling.temperature, first.task_id, first.user_pseudonym) == (0.5, "t", pseudonym("jo"))
    response = {"choices": [{"message": {"role": "assistant", "content": "It."}, "finish_reason": "length"}]}
    [made] = imported({"request": {"messages": ASKED}, "response": response, "rating": 1})
    assert (made.finish_reason, made.feedback[0].rating, made.sampling.temperature) == ("length", 1.0, 1.0)


def test_content_in_parts_is_read_where_it_is_text() -> None:
    parts = [{"type": "text", "text": "What "}, {"type": "text", "text": "is it?"}]
    [made] = imported({"messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}, *answered("It.")]})  # fmt: skip
    assert list(made.prompt_token_ids) == encode("system:Be brief.\nuser:What is it?\n")


def test_importing_again_makes_the_same_records_and_equal_lines_differ() -> None:
    line = {"prompt": "a", "completion": "b", "label": True}
    twice = imported(line, "", "  \n", line)
    assert twice == imported(line, line)
    assert len({t.id for t in twice}) == 2
    assert len(units("thumbs", [*twice, *imported(line, line)])) == 2
    assert hashlib.sha256(json.dumps(line).encode()).hexdigest()[:8] not in twice[0].id


GOOD = {"prompt": "a", "completion": "b", "label": True}
TOOLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
LOGGED = {"request": {"messages": ASKED}, "response": {"choices": [{"message": answered("It.")[0]}] * 2}}
INDEXED = {"choices": [{"index": i, "message": answered("It.")[0]} for i in range(2)]}

BAD: list[tuple[Any, str]] = [
    ("{", "not JSON"),
    ("[1]", "not a JSON object"),
    ("[" * 100_000, "not JSON"),
    (
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "reward": 1e999}',
        "reward",
    ),
    ('{"prompt": "\\ud800", "completion": "b", "label": true}', "not JSON"),
    ({"text": "a"}, "none of these sets of keys"),
    ({"prompt": "a", "completion": "b"}, "none of these sets of keys"),
    ({**GOOD, "label": 1}, "label"),
    ({**GOOD, "prompt": ""}, "prompt"),
    ({**GOOD, "completion": ""}, "completion"),
    ({**GOOD, "prompt": "<end>"}, "control token <end>"),
    ({**GOOD, "completion": "<end>"}, "control token <end>"),
    ({**GOOD, "user": 7}, "user"),
    ({"messages": [*ASKED, *answered("It.")], "reward": "0.5"}, "reward"),
    ({"messages": [*ASKED, *answered("It.")], "rating": True}, "rating"),
    ('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "reward": NaN}', "JSON"),
    ({"messages": ASKED}, "must be one assistant message"),
    ({"messages": answered("It.")}, "messages"),
    ({"messages": [*ASKED, *answered("It."), *answered("It.")]}, "ends with an assistant message"),
    ({"messages": [*ASKED, *answered("")]}, "answer is empty"),
    ({"messages": [{"role": "tool", "content": "a"}, *answered("It.")]}, "messages.0.role"),
    ({"messages": [*ASKED, {"role": "assistant", "content": "", "tool_calls": TOOLS}]}, "tool calls cannot"),
    ({"messages": [*ASKED, {"role": "assistant", "content": None}]}, "messages.2.content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, *answered("It.")]}, "messages.0.content"),
    ({"chosen": "a", "rejected": "b"}, "prompt is missing"),
    ({"chosen": answered("a"), "rejected": answered("b")}, "prompt is missing"),
    ({"chosen": [*ASKED, *answered("a")], "rejected": [ASKED[1], *answered("b")]}, "differ before their last message"),
    ({"prompt": "a", "chosen": [*ASKED, *answered("a")], "rejected": answered("b")}, "must be one assistant message"),
    (LOGGED, "indices"),
    ({"request": {"messages": ASKED, "tools": TOOLS}, "response": INDEXED}, "tools"),
    ({"request": {"messages": ASKED}, "response": INDEXED, "rating": 1}, "any of the 2 choices"),
    ({"request": {"messages": ASKED}, "response": {"error": "secret"}}, "response.choices"),
]


@pytest.mark.parametrize(("bad", "expected"), BAD)
def test_a_bad_line_is_named_and_nothing_is_imported(bad: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"^line 3: .*({expected}).*; nothing was imported$") as raised:
        imported(GOOD, "", bad)
    assert raised.value.public == ""
    assert len(str(raised.value)) < 250


@given(st.text(max_size=60) | st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["messages", "prompt", "chosen", "rejected", "completion", "label", "role", "content", "request", "response", "choices"]), inner, max_size=4)).map(json.dumps))  # fmt: skip
def test_whatever_a_line_holds_it_is_imported_or_refused(line: str) -> None:
    try:
        imported(line)
    except ConfigError as error:
        assert "line 1: " in str(error)


def test_faults_do_not_quote_the_line() -> None:
    with pytest.raises(ConfigError) as raised:
        imported({"messages": [{"role": "user", "content": "secret"}, {"role": "secret", "content": 5}]})
    assert "secret" not in str(raised.value)


PREFERENCES = [
    {"chosen": [*ASKED, *answered("This.")], "rejected": [*ASKED, *answered("That.")]},
    {"chosen": [*ASKED[1:], *answered("Yes.")], "rejected": [*ASKED[1:], *answered("No.")]},
]


def test_prompts_without_a_column_are_those_trl_extracts() -> None:
    assert imported(*PREFERENCES) == _as_if_first_written(imported(*map(extract_prompt, PREFERENCES)), PREFERENCES)


def _as_if_first_written(records: list[Trajectory], lines: list[Any]) -> list[Trajectory]:
    """Ids depend on how a line is written; everything else must be equal."""
    for record, first in zip(records, imported(*lines), strict=True):
        record.id, record.request_id = first.id, first.request_id
        for mine, theirs in zip(record.feedback, first.feedback, strict=True):
            mine.picked_over = theirs.picked_over
    return records


def test_trls_unpaired_form_of_a_preference_is_read_as_the_same_answers() -> None:
    lines = list(unpair_preference_dataset(Dataset.from_list([extract_prompt(line) for line in PREFERENCES])))
    paired, unpaired = imported(*PREFERENCES), imported(*lines)
    assert len(unpaired) == len(paired) == 4
    good = {tuple(t.completion_token_ids) for t in paired if t.feedback}
    for record in unpaired:
        assert record.feedback[0].rating == (1.0 if tuple(record.completion_token_ids) in good else -1.0)
    served = {(tuple(t.prompt_token_ids), tuple(t.completion_token_ids)) for t in paired}
    assert served == {(tuple(t.prompt_token_ids), tuple(t.completion_token_ids)) for t in unpaired}


def test_token_ids_are_those_the_node_would_serve(tokenizer: ChatTokenizer) -> None:
    asked, answer = [{"role": "user", "content": "What is 12+34?"}], "Answer: 46"
    [made] = import_lines(
        [json.dumps({"messages": [*asked, *answered(answer)]})],
        encode_prompt=tokenizer.encode,
        encode_answer=tokenizer.encode_text,
        pseudonym=pseudonym,
        model_version="base",
        now_s=NOW,
    )
    assert list(made.prompt_token_ids) == tokenizer.encode([Message("user", "What is 12+34?")])
    assert tokenizer.decode(list(made.completion_token_ids)) == answer
    with pytest.raises(ConfigError, match=r"line 1: .*control token"):
        import_lines(
            [json.dumps({"messages": [{"role": "user", "content": tokenizer._control_tokens[0]}, *answered(answer)]})],
            encode_prompt=tokenizer.encode,
            encode_answer=tokenizer.encode_text,
            pseudonym=pseudonym,
            model_version="base",
            now_s=NOW,
        )
