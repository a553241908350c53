"""The direction a server may choose: it fits the ring, is committed to before it is shown, and is shown once."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from common.errors import ConfigError, PrivacyError, TrustError
from common.secagg import SUM_ONLY, Limits, messages
from common.secagg.context import check_terms
from common.secagg.direction import LARGEST, commitment, length, read, rounded
from common.secagg.encoding import decode
from common.secagg.limits import check_may_upload
from common.secagg.masking import mask_sign
from common.secagg.ring import Ring
from common.secagg.sketch import Sketch
from tests.common.secagg.federation import LOOSE, Federation, asked, drive, opened, resigned, run, served

LOOKING = replace(LOOSE, directions=1)
DIMENSION = 12_000


def looking(n: int = 9, **options: Any) -> Federation:
    return Federation(n, limits=LOOKING, dimension=DIMENSION, **options)


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    one, other = one.astype(np.float64), other.astype(np.float64)
    return float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other)))


# --- the vector


@settings(deadline=None, max_examples=80)
@given(
    arrays.arrays(np.float32, st.integers(1, 300), elements=st.floats(-1e6, 1e6, width=32)),
    st.sampled_from([1.0, 1e-9, 1e9]),
)
def test_any_vector_becomes_small_whole_numbers_that_fit_the_ring(vector_D: np.ndarray, scale: float) -> None:
    found_D = rounded(vector_D.astype(np.float64) * scale)
    assert found_D.dtype == np.int8 and np.abs(found_D.astype(int)).max() <= LARGEST
    assert length(found_D) ** 2 <= len(vector_D) + 1e-9
    assert np.all(found_D * vector_D >= 0)  # no coordinate turns round
    assert read(found_D.tobytes(), dimension=len(vector_D), committed=commitment(found_D)).tolist() == found_D.tolist()


@pytest.mark.parametrize("tail", [2, 3, 30])
def test_it_points_where_the_vector_does(tail: int) -> None:
    """Student's t with few degrees of freedom: a gradient has coordinates far larger than is usual."""
    vector_D = np.random.default_rng(tail).standard_t(tail, size=40_000)
    assert cosine(rounded(vector_D), np.clip(vector_D, *(LARGEST * vector_D.std() * np.array([-1, 1])))) > 0.9


def test_nothing_and_what_is_no_number_have_no_direction() -> None:
    assert not rounded(np.zeros(5)).any()
    for value in (np.nan, np.inf):
        with pytest.raises(ValueError, match="not finite"):
            rounded(np.array([1.0, value]))


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (np.ones(99, np.int8), "has 99 values"),
        (np.r_[np.int8(17), np.zeros(99, np.int8)].astype(np.int8), "too large"),
        (np.r_[np.int8(-128), np.zeros(99, np.int8)].astype(np.int8), "too large"),
        (np.r_[np.int8(2), np.ones(99, np.int8)].astype(np.int8), "too long"),
    ],
)
def test_a_site_takes_no_direction_that_does_not_fit(data: np.ndarray, match: str) -> None:
    with pytest.raises(TrustError, match=match):
        read(data.tobytes(), dimension=100, committed=commitment(data))
    with pytest.raises(TrustError, match="not the one the server committed to"):
        read(bytes(100), dimension=100, committed=commitment(data))


# --- the projection


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32 - 1), st.integers(128 * 4, 150_000))
def test_the_last_word_is_the_inner_product_in_whole_numbers(seed: int, dimension: int) -> None:
    rng = np.random.default_rng(seed)
    words_D = rng.integers(0, 2**32, dimension, np.uint32)
    chosen_D = rng.integers(-LARGEST, LARGEST, dimension, np.int8, endpoint=True)
    plain, beside = Sketch(bytes(32), dimension, 128), Sketch(bytes(32), dimension, 128, chosen_D)
    found_K = beside.apply(words_D)
    assert (beside.rows, beside.hashed, plain.rows) == (513, 512, 512)
    assert np.array_equal(found_K[:-1], plain.apply(words_D))
    exact = sum(int(w) * int(v) for w, v in zip(words_D.tolist(), chosen_D.tolist(), strict=True))
    assert int(found_K[-1]) == exact % 2**32


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("weight", [1, 4])
def test_the_longest_update_along_the_longest_direction_does_not_wrap(weight: int, sign: float) -> None:
    chosen_D = np.ones(DIMENSION, np.int8)  # of length √D
    ring = Ring(2.0, 16, longest=4 * np.sqrt(DIMENSION))
    update_D = sign * 2.0 * chosen_D / length(chosen_D)
    words_D = ring.quantise(update_D, weight=weight, key=os.urandom(32))
    found = Sketch(bytes(32), DIMENSION, 32, chosen_D).apply(words_D)[-1:].view(np.int32)[0]
    assert found / (ring.scale * weight) == pytest.approx(sign * 2.0 * np.sqrt(DIMENSION), rel=1e-3)


def test_the_server_sees_how_long_each_update_is_along_it_and_no_more_than_that_is_new() -> None:
    federation = looking(8, weights={f"s0{i}": w for i, w in enumerate((1, 1, 2, 2, 1, 1, 2, 1), start=1)})
    reference_D = np.random.default_rng(1).normal(size=DIMENSION)
    server = federation.server(reference_D=reference_D)
    outcome = run(federation, server=server)
    assert outcome.result is not None and outcome.result.included == federation.names
    ahead_D = rounded(reference_D).astype(np.float64)
    ahead_D /= np.linalg.norm(ahead_D)
    shown = server._along()
    assert shown is not None and set(shown.lengths) == set(federation.names)
    for name, along in shown.lengths.items():
        assert along == pytest.approx(federation.update(name) @ ahead_D, abs=1e-4)
    assert np.abs(outcome.result.mean_D - federation.mean(federation.names)).max() < federation.rounding(
        federation.names
    )


# --- what it is for


def noisy(federation: Federation, signal_D: np.ndarray, *flipped: str, round: int = 1) -> None:
    """Updates whose cosines to each other are 0.004, with noise to tell them apart; some are turned round."""
    share = np.sqrt(0.004)
    for name in federation.names:
        noise_D = federation.rng.normal(size=DIMENSION)
        update_D = share * signal_D + np.sqrt(1 - share**2) * noise_D / np.linalg.norm(noise_D)
        federation.updates[name, round] = (0.9 * (-1 if name in flipped else 1) * update_D).astype(np.float32)


def test_negated_updates_are_told_by_the_reference_and_by_nothing_else() -> None:
    signal_D = np.random.default_rng(2).normal(size=DIMENSION)
    signal_D /= np.linalg.norm(signal_D)
    reference_D = 0.7 * signal_D + 0.7 * np.random.default_rng(3).normal(size=DIMENSION) / np.sqrt(DIMENSION)
    liars, federation = ("s03", "s08"), looking(12, seed=5)
    noisy(federation, signal_D, *liars)
    with_it = run(federation, server=federation.server(reference_D=reference_D))
    assert with_it.result is not None
    assert set(federation.names) - set(with_it.result.included) == set(liars)
    assert {(r.site, r.reason) for r in with_it.server.refusals} == {
        (name, "it points against what public data teach") for name in liars
    }
    assert not with_it.guilty
    without = looking(12, seed=5)
    noisy(without, signal_D, *liars)
    assert run(without).result.included == without.names  # type: ignore[union-attr]


def test_the_gate_keeps_to_the_budget_compares_angles_and_is_off_where_no_other_set_is_signed() -> None:
    """Five of 13 are turned round, at lengths from a quarter of the clip on; three may be excluded."""
    signal_D = np.random.default_rng(2).normal(size=DIMENSION)
    signal_D /= np.linalg.norm(signal_D)
    liars, federation = ("s03", "s08", "s09", "s10", "s11"), looking(13, seed=6)
    noisy(federation, signal_D, *liars)
    for number, name in enumerate(federation.names):
        federation.updates[name, 1] *= np.float32(0.25 + 0.06 * number)
    server = federation.server(reference_D=signal_D)
    outcome = run(federation, server=server)
    assert outcome.result is not None and server.held
    excluded = set(federation.names) - set(outcome.result.included)
    assert len(excluded) == 3 and excluded < set(liars)
    for name, along in server._along().lengths.items():  # type: ignore[union-attr]
        assert abs(along) < 0.2 * np.linalg.norm(federation.update(name))


def test_what_is_found_is_said_where_no_other_set_of_sites_would_be_signed() -> None:
    signal_D = np.random.default_rng(2).normal(size=DIMENSION)
    signal_D /= np.linalg.norm(signal_D)
    federation = Federation(13, limits=replace(LOOKING, distinct_sets=3), dimension=DIMENSION, seed=6)
    noisy(federation, signal_D, "s03", round=11)
    everyone = frozenset(federation.names)
    past = {8: everyone, 9: everyone - {"s12"}, 10: everyone - {"s12", "s13"}}
    terms = federation.terms(round=11)
    server = federation.server(terms, reference_D=signal_D, past=past)
    outcome = run(federation, server=server, terms=terms)
    assert outcome.result is not None and set(outcome.result.included) == everyone
    assert server.unapplied == {"s03": "it points against what public data teach"}
    assert not server.held


@pytest.mark.parametrize(("count", "liars"), [(12, ("s03", "s08")), (20, ("s02", "s05", "s11", "s17"))])
@pytest.mark.parametrize("norm", [0.9, 1.0])
def test_colluders_who_lie_about_the_masks_they_share_are_seen_by_their_sketches(
    count: int, liars: tuple[str, ...], norm: float
) -> None:
    """Nobody opens a mask between two that are summed. What one adds to its number the others take away modulo 2³²."""
    signal_D = np.random.default_rng(2).normal(size=DIMENSION)
    signal_D /= np.linalg.norm(signal_D)
    federation = looking(count, seed=1)
    noisy(federation, signal_D, *liars)
    for name in liars:
        federation.updates[name, 1] *= np.float32(norm / 0.9)
    hub, steps = liars[0], (1 << 32) // len(liars)

    def lied(name: str, report: messages.SketchReport) -> messages.SketchReport:
        def shown(mask: messages.MaskSketch) -> messages.MaskSketch:
            leaf = mask.other if name == hub else name
            if {name, mask.other} != {hub, leaf} or leaf not in liars:
                return mask
            word = int(np.frombuffer(mask.words[-4:], "<u4")[0]) - mask_sign(leaf, hub) * steps
            return replace(mask, words=mask.words[:-4] + np.uint32(word % 2**32).tobytes())

        return replace(report, masks=tuple(map(shown, report.masks)))

    server = federation.server(reference_D=signal_D)
    lies = _sketches_only(resigned(federation, messages.SketchReport, lied, *liars))
    outcome = run(federation, server=server, from_site={"Agreed": lies})
    assert outcome.result is not None
    seen = server._along()
    assert seen is not None and all(seen.lengths[name] > 0.1 for name in liars)  # as if they agreed with it
    assert set(federation.names) - set(outcome.result.included) == set(liars)
    assert {r.reason for r in server.refusals} == {"its projections contradict each other"}


@pytest.mark.parametrize("reference_D", [np.zeros(DIMENSION), None])
def test_no_reference_is_no_direction(reference_D: np.ndarray | None) -> None:
    federation = looking(5)
    server = federation.server(reference_D=reference_D)
    outcome = run(federation, server=server)
    assert outcome.result is not None and not server._along()


def test_where_the_terms_allow_none_the_server_shows_none() -> None:
    federation = Federation(5)
    server = federation.server(reference_D=np.ones(federation.dimension))
    assert run(federation, server=server).result is not None
    assert not server._along()


# --- a hostile server


def hostile(federation: Federation, at: str, message: Any) -> bytes:
    return asked(federation, message, drive(federation, federation.server(), at)["s01"])


def refused(federation: Federation, request: bytes, match: str) -> None:
    before = dict(federation.disks["s01"].records)
    with pytest.raises(TrustError, match=match):
        federation.tell("s01", request)
    assert federation.disks["s01"].records == before


@pytest.mark.parametrize("limits", [LOOSE, LOOKING])
def test_a_site_agrees_to_a_direction_only_where_its_policy_says_so(limits: Limits) -> None:
    federation = Federation(5, limits=limits)
    requests = drive(federation, federation.server(), "Uploads")
    uploads = opened(federation, messages.Uploads, requests["s01"])
    for committed in (b"x" * 31, b"x" * 33) if limits.directions else (b"x" * 32,):
        request = asked(federation, replace(uploads, direction=committed), requests["s01"])
        refused(federation, request, "not looked at along a direction")
        federation.live.clear()
        requests = drive(federation, federation.server(), "Uploads")
        uploads = opened(federation, messages.Uploads, requests["s01"])


def test_the_direction_that_is_shown_is_the_one_that_was_committed_to() -> None:
    other = rounded(np.random.default_rng(9).normal(size=DIMENSION)).tobytes()
    federation = looking(5)
    server = federation.server(reference_D=np.random.default_rng(1).normal(size=DIMENSION))
    outcome = run(
        federation, server=server, to_site={"Agreed": served(federation, messages.Agreed, lambda n, m: replace(m, direction=other))}
    )  # fmt: skip
    assert outcome.result is None
    assert set(outcome.refused_by_sites) == set(federation.names)
    assert all("not the one the server committed to" in str(e) for e in outcome.refused_by_sites.values())
    assert {federation.state(name) for name in federation.names} == {"uploaded"}  # nothing was opened


def test_a_direction_that_was_not_committed_to_is_not_taken() -> None:
    federation = looking(5)
    shown = rounded(np.random.default_rng(9).normal(size=DIMENSION)).tobytes()
    outcome = run(
        federation, to_site={"Agreed": served(federation, messages.Agreed, lambda n, m: replace(m, direction=shown))}
    )
    assert outcome.result is None
    assert all("did not commit to" in str(e) for e in outcome.refused_by_sites.values())


def test_sites_that_are_promised_different_directions_cannot_agree() -> None:
    """Else a server could look along one direction at one site and along another at the next."""
    federation = looking(5)
    promised = served(
        federation, messages.Uploads, lambda n, m: replace(m, direction=bytes([int(n[1:])] * 32)), *federation.names
    )
    outcome = run(federation, to_site={"Uploads": promised})
    assert outcome.result is None and "0 sites agree" in outcome.void
    assert {federation.state(name) for name in federation.names} == {"uploaded"}


def test_a_direction_beyond_the_ring_is_refused_before_anything_is_opened() -> None:
    federation = looking(5)
    server = federation.server(reference_D=np.ones(DIMENSION))
    server._direction_D = np.full(DIMENSION, 2, np.int8)  # twice as long as fits
    outcome = run(federation, server=server)
    assert outcome.result is None
    assert all("too long for the ring" in str(e) for e in outcome.refused_by_sites.values())
    assert {federation.state(name) for name in federation.names} == {"uploaded"}


# --- a hostile site


def test_a_lie_about_the_last_word_of_a_sketch_is_found_and_named() -> None:
    """It would pass as an update that agrees with the reference."""
    federation = looking(7)

    def lied(name: str, report: messages.SketchReport) -> messages.SketchReport:
        word = np.frombuffer(report.own[-4:], "<u4")[0] - np.uint32(1 << 24)
        return replace(report, own=report.own[:-4] + np.uint32(word).tobytes())

    server = federation.server(reference_D=np.random.default_rng(1).normal(size=DIMENSION))
    outcome = run(
        federation, server=server, from_site={"Agreed": _sketches_only(resigned(federation, messages.SketchReport, lied, "s02"))}
    )  # fmt: skip
    assert outcome.result is None
    assert outcome.guilty == {"s02"}
    assert "false sketch of its own mask" in outcome.server.guilty["s02"]


def _sketches_only(change: Any) -> Any:
    def changed(name: str, data: bytes) -> bytes:
        return change(name, data) if decode(messages.Reply, data).signed.kind == "SketchReport" else data

    return changed


# --- limits and terms


def test_the_direction_counts_among_what_was_shown() -> None:
    plain, beside = Federation(5).terms(), looking(5).terms()
    assert beside.sketched_share == pytest.approx(plain.sketched_share + 1 / DIMENSION)
    federation = looking(5)
    run(federation, server=federation.server(reference_D=np.ones(DIMENSION)))
    record = federation.disks["s01"].records[1]
    assert record.sketched_share == beside.sketched_share
    tight = replace(LOOKING, sketched_share=1.5 * beside.sketched_share)
    with pytest.raises(PrivacyError, match="sketches would have shown"):
        check_may_upload(federation.terms(round=2, limits=tight), "s01", [record])


def test_terms_have_one_direction_at_most_and_the_smallest_sketch_has_room_for_it() -> None:
    with pytest.raises(ConfigError, match="at most one direction"):
        check_terms(Federation(5).terms(limits=replace(LOOSE, directions=2)))
    # 9 847 dimensions carry a sketch of 128 words, and not one more
    assert Federation(5, dimension=9_847).terms().buckets == 32
    with pytest.raises(ConfigError, match="too small for a sketch"):
        Federation(5, dimension=9_847, limits=LOOKING).terms()


def test_words_are_alike_in_both_modes_and_never_sent_again_in_another_scale() -> None:
    federation = looking(4)
    sketched, summed = federation.terms(), federation.terms(mode=SUM_ONLY)
    assert sketched.ring.scale == summed.ring.scale < Federation(4, dimension=DIMENSION).terms().ring.scale
    assert summed.directions == 0
    requests = drive(federation, federation.server(), "Uploads")
    assert requests and federation.state("s01") == "uploaded"
    federation.limits = LOOSE  # the site's people strike the direction out, in the middle of a round
    federation.live.clear()
    requests = drive(federation, federation.server(), "Admitted")
    with pytest.raises(PrivacyError, match="another scale"):
        federation.tell("s01", requests["s01"])
    assert federation.disks["s01"].records[1].uploads == 1


def test_the_ring_has_room_for_the_heaviest_and_for_many_colluders() -> None:
    """2³⁰ steps are C w √D, so an update of less than twice the clip never wraps."""
    weights = {f"s{i:02}": w for i, w in enumerate((4, 1, 2, 4, 4, 4, 1, 4, 4), start=1)}
    terms = looking(9, weights=weights).terms()
    assert terms.clip_norm * 4 * np.sqrt(terms.dimension) * terms.ring.scale == pytest.approx(2.0**30)
    many = looking(97).terms()
    assert many.colluders == 32
    assert np.sqrt(many.dimension) * many.ring.scale == pytest.approx(2.0**30 / 4)


def test_so_many_parameters_that_rounding_would_be_felt_have_no_direction() -> None:
    assert Federation(9, dimension=70_000_000, limits=LOOKING).terms().directions == 1
    with pytest.raises(ConfigError, match="too many for a direction: rounding would move an update by 3"):
        Federation(9, dimension=80_000_000, limits=LOOKING).terms()
    assert Federation(9, dimension=80_000_000).terms().directions == 0


def test_a_reference_of_another_length_is_refused_before_anything_is_spent() -> None:
    with pytest.raises(ValueError, match="a reference of 9 values"):
        looking(5).server(reference_D=np.ones(9))
