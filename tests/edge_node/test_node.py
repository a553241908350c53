"""What a node stores and what it reports, from the outside."""

from __future__ import annotations

import pytest

from common.chat import Message
from common.errors import ConfigError, PrivacyError, RoundError
from common.inference.sampling import SamplingParameters
from common.tasks import math as task
from deploy.drills import crashing
from deploy.users import ask_all
from deploy.world import World
from edge_node.node import EdgeNode
from edge_node.serving.chat_service import ChatService
from edge_node.serving.exchange import Answer, ChatRequest, Exchange
from edge_node.serving.router import Choice
from model_hub.evidence import PairedOutcome
from model_hub.version import Lineage
from tests.conftest import changed
from tests.edge_node.adopting.test_adopt import publish_canary


async def exchange_about(node: EdgeNode, text: str) -> Exchange:
    choice = node.router.choose("c")
    request = ChatRequest([Message("user", text)], SamplingParameters(), 8, user="jane")
    return await node.service.answer(request, choice)


def test_what_is_stored_was_redacted_first(node: EdgeNode) -> None:
    import asyncio

    node.record(asyncio.run(exchange_about(node, "my token: s3cret")))
    (record,) = node.store.read(after_s=0, until_s=4e9)
    assert "s3cret" not in str(record)
    assert record.redactions == {"token": 1}
    assert not record.prompt_token_ids


def test_golden_outcomes_leave_only_under_a_policy_and_for_the_versions_asked(world: World, node: EdgeNode) -> None:
    version = publish_canary(world)
    node.look_again()
    prompts = [task.Problem(23, "+", 45).prompt, task.Problem(77, "-", 31).prompt]
    asked = {"canary_id": version, "control_id": "v0", "task": "math", "seed": 1}

    outcomes = node.replay_golden(prompts, **asked)
    assert len(outcomes) == 2
    assert all(0 <= o.canary_reward <= 1 and not o.control_error for o in outcomes)
    assert node.replay_golden(prompts, **asked) == outcomes  # a seed repeats
    assert list(node.store.read(after_s=0, until_s=4e9)) == []  # replays are not recorded

    for wrong in ({"canary_id": "v9"}, {"control_id": "v9"}, {"task": "poetry"}):
        with pytest.raises(RoundError):
            node.replay_golden(prompts, **{**asked, **wrong})
    with pytest.raises(RoundError):
        node.replay_golden(prompts * 51, **asked)
    world.setups[0].config.policy.unlink()
    with pytest.raises(PrivacyError):
        node.replay_golden(prompts, **asked)


def test_a_crashing_canary_errs_and_its_control_does_not(world: World, node: EdgeNode) -> None:
    bad = world.hub.submit(
        crashing(changed(world.hub.adapter("v0"), seed=1)),
        lineage=Lineage(node.model.digest),
        largest_change=1.0,
        unsafe_skip_gates=True,
    )
    world.hub.start_canary(bad)
    node.look_again()
    outcomes = node.replay_golden(["What is 23+45?"], canary_id=bad.id, control_id="v0", task="math", seed=1)
    assert [(o.canary_error, o.control_error, o.canary_reward) for o in outcomes] == [(True, False, 0.0)]


@pytest.mark.parametrize(
    ("text", "error"), [("", True), (" \n", True), ("<tool_call>{</tool_call>", True), ("Answer: 68", False)]
)
def test_empty_answers_and_invalid_tool_calls_are_errors(
    world: World, node: EdgeNode, monkeypatch: pytest.MonkeyPatch, text: str, error: bool
) -> None:
    real = ChatService.answer

    async def answering(self: ChatService, request: ChatRequest, choice: Choice) -> Exchange:
        exchange = await real(self, request, choice)
        said = Message("assistant", text)
        made = (
            [Answer(text, a.generation, said) for a in exchange.answers] if choice.arm == "canary" else exchange.answers
        )
        return Exchange(exchange.id, request, choice, exchange.prompt_ids, made)

    version = publish_canary(world)
    node.look_again()
    monkeypatch.setattr(ChatService, "answer", answering)
    (outcome,) = node.replay_golden(["What is 23+45?"], canary_id=version, control_id="v0", task="math", seed=1)
    assert isinstance(outcome, PairedOutcome)
    assert (outcome.canary_error, outcome.control_error) == (error, False)


def test_users_of_a_node_meet_both_arms(world: World, node: EdgeNode) -> None:
    publish_canary(world)
    node.look_again()
    problems = [task.Problem(10 + i % 80, "+", 11) for i in range(150)]
    ask_all(node.app, problems, model="headwater", answers=1, seed=0)
    arms = [t.arm for t in node.store.read(after_s=0, until_s=4e9)]
    assert 0 < arms.count("canary") < 30


def test_two_nodes_never_share_a_folder(world: World, node: EdgeNode) -> None:
    config = world.setups[0].config
    for _ in range(2):
        with pytest.raises(ConfigError, match="another node runs on") as refused:
            EdgeNode(config, clock=world.clock)
        assert str(config.data_dir) in str(refused.value)
    beside = EdgeNode(config, clock=world.clock, alone=False)  # a command that looks
    beside.close()
    with pytest.raises(ConfigError):
        EdgeNode(config, clock=world.clock)  # which took nothing from the one that runs
    node.close()
    EdgeNode(config, clock=world.clock).close()


def test_a_node_that_cannot_be_opened_keeps_no_lock(world: World) -> None:
    config = world.setups[0].config
    broken = config.model_copy(update={"selection": "no.such:Strategy"})
    with pytest.raises(ConfigError, match="cannot be imported") as kept:
        EdgeNode(broken, clock=world.clock)
    EdgeNode(config, clock=world.clock).close()
    assert kept.value.__traceback__ is not None  # the failed one is still referred to, and holds nothing
