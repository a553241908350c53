"""`headwater edge`: run a site's node, and ask its privacy ledger."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from common.config import load_config
from common.errors import ConfigError
from edge_node.config import EdgeConfig

if TYPE_CHECKING:
    from edge_node.training.ledger import Charge

app = typer.Typer(no_args_is_help=True, help="A site's edge node.")
privacy = typer.Typer(no_args_is_help=True, help="What the site's ledger has spent.")
app.add_typer(privacy, name="privacy")

ConfigFile = Annotated[Path, typer.Option("--config", help="The node's edge.toml.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting, e.g. engine.threads=4.")
]
_LOOK_AGAIN_EVERY_S = 60.0


@app.command()
def run(config: ConfigFile, set_: Overrides = None) -> None:
    """Serve the OpenAI API, record what the policy allows, and follow the hub, until stopped."""
    import uvicorn

    from edge_node.node import EdgeNode

    settings = _settings(config, set_)
    node = EdgeNode(settings, clock=time.time)
    stopping = threading.Event()

    def follow_the_hub() -> None:
        while True:
            node.look_again()
            if stopping.wait(_LOOK_AGAIN_EVERY_S):
                return

    following = threading.Thread(target=follow_the_hub, name="follow-hub", daemon=True)
    following.start()
    try:
        uvicorn.run(node.app, host=settings.host, port=settings.port, log_level="warning", access_log=False)
    finally:
        stopping.set()
        following.join()
        node.close()


@privacy.command()
def show(config: ConfigFile, set_: Overrides = None, as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Print what is spent, what is left, and what another round would cost."""
    from common.accounting import epsilon
    from edge_node.policy import PolicyFile

    settings = _settings(config, set_)
    law = PolicyFile(settings.policy).law().privacy
    events = [charge.event for charge in _charges(settings)]
    spent = epsilon(events, delta=law.delta)
    another = epsilon([*events, events[0]], delta=law.delta) - spent if events else None
    found = {
        "epsilon_spent": spent,
        "epsilon_total": law.epsilon_total,
        "delta": law.delta,
        "unit": law.unit,
        "rounds_charged": len(events),
        "epsilon_of_next_round": another,
    }
    if as_json:
        print(json.dumps(found))
        return
    console = Console(highlight=False)
    console.print(
        f"epsilon spent {spent:.2f} of {law.epsilon_total:g} (delta {law.delta:g}), "
        f"adding or removing one {law.unit}, {len(events)} rounds charged"
    )
    if another is None:
        console.print("nothing was charged yet; the first plan fixes what a round costs")
    elif spent + another > law.epsilon_total:
        console.print(f"the next round would cost {another:.2f}: the ledger will refuse it")
    else:
        console.print(f"the next round costs {another:.2f}")


@privacy.command()
def verify(config: ConfigFile, set_: Overrides = None) -> None:
    """Check every entry of the ledger; exit code 2 where it does not hold."""
    charges = _charges(_settings(config, set_))
    print(f"{len(charges)} entries, each signed by this site and chained to the one before")


def _settings(file: Path, overrides: list[str] | None) -> EdgeConfig:
    return load_config(
        EdgeConfig, file=file, environment=os.environ, prefix="HEADWATER_EDGE", overrides=overrides or ()
    )


def _charges(settings: EdgeConfig) -> list[Charge]:
    """The site's charges, verified; raises TrustError where the ledger does not hold."""
    from common.identity import load_or_create_signing_key
    from edge_node.node import open_ledger

    key = settings.data_dir / "keys" / "identity.pem"
    if not key.exists():
        raise ConfigError(f"{settings.data_dir} holds no node; start it first: headwater edge run --config …")
    ledger = open_ledger(settings.data_dir, load_or_create_signing_key(key))
    try:
        return ledger.charges()
    finally:
        ledger.close()
