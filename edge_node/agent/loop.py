"""The agent: ask the model, run the tools it calls, show it the results, until it answers.

An agent holds no conversation: the caller gives one and gets the new messages back, so
calls at the same time share nothing. Every tool call of the model runs once, on the
real request; nothing is run again for training.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import httpx2
from openai import APIError, AsyncOpenAI, BadRequestError

from common.chat import Message, ToolCall
from common.errors import TransportError
from edge_node.agent.memory import Window
from edge_node.agent.tools import Toolbox, ToolOutcome
from edge_node.collecting import tool_durations

VERSION_HEADER = "x-headwater-version"

_MOST_CALLS_A_STEP = 16
_GRACE_S = 1.0  # for cancelled tools to end; one that will not is left behind


@dataclass(frozen=True)
class Limits:
    """When a turn ends although the model would go on: requests to the model, and seconds over all."""

    steps: int = 8
    seconds: float = 120.0


@dataclass(frozen=True)
class Turn:
    """What one user turn led to.

    Attributes:
        messages: to append to the conversation; every tool call in them has its result.
        ended: `answer`, or what cut the turn short: `length` (of the answer), `steps` or `time`.
        response_ids: of the model's answers, in order; the last one is what feedback is about.
        version, arm: that gave the last answer, where the server names them.
    """

    messages: tuple[Message, ...] = ()
    outcomes: tuple[ToolOutcome, ...] = ()
    ended: str = "answer"
    response_ids: tuple[str, ...] = ()
    version: str = ""
    arm: str = ""

    @property
    def answer(self) -> str:
        """The text of the last thing the model said."""
        return next((m.content or "" for m in reversed(self.messages) if m.role == "assistant"), "")


@dataclass(frozen=True)
class TextDelta:
    """The model said some more."""

    text: str


@dataclass(frozen=True)
class ToolStarted:
    """A tool is about to run."""

    call: ToolCall


@dataclass(frozen=True)
class ToolFinished:
    """A tool has answered; in the order of the calls."""

    outcome: ToolOutcome


@dataclass(frozen=True)
class Finished:
    """The turn is over."""

    turn: Turn


Event = TextDelta | ToolStarted | ToolFinished | Finished


class ModelUnavailable(TransportError):
    """The model gave no answer; `turn` holds what was done until then, tools that ran included."""

    def __init__(self, message: str, turn: Turn) -> None:
        super().__init__(message)
        self.turn = turn


@dataclass
class _Progress:
    """A turn in the making."""

    asked: list[Message]
    window: Window
    new: list[Message] = field(default_factory=list)
    outcomes: list[ToolOutcome] = field(default_factory=list)
    response_ids: list[str] = field(default_factory=list)
    version: str = ""
    arm: str = ""
    unseen: int = 0  # index in `new` from which the model has not been shown anything yet

    @property
    def conversation(self) -> list[Message]:
        return [*self.asked, *self.new]

    def turn(self, ended: str) -> Turn:
        return Turn(tuple(self.new), tuple(self.outcomes), ended, tuple(self.response_ids), self.version, self.arm)

    def with_results(self, calls: Sequence[ToolCall], status: str, reason: str) -> None:
        """Give calls that will not run a result, so that the conversation stays whole."""
        for call in calls:
            self.take(ToolOutcome(call, f"error: {reason}", status, 0.0))

    def take(self, outcome: ToolOutcome) -> None:
        self.outcomes.append(outcome)
        self.new.append(Message("tool", outcome.result, tool_call_id=outcome.call.id))


@dataclass
class _Reply:
    """One answer of the model, put together from its stream."""

    text: list[str] = field(default_factory=list)
    calls: dict[int, dict[str, str]] = field(default_factory=dict)
    id: str = ""
    arm: str = ""
    finish_reason: str = ""

    def add(self, chunk: Any) -> str:
        """Take one chunk; the text it adds."""
        self.id = self.id or chunk.id or ""
        served = getattr(chunk, "headwater", None)
        if isinstance(served, dict):
            self.arm = str(served.get("arm", ""))
        if not chunk.choices:
            return ""
        choice = chunk.choices[0]
        self.finish_reason = choice.finish_reason or self.finish_reason
        if choice.delta is None:
            return ""
        for part in choice.delta.tool_calls or ():
            call = self.calls.setdefault(part.index, {"id": "", "name": "", "arguments": ""})
            call["id"] = call["id"] or part.id or ""
            if part.function is not None:
                call["name"] += part.function.name or ""
                call["arguments"] += part.function.arguments or ""
        added = choice.delta.content or ""
        self.text.append(added)
        return added

    def message(self) -> Message:
        """The whole turn; calls in the order of the model, each with an id of its own."""
        calls: list[ToolCall] = []
        for _, call in sorted(self.calls.items()):
            taken = {c.id for c in calls}
            call_id = call["id"] if call["id"] and call["id"] not in taken else f"call_{uuid.uuid4().hex[:24]}"
            calls.append(ToolCall(call_id, call["name"], call["arguments"]))
        return Message("assistant", "".join(self.text) or (None if calls else ""), tool_calls=tuple(calls))


class Agent:
    """A model behind an OpenAI-compatible API, with tools.

    Args:
        client: of the node, or of any other server; its own retries apply to requests, never to tools.
        system: the system turn; left out where a conversation brings its own.
        sampling: further fields of every request, e.g. temperature.
        report_durations: tell the server how long tools took (request metadata `tool_durations_s`);
            turn it off for a server that knows no metadata.
    """

    def __init__(
        self,
        client: AsyncOpenAI,
        *,
        model: str = "headwater",
        tools: Toolbox | None = None,
        system: str = "",
        limits: Limits = Limits(),
        window: Window | None = None,
        sampling: Mapping[str, Any] | None = None,
        report_durations: bool = True,
    ) -> None:
        self._client = client
        self._model = model
        self._tools = tools or Toolbox()
        self._system = system
        self._limits = limits
        self._window = window or Window()
        self._sampling = dict(sampling or {})
        self._report_durations = report_durations

    async def run(self, conversation: Sequence[Message], *, metadata: Mapping[str, str] | None = None) -> Turn:
        """Answer the last message of a conversation.

        Raises:
            ModelUnavailable: the model gave no answer.
        """
        turn = Turn()
        async with aclosing(self.events(conversation, metadata=metadata)) as events:
            async for event in events:
                if isinstance(event, Finished):
                    turn = event.turn
        return turn

    async def events(
        self, conversation: Sequence[Message], *, metadata: Mapping[str, str] | None = None
    ) -> AsyncGenerator[Event]:
        """The same, as it happens; the last event is Finished. Closing the iterator cancels tools that run."""
        asked = list(conversation)
        if self._system and not any(m.role in ("system", "developer") for m in asked):
            asked.insert(0, Message("system", self._system))
        progress = _Progress(asked, self._window)
        deadline = time.monotonic() + self._limits.seconds
        for _ in range(self._limits.steps):
            reply = _Reply()
            try:
                async with aclosing(self._reply(progress, reply, metadata or {}, deadline)) as deltas:
                    async for text in deltas:
                        yield TextDelta(text)
            except TimeoutError:
                yield Finished(progress.turn("time"))
                return
            message = reply.message()
            progress.new.append(message)
            progress.response_ids.append(reply.id)
            progress.arm = reply.arm
            progress.unseen = len(progress.new)
            if not message.tool_calls:
                yield Finished(progress.turn("length" if reply.finish_reason == "length" else "answer"))
                return
            async with aclosing(self._tools_of(message, progress, deadline)) as done:
                async for event in done:
                    yield event
        yield Finished(progress.turn("steps"))

    async def _reply(
        self, progress: _Progress, reply: _Reply, metadata: Mapping[str, str], deadline: float
    ) -> AsyncGenerator[str]:
        """Stream one answer into `reply`; raises TimeoutError when the time of the turn is up."""
        stream = None
        try:
            stream = await _until(deadline, self._request(progress, metadata))
            while True:
                try:
                    chunk = await _until(deadline, anext(stream))
                except StopAsyncIteration:
                    break
                text = reply.add(chunk)
                if text:
                    yield text
            if not reply.finish_reason:
                raise ModelUnavailable("the model's answer ended before it was finished", progress.turn("failed"))
        except APIError as error:
            raise ModelUnavailable(_told(error), progress.turn("failed")) from error
        except (httpx2.HTTPError, ValueError) as error:  # in mid-stream
            raise ModelUnavailable(f"the answer broke off: {type(error).__name__}", progress.turn("failed")) from error
        finally:
            if stream is not None:
                await stream.close()

    async def _request(self, progress: _Progress, metadata: Mapping[str, str]) -> Any:
        """Send the conversation; what the server refuses because of what tools returned is sent again without it."""
        while True:
            try:
                raw = await self._client.chat.completions.with_raw_response.create(**self._body(progress, metadata))
            except BadRequestError as error:
                if not _repaired(progress, error):
                    raise
                continue
            progress.version = raw.headers.get(VERSION_HEADER, "")
            return raw.parse()

    def _body(self, progress: _Progress, metadata: Mapping[str, str]) -> dict[str, Any]:
        body: dict[str, Any] = {
            **self._sampling,
            "model": self._model,
            "messages": [message.as_openai() for message in progress.window.shown(progress.conversation)],
            "stream": True,
        }
        if self._tools.definitions:
            body["tools"] = self._tools.definitions
        told = dict(metadata)
        if self._report_durations and progress.outcomes:
            told[tool_durations.METADATA_KEY] = tool_durations.written(
                {outcome.call.id: outcome.duration_s for outcome in progress.outcomes}
            )
        if told:
            body["metadata"] = told
        return body

    async def _tools_of(self, message: Message, progress: _Progress, deadline: float) -> AsyncGenerator[Event]:
        """Run the calls of one turn at the same time; results in the order of the calls."""
        calls, beyond = message.tool_calls[:_MOST_CALLS_A_STEP], message.tool_calls[_MOST_CALLS_A_STEP:]
        for call in calls:
            yield ToolStarted(call)
        running = [asyncio.create_task(self._tools.call(call)) for call in calls]
        try:
            await asyncio.wait(running, timeout=max(0.0, deadline - time.monotonic()))
        finally:
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=_GRACE_S)
        for call, task in zip(calls, running, strict=True):
            if not task.done() or task.cancelled():
                progress.with_results([call], "timeout", "the time for this turn is up; the tool may have run")
            else:
                progress.take(task.result())
            yield ToolFinished(progress.outcomes[-1])
        progress.with_results(beyond, "not-run", f"not run: at most {_MOST_CALLS_A_STEP} calls at a time")
        for outcome in progress.outcomes[len(progress.outcomes) - len(beyond) :]:
            yield ToolFinished(outcome)


async def _until(deadline: float, work: Any) -> Any:
    async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
        return await work


def _repaired(progress: _Progress, error: BadRequestError) -> bool:
    """Make a refused request acceptable, if what it was refused for can be left out.

    Too long: show less of the conversation. Anything else: tool results are other people's text, and one that the
    server refuses (a control token of the model, say) must not end the conversation.
    """
    if error.code == "context_length_exceeded":
        smaller = progress.window.halved(progress.conversation)
        if smaller is not None:
            progress.window = smaller
        return smaller is not None
    unseen = progress.new[progress.unseen :]
    if not unseen:
        return False
    refused = "error: the server refuses to show this result to the model"
    progress.new[progress.unseen :] = [replace(m, content=refused) for m in unseen]
    changed = {m.tool_call_id for m in unseen}
    progress.outcomes = [replace(o, result=refused) if o.call.id in changed else o for o in progress.outcomes]
    progress.unseen = len(progress.new)
    return True


def _told(error: APIError) -> str:
    status = getattr(error, "status_code", None)
    said = error.body.get("message", "") if isinstance(error.body, dict) else ""
    return f"the model's server answered {status}: {said or error.message}" if status else f"no answer: {error.message}"
