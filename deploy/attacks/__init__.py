"""Hostile sites, for simulations only.

An attacker owns a real site with a valid identity. It changes its data before it
trains, or its update before it is sealed; everything else, its training and its
privacy charge included, is production code. What each needs to know is said beside
it: `own` data only, the updates of all `colluders`, or, as only a simulation can
grant, those of the `honest` sites too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from deploy.attacks import colluding, single
from deploy.attacks.poisoning import Poison, backdoor, label_flip
from deploy.attacks.scene import Scene


@dataclass(frozen=True)
class Attack:
    """One entry of ATTACKS.

    Attributes:
        change: what it hands over instead of its update; None for its update as trained.
        poison: what it trains on instead of its records; None for what its users did.
        knows: whose updates `change` looks at.
        trains: whether it trains at all.
        speaks: whether it sends updates; otherwise bytes that are none.
    """

    change: Callable[[Scene], np.ndarray] | None = None
    poison: Poison | None = None
    knows: Literal["own", "colluders", "honest"] = "own"
    trains: bool = True
    speaks: bool = True


ATTACKS: Mapping[str, Attack] = {
    "sign-flip": Attack(single.sign_flip),
    "scale": Attack(single.scale),
    "alie": Attack(colluding.alie, knows="honest"),
    "ipm": Attack(colluding.inner_product, knows="honest"),
    "min-max": Attack(colluding.min_max, knows="honest"),
    "label-flip": Attack(poison=label_flip),
    "backdoor": Attack(single.planted, poison=backdoor),
    "boosted-backdoor": Attack(single.boosted, poison=backdoor),
    "nan": Attack(single.nan),
    "garbage": Attack(speaks=False),
    "free-rider": Attack(single.free_ride, trains=False),
    "sybil": Attack(colluding.sybil, knows="colluders"),
}
"""By the name on the command line. What looks at honest updates is in `colluding`."""


def parse_attack(text: str) -> tuple[str, int] | None:
    """Name and number of sites of `NAME:K`; None for `none`.

    Raises:
        ValueError: it is neither.
    """
    if text == "none":
        return None
    name, _, count = text.partition(":")
    if name not in ATTACKS or not count.isdecimal() or int(count) < 1:
        raise ValueError(f"write none or NAME:K with NAME one of {', '.join(sorted(ATTACKS))}")
    return name, int(count)
