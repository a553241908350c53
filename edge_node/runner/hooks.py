"""Watching calls of the `openai` package and of AgentScope's agents, where they happen and without changing them.

Four methods are wrapped while somebody watches or marks, and are themselves again
afterwards: `create` and `parse` of the two chat-completion resources. So are `reply`
and `reply_stream` of AgentScope's `Agent`, where that package has been imported. What
belongs to one call is kept in context variables: calls that run at the same time, also
on one agent, do not meet. Nothing here raises into the business call.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping
from contextlib import aclosing, closing, contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, cast

from openai import AsyncStream, Stream
from openai.resources.chat.completions import AsyncCompletions, Completions

from common.telemetry import log_event
from edge_node.marking import HEADER, Mark, read_header
from edge_node.runner.calls import AgentCall, Response, endpoint_of

logger = logging.getLogger("headwater.runner")

_AGENT_MODULE = "agentscope.agent"

_call: ContextVar[AgentCall | None] = ContextVar("headwater_agent_call", default=None)
_mark: ContextVar[tuple[Mark, str | None] | None] = ContextVar("headwater_mark", default=None)


class Watcher(Protocol):
    """Is told about every call that ended well."""

    endpoint: str

    def finished(self, call: AgentCall) -> None:
        """Must not block; what it raises is logged and goes no further."""
        ...


class _Hooks:
    """Who watches, and the methods that are wrapped for them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._users = 0
        self._wrapped: list[tuple[type, str, Callable[..., Any], Callable[..., Any]]] = []
        self.watchers: tuple[Watcher, ...] = ()

    def watch(self, watcher: Watcher) -> None:
        with self._lock:
            self.watchers = (*self.watchers, watcher)
            self.hold()

    def unwatch(self, watcher: Watcher) -> None:
        with self._lock:
            if watcher in self.watchers:
                self.watchers = tuple(w for w in self.watchers if w is not watcher)
                self.release()

    def hold(self) -> None:
        """Wrap what is not wrapped yet."""
        with self._lock:
            self._users += 1
            wrapped = {(kind, name) for kind, name, _, _ in self._wrapped}
            for kind, name, wrap in _targets():
                if (kind, name) not in wrapped:
                    original = kind.__dict__[name]
                    replacement = wrap(original)
                    setattr(kind, name, replacement)
                    self._wrapped.append((kind, name, original, replacement))

    def release(self) -> None:
        """Put the methods back when nobody needs them any more; not where somebody else has wrapped them since."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            ours = [entry for entry in self._wrapped if entry[0].__dict__[entry[1]] is entry[3]]
            for kind, name, original, _ in ours:
                setattr(kind, name, original)
            self._wrapped = [entry for entry in self._wrapped if entry not in ours]

    @property
    def active(self) -> bool:
        return self._users > 0

    def finished(self, call: AgentCall) -> None:
        for watcher in self.watchers:
            try:
                watcher.finished(call)
            except Exception as error:  # whatever it raises, the business call goes on
                log_event(logger, "call not observed", error=type(error).__name__)


HOOKS = _Hooks()


def _targets() -> list[tuple[type, str, Callable[[Any], Any]]]:
    targets: list[tuple[type, str, Callable[[Any], Any]]] = [
        (Completions, "create", _watched),
        (Completions, "parse", _watched),
        (AsyncCompletions, "create", _watched_async),
        (AsyncCompletions, "parse", _watched_async),
    ]
    agent = getattr(sys.modules.get(_AGENT_MODULE), "Agent", None)
    if isinstance(agent, type):
        targets += [(agent, "reply", _watched_reply), (agent, "reply_stream", _watched_reply_stream)]
    return targets


@contextmanager
def mark_for_training(
    *labels: str,
    metadata: Mapping[str, str] | None = None,
    task_id: str = "",
    run_id: str = "",
    endpoint: str | None = None,
) -> Iterator[Mark]:
    """Mark every request made with the `openai` package inside, also on tasks begun inside.

    Args:
        labels: what is known about them, such as "reviewed".
        endpoint: the node's URL: other servers are not told. By default those of running TrainingRunners; where none
            runs, nobody is told.
    Raises:
        ValueError: a label, key or value is longer than a node takes, or there are too many.
    """
    mark = read_header(Mark(labels, dict(metadata or {}), task_id, run_id).header())
    token = _mark.set((mark, None if endpoint is None else endpoint_of(endpoint)))
    HOOKS.hold()
    try:
        yield mark
    finally:
        HOOKS.release()
        _mark.reset(token)


@contextmanager
def agent_call(agent: Any = None, inputs: Any = None) -> Iterator[AgentCall]:
    """Treat every request made inside as one call of an agent, for agents of no known framework.

    Set `output` of what this gives before the block ends, where a reward calculator should see it. A block that raises
    is not a call that ended well.
    """
    call = _begun(agent, inputs)
    token = _call.set(call)
    try:
        yield call
    finally:
        _call.reset(token)
    HOOKS.finished(call)


def _begun(agent: Any, inputs: Any) -> AgentCall:
    marked = _mark.get()
    return AgentCall(agent, inputs, marking=marked[0] if marked is not None else None)


# --- the openai package


class _Request:
    """One request to the model, and the call it belongs to."""

    def __init__(self, resource: Any, arguments: dict[str, Any]) -> None:
        self.endpoint = endpoint_of(str(resource._client.base_url))
        self.model = str(arguments.get("model", ""))
        current = _call.get()
        self.alone = current is None
        self.call = current if current is not None else _begun(None, arguments.get("messages"))
        self.response: Response | None = None
        self._add_mark(arguments)

    def _add_mark(self, arguments: dict[str, Any]) -> None:
        marked = _mark.get()
        if marked is None:
            return
        mark, endpoint = marked
        known = {watcher.endpoint for watcher in HOOKS.watchers} if endpoint is None else {endpoint}
        if self.endpoint in known:
            given = dict(arguments.get("extra_headers") or {})
            arguments["extra_headers"] = {HEADER: mark.header(), **given}
            self.call.marking = mark

    def answered(self, result: Any) -> None:
        """A whole answer, or a stream of one that is read by others."""
        parsed = result.parse() if type(result).__name__ == "LegacyAPIResponse" else result  # with_raw_response; cached
        if isinstance(parsed, Stream):
            parsed._iterator = self._read(cast(Generator[Any], parsed._iterator))
        elif isinstance(parsed, AsyncStream):
            parsed._iterator = self._read_async(cast(AsyncGenerator[Any], parsed._iterator))
        elif isinstance(getattr(parsed, "id", None), str):
            self._add(parsed.id)
            if parsed.choices:
                message = parsed.choices[0].message
                self._heard(message.content, len(message.tool_calls or ()))
            self.ended()

    def _read(self, chunks: Generator[Any]) -> Iterator[Any]:
        with closing(chunks):
            for chunk in chunks:
                _quietly(self._chunk, chunk)
                yield chunk
        _quietly(self.ended)

    async def _read_async(self, chunks: AsyncGenerator[Any]) -> AsyncIterator[Any]:
        async with aclosing(chunks):
            async for chunk in chunks:
                _quietly(self._chunk, chunk)
                yield chunk
        _quietly(self.ended)

    def _chunk(self, chunk: Any) -> None:
        if self.response is None and isinstance(getattr(chunk, "id", None), str):
            self._add(chunk.id)
        for choice in chunk.choices[:1]:
            if choice.index == 0:
                begun = [call for call in choice.delta.tool_calls or () if call.id]
                self._heard(choice.delta.content, len(begun))

    def _add(self, response_id: str) -> None:
        self.response = Response(response_id, self.endpoint, self.model)
        self.call.add(self.response)

    def _heard(self, text: str | None, tool_calls: int) -> None:
        if self.response is not None:
            self.response.text += text or ""
            self.response.tool_calls += tool_calls

    def ended(self) -> None:
        """The answer is there; a request that no agent made is a call of its own."""
        if self.alone and self.call.responses:
            self.call.output = self.call.text
            HOOKS.finished(self.call)


def _quietly(observe: Callable[..., Any], *arguments: Any) -> Any:
    """What happens beside a business call never fails it."""
    try:
        return observe(*arguments)
    except Exception as error:
        log_event(logger, "call not observed", error=type(error).__name__)
        return None


def _watched(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def watched(self: Any, *args: Any, **arguments: Any) -> Any:
        request = _quietly(_Request, self, arguments) if HOOKS.active else None
        result = original(self, *args, **arguments)
        if request is not None:
            _quietly(request.answered, result)
        return result

    return watched


def _watched_async(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def watched(self: Any, *args: Any, **arguments: Any) -> Any:
        request = _quietly(_Request, self, arguments) if HOOKS.active else None
        result = await original(self, *args, **arguments)
        if request is not None:
            _quietly(request.answered, result)
        return result

    return watched


# --- AgentScope


def _observed(agent: Any) -> bool:
    """Whether a call of this agent begins here, and not within one of the same agent, as when a subclass asks super."""
    current = _call.get()
    return HOOKS.active and (current is None or current.agent is not agent)


def _inputs(args: tuple[Any, ...], arguments: Mapping[str, Any]) -> Any:
    return args[0] if args else arguments.get("inputs")


def _watched_reply(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def reply(self: Any, *args: Any, **arguments: Any) -> Any:
        if not _observed(self):
            return await original(self, *args, **arguments)
        call = _begun(self, _inputs(args, arguments))
        token = _call.set(call)
        try:
            call.output = await original(self, *args, **arguments)
        finally:
            _call.reset(token)
        HOOKS.finished(call)
        return call.output

    return reply


def _watched_reply_stream(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def reply_stream(self: Any, *args: Any, **arguments: Any) -> AsyncGenerator[Any, None]:
        events = original(self, *args, **arguments)
        call = _begun(self, _inputs(args, arguments)) if _observed(self) else None
        try:
            while True:
                # set only while the agent runs: between two events the context is the reader's
                token = _call.set(call) if call is not None else None
                try:
                    event = await anext(events)
                except StopAsyncIteration:
                    break
                finally:
                    if token is not None:
                        _call.reset(token)
                if call is not None:
                    call.output = event
                yield event
        finally:
            await events.aclose()
        if call is not None:
            HOOKS.finished(call)

    return reply_stream
