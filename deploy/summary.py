"""The short table at the end of a simulation."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table


def print_summary(folder: Path, console: Console) -> None:
    """Print what `report.json` in `folder` found, and where to read more."""
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    table = Table(box=None, pad_edge=False)
    for column in ("site", "reward", "gain, lower 95 %", "ε", "refused in rounds"):
        table.add_column(column)
    for site in report["sites"]:
        refused = [str(r["number"]) for r in report["rounds"] if any(x["site"] == site["name"] for x in r["refused"])]
        table.add_row(
            f"{site['name']} [red]({site['attack']})[/red]" if site["attack"] else site["name"],
            f"{site['reward_before']:.3f} → {site['reward_after']:.3f}",
            f"{site['reward_gain_low95']:+.3f}",
            "[red]none[/red]" if site["epsilon"] is None else f"{site['epsilon']:.2f}",
            ", ".join(refused) or "–",
        )
    console.print(table)
    pooled = report["pooled"]
    console.print(
        f"honest sites together: {pooled['reward_before']:.3f} → {pooled['reward_after']:.3f}, "
        f"gain at least {pooled['reward_gain_low95']:+.3f} (95 %)",
        highlight=False,
    )
    last = report["exams"][-1]
    if last["backdoor_success"] is not None:
        console.print(
            f"honest sites answer {last['honest_accuracy']:.1%} right; "
            f"with the trigger {last['backdoor_success']:.1%} of answers are the attacker's",
            highlight=False,
        )
    for version in report["versions"]:
        if version["drill"] or version["state"] in ("rejected", "rolled_back"):
            drill = f" (drill: {version['drill']})" if version["drill"] else ""
            missed = " [bold red]NOT CAUGHT by its test[/bold red]" if version["caught"] is False else ""
            console.print(
                f"{version['id']}{drill}: {version['state']}: {escape(version['reason'])}{missed}", highlight=False
            )
    if not report["privacy"]["private"]:
        console.print("[bold red]trained WITHOUT differential privacy (--unsafe-no-dp)[/bold red]")
    for name in ("report.html", "report.json"):
        console.print(str(folder / name), soft_wrap=True, highlight=False, markup=False)
