"""`headwater audit`: run the privacy code against itself and write what a privacy officer can read.

Exit code 0 where every check passes, 1 where one fails, 2 where the settings cannot work.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from common.inference.model_folder import EMBEDDED
from deploy.edge_settings import edge_settings, site_ledger
from deploy.output import whole_folder

if TYPE_CHECKING:
    from common.accounting import PrivateSteps
    from edge_node.auditing.mechanism import AuditedMechanism
    from edge_node.auditing.statement import Statement
    from edge_node.config import EdgeConfig

SCHEMA_VERSION = 1

app = typer.Typer(no_args_is_help=True, help="Checks of the privacy code, with a page for a privacy officer.")

Output = Annotated[Path | None, typer.Option(help="Folder of audit.json and audit.html; must not exist.")]


@dataclass(frozen=True)
class Sizes:
    """How much each check draws."""

    noise_values: int = 1_000_000
    gradient_values: int = 2_000
    sampled_units: int = 2_000
    sampled_steps: int = 400
    canaries: int = 5_000


QUICK = Sizes(noise_values=100_000, sampled_units=1_000, sampled_steps=200, canaries=1_000)
"""What `--quick` draws; its bounds are wider."""
RELEASES_PER_NOISE = 20


@app.command()
def privacy(
    config: Annotated[
        Path | None, typer.Option(help="A node's edge.toml: audit what its ledger charged; default: a simulation's.")
    ] = None,
    output: Output = None,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller samples, a few seconds.")] = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting of edge.toml.")
    ] = None,
) -> None:
    """Check noise, sensitivity and sampling, and put a measured lower bound on ε beside the claim."""
    mechanism, source = mechanism_of_node(config, set_ or []) if config else mechanism_of_simulation()
    sizes = QUICK if quick else Sizes()
    _run("privacy", output, lambda: audit_privacy(mechanism, sizes, source=source))


@app.command()
def inversion(
    model: Annotated[Path, typer.Option(help="Local Hugging Face folder; default: the embedded model.")] = EMBEDDED,
    output: Output = None,
) -> None:
    """Show which tokens of a text an update gives away, without and with differential privacy."""
    from common.inference.model_folder import open_model
    from edge_node.auditing.inversion import audit_inversion
    from edge_node.config import LoraSettings

    folder = open_model(model)
    mechanism, _ = mechanism_of_simulation()
    _run(
        "inversion",
        output,
        lambda: audit_inversion(folder, LoraSettings().shape, mechanism, draws=RELEASES_PER_NOISE),
    )


def mechanism_of_simulation() -> tuple[AuditedMechanism, str]:
    """What a simulation at its default settings charges, and where that is from."""
    from deploy.settings import SimulationSettings

    settings = SimulationSettings()
    return _solved(settings.epsilon, settings.delta), "the default settings of a simulation"


def mechanism_of_node(file: Path, overrides: list[str]) -> tuple[AuditedMechanism, str]:
    """What a node's ledger charged for training so far, or what its policy would allow, and where that is from.

    Raises:
        ConfigError: the settings cannot be read, or there is no node.
        PrivacyError: there is no valid policy.
        TrustError: the ledger does not verify.
    """
    from common.accounting import PrivateSteps
    from edge_node.auditing.mechanism import AuditedMechanism
    from edge_node.policy import PolicyFile

    settings = edge_settings(file, overrides)
    law = PolicyFile(settings.policy).law().privacy
    events = training_events(settings)
    if not events:
        return _solved(law.epsilon_total, law.delta), f"the policy of {settings.name}; nothing was charged yet"
    first, steps = events[0], sum(event.steps for event in events)  # a ledger holds one mechanism for each purpose
    charged = PrivateSteps(first.noise_multiplier, first.sampling_rate, steps)
    return AuditedMechanism(charged, _clip_norm(), law.delta), f"the ledger of {settings.name}, {len(events)} rounds"


def training_events(settings: EdgeConfig) -> list[PrivateSteps]:
    """The mechanisms a node's ledger charged for training, one for each round.

    Raises:
        ConfigError: there is no node.
        TrustError: the ledger does not verify.
    """
    with site_ledger(settings) as ledger:
        return [charge.event for charge in ledger.charges() if charge.purpose == "training"]


def _solved(epsilon_total: float, delta: float) -> AuditedMechanism:
    """The mechanism that spends (ε, δ) in a simulation's default rounds."""
    from common.accounting import PrivateSteps
    from deploy.settings import SimulationSettings
    from edge_node.auditing.mechanism import AuditedMechanism
    from edge_node.training.trainer import planned_noise

    settings = SimulationSettings()
    rate, steps = settings.training.sampling_rate, settings.training.steps * settings.rounds
    training = settings.training.plan(settings.algorithm)
    sigma = planned_noise(training, rounds=settings.rounds, epsilon_total=epsilon_total, delta=delta)
    return AuditedMechanism(PrivateSteps(sigma, rate, steps), _clip_norm(), delta)


def _clip_norm() -> float:
    """Every check is relative to it, so a plan's own value would give the same figures."""
    from deploy.settings import SimulationSettings

    return SimulationSettings().training.unit_clip_norm


def audit_privacy(mechanism: AuditedMechanism, sizes: Sizes, *, source: str) -> Statement:
    """A1 to A4 on one mechanism; canaries are tossed for from the operating system's entropy."""
    import numpy as np

    from common.accounting import epsilon
    from edge_node.auditing.mechanism import noise_floor, sampling, sensitivity
    from edge_node.auditing.one_run import one_run_canaries
    from edge_node.auditing.statement import Statement

    return Statement(
        kind="privacy",
        subject={
            "source": source,
            **asdict(mechanism.event),
            "clip_norm": mechanism.clip_norm,
            "epsilon": epsilon([mechanism.event], delta=mechanism.delta),
            "delta": mechanism.delta,
        },
        checks=(
            noise_floor(mechanism, values=sizes.noise_values),
            sensitivity(mechanism, values=sizes.gradient_values),
            sampling(mechanism, units=sizes.sampled_units, steps=sizes.sampled_steps),
            one_run_canaries(mechanism, canaries=sizes.canaries, coins=np.random.default_rng()),
        ),
    )


def _run(kind: str, output: Path | None, audit: Callable[[], Statement]) -> None:
    import torch

    torch.set_num_threads(1)  # the tensors are small: more threads only wait for each other
    target = output or Path("runs") / f"audit-{kind}-{datetime.now().strftime('%Y-%m-%dT%H-%M-%S')}"
    console = Console(highlight=False)
    begun = time.monotonic()
    with whole_folder(target) as folder:
        statement = audit()
        seconds = time.monotonic() - begun
        write_statement(statement, folder, made_at=datetime.now(UTC), seconds=seconds)
    for check in statement.checks:
        console.print(
            f"{'[green]pass[/green]' if check.passed else '[bold red]FAIL[/bold red]'}  {check.code}  {check.title}"
        )
        for figure in check.figures:
            if not figure.passed:
                console.print(escape(f"      {figure.name}: {figure.value:.4g}, expected {expectation(figure.data())}"))
    for name in ("audit.html", "audit.json"):
        console.print(str(target / name), soft_wrap=True, markup=False)
    raise typer.Exit(0 if statement.passed else 1)


def write_statement(statement: Statement, folder: Path, *, made_at: datetime, seconds: float) -> None:
    """Write `audit.json` and `audit.html`; the keys of the JSON are documented in docs/audit.md."""
    from importlib.metadata import version

    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    data = {
        "schema_version": SCHEMA_VERSION,
        "headwater_version": version("headwater"),
        "made_at": made_at.isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        **statement.data(),
    }
    (folder / "audit.json").write_text(json.dumps(data, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    environment = Environment(
        loader=PackageLoader("deploy"), autoescape=select_autoescape(["html"]), undefined=StrictUndefined
    )
    environment.filters["expectation"] = expectation
    page = environment.get_template("audit.html").render(audit=data)
    (folder / "audit.html").write_text(page, encoding="utf-8")


def expectation(figure: dict[str, Any]) -> str:
    """A figure's interval in words."""
    low, high = figure["low"], figure["high"]
    if low is None:
        return f"at most {high:.4g}"
    if high is None:
        return f"at least {low:.4g}"
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
