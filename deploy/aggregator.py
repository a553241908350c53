"""`headwater aggregator`: look at the rounds, and at the sites that were left out of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from aggregator.round_log import RoundLog
from common.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="The federation's aggregator.")
sites = typer.Typer(no_args_is_help=True, help="Sites that were excluded, and letting them in again.")
app.add_typer(sites, name="sites")

Folder = Annotated[Path, typer.Option("--folder", help="The aggregator's folder, with rounds.sqlite.", file_okay=False)]


@app.command()
def rounds(folder: Folder) -> None:
    """What became of each round; of one that is open, who has answered."""
    log = _log(folder)
    try:
        table = Table("round", "step", "sites", "refused", "version", "result")
        for number in range(1, log.number + 1):
            record, step = log.record(number), log.step(number)
            answered = log.answers(number) if step == "open" else {}
            taken = len(answered) or len(record.participants)
            result = record.void_reason or (record.stage.value if record.stage else "")
            refused = ", ".join(refusal.site for refusal in record.refused)
            table.add_row(str(number), step.value, str(taken), refused, record.version or "", result)
        Console(highlight=False).print(table if log.number else "no round has begun")
    finally:
        log.close()


@sites.command()
def show(folder: Folder) -> None:
    """What is held against each site, and which ones wait for a person."""
    log = _log(folder)
    try:
        excluded, suspended = log.exclusions(), log.suspended()
    finally:
        log.close()
    table = Table("site", "excluded in rounds", "last reason", "takes part")
    for site, refusals in sorted(excluded.items()):
        last = refusals[max(refusals)]
        state = "no: suspended" if site in suspended else "yes"
        table.add_row(site, ", ".join(map(str, sorted(refusals))), f"{last.stage}: {last.reason}", state)
    Console(highlight=False).print(table if excluded else "no site was ever excluded")


@sites.command()
def readmit(site: Annotated[str, typer.Argument(help="A suspended site.")], folder: Folder) -> None:
    """Let a suspended site take part again from the next round on, also while the aggregator runs."""
    log = _log(folder)
    try:
        suspended = log.suspended()
        if site not in suspended:
            named = ", ".join(sorted(suspended)) or "none"
            raise ConfigError(f"{site} is not suspended; suspended sites: {named}")
        log.readmit(site, now_s=time.time())
    finally:
        log.close()
    print(f"{site} takes part again from the next round on; it was {suspended[site]}")


def _log(folder: Path) -> RoundLog:
    if not (folder / "rounds.sqlite").exists():
        raise ConfigError(f"{folder} has no rounds.sqlite; name the aggregator's folder")
    return RoundLog(folder, owned=False)
