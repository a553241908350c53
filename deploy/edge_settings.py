"""Reading a node's edge.toml for a command."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from common.config import load_config
from common.errors import ConfigError
from common.identity import SigningKey, load_or_create_signing_key
from edge_node.config import EdgeConfig

if TYPE_CHECKING:
    from edge_node.training.ledger import Ledger

ConfigFile = Annotated[Path, typer.Option("--config", help="The node's edge.toml.")]
OptionalConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="The node's edge.toml; default: edge.toml in this folder, if it is there."),
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting, e.g. engine.threads=4.")
]


_HERE = Path("edge.toml")


def edge_settings(file: Path | None, overrides: list[str] | None) -> EdgeConfig:
    """The node's settings, from file, environment and `--set`; `data_dir` and `policy` lie beside the file."""
    if file is None and _HERE.exists():
        file = _HERE
    beside = file.parent if file is not None else Path()
    fields = EdgeConfig.model_fields
    return load_config(
        EdgeConfig,
        defaults={name: str(beside / fields[name].default) for name in ("data_dir", "policy")},
        file=file,
        environment=os.environ,
        prefix="HEADWATER_EDGE",
        overrides=overrides or (),
    )


def site_key(settings: EdgeConfig) -> SigningKey:
    """The identity of a node that was started before; raises ConfigError where there is none."""
    key = settings.data_dir / "keys" / "identity.pem"
    if not key.exists():
        raise ConfigError(f"{settings.data_dir} holds no node; start it first: headwater edge run --config …")
    return load_or_create_signing_key(key)


@contextmanager
def site_ledger(settings: EdgeConfig) -> Iterator[Ledger]:
    """A node's privacy ledger, verified.

    Raises:
        ConfigError: there is no node.
        TrustError: the ledger does not hold.
    """
    from edge_node.training.site_training import open_ledger

    ledger = open_ledger(settings.data_dir, site_key(settings))
    try:
        yield ledger
    finally:
        ledger.close()
