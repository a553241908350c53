"""What an aggregator knows of its federation: who takes part, by which rule, trained how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from aggregator.rules import RULES, Rule, tolerated_liars
from aggregator.rules.mean import LARGEST_SHARE
from aggregator.server_optimizer import PLAIN_AVERAGE, ServerOptimizer
from common.adapter import LORA_MODES
from common.errors import ConfigError
from common.identity import SigningKey, roster_digest
from common.plan import Training
from common.secagg.context import DEFAULT_LIMITS, Limits, Member, check_word_bits, fewest_summed
from common.secagg.context import MINIMUM_SITES as MINIMUM_SITES_OF
from common.secagg.context import MODES as SECURE_MODES

MINIMUM_SITES = 3
AGGREGATIONS = ("sealed", *SECURE_MODES)
"""How updates may travel and combine; `server_app.COMBINE` has the function of each."""


@dataclass(frozen=True)
class Federation:
    """Fixed for a run.

    Attributes:
        roster: raw Ed25519 public key by site name.
        weights: contract weight in {1, 2, 4} by site name.
        key: the aggregator's identity; signs plans.
        rule: name in RULES.
        planned_rounds: what the sites solve their noise for.
        clip_norm: L2 bound of one site's update.
        collect_timeout_s: from publishing a plan to its deadline.
        step_timeout_s: of one step of a secure round; sites that share a machine need more.
        aggregation: name in AGGREGATIONS.
        owners: organisation by site, for secure aggregation; a site that is not named is its own.
        vendor_sites: sites run by whoever runs the aggregator; they count as colluding with it.
        limits: how far the aggregator may choose over secure rounds; every site's policy must say the same.
        word_bits: of a masked number, 32, or 16 in mode `secagg`; every site's policy must say the same.
        longest_lag: versions an update may be behind and still count, damped; 0 for updates of unused plans on the
            same version only, -1 for none.
        lora_mode: name in LORA_MODES.
        balance: whether a version trained in its A factors is published with factors of equal norm.
        optimizer: what the server makes of a round's combined change.
        patience: rounds in a row without a promoted version after which training stops; 0 for never. The signal is
            the canary's verdict on public prompts.
    Raises:
        ConfigError: too few sites, or too few for the rule.
    """

    name: str
    roster: Mapping[str, bytes]
    weights: Mapping[str, int]
    key: SigningKey
    training: Training
    rule: str
    planned_rounds: int
    clip_norm: float
    collect_timeout_s: float
    lora_mode: str = "alternate"
    balance: bool = False
    patience: int = 0
    aggregation: str = "sealed"
    owners: Mapping[str, str] = field(default_factory=dict)
    vendor_sites: frozenset[str] = frozenset()
    limits: Limits = DEFAULT_LIMITS
    word_bits: int = 32
    step_timeout_s: float = 120.0
    longest_lag: int = 5
    optimizer: ServerOptimizer = PLAIN_AVERAGE

    def __post_init__(self) -> None:
        check_rule(self.rule, sites=len(self.roster))
        if self.lora_mode not in LORA_MODES:
            raise ConfigError(f"unknown LoRA mode {self.lora_mode!r}; known modes: {', '.join(LORA_MODES)}")
        if self.aggregation not in AGGREGATIONS:
            raise ConfigError(f"unknown aggregation {self.aggregation!r}; known: {', '.join(AGGREGATIONS)}")
        needed = MINIMUM_SITES_OF.get(self.aggregation, MINIMUM_SITES)
        if len(self.roster) < needed:
            raise ConfigError(f"aggregation {self.aggregation} needs at least {needed} sites, got {len(self.roster)}")
        if self.balance and self.optimizer.remembers:
            raise ConfigError("balancing changes the factors under the server's moments; switch balance off")
        if set(self.weights) != set(self.roster):
            raise ConfigError("every site of the roster needs a contract weight, and no other")
        total, largest = sum(self.weights.values()), max(self.weights.values())
        if not set(self.weights.values()) <= {1, 2, 4}:
            raise ConfigError("contract weights must be 1, 2 or 4")
        if largest / total > max(LARGEST_SHARE, 1 / len(self.roster)) + 1e-9:
            raise ConfigError(f"one site would have {largest / total:.0%} of the weight; at most a quarter is allowed")
        check_word_bits(self.word_bits, mode=self.aggregation, total_weight=total)

    @property
    def roster_digest(self) -> str:
        return roster_digest(self.roster)

    @property
    def members(self) -> tuple[Member, ...]:
        """The roster as secure aggregation knows it."""
        return tuple(
            Member(site, public, self.owners.get(site, site), self.weights[site], int(site in self.vendor_sites))
            for site, public in sorted(self.roster.items())
        )

    @property
    def quorum(self) -> int:
        """Fewest usable updates of a round that has a result: more than half of the roster, and enough for the rule.

        In a secure mode as many as sites agree to sum.
        """
        if self.aggregation in SECURE_MODES:
            return fewest_summed(len(self.roster))
        return max(RULES[self.rule].minimum_updates(tolerated_liars(len(self.roster))), len(self.roster) // 2 + 1)


def check_rule(name: str, *, sites: int) -> Rule:
    """The rule by its name, if the federation is large enough for it."""
    if name not in RULES:
        raise ConfigError(f"unknown rule {name!r}; known rules: {', '.join(sorted(RULES))}")
    rule = RULES[name]
    needed = max(MINIMUM_SITES, rule.minimum_sites)
    if sites < needed:
        raise ConfigError(f"rule {name} needs at least {needed} sites, got {sites}; add sites or take another rule")
    return rule
