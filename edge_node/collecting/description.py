"""An answered request as trajectories, one per choice; nothing is removed from its texts here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from common.chat import Message
from common.inference.batching import Generation
from edge_node.collecting import tool_durations
from edge_node.collecting.pending import Held
from edge_node.collecting.selection import Decision
from edge_node.collecting.trajectory_pb2 import ChatMessage, Trajectory
from edge_node.marking import Mark
from edge_node.rewards.task_reward import REWARDS
from edge_node.serving.exchange import Answer, ChatRequest, Exchange

FEEDBACK, RATING = "feedback", "rating"
"""Sources of the rewards that /feedback gave: an agent's reward, a user's rating."""


def trajectories(
    held: Held, decision: Decision, *, pseudonym: Callable[[str], bytes], base_digest: str, now_s: float
) -> list[Trajectory]:
    """What is known about every choice of a selected request.

    Args:
        pseudonym: keyed hash of a text, whose key never leaves the site.
        now_s: seconds since the epoch, the time of the collection.
    """
    exchange, request = held.exchange, held.exchange.request
    marked = held.marking or Mark()
    made = []
    for index, answer in enumerate(exchange.answers):
        trajectory = _generation(exchange, index, answer)
        trajectory.task_id = held.task_id or marked.task_id or request.task_id
        trajectory.run_id = held.run_id or marked.run_id or request.run_id
        trajectory.key_id = request.key_id
        trajectory.conversation_id = pseudonym(request.conversation_id).hex()
        if request.user is not None:
            trajectory.user_pseudonym = pseudonym(request.user)
        trajectory.collected_at_s, trajectory.base_digest = now_s, base_digest
        conversation = [*request.messages, answer.message]
        _add_messages(trajectory, conversation, request.metadata)
        _add_selection(trajectory, decision, (*marked.labels, *held.labels), marked.metadata)
        for reward in REWARDS.values():
            for source, value in (reward(conversation) or {}).items():
                trajectory.rewards.add(source=source, value=value)
        if index in held.rewards:
            trajectory.rewards.add(source=FEEDBACK, value=held.rewards[index])
        if index in held.ratings:
            trajectory.feedback.add(rating=held.ratings[index], received_at_s=now_s)
            trajectory.rewards.add(source=RATING, value=held.ratings[index])
        made.append(trajectory)
    return made


def _generation(exchange: Exchange, index: int, answer: Answer) -> Trajectory:
    request, version, generation = exchange.request, exchange.choice.version, answer.generation
    trajectory = Trajectory(
        id=exchange.id if len(exchange.answers) == 1 else f"{exchange.id}-{index}",
        request_id=exchange.id,
        choice_index=index,
        model_version=version.id,
        adapter_digest=version.adapter.digest,
        arm=exchange.choice.arm,
        prompt_token_ids=exchange.prompt_ids,
        completion_token_ids=generation.token_ids,
        logprobs=generation.logprobs,
        assistant_mask=_written(request, generation),
        finish_reason=answer.finish_reason,
    )
    trajectory.sampling.temperature = request.sampling.temperature
    trajectory.sampling.top_p = request.sampling.top_p
    trajectory.sampling.max_tokens = request.max_tokens or 0
    trajectory.sampling.top_k = request.sampling.top_k
    trajectory.sampling.biased = bool(request.sampling.logit_bias)
    trajectory.sampling.constrained = _constrained(request)
    if request.seed is not None:
        trajectory.sampling.seed = request.seed + index
    trajectory.timings.wait_s = generation.wait_s
    trajectory.timings.first_token_s = generation.first_token_s
    trajectory.timings.decode_s = generation.decode_s
    return trajectory


def _constrained(request: ChatRequest) -> bool:
    """Whether the answer had to have a form."""
    return request.response_format is not None or request.tool_choice.mode == "required"


def _written(request: ChatRequest, generation: Generation) -> list[bool]:
    """Which tokens the model chose; where another server does not say, none of an answer that was steered."""
    if generation.free:
        return list(generation.free)
    steered = _constrained(request) or bool(request.sampling.logit_bias)
    return [not steered] * len(generation.token_ids)


def _add_messages(trajectory: Trajectory, conversation: list[Message], metadata: Mapping[str, str]) -> None:
    """The conversation; each tool call with its result, and how long it took where the agent says so."""
    durations_s = tool_durations.read(metadata.get(tool_durations.METADATA_KEY, ""))
    results = {m.tool_call_id: m.content or "" for m in conversation if m.role == "tool" and m.tool_call_id}
    for message in conversation:
        added: ChatMessage = trajectory.messages.add(
            role=message.role,
            content=message.content or "",
            name=message.name or "",
            tool_call_id=message.tool_call_id or "",
            reasoning=message.reasoning or "",
        )
        for call in message.tool_calls:
            added.tool_calls.add(
                id=call.id,
                name=call.name,
                arguments=call.arguments,
                result=results.get(call.id, ""),
                duration_s=durations_s.get(call.id, 0.0),
            )


def _add_selection(
    trajectory: Trajectory, decision: Decision, labels: Sequence[str], metadata: Mapping[str, str]
) -> None:
    selection = trajectory.selection
    selection.accepted, selection.reason = decision.accepted, decision.reason
    selection.labels.extend(dict.fromkeys((*decision.labels, *labels)))
    for key, value in metadata.items():
        selection.metadata[key] = value
