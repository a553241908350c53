"""What public data teach: a node of whoever runs the aggregator, trained for each round's plan without noise.

An ordinary node on public, synthetic or staging traffic, beside the aggregator and in no
roster. Its change is never added to a version. It is what the sites' updates are held
against: one that points the other way is left out (`common.outliers`). Nobody's
private data may be in it; no noise hides them and no ledger counts them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from common.adapter import Adapter
from common.errors import ConfigError
from common.plan import RoundPlan
from common.update import NOT_CHARGED
from edge_node.node import EdgeNode


class PublicReference:
    """Implements `aggregator.server_app.Reference`.

    Args:
        node: opened with `unsafe_no_noise`, in no roster.
        adapter_of: a version's adapter, for example `Hub.adapter`.
    """

    def __init__(self, node: EdgeNode, adapter_of: Callable[[str], Adapter]) -> None:
        self._node = node
        self._adapter_of = adapter_of

    def __call__(self, plan: RoundPlan) -> np.ndarray:
        """The change; raises what training raises, for example PrivacyError where there is no data."""
        if self._node.name in plan.weights:
            raise ConfigError(f"{self._node.name} takes part in the federation; a reference is a node of its own")
        law = self._node.policy.law()
        adapter = self._adapter_of(plan.adapter_version)
        update = self._node.training.update_for(plan, law, adapter, self._node.recorder.redactor(law))
        if update.ledger_entry != NOT_CHARGED:
            raise ConfigError(f"{self._node.name} trains with noise; open the reference's node with unsafe_no_noise")
        return update.delta_D
