"""Whether a site has enough data to take part: a noisy count that is charged like everything else.

The exact answer would tell the aggregator whether a site has at least so many
records, and with chosen thresholds how many. So the count gets Gaussian noise: one
unit more changes it by one, which is the Gaussian mechanism at READINESS_EVENT, and
the ledger composes it with the training it stands before.
"""

from __future__ import annotations

from common.accounting import PrivateSteps
from common.errors import PrivacyError
from edge_node.policy import Privacy
from edge_node.training.ledger import Ledger
from edge_node.training.noise import SecureRandom

READINESS = "readiness"
READINESS_EVENT = PrivateSteps(noise_multiplier=10.0, sampling_rate=1.0, steps=1)
"""One count with noise of standard deviation 10 units."""

_READY, _NOT_READY = "ready", "not-ready"


def require_enough_units(
    units: int,
    *,
    min_samples: int,
    round_name: str,
    plan_digest: str,
    privacy: Privacy,
    ledger: Ledger,
    random: SecureRandom,
    now_s: float,
) -> None:
    """Count once a round, with noise, and remember the answer.

    Raises:
        PrivacyError: too few by this count, now or when the round was first asked for.
    """
    earlier = ledger.reservation(READINESS, round_name)
    if earlier is None:
        entry = ledger.reserve(
            READINESS,
            round_name,
            plan_digest,
            epsilon_total=privacy.epsilon_total,
            delta=privacy.delta,
            now_s=now_s,
        )
        noise = round(float(random.normal(1)[0]) * READINESS_EVENT.noise_multiplier)
        outcome = _READY if units + noise >= min_samples else _NOT_READY
        ledger.commit(entry, outcome, now_s=now_s)
    else:
        outcome = earlier.outcome or _NOT_READY
    if outcome != _READY:
        raise PrivacyError(
            f"{units} units, fewer than min_samples = {min_samples} by a noisy count; collect more, "
            "or lower training.min_samples in edge.toml",
            public="the site has too little data by a noisy count, which it has charged",
        )
