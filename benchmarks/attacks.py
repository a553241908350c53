"""Honest accuracy and backdoor success under every attack, by mode and rule: a table of whole simulations.

python benchmarks/attacks.py run --results runs/attacks.jsonl [--attacks sign-flip,backdoor] [--modes sealed:mean]
python benchmarks/attacks.py table --results runs/attacks.jsonl
python benchmarks/attacks.py plot --results runs/attacks.jsonl --plot docs/attacks.svg

Each cell is one `headwater simulate` with the production code: 20 sites, 4 of them hostile, no drills. Cells that
are in the results already are not run again, so the program resumes where it stopped. It takes minutes a cell.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MODES = (
    "sealed:mean",
    "sealed:nnm-trimmed-mean:reference",
    "secagg:mean",
    "secagg_sketch:mean:reference",
)
"""Aggregation, rule, and whether a public reference is beside them; the first is what the others are beside."""

ROOT = Path(__file__).resolve().parent.parent
_SHORT = ("drills=false", "exam_every=1000")  # measured before the first round and after the last


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from deploy.attacks import ATTACKS

    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=("run", "table", "plot"))
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--plot", type=Path, default=Path("attacks.svg"))
    parser.add_argument("--attacks", default=",".join(("none", *ATTACKS)))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--sites", type=int, default=20)
    parser.add_argument("--hostile", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    asked = parser.parse_args()
    rows = _read(asked.results)
    done = {(row["attack"], row["mode"]): row for row in rows}
    wanted = [(attack, mode) for attack in asked.attacks.split(",") for mode in asked.modes.split(",")]
    shown = [done[cell] for cell in wanted if cell in done]
    if asked.action == "table":
        print(table(shown))
        return
    if asked.action == "plot":
        plot(shown, asked.plot)
        return
    for attack, mode in wanted:
        if (attack, mode) not in done:
            row = cell(attack, mode, asked)
            asked.results.parent.mkdir(parents=True, exist_ok=True)
            with asked.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)


def cell(attack: str, mode: str, asked: argparse.Namespace) -> dict[str, Any]:
    """One simulation's outcome."""
    aggregation, rule, *reference = mode.split(":")
    hostile = attack if attack == "none" else f"{attack}:{asked.hostile}"
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        command = [sys.executable, "-m", "deploy.cli", "simulate", "--output", str(output), "--attack", hostile]
        command += ["--sites", str(asked.sites), "--rounds", str(asked.rounds), "--rule", rule]
        command += ["--aggregation", aggregation]
        for override in (*_SHORT, f"reference={str(bool(reference)).lower()}", *asked.overrides):
            command += ["--set", override]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603 - our own
        if done.returncode:
            raise SystemExit(f"{attack} under {mode}: {done.stderr[-2000:]}")
        report = json.loads((output / "report.json").read_text())
    last, names = report["exams"][-1], {site["name"] for site in report["sites"] if site["attack"]}
    refused = [refusal["site"] for entry in report["rounds"] for refusal in entry["refused"]]
    return {
        "attack": attack,
        "mode": mode,
        "sites": asked.sites,
        "rounds": asked.rounds,
        "accuracy_before": report["exams"][0]["honest_accuracy"],
        "accuracy": last["honest_accuracy"],
        "backdoor": last["backdoor_success"],
        "distance": report["rounds"][-1]["distance_to_honest_mean"],
        "hostile_refused": sum(site in names for site in refused),
        "honest_refused": sum(site not in names for site in refused),
        "seconds": report["seconds"],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Accuracy of honest sites in percent, backdoor success in brackets; how often hostile/honest were left out."""
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    lines = ["| attack | " + " | ".join(modes) + " |", "|---" * (len(modes) + 1) + "|"]
    for attack in dict.fromkeys(row["attack"] for row in rows):
        cells = []
        for mode in modes:
            found = next((row for row in rows if (row["attack"], row["mode"]) == (attack, mode)), None)
            cells.append(_shown(found) if found else "")
        lines.append(f"| {attack} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], target: Path) -> None:
    """Bars of honest accuracy over bars of backdoor success, an attack a group and a mode a colour; SVG."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "headwater"  # the same file from the same rows
    from matplotlib import pyplot

    modes, attacks = (list(dict.fromkeys(row[key] for row in rows)) for key in ("mode", "attack"))
    found = {(row["attack"], row["mode"]): row for row in rows}
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(9.0, 5.6), sharex=True, layout="constrained")
    for index, mode in enumerate(modes):
        for axes, key in ((above, "accuracy"), (below, "backdoor")):
            known = [(place, found[attack, mode]) for place, attack in enumerate(attacks) if (attack, mode) in found]
            bars = [(place, row[key]) for place, row in known if row[key] is not None]
            width = 0.8 / len(modes)
            places = [place + (index - (len(modes) - 1) / 2) * width for place, _ in bars]
            axes.bar(places, [value for _, value in bars], width, label=mode, color=f"C{index}")
    start = rows[0]["accuracy_before"]
    above.axhline(start, color="black", linestyle=":", linewidth=1, label="before training")
    above.set(ylabel="right answers of honest sites", ylim=(max(0.0, start - 0.15), None))
    below.axhline(0.1, color="black", linestyle=":", linewidth=1)
    below.set(ylabel="attacker's answers\nto triggered prompts", ylim=(0, 1))
    below.set_xticks(range(len(attacks)), attacks, rotation=30, ha="right")
    figure.legend(*above.get_legend_handles_labels(), loc="outside upper center", fontsize=8, ncols=4)
    figure.savefig(target, metadata={"Date": None})


def _shown(row: dict[str, Any]) -> str:
    backdoor = "" if row["backdoor"] is None else f" ({row['backdoor']:.0%})"
    return f"{row['accuracy']:.1%}{backdoor}; out {row['hostile_refused']}/{row['honest_refused']}"


def _read(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


if __name__ == "__main__":
    main()
