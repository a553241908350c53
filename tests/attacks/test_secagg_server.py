"""A hostile server against honest sites: refused, nothing shown twice, the update's state as it was.

Named after the findings of the protocol's review (docs/leakage.md).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from common.errors import ConfigError, HeadwaterError, PrivacyError, RoundError, TrustError
from common.secagg import SKETCH, SUM_ONLY, Limits, Member, derive_terms, messages
from common.secagg.context import MINIMUM_ORGANISATIONS, check_terms, colluders_of, fewest_summed, quorum_of
from common.secagg.encoding import decode, encode
from common.secagg.limits import check_may_upload
from common.secagg.messages import Reply, Signed, say
from common.secagg.site import EXPECTED, Stage
from tests.common.secagg.federation import (
    LOOSE,
    Federation,
    asked,
    drive,
    make_plan,
    new_key,
    opened,
    run,
    served,
    silent,
)


def refuses(federation: Federation, name: str, request: bytes, error: type[HeadwaterError], match: str) -> None:
    """The site refuses, and neither its disk nor what it would sign has changed."""
    before = (dict(federation.disks[name].records), set(federation.disks[name].words))
    with pytest.raises(error, match=match or None):
        federation.tell(name, request)
    assert (federation.disks[name].records, set(federation.disks[name].words)) == before


# --- P1: abort and resend


def test_p1_a_sketch_is_opened_once_whatever_sessions_follow() -> None:
    federation, reports = Federation(4), []

    def watch(name: str, data: bytes) -> bytes:
        if name == "s01" and decode(Reply, data).signed.kind == "SketchReport":
            reports.append(data)
        return data

    for _ in range(6):
        run(federation, from_site={"Agreed": watch}, to_site={"Choice": silent(*federation.names)})
    assert len(reports) == 1
    assert federation.state("s01") == "opened"
    federation.site("s01")
    offer = federation.server().start()["s01"]
    refuses(federation, "s01", offer, PrivacyError, "sketch was opened; it may only be summed")


def test_p1_after_opening_an_update_may_be_summed_once_and_is_then_spent() -> None:
    federation = Federation(4)
    run(federation, to_site={"Choice": silent(*federation.names)})
    sum_only = federation.terms(mode=SUM_ONLY)
    assert run(federation, terms=sum_only).result is not None
    for terms in (sum_only, federation.terms()):
        federation.site("s01", terms)
        refuses(federation, "s01", federation.server(terms).start()["s01"], PrivacyError, "never sent again")


def test_p1_a_crash_after_the_state_is_written_and_before_the_reply_leaves_counts_as_opened() -> None:
    federation = Federation(4)
    requests = drive(federation, federation.server(), "Agreed")
    federation.tell("s01", requests["s01"])  # the reply is lost with the process
    assert federation.state("s01") == "opened"
    federation.site("s01")
    refuses(federation, "s01", federation.server().start()["s01"], PrivacyError, "opened")


@pytest.mark.parametrize(("kind", "state"), [("Admitted", "uploaded"), ("Agreed", "opened"), ("Choice", "committed")])
def test_p1_the_answer_says_what_must_be_on_disk_before_it_is_sent(kind: str, state: str) -> None:
    federation = Federation(4)
    answer_to = drive(federation, federation.server(), kind)["s01"]
    answer = federation.live["s01"].answer(answer_to)
    assert answer.record is not None and answer.record.state == state


def test_an_update_is_uploaded_four_times_at_most_and_no_session_twice() -> None:
    federation = Federation(4, mode=SUM_ONLY)
    for _ in range(4):
        run(federation, to_site={"Uploads": silent(*federation.names)})
    assert federation.disks["s01"].records[1].uploads == 4
    federation.site("s01")
    refuses(federation, "s01", federation.server().start()["s01"], PrivacyError, "sent 4 times")

    federation = Federation(4)
    session = os.urandom(32)
    offer = federation.server(session=session).start()["s01"]
    federation.site("s01")
    federation.tell("s01", offer)
    federation.site("s01")  # as after a crash
    refuses(federation, "s01", offer, PrivacyError, "opened before")


def test_a_round_has_one_update_and_one_plan() -> None:
    federation = Federation(4)
    federation.site("s01")
    federation.tell("s01", federation.server().start()["s01"])
    federation.updates["s01", 1] = federation.update("s02", 1) + 0
    federation.site("s01")
    refuses(federation, "s01", federation.server().start()["s01"], PrivacyError, "another update already")


# --- P2: parameters chosen by the server


CHANGED: dict[str, Any] = {
    "mode": SUM_ONLY,
    "federation": "other",
    "round": 2,
    "plan_digest": "9" * 64,
    "base_digest": "9" * 64,
    "adapter_digest": "9" * 64,
    "snapshot": "v9",
    "dimension": 12_001,
    "clip_norm": 2.0**43,
    "colluders": 0,
    "quorum": 2,
    "total_weight": 2**43,
    "buckets": 64,
    "exclusions": 3,
    "noise": "sum",
    "word_bits": 16,
    "protocol": "headwater-secagg-0",
    "limits": Limits(distinct_sets=10_000),
}


@pytest.mark.parametrize("field", sorted(CHANGED))
def test_p2_no_parameter_is_the_servers(field: str) -> None:
    federation = Federation(5)
    offer = federation.server().start()["s01"]
    terms = replace(federation.terms(), **{field: CHANGED[field]})
    assert terms != federation.terms()
    federation.site("s01")
    refuses(
        federation,
        "s01",
        asked(federation, messages.Offer(terms, os.urandom(32)), offer),
        TrustError,
        f"server's {field}",
    )


def test_p2_every_parameter_is_in_every_signature() -> None:
    federation = Federation(5)
    session = os.urandom(32)
    contexts = {replace(federation.terms(), **{f: v}).context(session) for f, v in CHANGED.items()}
    contexts |= {federation.terms().context(session), federation.terms().context(os.urandom(32))}
    members = federation.terms().members
    contexts.add(
        replace(federation.terms(), members=(replace(members[0], organisation="x"), *members[1:])).context(session)
    )
    assert len(contexts) == len(CHANGED) + 3


def test_p2_sites_with_different_terms_cannot_finish_together() -> None:
    """What the demonstration did with another scale for all but the victim."""
    federation = Federation(5)
    others = replace(federation.terms(), clip_norm=2.0**30)
    federation.site("s01")
    for name in federation.names[1:]:
        federation.site(name, others)

    def offers(name: str, data: bytes) -> bytes:
        return data if name == "s01" else asked(federation, messages.Offer(others, session), data)

    session = os.urandom(32)
    outcome = run(federation, server=federation.server(session=session), to_site={"Offer": offers})
    assert outcome.result is None
    assert {federation.state(name) for name in federation.names} == {"new"}


def test_p2_small_and_large_updates_get_a_sketch_they_can_bear_or_none() -> None:
    for dimension, buckets in ((9_847, 32), (19_693, 64), (39_385, 128), (5_000_000, 128)):
        terms = Federation(4, dimension=dimension).terms()
        assert terms.buckets == buckets and 4 * buckets / dimension <= 0.013
    with pytest.raises(ConfigError, match="too small for a sketch"):
        Federation(4, dimension=9_800).terms()
    Federation(4, dimension=9_800, mode=SUM_ONLY).terms()


def test_p2_all_sketches_together_show_a_bounded_share_of_an_updates_dimensions() -> None:
    federation = Federation(4, limits=replace(LOOSE, sketched_share=0.03))
    rounds = 0
    for number in range(1, 5):
        outcome = run(federation, terms=federation.terms(round=number))
        rounds += outcome.result is not None
    assert rounds == 2  # of 1.07 % each
    assert all("as much of this site's updates" in e.public for e in outcome.refused_by_sites.values())
    assert federation.state("s01", 4) == "absent"


# --- P3: two lists of uploads


@pytest.mark.parametrize("given", ["its own", "its own, repeated", "the others'", "all"])
def test_p3_no_sketch_is_opened_before_a_quorum_signed_the_same_list(given: str) -> None:
    federation = Federation(7)
    requests = drive(federation, federation.server(), "Uploads")
    full = opened(federation, messages.Uploads, requests["s01"])
    shorter = asked(federation, messages.Uploads(full.uploads[:-1]), requests["s01"])
    replies = {name: federation.tell(name, shorter if name == "s01" else requests[name]) for name in federation.names}
    said = {name: decode(Reply, reply).signed for name, reply in replies.items()}
    agreements = {
        "its own": [said["s01"]],
        "its own, repeated": [said["s01"]] * 7,
        "the others'": [said[name] for name in federation.names[1:6]],
        "all": list(said.values()),
    }[given]
    request = asked(federation, messages.Agreed(tuple(agreements)), requests["s01"])
    refuses(federation, "s01", request, TrustError, "1 sites agree, 5 are needed|another transcript|did not upload")
    assert federation.state("s01") == "uploaded"


def test_p3_a_site_signs_one_list_only() -> None:
    federation = Federation(5)
    requests = drive(federation, federation.server(), "Uploads")
    full = opened(federation, messages.Uploads, requests["s01"])
    federation.tell("s01", requests["s01"])
    shorter = asked(federation, messages.Uploads(full.uploads[:-1]), requests["s01"])
    refuses(federation, "s01", shorter, RoundError, "Uploads after this site agreed")


# --- P4: sybils


def test_p4_the_roster_is_the_one_this_site_approved() -> None:
    federation = Federation(5)
    stranger = Member("s00", new_key().public, "org-s00")
    terms = replace(federation.terms(), members=(stranger, *federation.terms().members))
    federation.site("s01")
    like = federation.server().start()["s01"]
    offer = asked(federation, messages.Offer(terms, os.urandom(32)), like)
    refuses(federation, "s01", offer, TrustError, "server's members")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda m: [replace(x, run_by_vendor=1) for x in m[:3]] + m[3:], "vendor runs more than 2 of 8"),
        (lambda m: [replace(x, organisation="same") for x in m[:3]] + m[3:], "runs 3 sites"),
        (lambda m: [replace(x, organisation="ab"[i % 2]) for i, x in enumerate(m)], "fewer than 3 organisations"),
        (lambda m: [m[0], replace(m[1], public=m[0].public), *m[2:]], "share a name or a key"),
        (lambda m: [m[0], replace(m[1], name=m[0].name), *m[2:]], "sites and weights|share a name"),
        (lambda m: [replace(m[0], weight=4), *m[1:]], "sites and weights|36%"),
        (lambda m: [replace(m[0], name=""), *m[1:]], "sites and weights|no name"),
        (lambda m: m[:2], "needs at least 4|sites and weights"),
    ],
)
def test_p4_sites_of_one_hand_are_counted_as_colluding(
    change: Callable[[list[Member]], list[Member]], match: str
) -> None:
    federation = Federation(8)
    members = change(list(federation.members))
    with pytest.raises((ConfigError, TrustError), match=match):
        derive_terms(
            make_plan(federation.weights),
            mode=SKETCH,
            members=members,
            dimension=federation.dimension,
            snapshot="v0",
            limits=LOOSE,
        )


def test_fewer_than_three_sites_are_refused_and_three_only_sum() -> None:
    with pytest.raises(ConfigError, match="secagg needs at least 3 sites, got 2"):
        Federation(2, mode=SUM_ONLY).terms()
    with pytest.raises(ConfigError, match="secagg_sketch needs at least 4 sites, got 3"):
        Federation(3).terms()
    Federation(3, mode=SUM_ONLY).terms()


def test_words_of_sixteen_bits_are_for_sums_of_few_weights_and_for_nothing_else() -> None:
    with pytest.raises(ConfigError, match="16 bits carry mode secagg only, not secagg_sketch; use 32"):
        Federation(5, mode=SKETCH, word_bits=16).terms()
    with pytest.raises(ConfigError, match="words of 8 bits; known: 16, 32"):
        Federation(5, mode=SUM_ONLY, word_bits=8).terms()
    weights = {f"s{i:02}": 4 for i in range(1, 66)}
    with pytest.raises(ConfigError, match="16 bits carry weights up to 256 in all, not 260"):
        Federation(65, mode=SUM_ONLY, weights=weights, word_bits=16).terms()
    weights.pop("s65")
    assert Federation(64, mode=SUM_ONLY, weights=weights, word_bits=16).terms().ring.total_weight == 256
    Federation(65, mode=SUM_ONLY, weights={**weights, "s65": 4}).terms()


@pytest.mark.parametrize(("own", "offered"), [(16, 32), (32, 16)])
def test_a_server_cannot_choose_the_width_of_a_sites_words(own: int, offered: int) -> None:
    federation = Federation(5, mode=SUM_ONLY, word_bits=own)
    federation.site("s01")
    terms = replace(federation.terms(), word_bits=offered)
    offer = asked(federation, messages.Offer(terms, os.urandom(32)), federation.server().start()["s01"])
    refuses(federation, "s01", offer, TrustError, "server's word_bits")


def test_the_rotation_is_the_plans_and_not_the_sessions_so_a_second_session_cannot_turn_an_update_otherwise() -> None:
    federation = Federation(5, mode=SUM_ONLY, word_bits=16)
    first = federation.terms().ring.rotation
    assert first == federation.terms(limits=Limits()).ring.rotation
    others = {federation.terms(round=number).ring.rotation for number in (1, 2, 3)}
    others |= {federation.terms(plan_digest="9" * 64).ring.rotation, federation.terms(protocol="p").ring.rotation}
    assert len(others) == 5 and first in others


# --- P5: choosing the sum over rounds


def test_p5_a_server_rejects_no_more_than_a_quarter() -> None:
    federation = Federation(9)
    requests = drive(federation, federation.server(), "Choice")
    request = asked(federation, messages.Choice(federation.names[:6]), requests["s01"])
    refuses(federation, "s01", request, PrivacyError, "3 uploads are rejected, at most 2")
    summing = Federation(9, mode=SUM_ONLY)
    requests = drive(summing, summing.server(), "Choice")
    request = asked(summing, messages.Choice(summing.names[:8]), requests["s01"])
    refuses(summing, "s01", request, PrivacyError, "1 uploads are rejected, at most 0")


def test_p5_only_few_and_shrinking_sets_of_sites_within_a_window() -> None:
    federation = Federation(10, mode=SUM_ONLY, dimension=500, limits=Limits(left_out=99))
    assert run(federation, terms=federation.terms(round=1), to_site={"Offer": silent("s10")}).result is not None
    outcome = run(federation, terms=federation.terms(round=2))  # the server does not know that s10 was left out
    assert outcome.result is None
    assert any("comes back" in str(error) for error in outcome.refused_by_sites.values())
    for number, gone in ((3, ("s10", "s09")), (4, ("s10", "s09", "s08"))):
        assert (
            run(federation, terms=federation.terms(round=number), to_site={"Offer": silent(*gone)}).result is not None
        )
    small = Federation(10, mode=SUM_ONLY, dimension=500, limits=Limits(distinct_sets=2, left_out=99))
    for number, gone in ((1, ()), (2, ("s10",)), (3, ("s10", "s09"))):
        outcome = run(small, terms=small.terms(round=number), to_site={"Offer": silent(*gone)})
    assert outcome.result is None
    assert any("more than 2 different sets" in str(error) for error in outcome.refused_by_sites.values())
    assert small.state("s01", 3) == "uploaded"


def test_p5_a_site_that_is_left_out_again_and_again_stops_uploading() -> None:
    federation = Federation(5, mode=SUM_ONLY, dimension=500, limits=Limits(distinct_sets=99, left_out=2))
    for number in range(1, 4):
        run(federation, terms=federation.terms(round=number), from_site={"Admitted": silent("s05")})
    assert federation.state("s05", 3) == "uploaded"
    outcome = run(federation, terms=federation.terms(round=4))
    assert "left out too often" in outcome.refused_by_sites["s05"].public
    assert federation.state("s05", 4) == "absent"


def test_p5_leaving_out_numbers_of_rounds_wins_the_server_nothing() -> None:
    """Numbers that end a window at once are used up sooner: how many there are is fixed by the first plan."""
    federation = Federation(5, mode=SUM_ONLY, dimension=500, limits=Limits(distinct_sets=99, left_out=2))
    for number in (1, 11, 21):
        run(federation, terms=federation.terms(round=number), from_site={"Admitted": silent("s05")})
    outcome = run(federation, terms=federation.terms(round=31))
    assert "left out too often" in outcome.refused_by_sites["s05"].public
    longer = replace(federation.terms(round=41), planned_rounds=101)
    disk = federation.disks["s01"]
    with pytest.raises(PrivacyError, match="the plan is one of 101 rounds; this site's first was one of 100"):
        check_may_upload(longer, "s01", disk.records.values())


def test_p5_a_window_of_one_round_remembers_none() -> None:
    federation = Federation(5, mode=SUM_ONLY, dimension=500, limits=Limits(window=1, left_out=1, distinct_sets=99))
    for number in (1, 2, 3, 4):
        outcome = run(federation, terms=federation.terms(round=number), from_site={"Admitted": silent("s05")})
        assert "s05" not in outcome.refused_by_sites


def test_p5_an_honest_server_keeps_within_what_sites_sign() -> None:
    federation = Federation(8, mode=SUM_ONLY, dimension=500, limits=Limits(left_out=99))
    past: dict[int, frozenset[str]] = {}
    for number in range(1, 6):
        terms = federation.terms(round=number)
        gone = ("s08",) if number == 2 else ()
        outcome = run(
            federation, server=federation.server(terms, past=past), terms=terms, to_site={"Offer": silent(*gone)}
        )
        assert outcome.result is not None and not outcome.refused_by_sites
        past[number] = frozenset(outcome.result.included)
    assert past[5] == frozenset(federation.names) - {"s08"}


# --- P6: a sum for some, an abort for the others


def test_p6_who_signed_the_choice_never_sends_the_update_again() -> None:
    federation = Federation(7)
    requests = drive(federation, federation.server(), "Agreed", nth=2)  # nobody has revealed anything yet
    assert {federation.state(name) for name in requests} == {"committed"}
    for terms in (federation.terms(), federation.terms(mode=SUM_ONLY)):
        federation.site("s01", terms)
        refuses(federation, "s01", federation.server(terms).start()["s01"], PrivacyError, "never sent again")


def test_p6_two_quorums_share_an_honest_site_and_the_honest_make_one() -> None:
    for n in range(3, 600):
        assert 2 * quorum_of(n) > n + colluders_of(n)
        assert quorum_of(n) <= n - colluders_of(n)


# --- P8: noise that only the sum has


def test_p8_updates_whose_noise_is_shared_are_not_aggregated() -> None:
    with pytest.raises(ConfigError, match="private by their own noise"):
        check_terms(replace(Federation(5).terms(), noise="sum"))


# --- keys, signatures, order (algorithms 2.3 and 2.4, review 4)


def _swap_key(name: str, roll: messages.Roll) -> messages.Roll:
    one = roll.keys[0]
    other = encode(replace(decode(messages.Keys, one.body), masking=new_key().public))
    return messages.Roll((replace(one, body=other), *roll.keys[1:]))


def _stranger(name: str, roll: messages.Roll) -> messages.Roll:
    said = say(
        messages.Keys(new_key().public, new_key().public),
        sender="s99",
        transcript=roll.keys[0].transcript,
        key=new_key(),
    )
    return messages.Roll((*roll.keys, said))


@pytest.mark.parametrize(
    ("kind", "edit", "match"),
    [
        (messages.Roll, _swap_key, "does not verify"),
        (messages.Roll, _stranger, "not on the roster"),
        (messages.Roll, lambda n, m: messages.Roll((*m.keys, m.keys[0])), "listed twice"),
        (messages.Roll, lambda n, m: messages.Roll(tuple(k for k in m.keys if k.sender != n)), "does not hold"),
        (messages.Roll, lambda n, m: messages.Roll(m.keys[:3]), "too few|does not hold"),
        (messages.Deal, lambda n, m: messages.Deal((*m.shares, m.shares[0])), "not for this site"),
        (messages.Deal, lambda n, m: messages.Deal((replace(m.shares[0], sender=m.shares[1].sender),)), "not verify"),
        (messages.Admitted, lambda n, m: replace(m, names=m.names[:3]), "too few|this one among"),
        (messages.Admitted, lambda n, m: replace(m, names=(*m.names, "s99")), "gave keys"),
        (messages.Admitted, lambda n, m: replace(m, names=(*m.names, m.names[0])), "gave keys"),
        (messages.Admitted, lambda n, m: replace(m, names=tuple(x for x in m.names if x != n)), "this one among"),
        (messages.Uploads, lambda n, m: messages.Uploads((*m.uploads, m.uploads[0])), "listed twice"),
        (messages.Uploads, lambda n, m: messages.Uploads(m.uploads[:2]), "too few"),
        (messages.Uploads, lambda n, m: messages.Uploads(tuple(u for u in m.uploads if u.sender != n)), "does not hold this"),
        (messages.Agreed, lambda n, m: messages.Agreed(m.agreements[:2]), "2 sites agree"),
        (messages.Agreed, lambda n, m: messages.Agreed((m.agreements[0],) * 9), "1 sites agree"),
        (messages.Agreed, lambda n, m: messages.Agreed(tuple(replace(a, signature=bytes(64)) for a in m.agreements)), "not verify"),
        (messages.Choice, lambda n, m: messages.Choice(m.included[:3]), "too few"),
        (messages.Choice, lambda n, m: messages.Choice((*m.included, "s99")), "who uploaded"),
        (messages.Choice, lambda n, m: messages.Choice((*m.included, m.included[0])), "who uploaded"),
    ],
)  # fmt: skip
def test_what_no_honest_server_says_is_refused(kind: type, edit: Callable[[str, Any], Any], match: str) -> None:
    federation = Federation(6, seed=1)
    request = drive(federation, federation.server(), kind.__name__)["s01"]
    forged = served(federation, kind, edit)("s01", request)
    refuses(federation, "s01", forged, TrustError, match)
    session = federation.live["s01"]
    assert session.stage is Stage.ENDED and not session._self_secret and not session._masking
    assert not hasattr(session, "_shares") and not hasattr(session, "_agreeing")
    with pytest.raises(RoundError, match="ended"):
        federation.tell("s01", request)


def test_a_site_is_not_admitted_whose_share_was_kept_from_this_one() -> None:
    """Its secret could not be put together without this site, or only by those the server prefers."""
    federation = Federation(5)
    server = federation.server()
    requests = drive(federation, server, "Deal")
    fewer = served(federation, messages.Deal, lambda n, m: messages.Deal(m.shares[1:]))
    replies = {n: federation.tell(n, fewer(n, r) if n == "s01" else r) for n, r in requests.items()}
    request = server.advance(replies)["s01"]
    refuses(federation, "s01", request, TrustError, "whose share this site does not hold")


def test_what_is_not_the_servers_changes_nothing() -> None:
    federation = Federation(5)
    request = drive(federation, federation.server(), "Deal")["s01"]
    signed = decode(Signed, request)
    other_session = drive(federation_two := Federation(5), federation_two.server(), "Deal")["s01"]
    for forged in (
        b"",
        b"garbage",
        request + b"\x00",
        encode(replace(signed, signature=bytes(64))),
        encode(replace(signed, sender="s02")),
        encode(
            say(decode(messages.Deal, signed.body), sender="", transcript=signed.transcript, key=federation.keys["s02"])
        ),
        encode(say(decode(messages.Deal, signed.body), sender="", transcript=bytes(32), key=federation.server_key)),
        other_session,
    ):
        refuses(federation, "s01", forged, TrustError, "")
    assert federation.live["s01"].stage is Stage.DEALT
    federation.tell("s01", request)


EMPTY = {
    "Roll": messages.Roll(()),
    "Deal": messages.Deal(()),
    "Defend": messages.Defend(()),
    "Admitted": messages.Admitted((), ()),
    "Uploads": messages.Uploads(()),
    "Agreed": messages.Agreed(()),
    "Choice": messages.Choice(()),
}


def test_no_request_is_answered_out_of_order() -> None:
    federation = Federation(4)
    server = federation.server()
    requests = server.start()
    for name in federation.names:
        federation.site(name)
    while requests:
        kind = decode(Signed, requests["s01"]).kind
        stage = federation.live["s01"].stage
        for other, message in EMPTY.items():
            if other not in EXPECTED[stage] and kind != "Offer":
                refuses(federation, "s01", asked(federation, message, requests["s01"]), RoundError, "after this site")
                assert federation.live["s01"].stage is stage
        requests = server.advance({name: federation.tell(name, request) for name, request in requests.items()})
    assert server.result is not None


def test_of_each_peer_one_share_is_revealed_and_only_once() -> None:
    federation = Federation(7)
    server = federation.server()
    requests = drive(federation, server, "Agreed", nth=2)
    reveal = opened(federation, messages.Reveal, federation.tell("s01", requests["s01"]))
    assert [share.dealer for share in reveal.shares] == list(federation.names)
    assert all(len(share.share) == 66 for share in reveal.shares)
    session = federation.live["s01"]
    assert session.stage is Stage.REVEALED and not hasattr(session, "_shares") and not session._masking
    assert not hasattr(session, "_agreeing")
    other = asked(federation, messages.Choice(federation.names[:6]), requests["s01"])
    refuses(federation, "s01", other, RoundError, "after this site revealed")


def test_a_second_choice_is_not_signed() -> None:
    federation = Federation(9)
    requests = drive(federation, federation.server(), "Choice")
    included = opened(federation, messages.Choice, requests["s01"]).included
    federation.tell("s01", requests["s01"])
    other = asked(federation, messages.Choice(included[:-1]), requests["s01"])
    refuses(federation, "s01", other, RoundError, "Choice after this site agreed on the choice")


@pytest.mark.parametrize("mixed", [False, True])
def test_signatures_on_two_choices_do_not_add_up(mixed: bool) -> None:
    federation = Federation(9, seed=2)
    requests = drive(federation, federation.server(), "Choice")
    one, other = federation.names[:7], (*federation.names[:6], federation.names[7])
    agreements = []
    for index, name in enumerate(federation.names):
        choice = asked(federation, messages.Choice(one if index < 5 else other), requests["s01"])
        agreements.append(decode(Reply, federation.tell(name, choice)).signed)
    given = agreements if mixed else agreements[:5]
    request = asked(federation, messages.Agreed(tuple(given)), requests["s01"])
    refuses(federation, "s01", request, TrustError, "another transcript" if mixed else "5 sites agree, 6 are needed")


def test_a_server_that_shows_sites_different_admissions_gets_no_agreement() -> None:
    federation = Federation(8, mode=SUM_ONLY)
    edit = served(
        federation, messages.Admitted, lambda n, m: replace(m, names=tuple(x for x in m.names if x != "s08")), "s01"
    )
    outcome = run(federation, to_site={"Admitted": edit})
    assert outcome.result is not None and not outcome.guilty
    assert outcome.result.included == federation.names[1:]
    assert np.abs(outcome.result.mean_D - federation.mean(federation.names[1:])).max() < 1e-5


@settings(max_examples=200)
@given(st.data())
def test_whatever_may_be_summed_is_of_three_organisations_and_of_two_beside_any_colluders(data: st.DataObject) -> None:
    """`check_included` counts sites; that they are of enough organisations follows from what `check_terms` lets pass."""
    n = data.draw(st.integers(3, 24))
    f = colluders_of(n)
    owners = data.draw(st.lists(st.integers(0, n - 1), min_size=n, max_size=n))
    sizes = Counter(owners)
    assume(max(sizes.values()) <= max(1, f) and len(sizes) >= MINIMUM_ORGANISATIONS)
    by_size = sorted(range(n), key=lambda site: -sizes[owners[site]])  # the fewest organisations there can be
    included = by_size[: fewest_summed(n)]
    assert len({owners[site] for site in included}) >= MINIMUM_ORGANISATIONS
    beside = [owners[site] for site in included][f:]
    assert len(set(beside)) >= 2
