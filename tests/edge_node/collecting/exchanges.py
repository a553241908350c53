"""Exchanges and a recorder without a model: real store, policy file and redaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from common.chat import Message
from common.inference.batching import Generation
from common.inference.engine import LoadedAdapter
from common.inference.sampling import SamplingParameters
from edge_node.collecting.contract import TrainingContract
from edge_node.collecting.pending import Pending
from edge_node.collecting.recorder import Recorder
from edge_node.collecting.selection import SelectionStrategy
from edge_node.collecting.store import TrajectoryStore
from edge_node.collecting.trajectory_pb2 import Trajectory
from edge_node.config import RewardSettings
from edge_node.policy import PolicyFile
from edge_node.serving.exchange import Answer, ChatRequest, Exchange
from edge_node.serving.response_ids import ResponseIds
from edge_node.serving.router import Choice, ServedVersion

POLICY = """
[privacy]
unit = "trajectory"
epsilon_total = 8.0
delta = 1e-5
[upload]
updates = true
aggregation = ["sealed"]
"""
NOW = 1_767_225_600.0


def decode(token_ids: Sequence[int]) -> str:
    """Token ids as a model would spell them whose tokens are characters."""
    return "".join(map(chr, token_ids))


class _Adapter:
    digest = "0" * 64


def exchange(name: str = "chatcmpl-1", text: str = "fine", *, choices: int = 1, **asked: Any) -> Exchange:
    """An answered request; `asked` are fields of its ChatRequest."""
    fields = {"messages": [Message("user", "how are you")], "sampling": SamplingParameters(), "max_tokens": 8} | asked
    request = ChatRequest(**fields, choices=choices)  # type: ignore[arg-type]
    generation = Generation([5, 6], [-0.1, -0.2], "stop", 0.0, 0.1, 0.2)
    answers = [Answer(text, generation, Message("assistant", text)) for _ in range(choices)]
    version = ServedVersion("v3", cast(LoadedAdapter, _Adapter()))
    return Exchange(name, request, Choice("stable", version), [1, 2, 3], answers)


class Site:
    """A site's collecting, as a node puts it together."""

    def __init__(
        self,
        folder: Path,
        strategy: SelectionStrategy,
        *,
        pending: Pending | None = None,
        policy: str = POLICY,
        decode: Callable[[Sequence[int]], str] = decode,
    ) -> None:
        self.now_s = NOW
        self.folder = folder
        self.policy = folder / "policy.toml"
        self.policy.write_text(policy)
        self.policy.chmod(0o644)
        self.pending = Pending() if pending is None else pending
        self.ids = ResponseIds(b"r" * 32)
        self.store = TrajectoryStore(folder / "trajectories", b"k" * 32)
        clock: Callable[[], float] = lambda: self.now_s  # noqa: E731
        self.recorder = Recorder(
            site="site-1",
            store=self.store,
            policy=PolicyFile(self.policy),
            strategy=strategy,
            pending=self.pending,
            pseudonym_key=b"p" * 32,
            base_digest="b",
            decode=decode,
            clock=clock,
            ids=self.ids,
        )
        self.contract = TrainingContract(self.recorder, RewardSettings(), window_after_s=lambda _: 0.0)

    def records(self) -> list[Trajectory]:
        return list(self.store.read(after_s=0, until_s=4e9))

    def files(self) -> dict[str, bytes]:
        """Everything on disk, but for the policy."""
        return {p.name: p.read_bytes() for p in sorted(self.folder.rglob("*")) if p.is_file() and p != self.policy}
