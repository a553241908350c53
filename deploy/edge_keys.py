"""`headwater edge key`: who may use a node's API."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from deploy.edge_settings import OptionalConfigFile, Overrides, edge_settings
from edge_node.config import EdgeConfig
from edge_node.serving.keys import CHAT, FEEDBACK, SCOPES, KeyRing, key_file

app = typer.Typer(no_args_is_help=True, help="API keys: with the first one, every caller needs one.")

_Name = Annotated[str, typer.Argument(help="Whose key; shows in logs and records.")]
_Scopes = Annotated[
    list[str] | None,
    typer.Option("--scope", help="; ".join(f"{name}: {text}" for name, text in SCOPES.items())),
]


@app.command()
def add(name: _Name, config: OptionalConfigFile = None, scope: _Scopes = None, set_: Overrides = None) -> None:
    """Make a key and print it; only its hash is kept. Default scopes: chat and feedback. A running node takes it."""
    print(_ring(edge_settings(config, set_)).add(name, scope or [CHAT, FEEDBACK], now_s=time.time()))


@app.command(name="list")
def list_keys(config: OptionalConfigFile = None, set_: Overrides = None) -> None:
    """Show whose keys there are and what they may do."""
    keys = _ring(edge_settings(config, set_)).keys
    table = Table("name", "scopes", "made")
    for key in keys:
        table.add_row(key.id, " ".join(key.scopes), datetime.fromtimestamp(key.created_s).isoformat(" ", "minutes"))
    Console(highlight=False).print(table if keys else "there are no keys")


@app.command()
def revoke(name: _Name, config: OptionalConfigFile = None, set_: Overrides = None) -> None:
    """Forget a key; a running node refuses it from its next request on."""
    _ring(edge_settings(config, set_)).revoke(name)
    print(f"{name} is revoked")


def _ring(settings: EdgeConfig) -> KeyRing:
    settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    return KeyRing(key_file(settings.data_dir))
