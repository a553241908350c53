"""What other systems wrote, one JSON object per line, as trajectories.

| a line with | is | becomes |
|---|---|---|
| `messages` | a chat that ends with the answer | one trajectory, with `reward` and `rating` where given |
| `chosen`, `rejected` | TRL's preference format | two answers to one request, the first picked over the second |
| `prompt`, `completion`, `label` | TRL's unpaired preference format | one trajectory, rated +1 or -1 |
| `request`, `response` | a logged exchange of the OpenAI API | one trajectory per choice |

`user` and `task_id` are read beside each; other keys are ignored. TRL's formats may be plain or conversational; a
plain prompt is one user message. Token ids are made here, because they were not recorded; log-probabilities stay
empty, so objectives that need them refuse these records. Ids are keyed hashes of the line: importing a file twice
makes the same records again, which count once in training. Lines with tool calls are refused rather than read
without them.

Nothing is removed from the texts here: redact what this returns before storing it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pydantic_core
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from common.chat import Message
from common.errors import ConfigError
from edge_node.collecting.trajectory_pb2 import Trajectory

SOURCE = "imported"
"""Source of the rewards and reason of the selection of imported trajectories."""

_ID_DIGITS = 32
_ROLES = {"developer": "system"}


def import_lines(
    lines: Iterable[str],
    *,
    encode_prompt: Callable[[Sequence[Message]], Sequence[int]],
    encode_answer: Callable[[str], Sequence[int]],
    pseudonym: Callable[[str], bytes],
    model_version: str,
    now_s: float,
) -> list[Trajectory]:
    """All lines as trajectories, answers to one request next to each other; blank lines are skipped.

    Args:
        encode_prompt: token ids up to where the answer begins; ValueError where a text cannot be a prompt.
        encode_answer: completion token ids with the end token; ValueError where a text cannot be an answer.
        pseudonym: keyed hash of a text, at least 16 bytes.
        model_version: the version the answers count as served by; they become too old to train on with it.
        now_s: seconds since the epoch, the time of their collection.
    Raises:
        ConfigError: a line is not one of the formats; nothing of the file is returned.
    """
    imported: list[Trajectory] = []
    seen: Counter[str] = Counter()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            exchange = _exchange(_content(line))
            prompt_ids = encode_prompt(exchange.prompt)
            completions = [encode_answer(answer.text) for answer in exchange.answers]
        except ValidationError as error:
            raise ConfigError(f"line {number}: {_explained(error)}; nothing was imported") from error
        except ValueError as error:
            raise ConfigError(f"line {number}: {error}; nothing was imported") from error
        seen[line.strip()] += 1
        name = pseudonym(f"{SOURCE} {seen[line.strip()]} {line.strip()}").hex()[:_ID_DIGITS]
        described = _trajectories(f"{SOURCE}-{name}", exchange, now_s)
        for trajectory, completion_ids in zip(described, completions, strict=True):
            trajectory.prompt_token_ids.extend(prompt_ids)
            trajectory.completion_token_ids.extend(completion_ids)
            trajectory.assistant_mask.extend([True] * len(completion_ids))
            trajectory.model_version = model_version
            if exchange.user is not None:
                trajectory.user_pseudonym = pseudonym(exchange.user)
        imported += described
    return imported


@dataclass(frozen=True)
class _Answer:
    """One answer with what was said about it; `picked_over` is the index of another answer."""

    text: str
    reward: float | None = None
    rating: float | None = None
    picked_over: int | None = None
    finish_reason: str = "stop"


@dataclass(frozen=True)
class _Exchange:
    """What every format says: a prompt and its answers."""

    prompt: Sequence[Message]
    answers: Sequence[_Answer]
    user: str | None
    task_id: str
    temperature: float = 1.0
    top_p: float = 1.0


def _trajectories(request_id: str, exchange: _Exchange, now_s: float) -> list[Trajectory]:
    """The answers of one exchange, without what the callbacks of `import_lines` make."""
    several = len(exchange.answers) > 1
    ids = [f"{request_id}-{index}" if several else request_id for index in range(len(exchange.answers))]
    trajectories = []
    for index, answer in enumerate(exchange.answers):
        made = Trajectory(
            id=ids[index],
            request_id=request_id,
            choice_index=index,
            task_id=exchange.task_id,
            collected_at_s=now_s,
            finish_reason=answer.finish_reason,
        )
        for message in (*exchange.prompt, Message("assistant", answer.text)):
            made.messages.add(role=message.role, content=message.content or "", name=message.name or "")
        made.sampling.temperature, made.sampling.top_p = exchange.temperature, exchange.top_p
        made.selection.accepted, made.selection.reason = True, SOURCE
        if answer.rating is not None:
            made.feedback.add(received_at_s=now_s, rating=answer.rating)
        if answer.reward is not None:
            made.rewards.add(source=SOURCE, value=answer.reward)
        if answer.picked_over is not None:
            made.feedback.add(received_at_s=now_s, picked_over=ids[answer.picked_over])
        trajectories.append(made)
    return trajectories


def _content(line: str) -> dict[str, Any]:
    try:
        content = pydantic_core.from_json(line.removeprefix("\ufeff"), allow_inf_nan=False)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    return content


def _exchange(content: dict[str, Any]) -> _Exchange:
    for keys, line_format in _FORMATS.items():
        if content.keys() >= keys:
            return line_format.model_validate(content).exchange()
    expected = "; ".join(", ".join(sorted(keys)) for keys in _FORMATS)
    raise ValueError(f"has none of these sets of keys: {expected}")


def _explained(error: ValidationError) -> str:
    """Where the first fault is and what it is, without the text found there."""
    first = error.errors(include_input=False, include_url=False)[0]
    where = ".".join(map(str, first["loc"]))
    what = first["msg"].removeprefix("Value error, ")
    return f"{where}: {what}" if where else what


def _no_tools(found: list[Any] | None) -> list[Any] | None:
    if found:
        raise ValueError("tools and tool calls cannot be imported yet")
    return found


_NoTools = Annotated[list[Any] | None, AfterValidator(_no_tools)]


class _Text(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


class _Turn(BaseModel):
    """A chat message; content in parts is accepted where all parts are text."""

    model_config = ConfigDict(strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | list[_Text], Field(union_mode="left_to_right")]
    name: str | None = None
    tool_calls: _NoTools = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)

    @property
    def message(self) -> Message:
        return Message(_ROLES.get(self.role, self.role), self.text, self.name)


_Plain = Annotated[str, Field(min_length=1)]
_Turns = Annotated[list[_Turn], Field(min_length=1)]


def _messages(prompt: str | list[_Turn]) -> list[Message]:
    messages = [Message("user", prompt)] if isinstance(prompt, str) else [turn.message for turn in prompt]
    if messages[-1].role == "assistant":
        raise ValueError("the prompt ends with an assistant message")
    return messages


def _answer_text(answer: str | list[_Turn]) -> str:
    if isinstance(answer, str):
        return answer
    if len(answer) != 1 or answer[0].role != "assistant":
        raise ValueError("an answer must be one assistant message")
    if not answer[0].text:
        raise ValueError("the answer is empty")
    return answer[0].text


class _Line(BaseModel):
    """What every format may say."""

    model_config = ConfigDict(strict=True)

    user: str | None = None
    task_id: str = ""


class _Chat(_Line):
    messages: Annotated[list[_Turn], Field(min_length=2)]
    reward: FiniteFloat | None = None
    rating: FiniteFloat | None = None

    def exchange(self) -> _Exchange:
        answer = _Answer(_answer_text(self.messages[-1:]), self.reward, self.rating)
        return _Exchange(_messages(self.messages[:-1]), [answer], self.user, self.task_id)


class _Preference(_Line):
    prompt: _Plain | _Turns | None = None
    chosen: _Plain | _Turns
    rejected: _Plain | _Turns

    def exchange(self) -> _Exchange:
        prompt, chosen, rejected = self.prompt, self.chosen, self.rejected
        if prompt is None:
            if isinstance(chosen, str) or isinstance(rejected, str) or min(len(chosen), len(rejected)) < 2:
                raise ValueError("prompt is missing; only whole conversations can go without")
            if chosen[:-1] != rejected[:-1]:
                raise ValueError("chosen and rejected differ before their last message")
            prompt, chosen, rejected = chosen[:-1], chosen[-1:], rejected[-1:]
        answers = [_Answer(_answer_text(chosen), picked_over=1), _Answer(_answer_text(rejected))]
        return _Exchange(_messages(prompt), answers, self.user, self.task_id)


class _Labelled(_Line):
    prompt: _Plain | _Turns
    completion: _Plain | _Turns
    label: bool

    def exchange(self) -> _Exchange:
        answer = _Answer(_answer_text(self.completion), rating=1.0 if self.label else -1.0)
        return _Exchange(_messages(self.prompt), [answer], self.user, self.task_id)


class _Metadata(BaseModel):
    task_id: str = ""


class _Request(BaseModel):
    model_config = ConfigDict(strict=True)

    messages: _Turns
    tools: _NoTools = None
    user: str | None = None
    temperature: Annotated[FiniteFloat, Field(ge=0)] | None = None
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    metadata: _Metadata | None = None


class _Choice(BaseModel):
    model_config = ConfigDict(strict=True)

    index: Annotated[int, Field(ge=0)] = 0
    message: _Turn
    finish_reason: str | None = None


class _Response(BaseModel):
    model_config = ConfigDict(strict=True)

    choices: Annotated[list[_Choice], Field(min_length=1)]


class _Logged(_Line):
    request: _Request
    response: _Response
    reward: FiniteFloat | None = None
    rating: FiniteFloat | None = None

    def exchange(self) -> _Exchange:
        request = self.request
        choices = sorted(self.response.choices, key=lambda choice: choice.index)
        if [choice.index for choice in choices] != list(range(len(choices))):
            raise ValueError(f"choices have the indices {[c.index for c in choices]}, not 0 … {len(choices) - 1}")
        if len(choices) > 1 and (self.reward, self.rating) != (None, None):
            raise ValueError(f"reward and rating could mean any of the {len(choices)} choices; give one choice a line")
        answers = [
            _Answer(_answer_text([c.message]), self.reward, self.rating, finish_reason=c.finish_reason or "stop")
            for c in choices
        ]
        metadata = request.metadata or _Metadata()
        return _Exchange(
            _messages(request.messages),
            answers,
            user=self.user if self.user is not None else request.user,
            task_id=self.task_id or metadata.task_id,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
        )


_FORMATS: dict[frozenset[str], type[_Chat] | type[_Preference] | type[_Labelled] | type[_Logged]] = {
    frozenset({"chosen", "rejected"}): _Preference,
    frozenset({"prompt", "completion", "label"}): _Labelled,
    frozenset({"request", "response"}): _Logged,
    frozenset({"messages"}): _Chat,
}
"""Keys that tell a format from the others, and its model; the first that fits is taken."""
