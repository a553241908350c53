"""Sites of a simulation that are away in a round: dropped out, or too slow for it.

Drawn for every round, in a secure mode for every window of rounds, from the
simulation's seed, so the sites that are away are the same whatever else happens. A
site that dropped out does not train. A slow one trains and answers too late: it
hands over that update in a later round, if one on the same LoRA factor comes soon
enough.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from deploy.local_grid import Fault, Faults


class Absence(Enum):
    DROPPED = "dropped out"
    SLOW = "too slow"


@dataclass(frozen=True)
class Absences:
    """Who is away when.

    Attributes:
        drop, slow: probabilities for each site and round.
        most: that may be away in one round; a round without a quorum shows nothing.
        rounds: for which the same sites are away. In a secure mode one that was away once is out of the rest of its
            window, so others must not be away then.
    """

    sites: tuple[str, ...]
    drop: float
    slow: float
    most: int
    seed: int
    rounds: int = 1

    def in_round(self, number: int) -> dict[str, Absence]:
        rng = random.Random(f"{self.seed}:absences:{(number - 1) // self.rounds * self.rounds + 1}")
        away: dict[str, Absence] = {}
        for site in rng.sample(self.sites, len(self.sites)):
            drawn = rng.random()
            if drawn < self.drop + self.slow and len(away) < self.most:
                away[site] = Absence.DROPPED if drawn < self.drop else Absence.SLOW
        return away


def faults(absences: Absences, site_of: Callable[[int], str], kinds: Sequence[str]) -> Faults:
    """What happens to the messages of a round on a local grid.

    Args:
        site_of: the site behind a node's id.
        kinds: of the messages that carry a round's plan.
    """
    trained: set[tuple[str, int]] = set()
    lock = threading.Lock()

    def fault(message: Any) -> Fault | None:
        if message.metadata.message_type not in kinds:
            return None
        number = json.loads(message.content["request"]["payload"])["round"]
        site = site_of(message.metadata.dst_node_id)
        absence = absences.in_round(number).get(site)
        if absence is not Absence.SLOW:
            return Fault.UNREACHABLE if absence else None
        with lock:
            if (site, number) in trained:
                return Fault.UNREACHABLE
            trained.add((site, number))
        return Fault.NO_REPLY

    return fault
