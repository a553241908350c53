"""What the protocol's review found and no check can end: bounded as docs/leakage.md says, or named.

I3, P7 and B5 of the review; then what the aggregator can solve for, from all that real sessions show it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest
from scipy.stats import chi2

from common.secagg import SKETCH, SUM_ONLY, Limits, context, masking, messages, opening, shamir
from common.secagg import server as server_module
from common.secagg import sketch as sketch_module
from common.secagg.context import colluders_of, quorum_of
from common.secagg.encoding import decode, digest
from common.secagg.messages import Reply
from common.secagg.selection import Selection, select
from common.secagg.site import SketchSeed
from common.secagg.sketch import Sketch, as_floats
from tests.attacks.test_secagg_sites import adds, on_sketch, shift, shift_mask
from tests.common.secagg.federation import Change, Federation, Outcome, run, silent
from tests.common.secagg.test_session import check_exact

# --- I3: a bounded, and not a robust, choice


def colluding(federation: Federation, names: tuple[str, str], *, forge: bool) -> Outcome:
    """Two sites upload the same update; or make their sketches differ by noise that sums to zero in a mask they share."""
    one, other = names
    federation.updates[other, 1] = federation.update(one)
    dimension, ring = federation.dimension, federation.terms().ring
    noise_D = np.random.default_rng(1).normal(size=dimension) * 0.3 / math.sqrt(dimension)
    noise_D = np.rint(noise_D * ring.scale).astype(np.int64).astype(np.uint32)

    def lend(name: str, report: messages.SketchReport) -> messages.SketchReport:
        sketch = Sketch(digest(SketchSeed(federation.live[name]._t3)), dimension, federation.terms().buckets)
        return shift_mask(report, other if name == one else one, sketch.apply(noise_D))

    return run(federation, from_site={"Agreed": on_sketch(federation, lend, *names)} if forge else None)


def test_i3_noise_that_sums_to_zero_hides_copies_from_the_gate_and_changes_nothing_in_the_sum() -> None:
    """Docs: "Two colluders can make their copies look different at no cost"."""
    federation = Federation(9)
    outcome = colluding(federation, ("s04", "s07"), forge=False)
    result = check_exact(federation, outcome)
    assert {r.site for r in outcome.server.refusals if "nearly repeats" in r.reason} == {"s04", "s07"}
    assert not {"s04", "s07"} & set(result.included)

    federation = Federation(9)
    outcome = colluding(federation, ("s04", "s07"), forge=True)
    assert check_exact(federation, outcome).included == federation.names  # to the bit what was uploaded
    assert not outcome.server.refusals and not outcome.guilty


def test_i3_who_forges_noise_and_is_left_out_alone_is_named_with_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their mask is opened then, and neither's sketch is that of it."""
    leaves_out(monkeypatch, "s04")
    federation = Federation(9)
    outcome = colluding(federation, ("s04", "s07"), forge=True)
    assert outcome.guilty == {"s04", "s07"} and outcome.result is None


def furthest(nu: float, *, forge: bool, sites: int = 10, liars: int = 2, dimension: int = 1000) -> float:
    """How far an attacker that knows everything moves the mean along a direction of its own; honest signal 1."""
    rng, honest, rows = np.random.default_rng(5), sites - liars, 512
    common, few = rng.normal(size=dimension), rng.normal(size=(6, dimension))
    apart = rng.normal(size=(honest, 6)) @ (few / np.linalg.norm(few, axis=1, keepdims=True))
    apart /= math.sqrt(np.square(apart).sum(axis=1).mean())
    own, noise = rng.normal(size=(2, honest, dimension)) / math.sqrt(dimension)
    truth = common / np.linalg.norm(common) + math.sqrt(0.7) * apart + math.sqrt(0.3) * own + nu * noise
    clip = 1.3 * float(np.median(np.linalg.norm(truth, axis=1)))
    truth *= np.minimum(1, clip / np.linalg.norm(truth, axis=1, keepdims=True))
    mean_D, usual = truth.mean(axis=0), float(np.median(np.linalg.norm(truth, axis=1)))
    wanted_D = rng.normal(size=dimension)
    wanted_D /= np.linalg.norm(wanted_D)
    projection_DK = rng.normal(size=(dimension, rows)) / math.sqrt(rows)
    seen, best = truth @ projection_DK, 0.0
    for push in np.arange(0.2, 3.5, 0.2):
        lie_D = mean_D + push * wanted_D
        room = usual**2 - float(lie_D @ lie_D)
        if room < 0:
            break
        lent = rng.normal(size=(liars, rows)) / math.sqrt(rows)
        lent = (lent - lent.mean(axis=0)) * math.sqrt(room * liars / (liars - 1)) * forge
        points = np.vstack([seen, lie_D @ projection_DK + lent])
        named = {f"s{row:02}": point for row, point in enumerate(points)}
        chosen = select(
            named, clip_norm=clip, disputes=(), budget=(sites - 1) // 4, minimum=quorum_of(sites), seed=bytes(32)
        )
        rest = np.vstack([truth, np.tile(lie_D, (liars, 1))])[[int(name[1:]) for name in chosen.included]]
        best = max(best, float((rest.mean(axis=0) - mean_D) @ wanted_D))
    return best


@pytest.mark.parametrize(("nu", "most"), [(1.0, 0.30), (3.0, 0.66)])
def test_i3_a_fifth_of_the_sites_moves_the_mean_no_further_than_the_docs_say_and_is_not_stopped(
    nu: float, most: float
) -> None:
    assert 0.5 * most < furthest(nu, forge=True) <= most
    assert furthest(nu, forge=False) <= 0.01  # without the noise they lend each other they are copies


# --- P7: trying many projections


def gains(direction_D: np.ndarray, tries: int) -> np.ndarray:
    """|P v| / |v| for so many projections."""
    scale = 2.0**26
    words_D = np.rint(direction_D / np.linalg.norm(direction_D) * scale).astype(np.int64).astype(np.uint32)
    sketches = (Sketch(bytes([*seed.to_bytes(4, "big"), *bytes(28)]), len(words_D), 128) for seed in range(tries))
    return np.array([np.linalg.norm(as_floats(sketch.apply(words_D), scale=scale)) for sketch in sketches])


def test_p7_the_best_of_many_projections_shows_a_dense_direction_little_better() -> None:
    """Also one component of a LoRA factor, of which the first design had 33 rows."""
    assert math.sqrt(chi2.isf(2.0**-40, 512) / 512) == pytest.approx(1.23, abs=0.005)
    rng = np.random.default_rng(0)
    component_D = np.zeros(8192)
    component_D[5::16] = rng.normal(size=512)
    tries = 800
    for direction_D in (rng.normal(size=8192), component_D, np.ones(8192)):
        found = gains(direction_D, tries)
        assert 1 / (2 * found.var()) > 420  # rows that count
        assert found.max() < math.sqrt(chi2.isf(1e-3 / tries, 512) / 512) < 1.23
    two_D = np.zeros(8192)
    two_D[[3, 4000]] = 1
    assert gains(two_D, tries).max() <= math.sqrt(2) + 1e-6  # if they met in all four tables


def test_p7_whoever_uploads_last_draws_the_projection_and_draws_once() -> None:
    """A colluder's digest is a nonce of its choice; nobody has opened anything before all digests are agreed on."""
    seeds: list[bytes] = []

    def seen(name: str, data: bytes) -> bytes:
        if name == "s01" and decode(Reply, data).signed.kind == "SketchReport":
            seeds.append(digest(SketchSeed(decode(Reply, data).signed.transcript)))
        return data

    for last_word in (0, 1):
        federation = Federation(6)
        add_D = np.zeros(federation.dimension, np.int64)
        add_D[-1] = last_word
        for _ in range(3):  # nor does a new session draw again
            run(federation, from_site={"Admitted": adds(federation, add_D, "s04"), "Agreed": seen})
        assert federation.disks["s01"].records[1].sketched_share == federation.terms().sketched_share
    assert len(set(seeds)) == len(seeds) == 2


# --- B5: no room for who drops out


def test_b5_as_many_as_may_collude_leave_no_room_where_the_docs_say() -> None:
    tight = [n for n in range(3, 600) if n - quorum_of(n) == colluders_of(n)]
    assert [n for n in tight if n in (4, 5, 7, 8, 10, 20, 50, 100)] == [4, 5, 7, 8, 10, 20, 50, 100]
    assert not {6, 9} & set(tight)


@pytest.mark.parametrize(("step", "mode"), [("Deal", SUM_ONLY), ("Admitted", SUM_ONLY), ("Admitted", SKETCH)])
def test_b5_silent_colluders_are_borne_and_one_honest_dropout_more_loses_the_round_with_nothing_opened(
    step: str, mode: str
) -> None:
    federation = Federation(7, mode=mode)
    withheld = ("s02", "s05")
    outcome = run(federation, from_site={step: silent(*withheld)})
    assert check_exact(federation, outcome).included == ("s01", "s03", "s04", "s06", "s07")
    assert not outcome.guilty

    federation = Federation(7, mode=mode)
    outcome = run(federation, from_site={step: silent(*withheld, "s07")})
    assert outcome.result is None and "4 sites" in outcome.void and "too few" in outcome.void
    assert not outcome.guilty and not outcome.server.is_spent
    assert {r.site for r in outcome.server.refusals} == {*withheld, "s07"}
    again = run(federation)  # so its updates are still good
    assert check_exact(federation, again).included == federation.names


def test_b5_a_liar_costs_a_round_that_is_spent_and_is_named() -> None:
    federation = Federation(7)
    lie = on_sketch(federation, lambda name, report: replace(report, own=shift(report.own, 1)), "s04")
    outcome = run(federation, from_site={"Agreed": lie})
    assert outcome.result is None and outcome.guilty == {"s04"}
    assert {federation.state(name) for name in federation.names} == {"committed"}
    again = run(federation)
    assert again.result is None and set(again.refused_by_sites) == set(federation.names)


# --- what the aggregator can solve for


def leaves_out(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """A server that chooses freely, within what sites sign."""

    def choose(sketches: Mapping[str, np.ndarray], **_: object) -> Selection:
        return Selection(tuple(sorted(set(sketches) - set(names))), dict.fromkeys(names, "no reason"))

    monkeypatch.setattr(server_module, "select", choose)


BITS = 32


def _valuation(values: np.ndarray) -> np.ndarray:
    """How often 2 divides each word; 32 for 0."""
    lowest = values & (~values + np.uint64(1))
    return np.where(values == 0, BITS, np.log2(np.maximum(lowest, 1).astype(np.float64))).astype(int)


@dataclass
class Module:
    """All combinations of some rows modulo 2³², as a Howell form: those that begin with zeros are made by its rows that do."""

    pivots: dict[int, np.ndarray]

    @classmethod
    def of(cls, rows: np.ndarray) -> Module:
        left, pivots = (rows % 2**BITS).astype(np.uint64), {}
        for column in range(rows.shape[1]):
            left = left[left.any(axis=1)]
            if not len(left) or not left[:, column].any():
                continue
            row = int(np.argmin(_valuation(left[:, column])))
            power = int(_valuation(left[row, column : column + 1])[0])
            pivot = left[row] * np.uint64(pow(int(left[row, column]) >> power, -1, 2**BITS)) % 2**BITS
            left = np.delete(left, row, axis=0)
            factors = left[:, column] >> np.uint64(power)
            left = (left - factors[:, None] * pivot) % 2**BITS
            left = np.vstack([left, pivot * np.uint64(1 << (BITS - power)) % 2**BITS])
            pivots[column] = pivot
        return cls(pivots)

    def beginning_with_zeros(self, count: int, width: int) -> np.ndarray:
        rows = [pivot[count:] for column, pivot in self.pivots.items() if column >= count]
        return np.array(rows, np.uint64).reshape(len(rows), width)

    def holds(self, rows: np.ndarray) -> bool:
        for row in (rows % 2**BITS).astype(np.uint64):
            for column, pivot in self.pivots.items():
                row = (row - (row[column] // pivot[column]) * pivot) % 2**BITS
            if row.any():
                return False
        return True


@pytest.mark.parametrize(
    ("rows", "member", "stranger"),
    [([[2, 1], [0, 4]], [4, 2], [1, 0]), ([[2, 1]], [0, 2**31], [0, 2**30]), ([[6, 0]], [2, 0], [1, 0])],
)
def test_the_algebra_below_is_of_the_ring(rows: list[list[int]], member: list[int], stranger: list[int]) -> None:
    module = Module.of(np.array(rows, np.uint64))
    assert module.holds(np.array([member], np.uint64)) and not module.holds(np.array([stranger], np.uint64))


class Watched:
    """A session of a tiny federation with the production code, all that the server saw of it and what colluders add."""

    def __init__(self, federation: Federation, colluders: tuple[str, ...], gone: Mapping[str, Change]) -> None:
        self.federation, self.colluders = federation, colluders
        self.words: dict[str, np.ndarray] = {}
        self.reports: dict[str, messages.SketchReport] = {}
        self.keys: dict[tuple[str, str], bytes] = {}
        self.secrets: dict[str, tuple[bytes, bytes]] = {}
        shares: dict[tuple[str, str], dict[int, bytes]] = {}

        def remember(name: str) -> None:
            """What nobody sees, to check the rest against; and what a colluder tells the server."""
            session = federation.live[name]
            self.keys[name, name] = session._self_mask_key()
            self.keys.update({(name, other): session._mask_key(other) for other in session._peers()})
            self.secrets[name] = session._self_secret, session._masking
            for dealer, both in session._shares._held.items() if name in colluders else ():
                for which, share in zip(("self", "key"), both, strict=True):
                    shares.setdefault((dealer, which), {})[federation.terms().point(name)] = share

        def see(name: str, data: bytes) -> None:
            said, session = decode(Reply, data), federation.live[name]
            if said.signed.kind == "Upload":
                self.words[name] = np.frombuffer(said.words, "<u4")
            elif said.signed.kind == "SketchReport":
                self.reports[name] = decode(messages.SketchReport, said.signed.body)
                self.sketch_seed = digest(SketchSeed(said.signed.transcript))
            elif said.signed.kind == "Reveal":
                for share in decode(messages.Reveal, said.signed.body).shares:
                    which = "self" if share.dealer in session._included else "key"
                    shares.setdefault((share.dealer, which), {})[federation.terms().point(name)] = share.share

        def then(kind: str) -> Change:
            def change(name: str, data: bytes) -> bytes | None:
                if kind == "Admitted":
                    remember(name)
                came = gone[kind](name, data) if kind in gone else data
                if came is not None:
                    see(name, came)
                return came

            return change

        self.outcome = run(federation, from_site={kind: then(kind) for kind in ("Admitted", "Agreed")})
        self.included = self.outcome.server.included
        self.opened = {
            place: shamir.combine(found, threshold=federation.terms().quorum)
            for place, found in shares.items()
            if len(found) >= federation.terms().quorum
        }

    @property
    def uploaded(self) -> list[str]:
        """Honest sites whose words the server has."""
        return [name for name in self.words if name not in self.colluders]

    def is_known(self, owner: str, other: str) -> bool:
        """Whether a mask's key can be derived: from an end that colludes, or a secret that was put together."""
        if {owner, other} & set(self.colluders):
            return True
        if owner == other:
            return (owner, "self") in self.opened
        return (owner, "key") in self.opened or (other, "key") in self.opened

    def check_opened(self) -> None:
        """What shares make is the secret; a colluder is asked and need not be put together."""
        for (dealer, which), secret in self.opened.items():
            if dealer in self.secrets:
                assert secret == self.secrets[dealer][which == "key"]

    def equations(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Coefficients of masks nobody can derive, and of honest words, in each number seen; and the numbers.

        What can be derived, or is a colluder's, is taken away first. A mask is as good as uniform: it is AES's.
        """
        names, dimension = self.uploaded, self.federation.dimension
        unknown = [(a, b) for a, b in self.keys if a <= b and a in names and not self.is_known(a, b)]
        unknown += [(b, a) for a, b in self.keys if a > b and a in names and b not in names and not self.is_known(a, b)]
        place = {pair: index for index, pair in enumerate(unknown)}
        identity = np.eye(dimension, dtype=np.uint64)
        map_KD = self.sketch_matrix() if self.reports else np.zeros((0, dimension), np.uint64)
        masks, words, numbers = [], [], []

        def row(of: dict[int, int], word: int | None, by: np.ndarray, seen: np.ndarray) -> None:
            blocks = [np.uint64(of.get(index, 0) % 2**BITS) * by % 2**BITS for index in range(len(unknown))]
            masks.append(np.hstack([*blocks, np.zeros((len(by), 0), np.uint64)]))
            words.append(np.hstack([by * np.uint64(word == index) for index in range(len(names))]))
            numbers.append(seen.astype(np.uint64))

        for index, name in enumerate(names):
            of, seen_D = {}, self.words[name].copy()
            for (owner, other), key in self.keys.items():
                if owner != name:
                    continue
                sign = 1 if other == name else masking.mask_sign(name, other)
                pair = (min(owner, other), max(owner, other))
                if pair in place:
                    of[place[pair]] = sign
                else:
                    masking.add_mask(seen_D, key, sign=-sign)
            row(of, index, identity, seen_D)
        for name, report in self.reports.items():
            told = {name: report.own} if name in names else {}
            told |= {mask.other: mask.words for mask in report.masks}
            for other, sketched in told.items():
                pair = (min(name, other), max(name, other))
                if pair in place:
                    row({place[pair]: 1}, None, map_KD, np.frombuffer(sketched, "<u4"))
        self.unknown = [self.keys.get(pair) or self.keys[pair[::-1]] for pair in unknown]
        return np.vstack(masks), np.vstack(words), np.concatenate(numbers)

    def sketch_matrix(self) -> np.ndarray:
        terms = self.federation.terms()
        chosen_D = self.outcome.server._direction_D
        sketch = Sketch(self.sketch_seed, terms.dimension, terms.buckets, chosen_D)
        return np.stack([sketch.apply(unit_D) for unit_D in np.eye(terms.dimension, dtype=np.uint32)], 1).astype(
            np.uint64
        )

    def told(self) -> np.ndarray:
        """What docs/leakage.md says is learned, as coefficients of the honest sites' words."""
        names, dimension = self.uploaded, self.federation.dimension
        identity = np.eye(dimension, dtype=np.uint64)
        rows = [np.hstack([identity * np.uint64(name in self.included) for name in names])]
        if self.reports:
            map_KD = self.sketch_matrix()
            rows += [
                np.hstack([map_KD * np.uint64(name == other) for other in names])
                for name in names
                if name in self.reports
            ]
        return np.vstack(rows)


def tiny(
    monkeypatch: pytest.MonkeyPatch, n: int, mode: str, *, directions: int = 0
) -> tuple[Federation, Callable[..., Watched]]:
    """Updates of 12 parameters; sketches of 8 rows, which are fewer, where a real one has 512 of 40 000 and more."""
    for module in (sketch_module, context):
        monkeypatch.setattr(module, "LARGEST_SHARE", 1.0)
    monkeypatch.setattr(sketch_module, "BUCKETS", (2,))
    monkeypatch.setattr(opening, "RATIO", (0.0, math.inf))  # what eight rows say of a norm is nothing
    limits = Limits(distinct_sets=99, left_out=99, sketched_share=1.0, directions=directions)
    federation = Federation(n, mode=mode, dimension=12, limits=limits)
    if directions:
        real = federation.server
        reference_D = np.arange(12.0) - 5
        monkeypatch.setattr(federation, "server", lambda terms=None: real(terms, reference_D=reference_D))
    return federation, lambda colluders, gone=None: Watched(federation, colluders, gone or {})


def spread(watched: Watched) -> tuple[Module, Module]:
    """What can be solved for, and what is said to be."""
    masks, words, numbers = watched.equations()
    watched.check_opened()
    assert len(set(watched.unknown)) == len(watched.unknown), "no two masks have one key"
    dimension, names = watched.federation.dimension, watched.uploaded
    values = [masking.mask(key, dimension) for key in watched.unknown]
    values += [watched.federation.disks[name].words[1] for name in names]
    both = np.hstack([masks, words])
    np.testing.assert_array_equal(both @ np.concatenate(values).astype(np.uint64) % 2**BITS, numbers)
    width = words.shape[1]
    return Module.of(Module.of(both).beginning_with_zeros(masks.shape[1], width)), Module.of(watched.told())


SESSIONS: dict[str, tuple[int, str, tuple[str, ...], tuple[str, ...], dict[str, Change], int]] = {
    "a sum of all": (5, SUM_ONLY, ("s03",), (), {}, 0),
    "a sum of two honest sites": (4, SUM_ONLY, ("s04",), (), {"Admitted": silent("s02")}, 0),
    "sketches, all summed": (5, SKETCH, ("s03",), (), {}, 0),
    "sketches, an honest site left out": (7, SKETCH, ("s02", "s06"), ("s04",), {}, 0),
    "sketches, a colluder left out": (7, SKETCH, ("s02", "s06"), ("s06",), {}, 0),
    "sketches, two honest sites left out": (9, SKETCH, ("s01", "s05"), ("s04", "s08"), {}, 0),
    "sketches, one that did not upload": (7, SKETCH, ("s02",), ("s04",), {"Admitted": silent("s07")}, 0),
    "sketches, one that reported none": (7, SKETCH, ("s02",), (), {"Agreed": silent("s07")}, 0),
    "sketches and a direction": (7, SKETCH, ("s02", "s06"), ("s04",), {}, 1),
}
"""Sites, mode, who colludes, whom the server leaves out, who disappears, directions."""


@pytest.mark.parametrize("case", SESSIONS)
def test_the_aggregator_can_solve_for_the_sum_and_the_sketches_and_for_nothing_else(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, mode, colluders, out, gone, directions = SESSIONS[case]
    leaves_out(monkeypatch, *out)
    _, watch = tiny(monkeypatch, n, mode, directions=directions)
    watched = watch(colluders, gone)
    assert watched.outcome.result is not None and not set(out) & set(watched.included), watched.outcome.void
    found, said = spread(watched)
    assert found.holds(watched.told()), "less is learned than docs/leakage.md says"
    width = watched.told().shape[1]
    assert said.holds(found.beginning_with_zeros(0, width)), "more is learned than docs/leakage.md says"
    for name in watched.uploaded:  # of each honest site one of its two secrets
        assert ((name, "self") in watched.opened) != ((name, "key") in watched.opened)


def test_more_colluders_than_are_assumed_solve_for_single_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/leakage.md says; and so the test above can see it."""
    _, watch = tiny(monkeypatch, 7, SUM_ONLY)
    watched = watch(("s01", "s02", "s03", "s04", "s05"))
    found, _ = spread(watched)
    assert found.holds(np.eye(2 * 12, dtype=np.uint64))


@pytest.mark.parametrize(("sites", "honest"), [(4, 2), (10, 4), (20, 8), (100, 34)])
def test_a_sum_holds_as_many_honest_updates_as_the_docs_say(sites: int, honest: int) -> None:
    assert quorum_of(sites) - colluders_of(sites) == honest
