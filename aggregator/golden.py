"""Evidence from the sites about a canary: what they are asked, and what of their answers is believed."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from aggregator.sites import Reply
from common.errors import TrustError
from common.identity import GOLDEN_LABEL, canonical, sha256_hex, verify
from common.tasks import math as math_task
from common.update import Refusal
from model_hub.evidence import PairedOutcome

PROMPTS_PER_SITE = 20


def golden_request(canary_id: str, control_id: str, *, window: int, site: str) -> dict[str, Any]:
    """Prompts and sampling seed of their own for every canary, window and site: evidence never repeats itself."""
    seed = int(sha256_hex(f"golden/{canary_id}/{window}/{site}".encode())[:8], 16)
    problems = math_task.problems(math_task.Distribution(), math_task.Split.GOLDEN, seed)
    return {
        "canary_id": canary_id,
        "control_id": control_id,
        "task": math_task.NAME,
        "prompts": [problem.prompt for problem in islice(problems, PROMPTS_PER_SITE)],
        "seed": seed,
    }


def paired_outcomes(reply: Reply | Refusal, request: Mapping[str, Any], *, site_public: bytes) -> list[PairedOutcome]:
    """Outcomes of one site; none where the reply is malformed, so it can neither sway nor stop the test."""
    if isinstance(reply, Refusal):
        return []
    fields = dict(reply.fields)
    signature = fields.pop("signature", None)
    names = ("canary_error", "control_error", "canary_reward", "control_reward")
    columns = [fields.get(name) for name in names]
    if set(fields) != set(names) or not isinstance(signature, bytes):
        return []
    if not all(isinstance(c, list) and len(c) == len(request["prompts"]) for c in columns):
        return []
    pairs = [PairedOutcome(*values) for values in zip(*columns, strict=True)]
    if not all(map(_is_well_formed, pairs)):
        return []
    try:
        verify(site_public, GOLDEN_LABEL, canonical({"request": dict(request), "outcomes": fields}), signature)
    except TrustError:
        return []
    return pairs


def _is_well_formed(pair: PairedOutcome) -> bool:
    errors, rewards = (pair.canary_error, pair.control_error), (pair.canary_reward, pair.control_reward)
    return all(type(e) is bool for e in errors) and all(type(r) is float and 0 <= r <= 1 for r in rewards)
