"""The report's pictures, as inline SVG."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

matplotlib.use("svg")

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "headwater",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a94a3",
    "axes.grid": True,
    "grid.color": "#e4e8ee",
    "legend.frameon": False,
}
_COLOURS = ("#2563eb", "#0d9488", "#7c3aed", "#ca8a04", "#db2777", "#4b5563", "#65a30d", "#0891b2")
_BAD = "#dc2626"
_STATE_COLOURS = {
    "candidate": "#cbd5e1",
    "gated": "#94a3b8",
    "canary": "#f59e0b",
    "stable": "#16a34a",
    "retired": "#dbe4d8",
    "rejected": _BAD,
    "rolled_back": _BAD,
}
_HOUR_S = 3600.0
_MOST_PANELS, _MOST_ROWS = 16, 40


def reward_by_round(report: Mapping[str, Any]) -> Markup:
    """Held-out reward of every site after every round, against the start."""
    figure, axes = _figure(7.6, 3.6)
    exams = report["exams"]
    rounds = [exam["round"] for exam in exams]
    for index, site in enumerate(report["sites"]):
        rewards = [exam["rewards"][site["name"]] for exam in exams]
        hostile = site["attack"] is not None
        axes.plot(
            rounds,
            rewards,
            "o--" if hostile else "o-",
            color=_BAD if hostile else _COLOURS[index % len(_COLOURS)],
            markersize=4,
            linewidth=1.4,
            label=f"{site['name']} (hostile owner)" if hostile else site["name"],
        )
    mean = [sum(exam["rewards"].values()) / len(exam["rewards"]) for exam in exams]
    axes.plot(rounds, mean, color="#111827", linewidth=2.6, label="mean")
    axes.axhline(mean[0], color="#111827", linewidth=0.9, linestyle=":", label="start")
    axes.set(xlabel="round (0: before training)", ylabel="held-out reward", xticks=rounds)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
    return _svg(figure, "Held-out reward by round and site")


def attack_by_round(report: Mapping[str, Any]) -> Markup:
    """Share of right answers at honest sites, and with a backdoor of triggered ones that are the attacker's."""
    figure, axes = _figure(7.6, 2.8)
    exams = report["exams"]
    rounds = [exam["round"] for exam in exams]
    accuracy = [exam["honest_accuracy"] for exam in exams]
    success = [exam["backdoor_success"] for exam in exams]
    axes.plot(rounds, accuracy, "o-", color=_COLOURS[0], label="right answers of honest sites")
    if success[0] is not None:
        axes.plot(rounds, success, "o--", color=_BAD, label="attacker's answers to triggered prompts")
    axes.set(xlabel="round (0: before training)", ylabel="share of answers", xticks=rounds, ylim=(-0.02, 1.02))
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
    return _svg(figure, "Honest accuracy and, with a backdoor, its success by round")


def epsilon_by_site(report: Mapping[str, Any]) -> Markup:
    """ε spent by each site, stacked by round, against its budget."""
    figure, axes = _figure(7.6, 2.8)
    exams, names = report["exams"], [site["name"] for site in report["sites"]]
    spent = [0.0] * len(names)
    for exam in exams[1:]:
        now = [exam["epsilons"][name] for name in names]
        shade = 0.35 + 0.65 * exam["round"] / exams[-1]["round"]
        growth = [after - before for after, before in zip(now, spent, strict=True)]
        axes.bar(names, growth, bottom=spent, width=0.55, color="#2563eb", alpha=shade, edgecolor="white")
        spent = now
    axes.axhline(report["privacy"]["epsilon_budget"], color=_BAD, linewidth=1.2)
    axes.text(
        len(names) - 0.6,
        report["privacy"]["epsilon_budget"],
        "budget of each site",
        color=_BAD,
        fontsize=9,
        ha="right",
        va="bottom",
    )
    axes.set(ylabel="ε spent", ylim=(0, report["privacy"]["epsilon_budget"] * 1.2))
    axes.grid(visible=False, axis="x")
    return _svg(figure, "Privacy spent by site")


def version_timeline(report: Mapping[str, Any]) -> Markup:
    """What state every version was in, over simulated time; the last ones of many."""
    versions = report["versions"][-_MOST_ROWS:]
    figure, axes = _figure(7.6, 0.9 + 0.36 * len(versions))
    start_s = versions[0]["history"][0]["at_s"]
    end_s = max(step["at_s"] for version in versions for step in version["history"]) + 0.25 * _HOUR_S
    for row, version in enumerate(versions):
        steps = version["history"]
        ends = [step["at_s"] for step in steps[1:]] + [end_s]
        for step, until_s in zip(steps, ends, strict=True):
            left, width = (step["at_s"] - start_s) / _HOUR_S, (until_s - step["at_s"]) / _HOUR_S
            axes.barh(row, width, left=left, height=0.62, color=_STATE_COLOURS[step["state"]])
    labels = [v["id"] if v["drill"] is None else f"{v['id']} (drill: {v['drill']})" for v in versions]
    axes.set_yticks(range(len(versions)), labels)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("simulated hours")
    for state in ("canary", "stable", "retired", "rolled_back"):
        axes.barh(0, 0, color=_STATE_COLOURS[state], label=state.replace("_", " "))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.0 + 0.6 / len(versions)), ncols=4, fontsize=9)
    return _svg(figure, "Version timeline")


def canary_evidence(report: Mapping[str, Any]) -> Markup:
    """The sequential tests of every version that reached the canary."""
    watched = [version for version in report["versions"] if version["evidence"]][-_MOST_PANELS:]
    columns = min(4, max(1, len(watched)))
    rows = -(-max(1, len(watched)) // columns)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(2.3 * columns + 0.4, 2.0 * rows + 0.5), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    lines = {
        "e_worse_reward": ("reward is worse", _BAD, "-"),
        "e_too_many_errors": ("too many errors", "#ea580c", "--"),
        "e_no_worse_reward": ("reward is not worse", "#16a34a", "-"),
        "e_few_errors": ("few errors", "#0d9488", "--"),
    }
    for axes in grid.flat[len(watched) :]:
        axes.set_axis_off()
    for axes, version in zip(grid.flat, watched, strict=False):
        requests = [0] + [point["requests"] for point in version["evidence"]]
        for key, (label, colour, style) in lines.items():
            values = [1.0] + [min(max(point[key], 1e-3), 1e6) for point in version["evidence"]]
            axes.plot(requests, values, style, color=colour, marker="o", markersize=3, label=label)
        axes.axhline(100, color=_BAD, linewidth=0.7, linestyle=":")
        axes.axhline(20, color="#16a34a", linewidth=0.7, linestyle=":")
        axes.set_yscale("log")
        axes.set_title(f"{version['id']}: {version['state'].replace('_', ' ')}", fontsize=9)
        axes.set_xlabel("requests", fontsize=8)
        axes.tick_params(labelsize=8)
    if watched:
        handles, labels = grid.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=4, fontsize=8)
    return _svg(figure, "Evidence for and against every canary")


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, figure.subplots()


def _svg(figure: Figure, title: str) -> Markup:
    buffer = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Title": title})
    text = buffer.getvalue()
    return Markup(text[text.index("<svg") :])  # noqa: S704 - drawn here; labels were escaped by matplotlib
