"""How freely the server may choose, over rounds: checked by every site before it sends and before it signs.

Sums over sets of sites that change from round to round show what each site brings
to all of them. So a set may only shrink within a window of rounds, few different
ones are signed, few uploads are rejected, and a site that is left out again and
again stops uploading. Sites that drop out count as left out: the server could
claim it of anyone. This slows the leak and does not end it (docs/leakage.md).

Windows count numbers of rounds, which the server gives. It gains nothing by leaving
some out: the first plan fixes for good how many numbers there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from common.errors import PrivacyError
from common.secagg.context import SKETCH, Terms
from common.secagg.states import UpdateRecord

Past = Mapping[int, frozenset[str]]
"""Who was included, by round."""


def past_sums(history: Iterable[UpdateRecord]) -> Past:
    return {record.round: frozenset(record.included) for record in history if record.included}


def check_may_upload(terms: Terms, name: str, history: Iterable[UpdateRecord]) -> None:
    """Raise PrivacyError where the server has left this site out, or looked at it, too often.

    Args:
        history: the site's records of this federation.
    """
    limits = terms.limits
    records = sorted((r for r in history if r.round != terms.round), key=lambda record: record.round)
    planned = {record.planned_rounds for record in records} - {terms.planned_rounds}
    if planned:
        reason = f"the plan is one of {terms.planned_rounds} rounds; this site's first was one of {min(planned)}"
        raise PrivacyError(reason, public="the federation's number of rounds changed")
    sent = [record for record in records if record.uploads]  # its own, whatever their numbers
    sent = sent[max(0, len(sent) - (limits.window - 1)) :]
    left_out = sum(name not in record.included for record in sent)
    if left_out > limits.left_out:
        reason = f"this site was left out of {left_out} of its last {len(sent)} sums; a person must look at why"
        raise PrivacyError(reason, public="this site was left out too often")
    share = terms.sketched_share + sum(record.sketched_share for record in records)
    if terms.mode == SKETCH and share > limits.sketched_share:
        allowed = limits.sketched_share
        reason = f"sketches would have shown {share:.1%} of an update's dimensions; {allowed:.1%} is allowed"
        raise PrivacyError(reason, public="sketches have shown as much of this site's updates as it allows")


def check_choice(terms: Terms, uploaded: Iterable[str], included: Iterable[str], past: Past) -> None:
    """Raise PrivacyError where the server rejects too many, or chooses too many different sets."""
    chosen = frozenset(included)
    rejected = len(set(uploaded) - chosen)
    if rejected > terms.exclusions:
        reason = f"{rejected} uploads are rejected, at most {terms.exclusions} may be"
        raise PrivacyError(reason, public=reason)
    window, allowed = terms.limits.window, terms.limits.distinct_sets
    recent = {number: names for number, names in past.items() if 0 < abs(number - terms.round) < window}
    if len({*recent.values(), chosen}) > allowed:
        reason = f"more than {allowed} different sets of sites within {window} rounds"
        raise PrivacyError(reason, public=reason)
    for number, names in recent.items():
        earlier, later = (names, chosen) if number < terms.round else (chosen, names)
        if _same_epoch(terms, number) and not later <= earlier:
            reason = "a site that was left out comes back within the same window of rounds"
            raise PrivacyError(reason, public=reason)


def eligible(terms: Terms, past: Past) -> frozenset[str]:
    """Sites that may be in this round's sum: those that earlier rounds of the window have not left out."""
    names = frozenset(terms.names)
    for number, included in past.items():
        if number < terms.round and _same_epoch(terms, number):
            names &= included
    return names


def _same_epoch(terms: Terms, number: int) -> bool:
    return (number - 1) // terms.limits.window == (terms.round - 1) // terms.limits.window
