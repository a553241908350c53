"""`headwater edge privacy` and `headwater edge doctor`: what is spent, what it would cost, whether it works here."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from common.errors import ConfigError, PrivacyError
from deploy.edge_settings import ConfigFile, Overrides, edge_settings, site_key, site_ledger
from edge_node.config import EdgeConfig
from edge_node.policy import PolicyFile, Privacy

if TYPE_CHECKING:
    from common.adapter import Adapter
    from common.plan import Training
    from edge_node.training.ledger import Ledger
    from edge_node.training.self_test import Check
    from edge_node.training.site_training import SiteTraining

app = typer.Typer(no_args_is_help=True, help="What the site's ledger has spent, and what training would cost.")

AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]


@app.command()
def show(config: ConfigFile, set_: Overrides = None, as_json: AsJson = False) -> None:
    """Print what is spent, what is left, and what another round would cost."""
    settings = edge_settings(config, set_)
    law = PolicyFile(settings.policy).law().privacy
    with site_ledger(settings) as ledger:
        spent = ledger.epsilon_spent(law.delta)
        planned = bool(ledger.mechanisms())
        found = {
            "epsilon_spent": spent,
            "epsilon_total": law.epsilon_total,
            "delta": law.delta,
            "unit": ledger.unit or law.unit,
            "rounds_charged": len({charge.round for charge in ledger.charges()}),
            "rounds_left": ledger.rounds_left(law.epsilon_total, law.delta) if planned else None,
            "epsilon_of_next_round": ledger.epsilon_of_next_round(law.delta) if planned else None,
        }
    if as_json:
        print(json.dumps(found))
        return
    console = Console(highlight=False)
    console.print(
        f"epsilon spent {spent:.2f} of {law.epsilon_total:g} (delta {law.delta:g}), "
        f"adding or removing one {found['unit']}, {found['rounds_charged']} rounds charged"
    )
    if not planned:
        console.print("nothing was charged yet; the first plan fixes what a round costs")
    elif not found["rounds_left"]:
        console.print(f"the next round would cost {found['epsilon_of_next_round']:.2f}: the ledger will refuse it")
    else:
        console.print(
            f"the next round costs {found['epsilon_of_next_round']:.2f}, {found['rounds_left']} more fit the budget"
        )


@app.command()
def verify(config: ConfigFile, set_: Overrides = None) -> None:
    """Check every entry of the ledger; exit code 2 where it does not hold."""
    with site_ledger(edge_settings(config, set_)) as ledger:
        print(f"{len(ledger.charges())} charges, each signed by this site and chained to the one before")


@app.command()
def plan(
    config: ConfigFile,
    units: Annotated[int, typer.Option(min=1, help="Trajectories (or users) the site expects in a round.")],
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of training.")],
    objective: Annotated[str, typer.Option(help="What is trained.")] = "dpo",
    steps: Annotated[int, typer.Option(min=1, help="Private steps in a round.")] = 2,
    sampling_rate: Annotated[float, typer.Option(min=1e-6, max=1.0, help="Share of the units in one step.")] = 0.5,
    set_: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Forecast epsilon, minutes and megabytes of a number of rounds; exit code 2 where they make no sense.

    Once a ledger has charged, its schedule is fixed, and what counts is how many more rounds it holds.
    """
    from deploy.settings import TrainingSettings
    from edge_node.training.forecast import forecast
    from edge_node.training.readiness import READINESS_EVENT

    settings = edge_settings(config, set_)
    law = PolicyFile(settings.policy).law().privacy
    training = TrainingSettings(steps=steps, sampling_rate=sampling_rate, nominal_units=units).plan(objective)
    with _training(settings) as (site, start):
        sigma = _fixed_noise(site.ledger, law, training, rounds)
        found = forecast(
            training,
            rounds=rounds,
            units=units,
            values=sum(start.tensors[name].size for name in start.names("B")),
            adapter_values=sum(tensor.size for tensor in start.tensors.values()),
            epsilon_total=law.epsilon_total,
            delta=law.delta,
            seconds_per_unit=site.seconds_per_unit(start, objective),
            unit=law.unit,
            beside=(READINESS_EVENT,) if settings.training.min_samples else (),
            noise_multiplier=sigma,
        )
    if as_json:
        print(json.dumps(asdict(found)))
    else:
        console = Console(highlight=False)
        console.print(f"{rounds} rounds of {steps} steps on about {units} units, epsilon {law.epsilon_total:g} in all")
        table = Table(show_header=False, box=None)
        for name, text in (
            ("noise multiplier", f"{found.noise_multiplier:.3f}"),
            ("epsilon of the first round", f"{found.epsilon_of_first_round:.2f}"),
            ("epsilon of all rounds", f"{found.epsilon_of_all_rounds:.2f}"),
            ("signal to noise", f"{found.signal_to_noise:.0f}"),
            ("training time here", f"{found.minutes:.1f} minutes"),
            ("uploads, downloads", f"{found.megabytes_up:.1f} MB, {found.megabytes_down:.1f} MB"),
        ):
            table.add_row(name, text)
        console.print(table)
    if found.refusal is not None:
        print(f"headwater: {found.refusal}", file=sys.stderr)
        raise typer.Exit(2)


def _fixed_noise(ledger: Ledger, law: Privacy, training: Training, rounds: int) -> float | None:
    """σ of a budget that is in use; None for a fresh one.

    Raises:
        PrivacyError: the budget is for another schedule, or does not hold so many more rounds.
    """
    mechanisms = ledger.mechanisms()
    if not mechanisms:
        return None
    fixed = mechanisms["training"]
    if (fixed.steps, fixed.sampling_rate) != (training.steps, training.sampling_rate):
        raise PrivacyError(
            f"the ledger's schedule is fixed at {fixed.steps} steps with sampling rate {fixed.sampling_rate:g}; plan "
            "with these, or a new budget"
        )
    left = ledger.rounds_left(law.epsilon_total, law.delta)
    if left < rounds:
        raise PrivacyError(
            f"the ledger has spent epsilon {ledger.epsilon_spent(law.delta):.2f} of {law.epsilon_total:g}; "
            f"its schedule has {left} more rounds, not {rounds}: plan fewer, or raise epsilon_total in policy.toml"
        )
    return fixed.noise_multiplier


def doctor(
    config: ConfigFile,
    privacy: Annotated[bool, typer.Option("--privacy", help="The self-test of private training.")] = False,
    objective: Annotated[str, typer.Option(help="Whose losses are tested.")] = "dpo",
    set_: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Test private training on this site's own model; exit code 2 where a check fails."""
    if not privacy:
        raise ConfigError("choose what to test: headwater edge doctor --privacy")
    settings = edge_settings(config, set_)
    with _training(settings) as (site, start):
        checks = site.checks(start, objective)
    if as_json:
        print(json.dumps([{**asdict(check), "passed": check.passed} for check in checks]))
    else:
        Console(highlight=False).print(_table(checks))
    if not all(check.passed for check in checks):
        raise typer.Exit(2)


def _table(checks: list[Check]) -> Table:
    table = Table("check", "figure", "limit", "", "what the figure is")
    for check in checks:
        verdict = "[green]pass[/]" if check.passed else "[red]FAIL[/]"
        table.add_row(check.name, f"{check.figure:.2g}", f"{check.limit:.2g}", verdict, check.meaning)
    return table


@contextmanager
def _training(settings: EdgeConfig) -> Iterator[tuple[SiteTraining, Adapter]]:
    """The site's training without its server, and the adapter every site starts from."""
    from common.adapter import initial_adapter
    from common.identity import load_or_create_secret
    from common.inference.chat_tokenizer import ChatTokenizer
    from common.inference.model_folder import open_model
    from edge_node.collecting.store import TrajectoryStore
    from edge_node.training.site_training import SiteTraining

    key = site_key(settings)
    folder = open_model(settings.model)
    store = TrajectoryStore(
        settings.data_dir / "trajectories", load_or_create_secret(settings.data_dir / "keys" / "trajectories.key")
    )
    site = SiteTraining(
        settings.data_dir,
        key,
        site=settings.name,
        folder=folder,
        tokenizer=ChatTokenizer(folder),
        store=store,
        lora=settings.lora,
        settings=settings.training,
        clock=time.time,
    )
    try:
        yield site, initial_adapter(folder.module_shapes(), settings.lora.shape, seed=0)
    finally:
        site.close()
        store.close()
