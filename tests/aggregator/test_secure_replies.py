"""Answers in a secure session that are too large or too late: refused by name, and the round goes on or says why not."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.adapter import Adapter, LoraShape, initial_adapter
from model_hub.hub import Hub
from tests.aggregator.stub import new_hub
from tests.aggregator.test_secure_round import SecureStub, check_published, secure, sites_of

_GIB = 1 << 30


@pytest.fixture(scope="module")
def narrow() -> Adapter:
    return initial_adapter({"model.layers.0.self_attn.q_proj": (16, 16)}, LoraShape(2, 4.0, ("q_proj",)), seed=0)


@pytest.fixture
def hub(tmp_path: Path, narrow: Adapter) -> Iterator[Hub]:
    hub = new_hub(tmp_path / "hub", narrow)
    yield hub
    hub.close()


def most_memory() -> int:
    """Bytes that this process has had resident at once."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize("kind", ["ready", "Offer", "Admitted"])
def test_a_reply_of_a_gibibyte_is_refused_by_name_before_anyone_reads_it(
    kind: str, tmp_path: Path, hub: Hub, narrow: Adapter
) -> None:
    """The bytes are the system's zero pages: whoever copies or hashes them makes a gibibyte of memory of them."""
    sites = sites_of(5, tmp_path, narrow)
    sites[0].change = lambda site, at, reply: bytes(_GIB) if at == kind else reply
    before = most_memory()
    (record,) = secure(sites, hub)
    assert most_memory() - before < _GIB // 2
    check_published(hub, sites, record)
    assert record.participants == ("site-2", "site-3", "site-4", "site-5")
    ((site, reason),) = [(refusal.site, refusal.reason) for refusal in record.refused]
    assert site == "site-1"
    assert ("not one to a secure session" if kind == "ready" else f"reply has {_GIB} bytes, expected at most") in reason


def late(step: str, by_s: float) -> Any:
    """An honest answer, too late; what the site has written stands."""

    def change(site: SecureStub, kind: str, reply: bytes) -> bytes:
        if kind == step:
            time.sleep(by_s)
        return reply

    return change


@pytest.mark.parametrize("step", ["Admitted", "Uploads", "Agreed again"])
def test_an_answer_after_its_step_counts_for_nothing_and_its_site_is_named(
    step: str, tmp_path: Path, hub: Hub, narrow: Adapter
) -> None:
    """Nor is it taken for an answer to a later step, during which it arrives."""
    sites = sites_of(5, tmp_path, narrow)
    sites[0].change = late(step, 2.8)
    (record,) = secure(sites, hub, rounds=2, at_most=1, step_timeout_s=2.0)
    check_published(hub, sites, record)
    uploaded = step != "Admitted"
    assert ("site-1" in record.participants) == uploaded
    if not uploaded:
        assert [(r.site, r.reason) for r in record.refused] == [("site-1", "no answer within 2 s")]
    sites[0].change = late("", 0)
    (following,) = secure(sites, hub, rounds=2)
    assert following.version is not None and following.participants == record.participants


@pytest.mark.parametrize(
    ("step", "reason"),
    [("Admitted", "uploads: 3 sites"), ("Choice", "3 sites agree")],
)
def test_too_many_late_answers_void_the_round_and_the_reason_says_at_which_step(
    step: str, reason: str, tmp_path: Path, hub: Hub, narrow: Adapter
) -> None:
    sites = sites_of(5, tmp_path, narrow)
    for site in sites[:2]:
        site.change = late(step, 2.8)
    (record,) = secure(sites, hub, step_timeout_s=2.0)
    assert record.version is None and hub.stable.id == "v0"
    assert record.void_reason and record.void_reason.startswith(reason), record.void_reason
    assert [(r.site, r.reason) for r in record.refused] == [(f"site-{i}", "no answer within 2 s") for i in (1, 2)]
    assert ("committed" in {site.state() for site in sites}) == (step == "Choice")
