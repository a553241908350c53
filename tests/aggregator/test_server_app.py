"""Whole rounds over the in-process grid with sites that fail, lie or keep silent."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from safetensors.numpy import save

from aggregator.federation import Federation
from aggregator.flower_sites import FlowerSites
from aggregator.golden import paired_outcomes
from aggregator.sites import Reply
from common.adapter import Adapter
from common.errors import ConfigError, PrivacyError
from common.identity import GOLDEN_LABEL, canonical
from common.plan import RoundPlan
from common.update import PrivateUpdate, Refusal, SealedUpdate, seal_bytes
from model_hub.evidence import PairedOutcome
from model_hub.hub import Hub
from model_hub.rollout import Stage
from model_hub.version import Lineage
from tests.aggregator.stub import (
    AGGREGATOR,
    BASE,
    TRAINING,
    Misbehave,
    StubSite,
    grid_of,
    head,
    new_key,
    raises,
    run,
    sends,
    six,
)
from tests.conftest import changed


def as_another(site: StubSite, plan: RoundPlan, update: PrivateUpdate) -> SealedUpdate:
    return seal_bytes(
        update.file_bytes, plan, site="site-1", key=site.key, ledger_entry="e" * 64, ledger_head=head(site.key)
    )


def test_honest_rounds_publish_versions_that_become_stable(hub: Hub, start: Adapter) -> None:
    sites = six(start)
    records = run(sites, hub, rounds=2)
    assert [r.version for r in records] == ["v1", "v2"]
    assert records[0].participants == tuple(f"site-{i}" for i in range(1, 7))
    assert records[0].refused == ()
    assert hub.stable.id == "v2"
    after, names = hub.adapter("v1"), start.names("B")
    np.testing.assert_array_equal(after.flatten(start.names("A")), start.flatten(start.names("A")))
    assert np.linalg.norm(after.flatten(names)) == pytest.approx(2.0, rel=0.02)
    assert hub.adapter("v2").flatten(start.names("B")).tolist() == after.flatten(names).tolist()  # phase A


LIES: dict[str, tuple[Misbehave, str, str]] = {
    "boosted": (sends(lambda u: save({n: t * -10 for n, t in u.tensors.items()})), "validate", "norm 20 exceeds"),
    "nan": (sends(lambda u: save({n: t * np.float32("nan") for n, t in u.tensors.items()})), "validate", "not finite"),
    "garbage": (sends(lambda u: bytes(1000)), "validate", "not a safetensors"),
    "nothing": (sends(lambda u: b""), "validate", "not a safetensors"),
    "as another site": (as_another, "validate", "speaks for another site"),
    "no privacy left": (raises(PrivacyError("x", public="budget is out")), "train", "PrivacyError: budget is out"),
    "crash": (raises(RuntimeError("secret")), "train", "RuntimeError: see the site's own log"),
}


@pytest.mark.parametrize("lie", LIES)
def test_one_bad_site_is_refused_by_name_and_the_round_goes_on(hub: Hub, start: Adapter, lie: str) -> None:
    misbehave, stage, reason = LIES[lie]
    (record,) = run(six(start, site_3=misbehave), hub)
    assert record.version == "v1"
    (refusal,) = record.refused
    assert (refusal.site, refusal.stage) == ("site-3", stage)
    assert reason in refusal.reason
    assert "secret" not in refusal.reason
    assert record.participants == ("site-1", "site-2", "site-4", "site-5", "site-6")
    assert np.isfinite(hub.adapter("v1").flatten(start.tensors)).all()


def test_a_silent_site_is_refused_at_the_deadline(hub: Hub, start: Adapter) -> None:
    released = threading.Event()

    def sleep(site: StubSite, plan: RoundPlan, update: PrivateUpdate) -> SealedUpdate:
        released.wait(10)
        raise RuntimeError

    on_silence = threading.Timer(1.2, released.set)
    on_silence.start()
    (record,) = run(six(start, site_6=sleep), hub, timeout_s=1.0)
    assert [(r.site, r.reason) for r in record.refused] == [("site-6", "no answer within 1 s")]
    assert record.version == "v1"


def test_an_update_of_an_earlier_round_cannot_be_sent_again(hub: Hub, start: Adapter) -> None:
    kept: list[SealedUpdate] = []

    def replay(site: StubSite, plan: RoundPlan, update: PrivateUpdate) -> SealedUpdate:
        kept.append(site.sealed(plan, update))
        return kept[0]

    first, second = run(six(start, site_2=replay), hub, rounds=2)
    assert first.refused == ()
    assert [r.reason for r in second.refused] == ["it was made for another plan"]


def test_too_few_usable_updates_void_the_round_and_publish_nothing(hub: Hub, start: Adapter) -> None:
    bad = {f"site_{i}": LIES["nan"][0] for i in (1, 2, 3)}
    (record,) = run(six(start, **bad), hub)
    assert record.version is None
    assert record.void_reason == "3 usable updates of 6 sites, at least 4 are needed"
    assert len(record.refused) == 3
    assert [v.id for v in hub.catalog.versions()] == ["v0"]


def test_a_node_that_does_not_prove_its_name_takes_no_part(hub: Hub, start: Adapter) -> None:
    sites = six(start)
    sites[2] = StubSite("site-3", start)
    impostor = sites[2].key
    roster_sites = [*sites]
    real = new_key()
    roster_sites[2] = StubSite("site-3", start, key=real)
    federation_keys = {s.name: s.key.public for s in roster_sites}
    assert impostor.public != federation_keys["site-3"]
    (record,) = run(sites, hub, roster=roster_sites, rule="mean")
    assert [(r.site, r.stage) for r in record.refused] == [("site-3", "identify")]


def test_two_nodes_with_one_identity_are_left_out_and_the_round_goes_on(hub: Hub, start: Adapter) -> None:
    sites = six(start)
    twice = [*sites, sites[0]]
    (record,) = run(twice, hub, roster=sites)
    assert [(r.site, r.stage) for r in record.refused] == [("site-1", "identify")]
    assert "two nodes" in record.refused[0].reason
    assert record.version == "v1"


@pytest.mark.parametrize(
    "golden",
    [
        lambda count: [PairedOutcome(False, False, 1e9, 0.0)] * count,
        lambda count: [PairedOutcome(False, False, float("nan"), 0.0)] * count,
        lambda count: [PairedOutcome(False, False, -1.0, 0.0)] * count,
        lambda count: [PairedOutcome(1, 0, 1.0, 0.0)] * count,  # type: ignore[arg-type]
        lambda count: [PairedOutcome(False, False, 0.5, 0.5)] * (count - 1),
        lambda count: [],
    ],
)
def test_malformed_evidence_is_left_out(hub: Hub, start: Adapter, golden: Callable[[int], list[PairedOutcome]]) -> None:
    sites = six(start)
    sites[0].golden = golden
    (record,) = run(sites, hub)
    evidence = hub.catalog.evidence("v1")
    assert len(hub.catalog.outcomes("v1")["site-2"]) == 20 * len(evidence)
    assert hub.catalog.outcomes("v1")["site-1"] == []
    assert record.version == "v1"
    assert hub.stable.id == "v1"


@pytest.mark.parametrize("columns", [["x"], [b"x"], [[0.5]], [1], [None]])
def test_a_reply_of_any_type_neither_sways_nor_stops_the_test(columns: list[object]) -> None:
    names = ("canary_error", "control_error", "canary_reward", "control_reward")
    request = {"prompts": ["p"]}
    for name in names:
        fields = {n: [False] if n.endswith("error") else [0.5] for n in names} | {name: columns, "signature": b"x"}
        assert paired_outcomes(Reply(fields), request, site_public=bytes(32)) == []
        del fields[name]
        assert paired_outcomes(Reply(fields), request, site_public=bytes(32)) == []
    assert paired_outcomes(Reply({}), request, site_public=bytes(32)) == []
    assert paired_outcomes(Refusal("s", "golden", "r"), request, site_public=bytes(32)) == []


def test_evidence_signed_by_another_key_is_left_out() -> None:
    request = {"prompts": ["p"], "seed": 1}
    columns = {"canary_error": [False], "control_error": [False], "canary_reward": [1.0], "control_reward": [0.0]}
    statement = canonical({"request": request, "outcomes": columns})
    site, other = new_key(), new_key()
    fields = {**columns, "signature": site.sign(GOLDEN_LABEL, statement)}
    assert len(paired_outcomes(Reply(fields), request, site_public=site.public)) == 1
    assert paired_outcomes(Reply(fields), request, site_public=other.public) == []
    assert paired_outcomes(Reply(fields), {**request, "seed": 2}, site_public=site.public) == []


def test_evidence_never_repeats_its_prompts_and_seeds(hub: Hub, start: Adapter) -> None:
    sites = six(start)
    run(sites, hub, rounds=2)
    asked = [question for site in sites for question in site.asked]
    assert len(asked) >= 24
    assert len({seed for _, _, seed in asked}) == len(asked)
    assert len({prompts for _, prompts, _ in asked}) == len(asked)


def test_a_site_whose_update_was_refused_has_no_say_in_the_canary(hub: Hub, start: Adapter) -> None:
    sites = six(start, site_3=LIES["boosted"][0])
    run(sites, hub)
    assert sites[2].asked == []
    assert sites[1].asked != []


def test_one_site_that_lies_about_the_canary_does_not_decide(hub: Hub, start: Adapter) -> None:
    sites = six(start)
    sites[0].golden = lambda count: [PairedOutcome(True, False, 0.0, 1.0)] * count
    run(sites, hub)
    assert hub.stable.id == "v1"


def test_a_resumed_canary_is_not_asked_the_same_windows_again(hub: Hub, start: Adapter) -> None:
    sites = six(start)
    waited: list[str] = []

    def dies_in_the_second_window(reason: str) -> None:
        waited.append(reason)
        if waited.count("canary") == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(sites, hub, wait=dies_in_the_second_window)
    assert hub.canary is not None
    run(sites, hub)  # the same round goes on
    assert [len(site.plans) for site in sites] == [1] * 6
    seeds = [seed for site in sites for version, _, seed in site.asked if version == "v1"]
    assert len(seeds) == len(set(seeds)) > 6


def test_a_canary_that_an_earlier_run_left_is_decided_first(hub: Hub, start: Adapter) -> None:
    left = hub.submit(changed(start, seed=1, scale=0.001), lineage=Lineage(BASE), largest_change=2.0)
    hub.start_canary(left)
    (record,) = run(six(start), hub)
    assert [v.stage for v in hub.catalog.versions()] == [Stage.RETIRED, Stage.RETIRED, Stage.STABLE]
    assert record.version == "v2"


def test_a_round_that_was_not_adopted_is_trained_again_on_the_same_factor(hub: Hub, start: Adapter) -> None:
    sites = six(start)
    for site in sites:
        site.golden = lambda count: [PairedOutcome(False, False, 0.1, 0.9)] * count
    run(sites, hub, rounds=2)
    assert [v.lineage.phase for v in hub.catalog.versions()] == ["", "B", "B"]


def test_liars_are_counted_by_the_roster_not_by_who_came(hub: Hub, start: Adapter) -> None:
    """Nine sites tolerate two liars, also when three honest ones are away."""
    plans: list[RoundPlan] = []

    def lie(site: StubSite, plan: RoundPlan, update: PrivateUpdate) -> SealedUpdate:
        plans.append(plan)
        return sends(lambda update: save({n: -t for n, t in update.tensors.items()}))(site, plan, update)

    sites = [StubSite(f"site-{i}", start) for i in range(1, 10)]
    for site in sites[:2]:
        site.misbehave = lie
    for site in sites[6:]:
        site.misbehave = raises(RuntimeError())
    (record,) = run(sites, hub)
    assert set(record.participants) > {"site-3", "site-4", "site-5", "site-6"}
    assert len(record.participants) == 5  # of two liars alike one is left out: five updates tolerate two
    honest = np.array([site.update(plans[0]).delta_D for site in sites[2:6]])
    moved = hub.adapter("v1").flatten(start.names("B"))
    assert (honest.min(axis=0) - 1e-6 <= moved).all() and (moved <= honest.max(axis=0) + 1e-6).all()


def test_a_version_that_does_worse_is_rolled_back_and_the_next_round_starts_from_the_stable_one(
    hub: Hub, start: Adapter
) -> None:
    sites = six(start)
    for site in sites:
        site.golden = lambda count: [PairedOutcome(False, False, 0.1, 0.9)] * count
    records = run(sites, hub, rounds=2)
    assert [r.version for r in records] == ["v1", "v2"]
    assert hub.stable.id == "v0"
    assert [v.stage for v in hub.catalog.versions()] == [Stage.STABLE, Stage.ROLLED_BACK, Stage.ROLLED_BACK]
    assert hub.catalog.versions()[2].parent == "v0"


class Judges:
    """Golden outcomes that every site reports alike: which versions do better than the stable one."""

    def __init__(self, sites: list[StubSite], *, good: set[str]) -> None:
        for site in sites:
            site.golden = lambda count, site=site: self.outcomes(site, count)  # type: ignore[misc]
        self.good = good

    def outcomes(self, site: StubSite, count: int) -> list[PairedOutcome]:
        canary, _, _ = site.asked[-1]
        better, worse = (0.6, 0.5), (0.1, 0.9)
        return [PairedOutcome(False, False, *(better if canary in self.good else worse))] * count


@pytest.mark.parametrize(
    ("good", "patience", "expected"),
    [
        (set(), 2, ["v1", "v2"]),
        (set(), 1, ["v1"]),
        (set(), 0, ["v1", "v2", "v3", "v4", "v5"]),  # never stops
        ({"v2"}, 2, ["v1", "v2", "v3", "v4"]),  # one promotion begins the count again
        ({"v1", "v3", "v5"}, 2, ["v1", "v2", "v3", "v4", "v5"]),
        ({"v1", "v2"}, 3, ["v1", "v2", "v3", "v4", "v5"]),
    ],
)
def test_training_stops_after_so_many_rounds_in_a_row_that_bore_no_fruit(
    hub: Hub, start: Adapter, good: set[str], patience: int, expected: list[str]
) -> None:
    sites = six(start)
    Judges(sites, good=good)
    records = run(sites, hub, rounds=5, patience=patience)
    assert [record.version for record in records] == expected
    promoted = [record.version for record in records if record.stage is Stage.STABLE]
    assert promoted == [version for version in expected if version in good]
    assert hub.canary is None


def test_a_round_that_was_voided_bore_no_fruit_either(hub: Hub, start: Adapter) -> None:
    bad = {f"site_{i}": LIES["crash"][0] for i in (1, 2, 3)}
    records = run(six(start, **bad), hub, rounds=5, patience=3)
    assert [record.version for record in records] == [None] * 3


def test_in_mode_ffa_every_round_trains_b(hub: Hub, start: Adapter) -> None:
    records = run(six(start), hub, rounds=3, lora_mode="ffa")
    assert [record.stage for record in records] == [Stage.STABLE] * 3
    assert [v.lineage.phase for v in hub.catalog.versions()] == ["", "B", "B", "B"]
    for version in ("v1", "v2", "v3"):
        np.testing.assert_array_equal(hub.adapter(version).flatten(start.names("A")), start.flatten(start.names("A")))
    lengths = [np.linalg.norm(hub.adapter(v).flatten(start.names("B"))) for v in ("v1", "v2", "v3")]
    np.testing.assert_allclose(lengths, [2.0, 4.0, 6.0], rtol=0.02)


def test_in_mode_alternate_the_factors_take_turns(hub: Hub, start: Adapter) -> None:
    run(six(start), hub, rounds=4)
    assert [v.lineage.phase for v in hub.catalog.versions()] == ["", "B", "A", "B", "A"]


def keep_plans(plans: list[RoundPlan]) -> Misbehave:
    def misbehave(site: StubSite, plan: RoundPlan, update: PrivateUpdate) -> SealedUpdate:
        plans.append(plan)
        return site.sealed(plan, update)

    return misbehave


@pytest.mark.parametrize("balance", [True, False])
def test_after_a_round_on_a_its_version_is_published_in_balanced_factors_of_the_same_product(
    hub: Hub, start: Adapter, balance: bool
) -> None:
    plans: list[RoundPlan] = []
    sites = six(start, site_1=keep_plans(plans))
    records = run(sites, hub, rounds=3, rule="mean", balance=balance)
    assert [record.stage for record in records] == [Stage.STABLE] * 3
    assert [plan.lora_phase for plan in plans] == ["B", "A", "B"]

    def candidate(plan: RoundPlan) -> Adapter:
        delta_D = np.mean([site.update(plan).delta_D for site in sites], axis=0)
        return hub.adapter(plan.adapter_version).with_added(start.names(plan.lora_phase), delta_D)

    for plan, version in zip(plans, ("v1", "v2", "v3"), strict=True):
        made, published = candidate(plan), hub.adapter(version)
        np.testing.assert_allclose(published.products(), made.products(), atol=1e-5 * np.abs(made.products()).max())
        for name_a in start.names("A"):
            name_b = name_a.replace(".lora_A.", ".lora_B.")
            a, b = (np.linalg.norm(published.tensors[name]) for name in (name_a, name_b))
            assert bool(abs(a / b - 1) < 1e-3) is (balance and version == "v2")
        if not (balance and version == "v2"):
            np.testing.assert_allclose(published.flatten(start.tensors), made.flatten(start.tensors), atol=1e-6)
    assert plans[2].adapter_digest == hub.adapter("v2").digest


def test_a_version_published_as_another_function_is_rejected_and_training_goes_on_from_the_stable_one(
    hub: Hub, start: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Adapter.balanced
    monkeypatch.setattr(
        Adapter, "balanced", lambda self: Adapter(self.shape, {n: t * 1.01 for n, t in real(self).tensors.items()})
    )
    records = run(six(start), hub, rounds=3, balance=True)
    assert [record.stage for record in records] == [Stage.STABLE, Stage.REJECTED, Stage.REJECTED]
    assert hub.version("v2").reason.startswith("factors: the published products differ")
    assert hub.stable.id == "v1"
    assert [v.lineage.phase for v in hub.catalog.versions()] == ["", "B", "A", "A"]


def test_federations_that_cannot_work_are_refused() -> None:
    keys = {f"site-{i}": bytes(32) for i in range(3)}
    arguments = (AGGREGATOR, TRAINING, "mean", 1, 2.0, 20.0)
    for weights, expected in (
        (dict.fromkeys(keys, 100), "1, 2 or 4"),
        ({**dict.fromkeys(keys, 1), "site-0": 4}, "67%"),
    ):
        with pytest.raises(ConfigError, match=expected):
            Federation("t", keys, weights, *arguments)
    with pytest.raises(ConfigError, match="at least 3 sites, got 2"):
        Federation("t", dict(list(keys.items())[:2]), {"site-0": 1, "site-1": 1}, *arguments)
    with pytest.raises(ConfigError, match="contract weight"):
        Federation("t", keys, {"site-0": 1}, *arguments)


def test_a_grid_without_nodes_connects_to_nobody(start: Adapter) -> None:
    federation = Federation(
        "t",
        {f"site-{i}": bytes(32) for i in range(3)},
        {f"site-{i}": 1 for i in range(3)},
        AGGREGATOR,
        TRAINING,
        "mean",
        1,
        2.0,
        1.0,
    )
    with grid_of([]) as grid:
        assert FlowerSites.connect(grid, federation, timeout_s=0.2).names == ()
