"""Secure aggregation: the server learns one weighted sum of the sites' updates, and in sketch mode a few hundred
random projections of each, and nothing else of them (docs/leakage.md).

    plan, roster, policy → context.Terms        derived by every party for itself, compared, bound into every key
    PrivateUpdate → site.SiteSession            rounds, masks, signs, reveals; what must be on disk first comes along
    masked words → server.ServerSession         relays, selects on sketches, opens the sum, names who lied

Both sides are state machines without I/O. `edge_node.secure_session` keeps a site's records on disk,
`aggregator.secure_round` carries the messages.
"""

from common.secagg.context import MODES, SKETCH, SUM_ONLY, Limits, Member, Terms, derive_terms
from common.secagg.server import ServerSession, Summed
from common.secagg.site import Answer, Paid, SiteSession
from common.secagg.states import UpdateRecord, UpdateState

__all__ = [
    "MODES",
    "SKETCH",
    "SUM_ONLY",
    "Answer",
    "Limits",
    "Member",
    "Paid",
    "ServerSession",
    "SiteSession",
    "Summed",
    "Terms",
    "UpdateRecord",
    "UpdateState",
    "derive_terms",
]
