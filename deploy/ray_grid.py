"""The same ServerApp and ClientApp on Flower's Ray backend: processes instead of threads."""

from __future__ import annotations

from collections.abc import Callable

from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from aggregator.server_app import make_server_app


def run_on_ray(client_app: ClientApp, nodes: int, main: Callable[[Grid], None], *, cpus: int) -> None:
    """Run `main` on a grid of Ray actors; what it raises is raised here."""
    from flwr.simulation import run_simulation

    failures: list[BaseException] = []

    def guarded(grid: Grid) -> None:
        try:
            main(grid)
        except BaseException as error:
            failures.append(error)
            raise

    try:
        run_simulation(
            server_app=make_server_app(guarded),
            client_app=client_app,
            num_supernodes=nodes,
            backend_config={
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                "init_args": {"num_cpus": cpus, "include_dashboard": False},
            },
        )
    except Exception:
        if not failures:
            raise
    if failures:
        raise failures[0]
