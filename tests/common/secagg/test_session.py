"""Whole sessions: exact sums, whoever disappears, and whoever lies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import TrustError
from common.secagg import SKETCH, SUM_ONLY, Summed, messages
from common.secagg import server as server_module
from common.secagg import site as site_module
from common.secagg.encoding import decode, encode
from common.secagg.graph import Degree
from common.secagg.messages import Reply
from tests.common.secagg.federation import Change, Federation, Outcome, asked, drive, resigned, run, silent

STEPS = ("Offer", "Roll", "Deal", "Admitted", "Uploads", "Agreed", "Choice")


def check_exact(federation: Federation, outcome: Outcome) -> Summed:
    """The sum is that of the words on the included sites' disks, to the bit, and near that of their floats."""
    result = outcome.result
    assert result is not None, outcome.void
    terms = federation.terms()
    dtype = {32: np.uint32, 16: np.uint16}[federation.word_bits]
    words_D = np.sum([federation.disks[name].words[1] for name in result.included], axis=0, dtype=dtype)
    weight = sum(federation.weights[name] for name in result.included)
    assert np.array_equal(result.mean_D, terms.ring.values(words_D) / weight)
    error_D = result.mean_D - federation.mean(result.included)
    error = np.abs(error_D).max() if federation.word_bits == 32 else np.linalg.norm(error_D)
    assert error <= federation.rounding(result.included)
    return result


@pytest.mark.parametrize(
    ("n", "mode", "bits"),
    [
        (3, SUM_ONLY, 32),
        (3, SUM_ONLY, 16),
        (4, SUM_ONLY, 32),
        (4, SKETCH, 32),
        (5, SUM_ONLY, 32),
        (5, SKETCH, 32),
        (10, SUM_ONLY, 32),
        (10, SUM_ONLY, 16),
        (10, SKETCH, 32),
        pytest.param(20, SKETCH, 32, marks=pytest.mark.slow),
    ],
)
def test_the_sum_is_exact(n: int, mode: str, bits: int) -> None:
    federation = Federation(n, mode=mode, word_bits=bits)
    outcome = run(federation)
    result = check_exact(federation, outcome)
    assert len(result.included) >= federation.terms().minimum_included
    assert mode == SKETCH or result.included == federation.names
    assert not outcome.guilty and not outcome.refused_by_sites
    assert {federation.state(name) for name in federation.names} == {"committed"}


@pytest.mark.parametrize("bits", [32, 16])
def test_weights_count(bits: int) -> None:
    weights = {"s01": 4, "s02": 1, "s03": 2, "s04": 4, "s05": 4, "s06": 2}
    federation = Federation(6, mode=SUM_ONLY, weights=weights, word_bits=bits)
    check_exact(federation, run(federation))


def test_a_sketch_shows_an_updates_norm_and_its_distances() -> None:
    federation = Federation(5, dimension=60_000, weights={f"s0{i}": w for i, w in enumerate((2, 1, 2, 2, 2), 1)})
    outcome = run(federation)
    assert outcome.result is not None
    sketches = {name: outcome.server._in_units(name) for name in federation.names}
    for name, sketch in sketches.items():
        assert np.linalg.norm(sketch) == pytest.approx(np.linalg.norm(federation.update(name)), rel=0.15)
    between = np.linalg.norm(sketches["s01"] - sketches["s02"])
    assert between == pytest.approx(np.linalg.norm(federation.update("s01") - federation.update("s02")), rel=0.15)


@pytest.mark.parametrize(("mode", "bits"), [(SUM_ONLY, 32), (SUM_ONLY, 16), (SKETCH, 32)])
@pytest.mark.parametrize("step", STEPS)
def test_sites_that_disappear_before_any_step_cost_nobody_anything(step: str, mode: str, bits: int) -> None:
    federation = Federation(6, mode=mode, seed=3, word_bits=bits)
    gone = ("s02", "s05") if mode == SUM_ONLY or step in ("Offer", "Roll", "Deal", "Admitted") else ("s02",)
    stopped: set[str] = set()

    def vanish(name: str, data: bytes) -> bytes | None:
        stopped.update(set(gone))
        return None if name in gone else data

    rest: dict[str, Change] = {kind: silent(*gone) for kind in STEPS[STEPS.index(step) :]}
    outcome = run(federation, to_site={**rest, step: vanish})
    result = check_exact(federation, outcome)
    assert stopped and not outcome.guilty
    uploaded = step in ("Uploads", "Agreed", "Choice")
    assert all((federation.state(name) != "new") == uploaded for name in gone if federation.state(name) != "absent")
    if not uploaded:
        assert not set(gone) & set(result.included)
    if step == "Uploads" and mode == SUM_ONLY:  # the upload counts without its site
        assert set(gone) <= set(result.included)


@pytest.mark.parametrize("step", STEPS)
def test_a_reply_lost_on_the_way_is_like_a_site_that_disappeared(step: str) -> None:
    federation = Federation(5, mode=SUM_ONLY, seed=4)
    outcome = run(federation, from_site={step: silent("s03")})
    assert not outcome.guilty
    check_exact(federation, outcome)


def test_three_sites_are_all_or_nothing() -> None:
    for step in ("Offer", "Roll", "Deal", "Admitted"):
        federation = Federation(3, mode=SUM_ONLY)
        outcome = run(federation, to_site={step: silent("s02")})
        assert outcome.result is None and "too few" in outcome.void
        assert all(federation.state(name) in ("absent", "new", "uploaded") for name in federation.names)


def test_more_dropouts_than_the_quorum_allows_end_the_session_and_open_nothing() -> None:
    federation = Federation(10)
    outcome = run(federation, to_site={"Agreed": silent("s01", "s02", "s03", "s04")})
    assert outcome.result is None
    assert all(federation.state(name) in ("uploaded", "opened") for name in federation.names)


@pytest.mark.parametrize("bits", [32, 16])
def test_an_update_resent_in_another_session_is_the_same_words_under_other_masks(bits: int) -> None:
    federation = Federation(5, mode=SUM_ONLY, word_bits=bits)
    seen: list[bytes] = []

    def watch(name: str, data: bytes) -> bytes:
        if name == "s01":
            seen.append(decode(Reply, data).words)
        return data

    first = run(federation, from_site={"Admitted": watch}, to_site={"Uploads": silent("s04", "s05")})
    assert first.result is None
    words = federation.disks["s01"].words[1].copy()
    check_exact(federation, run(federation, from_site={"Admitted": watch}))
    assert np.array_equal(words, federation.disks["s01"].words[1])
    assert len(seen) == 2 and seen[0] != seen[1]


def test_half_the_bits_are_half_the_upload_and_no_word_tells_of_its_update() -> None:
    sent: dict[int, int] = {}
    for bits in (32, 16):
        federation = Federation(3, mode=SUM_ONLY, word_bits=bits)

        def weigh(name: str, data: bytes, bits: int = bits, federation: Federation = federation) -> bytes:
            words = decode(Reply, data).words
            sent[bits] = len(words)
            uploaded_D = np.frombuffer(words, f"<u{bits // 8}")
            rounded_D = federation.disks[name].words[1]
            assert abs(np.corrcoef(uploaded_D, rounded_D.view(f"i{bits // 8}"))[0, 1]) < 0.06
            assert np.bincount(uploaded_D >> (bits - 3), minlength=8).std() < 200  # of 1500, evenly spread
            return data

        check_exact(federation, run(federation, from_site={"Admitted": weigh}))
    assert sent == {32: 4 * 12_000, 16: 2 * 12_000}


def test_an_update_that_does_not_fit_narrow_words_is_that_sites_dropout() -> None:
    federation = Federation(5, mode=SUM_ONLY, word_bits=16)
    rotation = federation.terms().ring.rotation
    assert rotation is not None
    federation.updates["s02", 1] = rotation.undo(np.eye(1, federation.dimension, 9)[0])
    outcome = run(federation)
    result = check_exact(federation, outcome)
    assert result.included == ("s01", "s03", "s04", "s05") and not outcome.guilty
    assert "does not fit words of 16 bits" in str(outcome.refused_by_sites["s02"])
    assert federation.state("s02") == "new", "nothing of it was sent"


def test_a_request_repeated_is_answered_with_the_same_bytes() -> None:
    federation = Federation(4)
    answers: list[tuple[bytes, bytes]] = []

    def twice(name: str, data: bytes) -> bytes:
        if name == "s02":
            session = federation.live[name]
            answers.append((session.answer(data).reply, session.answer(data).reply))
        return data

    outcome = run(federation, to_site=dict.fromkeys(STEPS, twice))
    check_exact(federation, outcome)
    assert len(answers) == 8 and all(one == other for one, other in answers)


# --- a regular graph, as above a hundred sites


@pytest.fixture
def sparse(monkeypatch: pytest.MonkeyPatch) -> Degree:
    """Neighbourhoods of four, with sizes too small to be safe and easy to test."""
    small = Degree(neighbours=4, share_threshold=3, minimum_neighbours=3)
    for module in (site_module, server_module):
        monkeypatch.setattr(module, "degree", lambda *args, **kwargs: small)
    return small


@pytest.mark.parametrize(("mode", "bits"), [(SUM_ONLY, 32), (SUM_ONLY, 16), (SKETCH, 32)])
def test_a_sum_over_a_regular_graph_is_exact_with_and_without_dropouts(mode: str, bits: int, sparse: Degree) -> None:
    federation = Federation(12, mode=mode, word_bits=bits)
    masks: list[int] = []

    def count(name: str, data: bytes) -> bytes:
        message = decode(Reply, data).signed
        if message.kind == "SketchReport":
            masks.append(len(decode(messages.SketchReport, message.body).masks))
        return data

    outcome = run(federation, from_site={"Agreed": count})
    check_exact(federation, outcome)
    assert mode == SUM_ONLY or set(masks) == {4}
    federation = Federation(12, mode=mode, word_bits=bits)
    outcome = run(federation, to_site={"Uploads": silent("s05"), "Agreed": silent("s05"), "Choice": silent("s05")})
    assert not outcome.guilty and (outcome.result is None or check_exact(federation, outcome))


@pytest.mark.slow
def test_above_a_hundred_sites_the_graph_is_regular_and_the_sum_exact() -> None:
    federation = Federation(102, mode=SUM_ONLY, dimension=200)
    sharers: set[int] = set()

    def count(name: str, data: bytes) -> bytes:
        sharers.add(len(decode(messages.Dealing, decode(Reply, data).signed.body).shares))
        return data

    outcome = run(federation, from_site={"Roll": count}, to_site={"Admitted": silent("s07", "s55", "s99")})
    result = check_exact(federation, outcome)
    assert sharers == {77} and len(result.included) == 99 and not outcome.refused_by_sites


@pytest.mark.parametrize("mode", [SUM_ONLY, SKETCH])
def test_a_site_keeps_no_more_than_it_still_needs(mode: str, sparse: Degree) -> None:
    """Its neighbours' keys and no others'; once it has sent, neither its update nor what it dealt."""
    federation = Federation(12, mode=mode)
    drive(federation, federation.server(), "Admitted")
    site = federation.live["s01"]
    assert set(site._peer_keys) == {"s01", *site._graph.neighbours("s01")} and len(site._peer_keys) == 5
    assert len(site._shares._dealt) == len(site._shares._secrets) + 1 == 5
    federation.live.clear()
    requests = drive(federation, federation.server(), "Uploads")
    site = federation.live["s01"]
    assert not hasattr(site, "_update_D") and not hasattr(site, "_stored_words_D")
    assert not (site._shares._dealt or site._shares._received or site._shares._secrets)
    assert set(site._shares._held) == set(site._peer_keys)  # what it has to reveal
    assert federation.tell("s01", requests["s01"])  # and it goes on


def test_a_site_insists_on_its_own_neighbours(sparse: Degree) -> None:
    """The server may drop few sites in all and still most of one site's neighbourhood."""
    federation = Federation(13, mode=SKETCH)
    requests = drive(federation, federation.server(), "Choice")
    near = federation.live["s01"]._graph.neighbours("s01")
    included = tuple(name for name in federation.names if name not in near[:2])
    request = asked(federation, messages.Choice(included), requests["s01"])
    with pytest.raises(TrustError, match="2 neighbours are too few: at least 3"):
        federation.tell("s01", request)
    assert federation.state("s01") == "opened"


# --- any schedule of silence and lies


def shifted(words: bytes) -> bytes:
    values = np.frombuffer(words, "<u4").copy()
    values[0] += np.uint32(1 << 20)
    return values.tobytes()


def _other_words(name: str, report: messages.SketchReport) -> messages.SketchReport:
    return replace(report, own=shifted(report.own))


def _other_pair(name: str, report: messages.SketchReport) -> messages.SketchReport:
    first = replace(report.masks[0], words=shifted(report.masks[0].words))
    return replace(report, masks=(first, *report.masks[1:]))


def _other_share(name: str, reveal: messages.Reveal) -> messages.Reveal:
    one = reveal.shares[1]
    return replace(reveal, shares=(reveal.shares[0], replace(one, share=bytes(66)), *reveal.shares[2:]))


def _complain(name: str, verdict: messages.Verdict) -> messages.Verdict:
    return messages.Verdict(("s01",) if name != "s01" else ("s02",))


def garbage(*names: str) -> Change:
    return lambda name, data: b"\x00garbage" if name in names else data


def broken_signature(*names: str) -> Change:
    def change(name: str, data: bytes) -> bytes:
        if name not in names:
            return data
        reply = decode(Reply, data)
        return encode(replace(reply, signed=replace(reply.signed, signature=bytes(64))))

    return change


LIES: dict[str, tuple[str, Callable[[Federation, str], Change]]] = {
    "own sketch": (
        "Agreed",
        lambda f, s: _if(messages.SketchReport, resigned(f, messages.SketchReport, _other_words, s)),
    ),
    "pair sketch": (
        "Agreed",
        lambda f, s: _if(messages.SketchReport, resigned(f, messages.SketchReport, _other_pair, s)),
    ),
    "share": ("Agreed", lambda f, s: _if(messages.Reveal, resigned(f, messages.Reveal, _other_share, s))),
    "complaint": ("Deal", lambda f, s: resigned(f, messages.Verdict, _complain, s)),
    "garbage keys": ("Offer", lambda f, s: garbage(s)),
    "garbage shares": ("Roll", lambda f, s: garbage(s)),
    "bad signature": ("Admitted", lambda f, s: broken_signature(s)),
    "bad agreement": ("Uploads", lambda f, s: broken_signature(s)),
    "garbage choice": ("Choice", lambda f, s: garbage(s)),
}


def _if(kind: type, change: Change) -> Change:
    """Only where the reply is of that kind: sketches and reveals answer the same request."""
    return lambda name, data: change(name, data) if decode(Reply, data).signed.kind == kind.__name__ else data


def both(*changes: Change) -> Change:
    def change(name: str, data: bytes) -> bytes | None:
        seen: bytes | None = data
        for one in changes:
            seen = None if seen is None else one(name, seen)
        return seen

    return change


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    kind=st.sampled_from([(SUM_ONLY, 32), (SUM_ONLY, 16), (SKETCH, 32)]),
    liars=st.dictionaries(st.sampled_from(["s02", "s05"]), st.sampled_from(sorted(LIES)), max_size=2),
    gone=st.dictionaries(st.sampled_from(["s03", "s04"]), st.sampled_from(STEPS), max_size=2),
)
def test_no_schedule_blames_the_honest_or_gives_a_false_sum(
    kind: tuple[str, int], liars: dict[str, str], gone: dict[str, str]
) -> None:
    federation = Federation(7, mode=kind[0], dimension=10_000, word_bits=kind[1])  # two may lie: f = 2
    changes: dict[str, Change] = {}
    for name, lie in liars.items():
        step, make = LIES[lie]
        made = make(federation, name)
        changes[step] = both(changes[step], made) if step in changes else made
    to_site: dict[str, Change] = {}
    for step in STEPS:
        names = [name for name, since in gone.items() if STEPS.index(since) <= STEPS.index(step)]
        to_site[step] = silent(*names)
    outcome = run(federation, to_site=to_site, from_site=changes)
    assert outcome.guilty <= set(liars)
    assert not outcome.refused_by_sites.keys() - set(liars), outcome.refused_by_sites
    if outcome.result is not None:
        check_exact(federation, outcome)
    else:
        assert outcome.void
