"""`headwater edge`: run a site's node, import records, look at interrupted training."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from common.errors import ConfigError
from common.telemetry import log_event
from deploy import edge_chat, edge_keys, edge_privacy
from deploy.edge_settings import ConfigFile, OptionalConfigFile, Overrides, edge_settings, site_key
from edge_node.config import EdgeConfig
from edge_node.policy import ServeOnly

if TYPE_CHECKING:
    from edge_node.node import EdgeNode

app = typer.Typer(no_args_is_help=True, help="A site's edge node.")
app.add_typer(edge_keys.app, name="key")
app.add_typer(edge_privacy.app, name="privacy")
app.command(name="doctor")(edge_privacy.doctor)
app.command(name="chat")(edge_chat.chat)

logger = logging.getLogger("headwater.edge")

_LOOK_AGAIN_EVERY_S = 60.0


@app.command()
def run(config: OptionalConfigFile = None, set_: Overrides = None) -> None:
    """Serve the OpenAI API, record what the policy allows, and follow the hub, until stopped.

    Without settings: the embedded model on loopback. Stopped once, running answers finish; twice, it stops at once.
    """
    from edge_node.node import EdgeNode
    from edge_node.serving.server import NodeServer

    settings = edge_settings(config, set_)
    if settings.log_requests:
        logging.getLogger("headwater.requests").setLevel(logging.INFO)
    node = EdgeNode(settings, clock=time.time)
    stopping = threading.Event()

    def follow_the_hub() -> None:
        while True:
            try:
                node.look_again()
            except Exception as error:  # outermost loop of this thread: the next look may go well
                log_event(logger, "looking at the hub failed", error=type(error).__name__)
            if stopping.wait(_LOOK_AGAIN_EVERY_S):
                return

    node.probe_all()
    following = threading.Thread(target=follow_the_hub, name="follow-hub", daemon=True)
    following.start()
    server = NodeServer(node.app, host=settings.host, port=settings.port, limits=settings.limits, keys=node.keys)
    try:
        print(_opening(node, settings), flush=True)
        server.run()
    finally:
        stopping.set()
        following.join()
        node.close()


def _opening(node: EdgeNode, settings: EdgeConfig) -> str:
    """What a newcomer needs to know, in a few lines."""
    policy = node.policy.current()
    follows = f"follows {settings.federation}" if settings.federation is not None else "follows no federation"
    records = f"only serves: {policy.reason}" if isinstance(policy, ServeOnly) else "records what policy.toml allows"
    keys = "API keys are needed" if node.keys.in_use else "no API key is needed on this machine"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return (
        f"headwater: http://{host}:{settings.port}/v1, model headwater, version {node.router.arms.stable.id}\n"
        f"headwater: {node.provider}; {keys}; {follows}; {records}"
    )


@app.command(name="import")
def import_records(
    config: ConfigFile,
    file: Annotated[Path, typer.Argument(help="JSON lines: chats, preferences, thumbs, or logged requests.")],
    set_: Overrides = None,
) -> None:
    """Put records another system wrote into the site's store, redacted like its own."""
    from edge_node.node import EdgeNode

    settings = edge_settings(config, set_)
    site_key(settings)  # there is a node
    node = EdgeNode(settings, clock=time.time, alone=False)
    try:
        with file.open(encoding="utf-8") as lines:
            print(f"{node.import_records(lines)} records imported")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    finally:
        node.close()


@app.command()
def data(
    config: ConfigFile,
    objective: Annotated[str, typer.Option(help="What would be trained.")] = "dpo",
    set_: Overrides = None,
) -> None:
    """Count what a round would train on now; exact, so for the site's own people. Exit code 2 where nothing is usable.

    Nothing is charged and nothing leaves.
    """
    from deploy.settings import TrainingSettings
    from edge_node.node import EdgeNode
    from edge_node.training.dataset import imbalance

    settings = edge_settings(config, set_)
    site_key(settings)  # there is a node
    node = EdgeNode(settings, clock=time.time, alone=False)
    try:
        found = node.dataset(TrainingSettings().plan(objective))
    finally:
        node.close()
    print(f"{len(found.units)} units for {objective}")
    for reason, count in sorted(found.left_out.items()):
        print(f"  left out, {reason}: {count}")
    if not found.units:
        raise ConfigError(f"nothing here can be trained on with {objective}; collect more, or ask users for feedback")
    one_sided = imbalance(found)
    if one_sided is not None:
        print(f"warning: {one_sided}")


@app.command()
def checkpoints(
    config: ConfigFile,
    resume_from: Annotated[
        int | None, typer.Option("--resume-from", metavar="STEP", help="Go on from this step; later ones are deleted.")
    ] = None,
    set_: Overrides = None,
) -> None:
    """List the checkpoints of rounds that were interrupted; their training goes on from the last one."""
    from edge_node.training.checkpoints import Checkpoints

    settings = edge_settings(config, set_)
    site_key(settings)  # there is a node
    found = Checkpoints(settings.data_dir / "checkpoints")
    plans = found.plans()
    if resume_from is not None:
        if len(plans) != 1:
            raise ConfigError(f"--resume-from needs one interrupted round, there are {len(plans)}")
        found.rewind(plans[0], step=resume_from)
    table = Table("plan", "round", "step", "of", "noise multiplier", "precision")
    for plan in plans:
        for step in found.steps(plan):
            checkpoint = found.read(plan, step)
            if checkpoint is None:
                table.add_row(plan[:12], "", str(step), "", "damaged", "")
                continue
            record = checkpoint.record
            steps = str(record.plan["training"]["steps"])
            sigma = f"{record.noise_multiplier:.3g}"
            table.add_row(plan[:12], str(record.plan["round"]), str(step), steps, sigma, record.precision)
    Console(highlight=False).print(table if plans else "no round was interrupted")
