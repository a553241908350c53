"""A server and the sites it has bought: each honest half is shown its own truth, and the bought sign both.

Two quorums share an honest site, and an honest site signs once. So of two lists, or of two choices, one at most is
ever opened; of nobody are both secrets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from common.errors import TrustError
from common.secagg import SKETCH, SUM_ONLY, messages
from common.secagg.encoding import decode
from common.secagg.messages import Reply, Signed, say
from common.secagg.site import Stage
from tests.attacks.test_secagg_server import refuses
from tests.common.secagg.federation import Federation, asked, drive, opened

HONEST, BOUGHT = ("s01", "s02", "s03", "s04", "s05"), ("s06", "s07")
VICTIM = HONEST[0]
"""Left out of what the second half is shown."""

SPLITS = [
    *((first, "nothing") for first in (1, 2, 3, 4)),
    (2, "the bought, twice"),
    (3, "the bought, twice"),
    (2, "the other half"),
]
"""Honest sites in the first half, and what the server adds to the signatures each half gets to see."""


def told(federation: Federation, half: Iterable[str], message: object, like: bytes) -> dict[str, Signed]:
    request = asked(federation, message, like)
    return {name: decode(Reply, federation.tell(name, request)).signed for name in half}


def signed_by_the_bought(federation: Federation, transcript: bytes) -> tuple[Signed, ...]:
    return tuple(
        say(messages.Agreement(), sender=name, transcript=transcript, key=federation.keys[name]) for name in BOUGHT
    )


def agreed(federation: Federation, said: Mapping[str, Signed], *padding: Signed) -> messages.Agreed:
    """All that a half has signed, and the bought with it."""
    transcript = next(iter(said.values())).transcript
    return messages.Agreed((*said.values(), *signed_by_the_bought(federation, transcript), *padding))


def padding_of(
    federation: Federation, kind: str, own: Mapping[str, Signed], other: Mapping[str, Signed]
) -> list[Signed]:
    return {
        "nothing": [],
        "the bought, twice": list(signed_by_the_bought(federation, next(iter(own.values())).transcript)),
        "the other half": list(other.values()),
    }[kind]


def check_opens_for_one_half_only(
    federation: Federation, said: list[dict[str, Signed]], padding: str, like: bytes
) -> dict[str, Signed]:
    """Ask both halves to go on; what the one says that has a quorum. The other refuses, and forgets its secrets."""
    quorum, going = federation.terms().quorum, {}
    for own, other in (said, said[::-1]):
        message = agreed(federation, own, *padding_of(federation, padding, own, other))
        if len(own) + len(BOUGHT) >= quorum and padding != "the other half":
            assert not going, "two halves have a quorum"
            going = told(federation, own, message, like)
            continue
        for name in own:
            few = f"{len(own) + len(BOUGHT)} sites agree, {quorum} are needed"
            match = "another transcript|did not upload" if padding == "the other half" else few
            refuses(federation, name, asked(federation, message, like), TrustError, match)
            assert federation.live[name].stage is Stage.ENDED and not hasattr(federation.live[name], "_shares")
    return going


def check_victim_is_hidden(federation: Federation, reveals: Mapping[str, Signed]) -> None:
    """Beside the bought, too few have revealed its self secret, or too few its masking key."""
    shown: dict[bool, int] = {True: len(BOUGHT), False: len(BOUGHT)}
    for name, said in reveals.items():
        reveal = decode(messages.Reveal, said.body)
        assert [share.dealer for share in reveal.shares] == list(federation.names)
        shown[VICTIM in federation.live[name]._included] += 1
    assert min(shown.values()) < federation.live[VICTIM]._graph.degree.share_threshold


@pytest.mark.parametrize(("first", "padding"), SPLITS)
def test_of_two_choices_that_the_bought_sign_both_one_at_most_is_revealed(first: int, padding: str) -> None:
    federation = Federation(7)
    requests = drive(federation, federation.server(), "Choice")
    like, without = requests[VICTIM], tuple(name for name in federation.names if name != VICTIM)
    said = [
        told(federation, HONEST[:first], messages.Choice(federation.names), like),
        told(federation, HONEST[first:], messages.Choice(without), like),
    ]
    check_victim_is_hidden(federation, check_opens_for_one_half_only(federation, said, padding, like))


@pytest.mark.parametrize(
    ("first", "padding", "equivocate"), [*((*split, False) for split in SPLITS[1:]), (2, "nothing", True)]
)
def test_of_two_lists_that_the_bought_sign_both_the_sketches_of_one_at_most_are_opened(
    first: int, padding: str, equivocate: bool
) -> None:
    federation = Federation(7)
    like, said = two_lists(federation, first, equivocate=equivocate)
    reports = check_opens_for_one_half_only(federation, said, padding, like)
    assert {one.kind for one in reports.values()} <= {"SketchReport"}
    opened_by = {name for name in HONEST if federation.state(name) == "opened"}
    assert opened_by == set(reports)


@pytest.mark.parametrize(("first", "padding"), SPLITS)
def test_without_sketches_two_lists_go_as_far_as_their_choices_and_one_at_most_is_revealed(
    first: int, padding: str
) -> None:
    federation = Federation(7, mode=SUM_ONLY, dimension=500)
    like, said = two_lists(federation, first, equivocate=False)
    without = tuple(name for name in federation.names if name != VICTIM)
    chosen = [
        told(federation, half, messages.Choice(choice), like)
        for half, choice in zip(said, (federation.names, without), strict=True)
    ]
    check_victim_is_hidden(federation, check_opens_for_one_half_only(federation, chosen, padding, like))


def two_lists(federation: Federation, first: int, *, equivocate: bool) -> tuple[bytes, list[dict[str, Signed]]]:
    """What each half signs of the uploads it was shown: the second without the victim's, or another one of a bought."""
    like = drive(federation, federation.server(), "Uploads")[VICTIM]
    full = opened(federation, messages.Uploads, like).uploads
    if equivocate:
        upload = messages.Upload(bytes(32), "e" * 64, "")
        key, transcript = federation.keys[BOUGHT[0]], full[0].transcript
        other = say(upload, sender=BOUGHT[0], transcript=transcript, key=key)
        second = tuple(other if one.sender == BOUGHT[0] else one for one in full)
    else:
        second = tuple(one for one in full if one.sender != VICTIM)
    return like, [
        told(federation, HONEST[:first], messages.Uploads(full), like),
        told(federation, HONEST[first:], messages.Uploads(second), like),
    ]


@pytest.mark.parametrize("step", ["the uploads", "the choice"])
def test_a_bought_site_that_signs_one_list_alone_with_the_server_opens_nothing(step: str) -> None:
    """Four of seven, two of them honest: every way to make up the fifth is refused."""
    federation = Federation(7, mode=SKETCH)
    kind = "Agreed" if step == "the uploads" else "Choice"
    like = drive(federation, federation.server(), kind)[VICTIM]
    if step == "the uploads":
        real = opened(federation, messages.Agreed, like).agreements
        own = {one.sender: one for one in real if one.sender in HONEST[:2]}
    else:
        own = told(federation, HONEST[:2], messages.Choice(federation.names), like)
    four = agreed(federation, own)
    transcript = own[VICTIM].transcript
    forged = say(messages.Agreement(), sender="s05", transcript=transcript, key=federation.keys["s07"])
    stranger = say(messages.Agreement(), sender="s99", transcript=transcript, key=federation.keys["s07"])
    for name, fifth, match in (("s01", forged, "does not verify"), ("s02", stranger, "cannot agree")):
        request = asked(federation, messages.Agreed((*four.agreements, fifth)), like)
        refuses(federation, name, request, TrustError, match)
