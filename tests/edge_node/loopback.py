"""A node behind a real server on loopback."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from deploy.world import World
from edge_node.node import EdgeNode


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """The URL an application answers at while the block runs."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(timeout=10)


@contextmanager
def opened(world: World, **changes: object) -> Iterator[EdgeNode]:
    """Site 1's node with some settings of its edge.toml changed."""
    node = EdgeNode(world.setups[0].config.model_copy(update=changes), clock=world.clock)
    node.look_again()
    yield node
    node.close()
