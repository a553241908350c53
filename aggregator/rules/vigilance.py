"""When a rule drops only what sticks out, and when it drops as many as could lie.

In the normal state a round without a liar loses little. After a sign of attack
the state is alert for ten rounds: rules then always leave out as many updates as
they tolerate, which holds beyond that number but costs some honest data.
"""

from __future__ import annotations

from dataclasses import dataclass

ALERT_ROUNDS = 10


@dataclass(frozen=True)
class Evidence:
    """What a round showed.

    Attributes:
        round: its number.
        blamed: some site was proved to have broken the protocol.
        gate_failed: the combined change did not pass the gates.
        rolled_back: the version it made was rolled back.
    """

    round: int
    blamed: bool = False
    gate_failed: bool = False
    rolled_back: bool = False


@dataclass(frozen=True)
class Vigilance:
    """Alert up to and with a round; 0 for never."""

    alert_until: int = 0

    def alert(self, round_number: int) -> bool:
        return round_number <= self.alert_until


def advance(state: Vigilance, evidence: Evidence) -> Vigilance:
    """The state after a round's evidence: a sign of attack starts the ten rounds anew.

    An update left out as an outlier is no sign of attack: data differ.
    """
    if not (evidence.blamed or evidence.gate_failed or evidence.rolled_back):
        return state
    return Vigilance(max(state.alert_until, evidence.round + ALERT_ROUNDS))
