"""Hostile sites against an honest server and honest sites: refused, or named; the honest never are.

Named after the findings of the protocol's review (docs/leakage.md).
"""

from __future__ import annotations

import hashlib
import os
import pickle
import types
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from aggregator.cohort import EXCLUDING_STAGES
from aggregator.secure_round import _refusals
from common.errors import PrivacyError, RoundError, TrustError
from common.secagg import SKETCH, SUM_ONLY, masking, messages, shamir, shares
from common.secagg.encoding import decode, digest, encode
from common.secagg.messages import Reply, say
from common.secagg.opening import check_sum
from common.secagg.selection import ABOVE_CLIP, DISPUTED, select
from common.secagg.site import SketchSeed
from common.secagg.sketch import Sketch, as_floats
from tests.common.secagg.federation import Change, Federation, Outcome, asked, drive, resigned, run, silent
from tests.common.secagg.test_session import _if, broken_signature, check_exact

BAD = "s04"


def adds(federation: Federation, delta_D: np.ndarray, *names: str) -> Change:
    """Upload something else than was rounded: `delta_D` ring words are added, and the sum of both is signed."""

    def change(name: str, data: bytes) -> bytes:
        if name not in names:
            return data
        reply = decode(Reply, data)
        kind = f"<u{federation.word_bits // 8}"
        words = (np.frombuffer(reply.words, kind) + delta_D.astype(kind)).astype(kind).tobytes()
        upload = replace(decode(messages.Upload, reply.signed.body), words_sha256=hashlib.sha256(words).digest())
        federation.live[name]._uploaded = upload  # its own session must not notice
        said = say(upload, sender=name, transcript=reply.signed.transcript, key=federation.keys[name])
        return encode(Reply(said, words))

    return change


def boost(federation: Federation, name: str, times: float) -> np.ndarray:
    """Ring words that make of an update `times` that update."""
    ring = federation.terms().ring
    values_D = ring.coordinates(federation.update(name)).astype(np.float64)
    return np.rint((times - 1) * values_D * ring.scale).astype(np.int64)


def on_sketch(federation: Federation, edit: Callable[[str, Any], Any], *names: str) -> Change:
    return _if(messages.SketchReport, resigned(federation, messages.SketchReport, edit, *names))


def on_reveal(federation: Federation, edit: Callable[[str, Any], Any], *names: str) -> Change:
    return _if(messages.Reveal, resigned(federation, messages.Reveal, edit, *names))


def shift(words: bytes, by: np.ndarray | int) -> bytes:
    return (np.frombuffer(words, "<u4") + np.asarray(by).astype(np.uint32)).astype("<u4").tobytes()


def shift_mask(report: messages.SketchReport, other: str, by: np.ndarray | int) -> messages.SketchReport:
    masks = tuple(replace(m, words=shift(m.words, by)) if m.other == other else m for m in report.masks)
    return replace(report, masks=masks)


# --- uploads outside what an honest site can make


@pytest.mark.parametrize("kind", ["boosted", "random words", "all 2^31", "reversed and boosted"])
def test_what_is_too_long_is_excluded_and_the_others_are_summed(kind: str) -> None:
    federation = Federation(6, dimension=40_000)
    delta_D = {
        "boosted": lambda: boost(federation, BAD, 30),
        "reversed and boosted": lambda: boost(federation, BAD, -30),
        "random words": lambda: np.frombuffer(os.urandom(160_000), np.uint32),
        "all 2^31": lambda: np.full(40_000, 1 << 31, np.uint32),
    }[kind]()
    outcome = run(federation, from_site={"Admitted": adds(federation, delta_D, BAD)})
    result = check_exact(federation, outcome)
    assert BAD not in result.included and not outcome.guilty
    assert any(r.site == BAD and r.reason == "its norm is above the clip" for r in outcome.server.refusals)


@pytest.mark.parametrize("bits", [32, 16])
@pytest.mark.parametrize("kind", ["boosted", "reversed and boosted", "random words", "the highest bit everywhere"])
def test_without_sketches_a_sum_that_is_too_long_is_thrown_away_and_nobody_named(kind: str, bits: int) -> None:
    """Words outside what an honest site can make wrap within 16 bits, and the sum they make is as long as the ring."""
    federation = Federation(5, mode=SUM_ONLY, word_bits=bits)
    delta_D = {
        "boosted": lambda: boost(federation, BAD, 30),
        "reversed and boosted": lambda: boost(federation, BAD, -30),
        "random words": lambda: np.frombuffer(os.urandom(48_000), np.uint32),
        "the highest bit everywhere": lambda: np.full(12_000, 1 << (bits - 1)),
    }[kind]()
    outcome = run(federation, from_site={"Admitted": adds(federation, delta_D, BAD)})
    assert outcome.result is None and "norm" in outcome.void and not outcome.guilty


@pytest.mark.parametrize("bits", [32, 16])
def test_a_sum_that_is_published_is_never_longer_than_its_sites_may_make_it(bits: int) -> None:
    """Also where a word of the liar's wraps: one at either width takes what is left of W C, and no more."""
    published = []
    for times in (2, 4, 8, 16, -4):
        federation = Federation(5, mode=SUM_ONLY, word_bits=bits, dimension=3000)
        delta_D = boost(federation, BAD, times)
        delta_D[:3] += 1 << (bits - 2)  # and single words far outside
        outcome = run(federation, from_site={"Admitted": adds(federation, delta_D, BAD)})
        assert not outcome.guilty
        if outcome.result is not None:
            published.append(times)
            slack = federation.terms().ring.rounding_norm(3000, 5) / 5
            assert np.linalg.norm(outcome.result.mean_D) <= 1.001 + slack
        else:
            assert "norm" in outcome.void
    assert 16 not in published and (bits == 32 or 2 in published)


@pytest.mark.parametrize(("bits", "sent"), [(16, 4), (32, 2), (16, 1), (16, 0)])
def test_words_of_another_width_put_their_site_out(bits: int, sent: int) -> None:
    federation = Federation(5, mode=SUM_ONLY, word_bits=bits, dimension=2000)

    def other(name: str, data: bytes) -> bytes:
        reply = decode(Reply, data)
        words = bytes(sent * 2000)
        upload = replace(decode(messages.Upload, reply.signed.body), words_sha256=hashlib.sha256(words).digest())
        said = say(upload, sender=name, transcript=reply.signed.transcript, key=federation.keys[name])
        return encode(Reply(said, words))

    outcome = run(federation, from_site={"Admitted": lambda n, d: other(n, d) if n == BAD else d})
    assert BAD not in check_exact(federation, outcome).included and not outcome.guilty
    reasons = [refusal.reason for refusal in outcome.server.refusals if refusal.site == BAD]
    assert any("bytes of masked words" in r for r in reasons) and BAD not in outcome.server.included


def test_four_sites_leave_no_exclusion_so_the_round_is_lost() -> None:
    federation = Federation(4, dimension=40_000)
    outcome = run(federation, from_site={"Admitted": adds(federation, boost(federation, BAD, 30), BAD)})
    assert outcome.result is None and "at most 0 may be" in outcome.void and not outcome.guilty
    assert [(r.site, r.stage, r.reason) for r in outcome.server.refusals] == [(BAD, "validate", ABOVE_CLIP)]
    assert {federation.state(name) for name in federation.names} == {"opened"}


def test_i4_more_bad_uploads_than_the_budget_end_the_round_with_nothing_summed() -> None:
    federation = Federation(9, dimension=40_000)  # two exclusions
    three = ("s02", "s03", "s04")
    outcome = run(federation, from_site={"Admitted": adds(federation, boost(federation, "s02", 30), *three)})
    assert outcome.result is None and "3 uploads must be excluded, at most 2" in outcome.void
    assert {r.site: (r.stage, r.reason) for r in outcome.server.refusals} == dict.fromkeys(
        three, ("validate", ABOVE_CLIP)
    )
    assert {federation.state(name) for name in federation.names} == {"opened"}  # no second look at anybody


def test_values_that_are_not_finite_do_not_leave_the_site() -> None:
    federation = Federation(4)
    federation.update("s01")[7] = np.nan
    request = drive_to_upload(federation)
    with pytest.raises(PrivacyError, match="not finite"):
        federation.tell("s01", request)
    assert federation.state("s01") == "new"


def drive_to_upload(federation: Federation) -> bytes:
    return drive(federation, federation.server(), "Admitted")["s01"]


# --- I1, I2: the sketch


def test_i1_a_vector_hidden_from_the_sketch_is_caught_by_the_sums_own_norm() -> None:
    """Two entries that cancel in every table, found by trying as an attacker with luck would."""
    federation = Federation(10, dimension=40_000)
    terms = federation.terms()
    sketch = Sketch(bytes(32), terms.dimension, terms.buckets)
    tables = np.stack(sketch._bytes_TD)
    order = np.lexsort(tables)
    total_D = terms.ring.quantise(federation.update("s01"), weight=1, key=bytes(32))
    kernel_D = np.zeros(terms.dimension, np.int64)
    kernel_D[order[0]], kernel_D[order[1]] = 6 * terms.ring.scale, -6 * terms.ring.scale
    hidden = total_D + kernel_D.astype(np.uint32)
    check_sum(terms, federation.names, total_D, sketch)
    shown = np.linalg.norm(as_floats(sketch.apply(hidden), scale=terms.ring.scale))
    norm = np.linalg.norm(terms.ring.values(hidden))
    assert norm < len(federation.names), "below the bound on the sum"
    if not 0.75 <= norm / shown <= 1.25:
        with pytest.raises(RoundError, match=r"not the .* that its sketch shows"):
            check_sum(terms, federation.names, hidden, sketch)

    class Blind(Sketch):
        def apply(self, words_D: np.ndarray) -> np.ndarray:
            return super().apply(words_D - kernel_D.astype(np.uint32))

    with pytest.raises(RoundError, match=r"not the .* that its sketch shows"):
        check_sum(terms, federation.names, hidden, Blind(bytes(32), terms.dimension, terms.buckets))


def test_i2_words_that_are_not_the_signed_ones_do_not_count() -> None:
    federation = Federation(6)

    def other_words(name: str, data: bytes) -> bytes:
        reply = decode(Reply, data)
        return encode(Reply(reply.signed, shift(reply.words, 1))) if name == BAD else data

    outcome = run(federation, from_site={"Admitted": other_words})
    assert BAD not in check_exact(federation, outcome).included
    assert any(r.site == BAD and "not those it signed" in r.reason for r in outcome.server.refusals)


def test_i2_no_digest_of_an_upload_is_shown_before_all_are_in() -> None:
    federation = Federation(5)
    server = federation.server()
    before = drive(federation, server, "Admitted")
    said = [decode(Reply, federation.tell(name, request)).signed for name, request in before.items()]
    digests = [decode(messages.Upload, one.body).words_sha256 for one in said]
    assert not any(digest in request for digest in digests for request in before.values())


# --- lies about sketches


def test_a_lie_about_ones_own_mask_is_named() -> None:
    federation = Federation(6)
    change = on_sketch(federation, lambda n, m: replace(m, own=shift(m.own, 7)), BAD)
    outcome = run(federation, from_site={"Agreed": change})
    assert outcome.guilty == {BAD} and outcome.result is None


def test_a_boosted_upload_behind_a_lie_about_ones_own_mask_is_named() -> None:
    federation = Federation(6, dimension=40_000)
    delta_D = boost(federation, BAD, 30)

    def hide(name: str, report: messages.SketchReport) -> messages.SketchReport:
        seen = _sketch_of_session(federation, name)
        return replace(report, own=shift(report.own, seen.apply(delta_D.astype(np.uint32))))

    outcome = run(
        federation,
        from_site={"Admitted": adds(federation, delta_D, BAD), "Agreed": on_sketch(federation, hide, BAD)},
    )
    assert outcome.guilty == {BAD} and outcome.result is None


def _sketch_of_session(federation: Federation, name: str) -> Sketch:
    terms = federation.terms()
    return Sketch(digest(SketchSeed(federation.live[name]._t3)), terms.dimension, terms.buckets)


@pytest.mark.parametrize("accused", ["s01", "s02", "s06"])
def test_b4_a_lie_about_a_pair_drops_either_end_and_blames_the_liar_only(accused: str) -> None:
    for seed in range(2):
        federation = Federation(6, seed=seed)
        change = on_sketch(federation, lambda n, m: shift_mask(m, accused, 1 << 20), BAD)
        outcome = run(federation, from_site={"Agreed": change})
        assert outcome.guilty == {BAD}
        assert outcome.result is None
        (dropped,) = (r for r in outcome.server.refusals if r.reason == DISPUTED)
        assert dropped.site in {BAD, accused}
        held = {r.site for r in _refusals(outcome.server, {}) if r.stage in EXCLUDING_STAGES}
        assert held == {BAD}  # nothing is held against a site that another one lied about


def test_b4_ties_are_drawn_not_lost_by_the_first_name() -> None:
    points = {f"s{i:02}": np.random.default_rng(i).normal(size=512) / 30 for i in range(8)}
    losers = set()
    for draw in range(40):
        chosen = select(points, clip_norm=1.0, disputes=[("s00", "s05")], budget=1, minimum=6, seed=bytes([draw] * 32))
        losers |= set(chosen.excluded)
    assert losers == {"s00", "s05"}


QUARRELS = {
    "s01": ("s17", "s18", "s19", "s20"),
    "s02": ("s17", "s18", "s19"),
    "s03": ("s17", "s20"),
    "s04": ("s18", "s19"),
    "s05": ("s20",),
}
"""Honest sites, and the four liars who dispute with each: leaving out those with most disputes first takes five."""


def quarrelling(federation: Federation, quarrels: Mapping[str, tuple[str, ...]]) -> Outcome:
    def lie(name: str, report: messages.SketchReport) -> messages.SketchReport:
        for honest, liars in quarrels.items():
            if name in liars:
                report = shift_mask(report, honest, 1 << 20)
        return report

    liars = sorted({liar for each in quarrels.values() for liar in each})
    return run(federation, from_site={"Agreed": on_sketch(federation, lie, *liars)})


def test_more_disputes_than_exclusions_still_name_a_liar() -> None:
    federation = Federation(20)  # four exclusions
    outcome = quarrelling(federation, QUARRELS)
    assert outcome.result is None and "false" in outcome.void
    assert outcome.guilty and outcome.guilty <= {"s17", "s18", "s19", "s20"}
    refused = [refusal for refusal in outcome.server.refusals if refusal.reason == DISPUTED]
    assert len(refused) == 4 and {refusal.stage for refusal in refused} == {"dispute"}


def test_a_dispute_that_nobody_may_be_left_out_for_names_both_and_blames_neither() -> None:
    federation = Federation(4, dimension=40_000)
    outcome = quarrelling(federation, {"s01": (BAD,)})
    assert outcome.result is None and "different things about their masks" in outcome.void and not outcome.guilty
    assert {(r.site, r.stage) for r in outcome.server.refusals} == {("s01", "dispute"), (BAD, "dispute")}
    assert not {r.stage for r in _refusals(outcome.server, {})} & EXCLUDING_STAGES


def test_two_colluders_who_forge_their_common_mask_are_both_named() -> None:
    """A booster looks like nothing, its partner takes the norm and is rejected; then their mask is opened."""
    federation = Federation(6, dimension=40_000)
    booster, partner = "s04", "s06"
    delta_D = boost(federation, booster, -30)

    def forge(name: str, report: messages.SketchReport) -> messages.SketchReport:
        moved = _sketch_of_session(federation, name).apply(delta_D.astype(np.uint32))
        return shift_mask(report, partner if name == booster else booster, moved)

    outcome = run(
        federation,
        from_site={
            "Admitted": adds(federation, delta_D, booster),
            "Agreed": on_sketch(federation, forge, booster, partner),
        },
    )
    assert any(r.site == partner and "norm" in r.reason for r in outcome.server.refusals)
    assert outcome.guilty == {booster, partner} and outcome.result is None


def test_the_sketch_of_the_sum_is_the_sum_of_the_sketches_even_where_colluders_shift_it_among_themselves() -> None:
    federation = Federation(9)
    change = on_sketch(federation, lambda n, m: shift_mask(m, "s05" if n == BAD else BAD, 1 << 16), BAD, "s05")
    outcome = run(federation, from_site={"Agreed": change})
    if outcome.result is not None:  # both or neither was rejected: what they moved stays between them
        check_exact(federation, outcome)
        assert len({BAD, "s05"} & set(outcome.result.included)) != 1
    assert outcome.guilty <= {BAD, "s05"}


# --- B1, B2: framing with shares


def lagrange_weight(federation: Federation, holder: str, names: list[str]) -> int:
    points = [federation.terms().point(name) for name in names]
    weights = shamir._weights_at_zero(points)
    return weights[points.index(federation.terms().point(holder))]


@pytest.mark.parametrize("kind", ["shifted by its Lagrange weight", "junk", "not a field element", "empty"])
def test_b1_a_false_share_is_the_holders_and_not_the_dealers(kind: str) -> None:
    federation = Federation(6)
    quorum = list(federation.names[: federation.terms().quorum])
    weight = lagrange_weight(federation, "s02", quorum)

    def lie(name: str, reveal: messages.Reveal) -> messages.Reveal:
        def false(share: messages.Revealed) -> messages.Revealed:
            value = int.from_bytes(share.share, "big")
            moved = (value + pow(weight, -1, shamir.FIELD)) % shamir.FIELD
            return replace(
                share,
                share={
                    "shifted by its Lagrange weight": moved.to_bytes(66, "big"),
                    "junk": (7).to_bytes(66, "big"),
                    "not a field element": b"\xff" * 66,
                    "empty": b"",
                }[kind],
            )

        return replace(reveal, shares=tuple(false(s) if s.dealer == "s05" else s for s in reveal.shares))

    outcome = run(federation, from_site={"Agreed": on_reveal(federation, lie, "s02")})
    assert outcome.guilty == {"s02"}
    check_exact(federation, outcome)  # the others' shares are enough


@pytest.mark.parametrize("kind", ["no field element", "too long", "empty"])
@pytest.mark.parametrize("mode", [SUM_ONLY, SKETCH])
def test_b1_a_dealer_of_what_is_no_share_is_named_and_the_round_goes_on(mode: str, kind: str) -> None:
    """It commits to junk, encrypts and signs it: all it said is consistent, and nothing can be put together from it."""
    federation = Federation(7, mode=mode)

    def deals(name: str, data: bytes) -> bytes:
        if name != BAD:
            return data
        book = federation.live[name]._shares
        assert book is not None
        for holder, (one, two) in book._dealt.items():
            book._dealt[holder] = {
                "no field element": (b"\xff" * 66, b"\xff" * 66),
                "too long": (one, two + bytes(40)),
                "empty": (one, b""),
            }[kind]
        commitment = book._commit(name, "", "self", federation.live[name]._self_secret)
        transcript = decode(Reply, data).signed.transcript

        def signed(message: Any) -> Any:
            return say(message, sender=name, transcript=transcript, key=federation.keys[name])

        dealt = [signed(book._share(holder, commitment)) for holder in book.graph.holders(name)]
        return encode(Reply(signed(messages.Dealing(tuple(dealt))), b""))

    outcome = run(federation, from_site={"Roll": deals})
    assert outcome.guilty == {BAD}
    assert outcome.result is not None and BAD not in outcome.result.included


def test_b2_among_three_sites_one_sites_word_names_nobody() -> None:
    """Nobody can be presumed honest there beside one liar; the session ends and says who complained of whom."""
    federation = Federation(3, mode=SUM_ONLY)

    def complains(name: str, verdict: messages.Verdict) -> messages.Verdict:
        return replace(verdict, complaints=("s02",))

    outcome = run(federation, from_site={"Deal": resigned(federation, messages.Verdict, complains, "s01")})
    assert outcome.result is None and not outcome.guilty
    assert [(r.site, r.stage) for r in outcome.server.refusals] == [("s02", "complaints")]


def dealing(monkeypatch: pytest.MonkeyPatch, *, wrong: str) -> Change:
    """BAD splits another secret than it committed to; its commitments to the shares are right."""

    def split(secret: bytes, **rest: Any) -> dict[int, bytes]:
        calls.append(secret)
        first = len(calls) % 2 == 1
        lie = first if wrong == "self" else not first
        return shamir.split(os.urandom(32) if lie else secret, **rest)

    calls: list[bytes] = []
    fake = types.SimpleNamespace(split=split, SHARE_BYTES=shamir.SHARE_BYTES)

    def before(name: str, data: bytes) -> bytes:
        monkeypatch.setattr(shares, "shamir", fake if name == BAD else shamir)
        return data

    return before


def test_b2_a_dealer_of_a_false_masking_key_who_gets_itself_rejected_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = Federation(6, dimension=40_000)
    outcome = run(
        federation,
        to_site={"Roll": dealing(monkeypatch, wrong="key")},
        from_site={"Admitted": adds(federation, boost(federation, BAD, 30), BAD)},
    )
    assert outcome.guilty == {BAD} and outcome.result is None


def test_b2_a_dealer_of_a_false_self_secret_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = Federation(6)
    outcome = run(federation, to_site={"Roll": dealing(monkeypatch, wrong="self")})
    assert outcome.guilty == {BAD} and outcome.result is None
    federation = Federation(6, mode=SUM_ONLY)
    outcome = run(federation, to_site={"Roll": dealing(monkeypatch, wrong="self")})
    assert outcome.guilty == {BAD} and outcome.result is None


def test_b2_a_dealer_of_a_polynomial_of_too_high_a_degree_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def split(secret: bytes, *, threshold: int, **rest: Any) -> dict[int, bytes]:
        return shamir.split(secret, threshold=threshold + 1, **rest)

    fake = types.SimpleNamespace(split=split, SHARE_BYTES=shamir.SHARE_BYTES)

    def before(name: str, data: bytes) -> bytes:
        monkeypatch.setattr(shares, "shamir", fake if name == BAD else shamir)
        return data

    outcome = run(Federation(6), to_site={"Roll": before})
    assert outcome.guilty == {BAD} and outcome.result is None


# --- B3: shares that do not open, complaints


def bad_share_for(federation: Federation, *holders: str) -> Change:
    """BAD's ciphertexts for these holders are junk, and signed by it."""

    def edit(name: str, dealing: messages.Dealing) -> messages.Dealing:
        def spoil(signed: messages.Signed) -> messages.Signed:
            share = decode(messages.Share, signed.body)
            if share.holder not in holders:
                return signed
            share = replace(share, ciphertext=bytes(len(share.ciphertext)))
            return say(share, sender=BAD, transcript=signed.transcript, key=federation.keys[BAD])

        return messages.Dealing(tuple(map(spoil, dealing.shares)))

    return resigned(federation, messages.Dealing, edit, BAD)


@pytest.mark.parametrize("mode", [SUM_ONLY, SKETCH])
def test_b3_a_share_that_does_not_open_is_published_and_the_round_goes_on(mode: str) -> None:
    federation = Federation(7, mode=mode)
    outcome = run(federation, from_site={"Roll": bad_share_for(federation, "s01", "s02")})
    check_exact(federation, outcome)
    assert not outcome.guilty and not outcome.refused_by_sites


def test_b1_a_share_that_opens_and_is_not_the_committed_one_is_complained_about_and_frames_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    federation = Federation(7)
    locked: list[bytes] = []

    def lock(key: bytes, plaintext: bytes, *, context: bytes) -> bytes:
        locked.append(plaintext)
        first = len(locked) == 1  # the one for s01
        return masking.lock(key, bytes(len(plaintext)) if first else plaintext, context=context)

    fake = types.SimpleNamespace(**{**vars(masking), "lock": lock})
    complaints: list[tuple[str, ...]] = []

    def before(name: str, data: bytes) -> bytes:
        monkeypatch.setattr(shares, "masking", fake if name == BAD else masking)
        return data

    def heard(name: str, data: bytes) -> bytes:
        complaints.append(decode(messages.Verdict, decode(Reply, data).signed.body).complaints)
        return data

    outcome = run(federation, to_site={"Roll": before}, from_site={"Deal": heard})
    check_exact(federation, outcome)
    assert complaints[0] == (BAD,) and not any(complaints[1:])
    assert not outcome.guilty


def test_b3_a_dealer_whom_more_complain_about_than_can_lie_is_out_and_named() -> None:
    federation = Federation(7)  # two colluders
    outcome = run(federation, from_site={"Roll": bad_share_for(federation, "s01", "s02", "s03")})
    assert outcome.guilty == {BAD}
    assert BAD not in check_exact(federation, outcome).included
    assert federation.state(BAD) == "new"


@pytest.mark.parametrize(
    ("published", "guilty"),
    [
        (lambda f: silent(BAD), set()),
        (lambda f: broken_signature(BAD), set()),
        (lambda f: resigned(f, messages.Published, lambda n, m: messages.Published(()), BAD), set()),
        (
            lambda f: resigned(
                f,
                messages.Published,
                lambda n, m: messages.Published((replace(m.shares[0], key_share=bytes(66)),)),
                BAD,
            ),
            {BAD},
        ),
    ],
)
def test_b3_a_dealer_that_does_not_publish_is_out_and_one_that_publishes_falsely_is_named(
    published: Callable[[Federation], Change], guilty: set[str]
) -> None:
    federation = Federation(7)
    outcome = run(federation, from_site={"Roll": bad_share_for(federation, "s01"), "Defend": published(federation)})
    assert outcome.guilty == guilty
    assert BAD not in check_exact(federation, outcome).included


def test_b3_false_complaints_cost_an_honest_dealer_nothing() -> None:
    federation = Federation(7)
    change = resigned(federation, messages.Verdict, lambda n, m: messages.Verdict(("s01",)), "s03", "s05")
    outcome = run(federation, from_site={"Deal": change})
    assert not outcome.guilty and not outcome.refused_by_sites
    check_exact(federation, outcome)


def test_b3_a_dealer_publishes_for_no_more_than_can_lie_and_only_once() -> None:
    federation = Federation(7)
    server = federation.server()
    requests = drive(federation, server, "Deal")
    verdicts = []
    for name in federation.names:
        reply = decode(Reply, federation.tell(name, requests[name])).signed
        verdicts.append(
            say(messages.Verdict(("s01",)), sender=name, transcript=reply.transcript, key=federation.keys[name])
        )

    def defend(*signed: messages.Signed) -> bytes:
        return asked(federation, messages.Defend(signed), requests["s01"])

    published = decode(messages.Published, decode(Reply, federation.tell("s01", defend(*verdicts[1:3]))).signed.body)
    assert [share.holder for share in published.shares] == ["s02", "s03"]
    with pytest.raises(TrustError, match="more complaints than liars"):
        federation.tell("s01", defend(*verdicts[3:5]))

    federation = Federation(7)
    requests = drive(federation, federation.server(), "Deal")
    for name in federation.names:
        reply = decode(Reply, federation.tell(name, requests[name])).signed
        verdicts.append(
            say(messages.Verdict(("s01",)), sender=name, transcript=reply.transcript, key=federation.keys[name])
        )
    with pytest.raises(TrustError, match="more complaints than liars"):
        federation.tell("s01", defend(*verdicts[8:11]))


@pytest.mark.parametrize("which", ["sharing", "masking"])
@pytest.mark.parametrize(
    "point", [bytes(32), b"\x01" + bytes(31), bytes.fromhex("ecffffff" + "ff" * 27 + "7f"), b"short"]
)
def test_b3_keys_that_make_no_secret_are_refused_and_named(which: str, point: bytes) -> None:
    federation = Federation(7)
    change = resigned(federation, messages.Keys, lambda n, m: replace(m, **{which: point}), BAD)
    outcome = run(federation, from_site={"Offer": change})
    assert outcome.guilty == {BAD}
    assert BAD not in check_exact(federation, outcome).included
    assert not masking.contributes(point)


def test_b3_a_key_of_low_order_in_the_servers_list_is_refused_by_every_site() -> None:
    federation = Federation(5)
    requests = drive(federation, federation.server(), "Roll")
    roll = decode(messages.Roll, decode(messages.Signed, requests["s01"]).body)
    low = say(
        messages.Keys(bytes(32), os.urandom(32)),
        sender=BAD,
        transcript=roll.keys[0].transcript,
        key=federation.keys[BAD],
    )
    keys = tuple(low if key.sender == BAD else key for key in roll.keys)
    for name in ("s01", "s02"):
        with pytest.raises(TrustError, match="make no secret"):
            federation.tell(name, asked(federation, messages.Roll(keys), requests[name]))
        assert federation.state(name) == "new"


def _uploads_of_an_outsider(federation: Federation) -> bytes:
    requests = drive_without(federation, "s05", "Uploads")
    uploads = decode(messages.Uploads, decode(messages.Signed, requests["s01"]).body)
    stranger = say(
        messages.Upload(bytes(32), "e" * 64, ""),
        sender="s05",
        transcript=uploads.uploads[0].transcript,
        key=federation.keys["s05"],
    )
    return asked(federation, messages.Uploads((*uploads.uploads, stranger)), requests["s01"])


def drive_without(federation: Federation, gone: str, until: str) -> dict[str, bytes]:
    server = federation.server()
    for name in federation.names:
        federation.site(name)
    requests = server.start()
    while decode(messages.Signed, next(iter(requests.values()))).kind != until:
        requests = server.advance({n: federation.tell(n, r) for n, r in requests.items() if n != gone})
    return requests


def test_b3_who_was_not_admitted_is_not_among_the_uploads() -> None:
    federation = Federation(7)
    with pytest.raises(TrustError, match="s05 is listed twice, or was not admitted"):
        federation.tell("s01", _uploads_of_an_outsider(federation))


def test_b3_who_did_not_upload_does_not_make_up_a_quorum() -> None:
    federation = Federation(7)
    requests = drive_without(federation, "s05", "Agreed")
    agreements = decode(messages.Agreed, decode(messages.Signed, requests["s01"]).body).agreements
    assert len(agreements) == 6
    transcript = agreements[0].transcript
    outsider = say(messages.Agreement(), sender="s05", transcript=transcript, key=federation.keys["s05"])
    request = asked(federation, messages.Agreed((*agreements[:4], outsider)), requests["s01"])
    with pytest.raises(TrustError, match="s05 did not upload and cannot agree"):
        federation.tell("s01", request)
    assert federation.state("s01") == "uploaded"


def test_a_key_that_another_site_gave_is_refused_on_both_sides() -> None:
    federation = Federation(6)
    requests = drive(federation, federation.server(), "Roll")
    roll = decode(messages.Roll, decode(messages.Signed, requests["s01"]).body)
    theirs = decode(messages.Keys, next(key.body for key in roll.keys if key.sender == "s02"))
    own = decode(messages.Keys, next(key.body for key in roll.keys if key.sender == BAD))
    copied = say(
        replace(own, masking=theirs.masking), sender=BAD, transcript=roll.keys[0].transcript, key=federation.keys[BAD]
    )
    keys = tuple(copied if key.sender == BAD else key for key in roll.keys)
    with pytest.raises(TrustError, match="two keys in the list are the same"):
        federation.tell("s01", asked(federation, messages.Roll(keys), requests["s01"]))
    federation = Federation(6)
    seen: dict[str, messages.Keys] = {}

    def copy(name: str, data: bytes) -> bytes:
        seen[name] = decode(messages.Keys, decode(Reply, data).signed.body)
        if name != BAD:
            return data
        return resigned(federation, messages.Keys, lambda n, m: seen["s02"], BAD)(name, data)

    outcome = run(federation, from_site={"Offer": copy})
    assert BAD not in check_exact(federation, outcome).included and not outcome.guilty


@pytest.mark.parametrize("step", ["Offer", "Roll", "Deal", "Admitted", "Uploads", "Agreed", "Choice"])
def test_b3_a_bad_signature_at_any_step_puts_its_site_out_and_nobody_else(step: str) -> None:
    federation = Federation(7, mode=SUM_ONLY) if step in ("Agreed", "Choice") else Federation(7)
    outcome = run(federation, from_site={step: broken_signature(BAD)})
    check_exact(federation, outcome)
    assert not outcome.guilty and not outcome.refused_by_sites
    assert any(r.site == BAD for r in outcome.server.refusals)


# --- bytes that are no message


class Boom:
    def __reduce__(self) -> tuple[Any, ...]:
        raise AssertionError("unpickled")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00",
        pickle.dumps({"site": BAD}),
        os.urandom(1000),
        bytes(2_000_000),
        encode(Reply(messages.Signed(BAD, bytes(32), b"", b""), b"")),
    ],
    ids=["empty", "zero", "pickle", "random", "large", "hollow"],
)
@pytest.mark.parametrize("step", ["Offer", "Admitted"])
def test_bytes_that_are_no_message_put_their_site_out(step: str, data: bytes) -> None:
    federation = Federation(5, mode=SUM_ONLY, dimension=500)
    outcome = run(federation, from_site={step: lambda name, reply: data if name == BAD else reply})
    check_exact(federation, outcome)
    assert not outcome.guilty


def test_a_site_cannot_answer_for_another() -> None:
    kept: dict[str, bytes] = {}

    def swap(name: str, data: bytes) -> bytes:
        kept[name] = data
        return kept["s01"] if name == BAD else data

    for step in ("Offer", "Admitted", "Uploads"):
        outcome: Outcome = run(Federation(6), from_site={step: swap})
        assert not outcome.guilty
        assert any(r.site == BAD and "another site" in r.reason for r in outcome.server.refusals)


def test_a_reply_of_an_earlier_session_does_not_count() -> None:
    federation = Federation(5, mode=SUM_ONLY)
    old: dict[str, bytes] = {}

    def keep(name: str, data: bytes) -> bytes:
        old[name] = data
        return data

    run(federation, from_site={"Admitted": keep}, to_site={"Uploads": silent(*federation.names)})
    outcome = run(federation, from_site={"Admitted": lambda n, d: old[n] if n == BAD else d})
    assert any(r.site == BAD and "another transcript" in r.reason for r in outcome.server.refusals)
    assert BAD not in check_exact(federation, outcome).included
