"""What a simulation found: `report.json` for programs, `report.html` for people.

The JSON is the report's API; its keys are documented in docs/report.md. The page
is one file without scripts or outside references.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from deploy import plots
from deploy.world import World

SCHEMA_VERSION = 1
_ONE_SIDED_95 = 1.6448536269514722


@dataclass(frozen=True)
class Gain:
    """Change of reward over the same problems; the bounds are one-sided 95 %, normal approximation."""

    before: float
    after: float
    low95: float
    high95: float


@dataclass(frozen=True)
class Report:
    """Everything the page shows; `data` is `report.json`."""

    data: Mapping[str, Any]

    @classmethod
    def of(cls, world: World, *, seconds: float) -> Report:
        settings = world.settings
        first, last = world.exams[0], world.exams[-1]
        honest = [site for site in settings.site_names if settings.attack_of(site) is None]
        gains = {site: paired_gain(first.rewards[site], last.rewards[site]) for site in settings.site_names}
        pooled = paired_gain(
            [reward for site in honest for reward in first.rewards[site]],
            [reward for site in honest for reward in last.rewards[site]],
        )
        data = {
            "schema_version": SCHEMA_VERSION,
            "settings": {**settings.model_dump(mode="json"), "rule": settings.rule_name, "aggregation": settings.mode},
            "seconds": round(seconds, 1),
            "privacy": {
                "private": not settings.unsafe_no_dp,
                "unit": settings.unit,
                "relation": "add or remove one unit",
                "epsilon_budget": settings.epsilon,
                "delta": settings.delta,
            },
            "pooled": _gain_fields(pooled),
            "sites": [
                {
                    "name": site,
                    "attack": settings.attack_of(site),
                    "epsilon": None if settings.unsafe_no_dp else last.epsilons[site],
                    "delta": settings.delta,
                    **_gain_fields(gains[site]),
                }
                for site in settings.site_names
            ],
            "rounds": [
                {
                    "number": record.number,
                    "participants": list(record.participants),
                    "refused": [asdict(refusal) for refusal in record.refused],
                    "version": record.version,
                    "void_reason": record.void_reason,
                    "distance_to_honest_mean": world.distances.get(record.number),
                }
                for record in world.rounds
            ],
            "versions": [
                {
                    "id": version.id,
                    "digest": version.digest,
                    "parent": version.parent,
                    "rule": version.lineage.rule,
                    "state": version.stage.value,
                    "reason": version.reason,
                    "drill": next((d.name for d in world.drills if d.version == version.id), None),
                    "caught": next((d.caught for d in world.drills if d.version == version.id), None),
                    "history": [
                        {"state": t.stage.value, "reason": t.reason, "at_s": t.at_s}
                        for t in world.hub.catalog.transitions()
                        if t.version == version.id
                    ],
                    "evidence": [
                        {"at_s": point.at_s, **asdict(point.verdict)}
                        for point in world.hub.catalog.evidence(version.id)
                    ],
                }
                for version in world.hub.catalog.versions()
            ],
            "exams": [
                {
                    "round": exam.round,
                    "version": exam.version,
                    "rewards": {site: exam.reward_of(site) for site in exam.rewards},
                    "epsilons": dict(exam.epsilons),
                    "honest_reward": _mean([exam.reward_of(site) for site in honest]),
                    "honest_accuracy": _mean([exam.right[site] for site in honest]),
                    "backdoor_success": _mean([exam.fooled[site] for site in honest]) if exam.fooled else None,
                }
                for exam in world.exams
            ],
        }
        return cls(data)


def paired_gain(before: Sequence[float], after: Sequence[float]) -> Gain:
    """Mean difference over paired problems with its one-sided 95 % bounds."""
    differences = [a - b for a, b in zip(after, before, strict=True)]
    mean = _mean(differences)
    variance = sum((d - mean) ** 2 for d in differences) / max(1, len(differences) - 1)
    margin = _ONE_SIDED_95 * math.sqrt(variance / len(differences))
    return Gain(_mean(before), _mean(after), mean - margin, mean + margin)


def write_report(report: Report, folder: Path) -> None:
    """Write `report.json` and `report.html`."""
    text = json.dumps(report.data, indent=2, allow_nan=False) + "\n"
    (folder / "report.json").write_text(text, encoding="utf-8")
    environment = Environment(
        loader=PackageLoader("deploy"), autoescape=select_autoescape(["html"]), undefined=StrictUndefined
    )
    attacked = any(site["attack"] for site in report.data["sites"])
    page = environment.get_template("report.html").render(
        report=report.data,
        reward_plot=plots.reward_by_round(report.data),
        attack_plot=plots.attack_by_round(report.data) if attacked else None,
        epsilon_plot=plots.epsilon_by_site(report.data),
        timeline_plot=plots.version_timeline(report.data),
        evidence_plot=plots.canary_evidence(report.data),
    )
    (folder / "report.html").write_text(page, encoding="utf-8")


def _gain_fields(gain: Gain) -> dict[str, float]:
    return {
        "reward_before": gain.before,
        "reward_after": gain.after,
        "reward_gain_low95": gain.low95,
        "reward_gain_high95": gain.high95,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
