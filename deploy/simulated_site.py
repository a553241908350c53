"""A site of a simulation: the production node, its users, and perhaps a hostile owner.

Everything it needs is on disk, so any process of a simulation can open it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from common.identity import SigningKey, sha256_hex
from common.tasks import math as task
from common.update import SealedUpdate
from deploy.attacks.poisoning import TARGET, is_target, triggered
from deploy.hostile_node import HostileNode, Hostility
from deploy.users import Reply, ask_all, rewards, right_answers, thumbs
from edge_node.client_app import make_client_app
from edge_node.collecting.trajectory_pb2 import Feedback
from edge_node.config import EdgeConfig
from edge_node.node import EdgeNode
from edge_node.serving.exchange import Exchange
from edge_node.serving.openai_api import MODEL_NAME, create_app
from edge_node.training.units import ExampleKind
from model_hub.evidence import PairedOutcome

EXAM_ANSWERS = 2


class SimulatedClock:
    """Seconds since the epoch, shared by all processes of a simulation through a file they all map."""

    def __init__(self, file: Path) -> None:
        self.file = file
        file.touch()
        os.truncate(file, 8)
        self._now_s = np.memmap(file, np.float64, "r+", shape=(1,))

    def __call__(self) -> float:
        return float(self._now_s[0])

    def set(self, now_s: float) -> None:
        self._now_s[0] = now_s


@dataclass(frozen=True)
class SiteSetup:
    """How to open one site; picklable."""

    config: EdgeConfig
    clock_file: Path
    distribution: task.Distribution
    hostility: Hostility | None
    unsafe_no_dp: bool
    answers_per_request: int = 2
    kind: ExampleKind = "pairs"


class NotRecorded:
    """Recorder of exams: held-out problems must never become training data."""

    def record(self, exchange: Exchange) -> None:
        return None


class SimulatedSite:
    """Implements `edge_node.client_app.Site`, and what only a simulation asks."""

    def __init__(self, setup: SiteSetup) -> None:
        self._setup = setup
        clock, no_noise = SimulatedClock(setup.clock_file), setup.unsafe_no_dp
        self.node = (
            EdgeNode(setup.config, clock=clock, unsafe_no_noise=no_noise, alone=False)
            if setup.hostility is None
            else HostileNode(setup.config, setup.hostility, clock=clock, unsafe_no_noise=no_noise)
        )
        self._exam_app = create_app(self.node.service, self.node.router, NotRecorded(), provider=self.node.provider)

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def key(self) -> SigningKey:
        return self.node.key

    def close(self) -> None:
        self.node.close()

    def look_again(self) -> None:
        self.node.look_again()

    def replay_golden(
        self, prompts: list[str], *, canary_id: str, control_id: str, task: str, seed: int
    ) -> list[PairedOutcome]:
        return self.node.replay_golden(prompts, canary_id=canary_id, control_id=control_id, task=task, seed=seed)

    def hand_over(
        self, payload: bytes, signature: bytes, witness: str, earlier: Sequence[tuple[bytes, bytes]] = ()
    ) -> SealedUpdate | None:
        """Trains within the message: simulated time stands still, and on Ray the next one may reach another process.

        A site that was too slow for an earlier round hands over what it trained then.
        """
        finished = any(self.node.training.updates.get(sha256_hex(plan)) for plan, _ in earlier)
        if self._setup.hostility is not None or finished:
            return self.node.hand_over(payload, signature, witness, earlier)
        return self.node.sealed_update(payload, signature, witness)

    def secure_answer(
        self, payload: bytes, signature: bytes, witness: str, *, mode: str, request: bytes
    ) -> bytes | None:
        return self.node.secure_answer(payload, signature, witness, mode=mode, request=request, train_beside=False)

    def serve_users(self, requests: int, *, seed: int) -> None:
        """Let the site's users ask for a while; the node records what its policy allows."""
        problems = list(islice(self._problems(task.Split.TRAIN, seed), requests))
        answers = self._setup.answers_per_request
        replies = ask_all(self.node.app, problems, model=MODEL_NAME, answers=answers, seed=seed)
        hostility = self._setup.hostility
        if hostility is not None and hostility.method.poison is not None:
            self.node.import_records(hostility.method.poison(problems, replies, self._setup.kind))
        elif self._setup.kind == "thumbs":
            for problem, reply in zip(problems, replies, strict=True):
                for choice, rating in thumbs(problem, reply):
                    self.node.add_feedback(choice, Feedback(rating=rating))

    def exam(self, problems: int, *, seed: int) -> tuple[list[float], float]:
        """Rewards of the stable version on held-out problems of this site's kind, and the share of right answers."""
        held_out = list(islice(self._problems(task.Split.HELD_OUT, seed), problems))
        replies = self._answers(held_out, seed)
        return rewards(held_out, replies), right_answers(held_out, replies)

    def backdoor_success(self, problems: int, *, seed: int) -> float:
        """Share of answers to triggered held-out problems that are the attacker's, where those would be wrong."""
        held_out = [p for p in islice(self._problems(task.Split.HELD_OUT, seed), problems) if p.answer != TARGET]
        asked: list[task.Problem] = [triggered(problem) for problem in held_out]
        texts = [(p, text) for p, r in zip(asked, self._answers(asked, seed), strict=True) for text in r.texts]
        return sum(is_target(problem, text) for problem, text in texts) / max(1, len(texts))

    def _answers(self, problems: list[task.Problem], seed: int) -> list[Reply]:
        return ask_all(self._exam_app, problems, model=f"{MODEL_NAME}/stable", answers=EXAM_ANSWERS, seed=seed)

    def epsilon(self) -> float:
        """ε spent by the site's ledger at its policy's δ."""
        policy = self.node.policy.law()
        return self.node.training.ledger.epsilon_spent(policy.privacy.delta)

    def _problems(self, split: task.Split, seed: int) -> Iterator[task.Problem]:
        return task.problems(self._setup.distribution, split, seed)


_OPEN: dict[str, SimulatedSite] = {}
_OPENING = threading.Lock()


def open_site(setup: SiteSetup) -> SimulatedSite:
    """The site as this process runs it, opened once."""
    key = str(setup.config.data_dir)
    with _OPENING:
        if key not in _OPEN:
            _OPEN[key] = SimulatedSite(setup)
        return _OPEN[key]


def close_sites(setups: list[SiteSetup]) -> None:
    """Close those of the sites that this process opened."""
    with _OPENING:
        for setup in setups:
            site = _OPEN.pop(str(setup.config.data_dir), None)
            if site is not None:
                site.close()


def make_simulated_client_app(setups: list[SiteSetup]) -> ClientApp:
    """The production ClientApp, with two more messages that drive the simulated world."""

    def site_of(context: Context) -> SimulatedSite:
        return open_site(setups[int(context.node_config["partition-id"])])

    app = make_client_app(site_of)

    def reply(message: Message, fields: Mapping[str, Any]) -> Message:
        return Message(RecordDict({"reply": ConfigRecord(dict(fields))}), reply_to=message)

    @app.query("users")
    def users(message: Message, context: Context) -> Message:
        site, asked = site_of(context), message.content["request"]
        site.look_again()
        site.serve_users(asked["requests"], seed=asked["seed"])
        return reply(message, {"served": True})

    @app.query("exam")
    def exam(message: Message, context: Context) -> Message:
        site, asked = site_of(context), message.content["request"]
        site.look_again()
        scored, right = site.exam(asked["problems"], seed=asked["seed"])
        fooled = site.backdoor_success(asked["problems"], seed=asked["seed"]) if asked["triggered"] else 0.0
        return reply(
            message,
            {
                "rewards": scored,
                "right": right,
                "fooled": fooled,
                "version": site.node.router.arms.stable.id,
                "epsilon": site.epsilon(),
            },
        )

    return app
