"""What the aggregator remembers of the sites' ledgers, and that no site decides it for another."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from aggregator.combine import OpenRound, combine
from aggregator.federation import Federation
from aggregator.sites import Question, Reply
from aggregator.witness import Witness
from common.errors import ConfigError, TransportError
from common.identity import SigningKey
from common.update import NOT_CHARGED, Aggregate, LedgerHead, Refusal, SealedUpdate, Voided, seal_bytes
from tests.common.test_update import AGGREGATOR, SEALING, SHAPES, TRAINING, plan, tensors

NAMES = tuple(f"site-{number}" for number in range(1, 7))
ENTRY = "e" * 64


def new_key() -> SigningKey:
    return SigningKey(Ed25519PrivateKey.generate())


def head(key: SigningKey, sequence: int, digest: str = "d" * 64) -> LedgerHead:
    return LedgerHead.signed(sequence, digest, key)


# --- the file


def test_the_last_head_of_each_site_survives_a_restart(tmp_path: Path) -> None:
    one, two = new_key(), new_key()
    path = tmp_path / "aggregator" / "witness.json"
    witness = Witness(path)
    assert witness.head(one.public) == ""
    witness.remember({one.public: head(one, 3), two.public: head(two, 5)})
    witness.remember({one.public: head(one, 7)})
    for kept in (witness, Witness(path)):
        assert kept.head(one.public) == head(one, 7).encode()
        assert kept.head(two.public) == head(two, 5).encode()
        assert kept.head(new_key().public) == ""
    assert [p.name for p in path.parent.iterdir()] == ["witness.json"]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("ab")), min_size=1))
def test_a_sequence_never_goes_down_and_never_changes_its_digest(
    tmp_path_factory: pytest.TempPathFactory, shown: list[tuple[int, str]]
) -> None:
    key = new_key()
    witness = Witness(tmp_path_factory.mktemp("witness") / "witness.json")
    kept: tuple[int, str] | None = None
    for sequence, letter in shown:
        witness.remember({key.public: head(key, sequence, letter * 64)})
        if kept is None or sequence > kept[0]:
            kept = (sequence, letter)
        assert witness.head(key.public) == head(key, kept[0], kept[1] * 64).encode()


def test_a_damaged_file_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    key, liar = new_key(), new_key()
    path = tmp_path / "witness.json"
    Witness(path).remember({key.public: head(key, 3)})
    good = path.read_bytes()
    name = key.public.hex()
    for bad in (
        b"",
        b"\xff",
        b"[]",
        b"3",
        good[:-10],
        json.dumps({name: 3}).encode(),
        json.dumps({name: ""}).encode(),
        json.dumps({"zz": head(key, 3).encode()}).encode(),
        json.dumps({name: head(liar, 3).encode()}).encode(),
        good.replace(b'"3 ', b'"2 '),
    ):
        path.write_bytes(bad)
        with pytest.raises(ConfigError, match="restore it from its backup"):
            Witness(path)
        assert path.read_bytes() == bad
    path.write_bytes(good)
    assert Witness(path).head(key.public) == head(key, 3).encode()


def test_a_disk_that_does_not_write_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = new_key()
    witness = Witness(tmp_path / "witness.json")
    witness.remember({key.public: head(key, 3)})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("aggregator.witness.replace_file", full)
        with pytest.raises(TransportError, match="No space left"):
            witness.remember({key.public: head(key, 4)})
    for kept in (witness, Witness(tmp_path / "witness.json")):
        assert kept.head(key.public) == head(key, 3).encode()


# --- a round


class Answering:
    """Sites that answer as told, once; notes what each was asked."""

    open: frozenset[str] = frozenset()

    def __init__(self, answers: Mapping[str, SealedUpdate]) -> None:
        self._answers = answers
        self.requests: dict[str, Mapping[str, Any]] = {}
        self._asked: list[str] = []

    @property
    def names(self) -> tuple[str, ...]:
        return NAMES

    def look_around(self) -> None:
        return None

    def absence(self, site: str) -> str:
        return "absent"

    def question(self, kind: str) -> Question:
        return self

    def answers(self) -> list[tuple[str, Reply | Refusal]]:
        asked, self._asked = self._asked, []
        return [(site, Reply(dataclasses.asdict(self._answers[site]))) for site in asked]

    def ask(self, requests: Mapping[str, Mapping[str, Any]]) -> None:  # type: ignore[override]
        self.requests.update(requests)
        self._asked += list(requests)


class Round:
    """Six sites with ledgers of some length, one of which may do otherwise."""

    def __init__(self, path: Path) -> None:
        self.keys = {name: new_key() for name in NAMES}
        self.witness = Witness(path)
        self.plan = plan(weights=dict.fromkeys(NAMES, 1))
        self.federation = Federation(
            name="test",
            roster={name: key.public for name, key in self.keys.items()},
            weights=dict.fromkeys(NAMES, 1),
            key=AGGREGATOR,
            training=TRAINING,
            rule="mean",
            planned_rounds=3,
            clip_norm=2.0,
            collect_timeout_s=1.0,
        )

    def sealed(self, site: str, *, signer: str = "", entry: str = ENTRY, shows: str | None = None) -> SealedUpdate:
        key = self.keys[signer or site]
        shown = self.head(site, 5).encode() if shows is None else shows
        return seal_bytes(save(tensors()), self.plan, site=site, key=key, ledger_entry=entry, ledger_head=shown)

    def head(self, site: str, sequence: int) -> LedgerHead:
        return head(self.keys[site], sequence)

    def run(self, **changed: SealedUpdate) -> tuple[Aggregate | Voided, Answering]:
        answers = {name: self.sealed(name) for name in NAMES}
        sites = Answering({**answers, **{name.replace("_", "-"): update for name, update in changed.items()}})
        return combine(OpenRound(self.plan, SEALING, SHAPES), sites, self.federation, self.witness), sites

    def remembered(self, site: str) -> str:
        return self.witness.head(self.keys[site].public)


@pytest.fixture
def current(tmp_path: Path) -> Round:
    return Round(tmp_path / "witness.json")


def test_each_site_is_shown_its_own_last_head(current: Round) -> None:
    _, first = current.run()
    assert {request["witness"] for request in first.requests.values()} == {""}
    outcome, second = current.run()
    assert isinstance(outcome, Aggregate) and outcome.refusals == ()
    for site in NAMES:
        assert second.requests[site]["witness"] == current.head(site, 5).encode()
        LedgerHead.parse(second.requests[site]["witness"]).verify(current.keys[site].public)


def test_a_site_without_noise_has_no_head_to_remember(current: Round) -> None:
    outcome, _ = current.run(site_2=current.sealed("site-2", entry=NOT_CHARGED, shows=""))
    assert isinstance(outcome, Aggregate) and "site-2" in outcome.participants
    assert current.remembered("site-2") == ""


LIES: dict[str, Callable[[Round], SealedUpdate]] = {
    "another site's head": lambda r: r.sealed("site-2", shows=r.head("site-1", 999).encode()),
    "speaks for another": lambda r: r.sealed("site-1", signer="site-2", shows=r.head("site-2", 999).encode()),
    "signs for another with its head": lambda r: r.sealed("site-1", signer="site-2"),
    "a head changed on the way": lambda r: dataclasses.replace(
        r.sealed("site-2"), ledger_head=r.head("site-2", 999).encode()
    ),
    "no head": lambda r: r.sealed("site-2", shows=""),
    "words": lambda r: r.sealed("site-2", shows="999 is my number"),
    "no update, but a head": lambda r: dataclasses.replace(
        r.sealed("site-2", shows=r.head("site-2", 999).encode()), ciphertext=b"x"
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_about_a_ledger_is_refused_and_poisons_nobody(current: Round, lie: str) -> None:
    for site in NAMES:
        current.witness.remember({current.keys[site].public: current.head(site, 3)})
    outcome, _ = current.run(site_2=LIES[lie](current))
    assert isinstance(outcome, Aggregate)
    (refusal,) = outcome.refusals
    assert (refusal.site, refusal.stage) == ("site-2", "validate")
    assert current.remembered("site-2") == current.head("site-2", 3).encode()
    for site in set(NAMES) - {"site-2"}:
        assert current.remembered(site) == current.head(site, 5).encode()


def test_a_site_that_enrolled_again_starts_without_a_witness(current: Round, tmp_path: Path) -> None:
    current.run()
    again = Round(tmp_path / "witness.json")  # the same names with new keys
    _, asked = again.run()
    assert {request["witness"] for request in asked.requests.values()} == {""}
