"""What a site signs and no honest site says: refused by that site's name at that very step; the others go on without it.

Nobody but the signer can be meant, and what is malformed is no proven lie: nobody is guilty. The rest of the session
is as if the site had gone silent there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from common.secagg import SUM_ONLY, messages
from common.secagg.encoding import decode, encode
from common.secagg.messages import Reply, Signed, say
from common.secagg.server import ServerSession
from tests.attacks.test_secagg_sites import BAD, bad_share_for, on_sketch, shift_mask
from tests.common.secagg.federation import Change, Federation, Outcome, resigned, run, silent
from tests.common.secagg.test_session import STEPS, _if, check_exact

REPLIES: dict[str, tuple[type, str]] = {
    "keys": (messages.Keys, "Offer"),
    "shares": (messages.Dealing, "Roll"),
    "verdict": (messages.Verdict, "Deal"),
    "published": (messages.Published, "Defend"),
    "upload": (messages.Upload, "Admitted"),
    "agreement": (messages.Agreement, "Uploads"),
    "sketch": (messages.SketchReport, "Agreed"),
    "choice": (messages.Agreement, "Choice"),
    "reveal": (messages.Reveal, "Agreed"),
}
"""What a site says, and the request it answers; in the order of a session."""

COUNTS_ANYWAY = ("agreement", "choice", "reveal")
"""Without sketches, an update that was sent is summed whatever its site says after."""


def federation_for(step: str) -> Federation:
    """As small as will do: five sites bear the loss of one, and only sketches need a long update."""
    return Federation(5) if step == "sketch" else Federation(5, mode=SUM_ONLY, dimension=500)


def answered(federation: Federation, step: str, change: Change) -> Outcome:
    """A session in which `change` has its way with one reply of BAD."""
    kind, request = REPLIES[step]
    changes = {request: _if(kind, lambda name, data: change(name, data) if name == BAD else data)}
    if step == "published":
        changes["Roll"] = bad_share_for(federation, "s01")
    return run(federation, from_site=changes)


def check_named(federation: Federation, outcome: Outcome, step: str, reason: str) -> None:
    """BAD is out from this step on and for this reason; nobody else is, nobody is guilty, the sum is the others'."""
    result = check_exact(federation, outcome)
    refused = outcome.server.refusals
    assert [(r.site, r.stage) for r in refused] == [(BAD, REPLIES[step][0].__name__)]
    assert reason in refused[0].reason
    assert not outcome.guilty and not outcome.refused_by_sites
    assert (BAD in result.included) == (step in COUNTS_ANYWAY)
    assert {federation.state(name) for name in federation.names if name != BAD} == {"committed"}


# --- whatever the message


def _larger(federation: Federation, reply: Reply) -> Reply:
    return replace(reply, words=bytes(200_000))


def _of_another_kind(federation: Federation, reply: Reply) -> Reply:
    signed = reply.signed
    mask = messages.MaskSketch("s01", b"")
    return Reply(say(mask, sender=BAD, transcript=signed.transcript, key=federation.keys[BAD]), reply.words)


def _under_another_transcript(federation: Federation, reply: Reply) -> Reply:
    transcript = federation.terms().context(bytes(32))
    message = decode({kind.__name__: kind for kind, _ in REPLIES.values()}[reply.signed.kind], reply.signed.body)
    return Reply(say(message, sender=BAD, transcript=transcript, key=federation.keys[BAD]), reply.words)


@pytest.mark.parametrize("step", REPLIES)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_larger, "bytes, expected at most"),
        (_of_another_kind, "not the encoding of a"),
        (_under_another_transcript, "another transcript"),
    ],
    ids=["too large", "of another kind", "under another transcript"],
)
def test_a_reply_that_is_not_what_was_asked_for_puts_its_site_out(
    step: str, change: Callable[[Federation, Reply], Reply], reason: str
) -> None:
    federation = federation_for(step)
    outcome = answered(federation, step, lambda name, data: encode(change(federation, decode(Reply, data))))
    check_named(federation, outcome, step, reason)


# --- each message


def first_share(**changed: Any) -> Callable[[Federation, messages.Dealing], messages.Dealing]:
    """The share for s01 says something else, and BAD signs it."""

    def edit(federation: Federation, dealing: messages.Dealing) -> messages.Dealing:
        first, *rest = dealing.shares
        share = replace(decode(messages.Share, first.body), **changed)
        return messages.Dealing((say(share, sender=BAD, transcript=first.transcript, key=federation.keys[BAD]), *rest))

    return edit


def first_signed(**changed: Any) -> Callable[[Federation, messages.Dealing], messages.Dealing]:
    """The share for s01 as it was, said in another name or under another transcript, and signed by BAD."""

    def edit(federation: Federation, dealing: messages.Dealing) -> messages.Dealing:
        first, *rest = dealing.shares
        said = {"sender": BAD, "transcript": first.transcript, **changed}
        again: Signed = say(decode(messages.Share, first.body), key=federation.keys[BAD], **said)
        return messages.Dealing((again, *rest))

    return edit


def complains(*names: str) -> Callable[[Federation, messages.Verdict], messages.Verdict]:
    return lambda federation, verdict: messages.Verdict(names)


def masks(edit: Callable[[tuple[messages.MaskSketch, ...]], tuple[messages.MaskSketch, ...]]) -> Any:
    return lambda federation, report: replace(report, masks=edit(report.masks))


def revealing(edit: Callable[[tuple[messages.Revealed, ...]], tuple[messages.Revealed, ...]]) -> Any:
    return lambda federation, reveal: messages.Reveal(edit(reveal.shares))


def publishing(edit: Callable[[tuple[messages.OpenShare, ...]], tuple[messages.OpenShare, ...]]) -> Any:
    return lambda federation, published: messages.Published(edit(published.shares))


DEALT, COMPLAINED, PUBLISHED = "dealt to others", "that dealt it nothing", "published other shares"
MASKS, SIZE, REVEALED = "sketched other masks", "the wrong size", "revealed other shares"

MALFORMED: dict[str, tuple[str, Callable[[Federation, Any], Any], str]] = {
    "one key for both": ("keys", lambda f, m: replace(m, sharing=m.masking), "another site's"),
    "no shares": ("shares", lambda f, m: messages.Dealing(()), DEALT),
    "a share short": ("shares", lambda f, m: messages.Dealing(m.shares[1:]), DEALT),
    "a share twice": ("shares", lambda f, m: messages.Dealing((*m.shares, m.shares[0])), DEALT),
    "a share for an outsider": ("shares", first_share(holder="s99"), DEALT),
    "a share too many": (
        "shares",
        lambda f, m: messages.Dealing((*m.shares, *first_share(holder="s99")(f, m).shares[:1])),
        DEALT,
    ),
    "a share in another's name": ("shares", first_signed(sender="s02"), DEALT),
    "a share of another session": ("shares", first_signed(transcript=bytes(32)), "another transcript"),
    "two secrets": ("shares", first_share(self_secret=bytes(32)), "committed to two secrets"),
    "complains about an outsider": ("verdict", complains("s99"), COMPLAINED),
    "complains about itself": ("verdict", complains(BAD), COMPLAINED),
    "complains twice": ("verdict", complains("s01", "s01"), COMPLAINED),
    "publishes for another too": (
        "published",
        publishing(lambda shares: (*shares, replace(shares[0], holder="s02"))),
        PUBLISHED,
    ),
    "publishes twice": ("published", publishing(lambda shares: shares * 2), PUBLISHED),
    "publishes for another": ("published", publishing(lambda shares: (replace(shares[0], holder="s02"),)), PUBLISHED),
    "the digest of other words": ("upload", lambda f, m: replace(m, words_sha256=bytes(32)), "not those it signed"),
    "no masks": ("sketch", masks(lambda said: ()), MASKS),
    "a mask short": ("sketch", masks(lambda said: said[1:]), MASKS),
    "a mask twice": ("sketch", masks(lambda said: (said[0], *said)), MASKS),
    "masks in another order": ("sketch", masks(lambda said: said[::-1]), MASKS),
    "a mask with itself": ("sketch", masks(lambda said: (*said[:-1], replace(said[-1], other=BAD))), MASKS),
    "a mask with an outsider": ("sketch", masks(lambda said: (*said, replace(said[0], other="s99"))), MASKS),
    "no sketch": ("sketch", lambda f, m: replace(m, own=b""), SIZE),
    "one word for all": ("sketch", lambda f, m: replace(m, own=m.own[:4]), SIZE),
    "a word too many": ("sketch", lambda f, m: replace(m, own=m.own + bytes(4)), SIZE),
    "half a word short": ("sketch", lambda f, m: replace(m, own=m.own[:-2]), SIZE),
    "one word for a mask": ("sketch", masks(lambda said: (replace(said[0], words=bytes(4)), *said[1:])), SIZE),
    "no words for the last mask": ("sketch", masks(lambda said: (*said[:-1], replace(said[-1], words=b""))), SIZE),
    "reveals nothing": ("reveal", revealing(lambda shares: ()), REVEALED),
    "reveals a share short": ("reveal", revealing(lambda shares: shares[1:]), REVEALED),
    "reveals a share twice": ("reveal", revealing(lambda shares: (*shares, shares[-1])), REVEALED),
    "reveals in another order": ("reveal", revealing(lambda shares: shares[::-1]), REVEALED),
    "reveals an outsider's": ("reveal", revealing(lambda shares: (*shares[:-1], replace(shares[-1], dealer="s99"))), REVEALED),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_what_no_honest_site_says_is_refused_by_its_name(case: str) -> None:
    step, edit, reason = MALFORMED[case]
    federation = federation_for(step)
    change = resigned(federation, REPLIES[step][0], lambda name, message: edit(federation, message), BAD)
    check_named(federation, answered(federation, step, change), step, reason)


def test_a_complaint_about_a_site_that_dealt_nothing_is_none() -> None:
    federation = Federation(7, mode=SUM_ONLY, dimension=500)
    gone: dict[str, Change] = dict.fromkeys(STEPS[1:], silent("s07"))
    change = resigned(federation, messages.Verdict, lambda n, m: messages.Verdict(("s07",)), BAD)
    outcome = run(federation, to_site=gone, from_site={"Deal": change})
    assert [(r.site, r.stage) for r in outcome.server.refusals] == [("s07", "Dealing"), (BAD, "Verdict")]
    assert check_exact(federation, outcome).included == ("s01", "s02", "s03", "s05", "s06")


# --- many at once


@pytest.mark.parametrize("malformed", [False, True])
def test_more_uploads_without_a_sketch_than_may_be_left_out_end_the_round(malformed: bool) -> None:
    federation = Federation(9)  # two exclusions
    three = ("s02", BAD, "s06")
    change = on_sketch(federation, lambda n, m: replace(m, own=b""), *three) if malformed else silent(*three)
    outcome = run(federation, from_site={"Agreed": change})
    assert outcome.result is None and not outcome.guilty
    assert outcome.void == "3 uploads have no sketch, at most 2 may be left out"
    assert {r.site for r in outcome.server.refusals} == set(three)
    assert {federation.state(name) for name in federation.names} == {"opened"}


def test_sketches_that_do_not_add_up_to_the_sums_own_are_believed_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disputes are settled before; this is what remains where one was overlooked."""
    monkeypatch.setattr(ServerSession, "_disputes", lambda session: [])
    federation = Federation(6)
    outcome = run(federation, from_site={"Agreed": on_sketch(federation, lambda n, m: shift_mask(m, "s01", 1), BAD)})
    assert outcome.server.included == federation.names
    assert outcome.result is None and not outcome.guilty
    assert outcome.void == "the sketch of the sum is not the sum of the sketches"
