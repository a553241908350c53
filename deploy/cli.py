"""The `headwater` command."""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from common.errors import ConfigError, HeadwaterError
from deploy import aggregator, audit, edge, model

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(edge.app, name="edge")
app.add_typer(aggregator.app, name="aggregator")
app.add_typer(audit.app, name="audit")
app.add_typer(model.app, name="model")


@app.callback()
def headwater() -> None:
    """Private federated online learning of LLM agents."""


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    print(installed("headwater"))


@app.command()
def simulate(
    sites: Annotated[int | None, typer.Option(help="Customer sites.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of training.")] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="Objective: dpo, ipo, ppo, ppo-sequence, rft, bco or grpo.")
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="Privacy budget of each site over the whole run.")] = None,
    attack: Annotated[
        str | None,
        typer.Option(
            metavar="NAME:K",
            help="K sites attack: sign-flip, scale, alie, ipm, min-max, label-flip, backdoor, boosted-backdoor, nan, "
            "garbage, free-rider or sybil; or: none.",
        ),
    ] = None,
    drop: Annotated[
        float | None, typer.Option(help="Probability that a site is away in a round; in secure modes, in a window.")
    ] = None,
    slow: Annotated[
        float | None, typer.Option(help="Probability that a site is too slow for a round; in secure modes, a window.")
    ] = None,
    rule: Annotated[
        str | None,
        typer.Option(
            help="How updates combine: mean, norm-gate, median, trimmed-mean, geometric-median, centred-clipping, "
            "krum, multi-krum, dnc or nnm-trimmed-mean. Makes the aggregation sealed."
        ),
    ] = None,
    aggregation: Annotated[
        str | None,
        typer.Option(
            help="What the aggregator may see: sealed, secagg or secagg_sketch. Default: secagg_sketch from 6 sites "
            "on, sealed with --rule, --drop, --slow, --grid ray or --unsafe-no-dp."
        ),
    ] = None,
    grid: Annotated[str | None, typer.Option(help="local (this process) or ray.")] = None,
    seed: Annotated[int | None, typer.Option(help="Fixes data, users and initial weights; never noise.")] = None,
    model: Annotated[Path | None, typer.Option(help="Local Hugging Face folder; default: the embedded model.")] = None,
    lora_mode: Annotated[str | None, typer.Option(help="alternate (A and B in turn) or ffa (B only).")] = None,
    profile: Annotated[str, typer.Option(help="dp (measured to work) or source (the original design's).")] = "dp",
    output: Annotated[Path | None, typer.Option(help="Folder of the results; must not exist.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A short run of about a minute.")] = False,
    unsafe_no_dp: Annotated[
        bool, typer.Option("--unsafe-no-dp", help="Train WITHOUT privacy; the report says so in red.")
    ] = False,
    config: Annotated[Path | None, typer.Option(help="TOML file with any of the settings.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting, e.g. training.steps=4.")
    ] = None,
) -> None:
    """Run a whole federation on this machine and report what it learned."""
    from common.config import load_config, merged
    from deploy.progress import Terminal
    from deploy.settings import PROFILES, QUICK, SimulationSettings
    from deploy.simulate import simulate as run
    from deploy.summary import print_summary

    given: dict[str, Any] = {
        "sites": sites,
        "rounds": rounds,
        "algorithm": algorithm,
        "epsilon": epsilon,
        "attack": attack,
        "drop": drop,
        "slow": slow,
        "rule": rule,
        "aggregation": aggregation,
        "grid": grid,
        "seed": seed,
        "model": str(model) if model is not None else None,
        "lora_mode": lora_mode,
        "unsafe_no_dp": True if unsafe_no_dp else None,
    }
    if profile not in PROFILES:
        raise ConfigError(f"unknown profile {profile!r}; known profiles: {', '.join(sorted(PROFILES))}")
    settings = load_config(
        SimulationSettings,
        defaults=merged(PROFILES[profile], QUICK if quick else {}),
        file=config,
        environment=os.environ,
        prefix="HEADWATER",
        flags={name: value for name, value in given.items() if value is not None},
        overrides=set_ or (),
    )
    target = output or Path("runs") / datetime.now().strftime("%Y-%m-%dT%H-%M-%S")
    console = Console()
    with Terminal(settings, console) as progress:
        run(settings, target, progress)
    print_summary(target, console)


def refuse_shadowed_packages() -> None:
    """Raise ConfigError where another installed package hides one of ours (`common` is a frequent name)."""
    root = Path(__file__).resolve().parent.parent
    for name in ("common", "model_hub", "aggregator", "edge_node", "deploy"):
        spec = find_spec(name)
        found = Path(spec.origin).resolve().parent if spec is not None and spec.origin else None
        if found != root / name:
            raise ConfigError(f"package {name!r} is hidden by {found}; install headwater in its own environment")


def main() -> None:
    """Run the command; a known error is one line and exit code 2."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is half-written is removed
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    try:
        refuse_shadowed_packages()
        app(standalone_mode=True)
    except HeadwaterError as error:
        print(f"headwater: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
