"""What the HTTP layer of a node holds and costs.

    python benchmarks/serving_http.py                 # everything, a few minutes
    python benchmarks/serving_http.py --only swap     # crowd, memory, share, swap or load

Parts: 1,000 concurrent requests and 200 streams on a node in its own process; its memory over
10,000 requests; how much of a request's time is not the engine's; versions swapped under load;
from a version's files on disk to serving, as a multiple of reading and hashing the adapter.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import psutil

import deploy  # noqa: F401 - switches off telemetry before libraries load
from common.adapter import Adapter, LoraShape, initial_adapter
from common.identity import load_or_create_signing_key
from common.inference.batching import Batcher
from common.inference.chat_tokenizer import ChatTokenizer
from common.inference.constraints import Grammars
from common.inference.engine import Engine, LoadedAdapter
from common.inference.model_folder import (
    EMBEDDED,
    TARGET_MODULES,
    LlamaDimensions,
    module_shapes_of_a_layer,
    open_model,
)
from common.inference.packed_adapter import graph_inputs
from edge_node.config import LimitSettings
from edge_node.serving.chat_service import ChatService
from edge_node.serving.exchange import Exchange
from edge_node.serving.keys import KeyRing
from edge_node.serving.openai_api import create_app
from edge_node.serving.router import Arms, Router, ServedVersion
from edge_node.serving.server import NodeServer
from model_hub.repository import Repository, RepositoryReader
from model_hub.version import Lineage

PATH = "/v1/chat/completions"
SHAPE = LoraShape(8, 16.0, TARGET_MODULES)


def ask(max_tokens: int, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "What is 23+45?"}]
    return {"model": "headwater", "messages": messages, "max_tokens": max_tokens, **more}


# --- a node in its own process


@contextmanager
def node() -> Iterator[tuple[str, psutil.Process]]:
    """`headwater edge run` on nothing, with its defaults."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).with_name("headwater")), "edge", "run", "--set", f"port={port}"]
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)  # noqa: S603 - our own command
        try:
            while True:
                try:
                    if httpx2.get(f"http://127.0.0.1:{port}/readyz").status_code == 200:
                        break
                except httpx2.TransportError:
                    time.sleep(0.2)
            yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(60)


async def until_answered(http: httpx2.AsyncClient, url: str, body: dict[str, Any]) -> list[int]:
    """Statuses of one request, asked again as often and as late as the node says."""
    statuses: list[int] = []
    while True:
        response = await http.post(url + PATH, json=body)
        statuses.append(response.status_code)
        if response.status_code != 429:
            if body.get("stream") and response.status_code == 200 and not response.text.endswith("[DONE]\n\n"):
                statuses[-1] = -1  # broke off
            return statuses
        await asyncio.sleep(float(response.headers["retry-after"]) * (1 + np.random.default_rng().random()))


def crowd() -> None:
    """1,000 short requests and 200 streams, all at once."""

    async def all_at_once(url: str) -> tuple[list[list[int]], float]:
        limits = httpx2.Limits(max_connections=1200, max_keepalive_connections=1200)
        async with httpx2.AsyncClient(limits=limits, timeout=300) as http:
            began = time.monotonic()
            bodies = [ask(8, seed=i) for i in range(1000)] + [ask(32, seed=i, stream=True) for i in range(200)]
            return await asyncio.gather(*(until_answered(http, url, body) for body in bodies)), time.monotonic() - began

    with node() as (url, process):
        found, seconds = asyncio.run(all_at_once(url))
        memory = process.memory_info().rss / 2**20
    for name, group in (("1,000 short requests", found[:1000]), ("200 streams", found[1000:])):
        last = Counter(statuses[-1] for statuses in group)
        again = sum(len(statuses) > 1 for statuses in group)
        print(f"{name}: ended in {dict(last)}; {again} were told to come back first")
    print(f"all answered within {seconds:.1f} s; the node then holds {memory:.0f} MB\n")


def memory(requests: int = 10_000, every: int = 1000) -> None:
    """The node's resident memory as it answers one request after the other, 32 at a time."""

    async def some(url: str, count: int) -> None:
        async with httpx2.AsyncClient(timeout=300) as http:
            busy = asyncio.Semaphore(32)

            async def one(index: int) -> None:
                async with busy:
                    body = ask(2, seed=index, stream=index % 4 == 0, user=f"user-{index}")
                    assert (await until_answered(http, url, body))[-1] == 200

            await asyncio.gather(*map(one, range(count)))

    with node() as (url, process):
        sizes = []
        for done in range(every, requests + 1, every):
            asyncio.run(some(url, every))
            sizes.append(process.memory_info().rss / 2**20)
            print(f"{done:>6} requests: {sizes[-1]:.1f} MB")
    grown = sizes[-1] - sizes[1]
    print(f"from {2 * every} to {requests}: {grown:+.1f} MB, {grown / sizes[1]:+.1%}\n")


# --- a server in this process, where the engine can be looked at


class Kept:
    """A recorder that keeps how long the engine took."""

    def __init__(self) -> None:
        self.engine_s: dict[str, float] = {}

    def record(self, exchange: Exchange) -> None:
        generations = [answer.generation for answer in exchange.answers]
        self.engine_s[exchange.id] = max(g.wait_s + g.first_token_s + g.decode_s for g in generations)


@contextmanager
def served(threads: int = 1) -> Iterator[tuple[str, Engine, Router, Kept, Adapter]]:
    model = open_model(EMBEDDED)
    tokenizer, engine = ChatTokenizer(model), Engine(model, context_tokens=256, threads=threads)
    start = initial_adapter(model.module_shapes(), SHAPE, seed=0)
    batcher, router, kept = Batcher(engine), Router(Arms(ServedVersion("v0", engine.load(start)))), Kept()
    limits = LimitSettings(requests_per_key=4096)
    service = ChatService(tokenizer, batcher, Grammars(model, tokenizer))
    app = create_app(service, router, kept, provider=engine.provider, limits=limits)
    with tempfile.TemporaryDirectory() as folder:
        keys = KeyRing(Path(folder) / "keys.json")
        server = NodeServer(app, host="127.0.0.1", port=0, limits=limits, keys=keys)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", engine, router, kept, start
        server.should_exit = True
        thread.join()
    batcher.close()


def share(requests: int = 200) -> None:
    """One request at a time, as its client sees it, less what the engine took for it."""
    with served() as (url, _, _, kept, _), httpx2.Client(timeout=60) as http:
        for tokens, stream in ((8, False), (48, False), (48, True)):
            body = ask(tokens, stream=stream, logit_bias={"20": 100})  # always all the tokens
            times, outside = [], []
            for index in range(requests + 20):
                began = time.perf_counter()
                response = http.post(url + PATH, json=body)
                seconds = time.perf_counter() - began
                name = response.text.split('"id":"', 1)[1].split('"', 1)[0]
                if index >= 20:
                    times.append(seconds)
                    outside.append(seconds - kept.engine_s[name])
            whole, rest = statistics.median(times), statistics.median(outside)
            kind = "streamed" if stream else "whole"
            print(
                f"{tokens} tokens, {kind}: {whole * 1e3:.2f} ms, of which outside the engine {rest * 1e3:.2f} ms "
                f"({rest / whole:.0%}), client included"
            )
    print()


def changed(start: Adapter, seed: int) -> Adapter:
    """`start` with another B."""
    rng = np.random.default_rng(seed)
    drawn = {n: rng.normal(0, 0.5, t.shape) if "lora_B" in n else t for n, t in start.tensors.items()}
    return Adapter(start.shape, drawn)


def swap(clients: int = 64, seconds: float = 10.0) -> None:
    """Three versions take turns while many clients ask; every answer must be its own version's."""

    with served() as (url, engine, router, _, start):
        adapters = {f"v{seed}": changed(start, seed) for seed in (1, 2, 3)}
        body = ask(16, temperature=0)
        alone: dict[str, str] = {}
        for name, adapter in adapters.items():
            router.arms = Arms(ServedVersion(name, engine.load(adapter)))
            alone[name] = httpx2.post(url + PATH, json=body).json()["choices"][0]["message"]["content"]
        found: Counter[str] = Counter()
        swaps = 0

        async def ask_on(http: httpx2.AsyncClient, until: float) -> None:
            while time.monotonic() < until:
                response = await http.post(url + PATH, json=body)
                if response.status_code != 200:
                    found["failed"] += 1
                    continue
                said = response.json()
                right = said["choices"][0]["message"]["content"] == alone[said["system_fingerprint"]]
                named = response.headers["x-headwater-version"] == said["system_fingerprint"]
                found["right" if right and named else "mixed"] += 1

        async def swap_on(until: float) -> None:
            nonlocal swaps
            while time.monotonic() < until:
                name = f"v{swaps % 3 + 1}"
                loaded = await asyncio.to_thread(engine.load, adapters[name])  # anew, as it is adopted
                router.arms = Arms(ServedVersion(name, loaded))
                swaps += 1
                await asyncio.sleep(0.02)

        async def run() -> None:
            until = time.monotonic() + seconds
            async with httpx2.AsyncClient(timeout=60, limits=httpx2.Limits(max_connections=clients)) as http:
                await asyncio.gather(swap_on(until), *(ask_on(http, until) for _ in range(clients)))

        asyncio.run(run())
    assert len(set(alone.values())) == 3
    print(f"{swaps} swaps in {seconds:.0f} s under {clients} clients: {dict(found)}\n")


# --- from file to serving


class _Shaped:
    """The shapes of SmolLM2-135M, all that packing an adapter asks of a model folder."""

    dimensions = LlamaDimensions(
        hidden=576,
        intermediate=1536,
        layers=30,
        heads=9,
        kv_heads=3,
        head_dim=64,
        vocabulary=49152,
        context_tokens=8192,
        norm_epsilon=1e-5,
        rope_theta=1e5,
        tied=True,
    )

    def module_shapes(self) -> dict[str, tuple[int, int]]:
        layer = module_shapes_of_a_layer(self.dimensions)
        return {f"model.layers.{i}.{name}": shape for i in range(30) for name, shape in layer.items()}


def load(repeats: int = 41) -> None:
    """A version's signed files to an assignment in the router, against reading and hashing the adapter's file.

    Both in turn, of a file in the page cache, into memory that the process takes anew; CPU time.
    """
    shaped: Any = _Shaped()
    start = changed(initial_adapter(shaped.module_shapes(), SHAPE, seed=0), seed=1)
    router = Router(Arms(ServedVersion("v0", LoadedAdapter({}, "none", device="cpu"))))
    with tempfile.TemporaryDirectory() as folder:
        key = load_or_create_signing_key(Path(folder) / "hub.pem")
        Repository(Path(folder) / "hub", key).publish("v1", start, parent=None, lineage=Lineage("base"), base="x")
        reader = RepositoryReader(Path(folder) / "hub", hub_public=key.public)
        file = Path(folder) / "hub" / "versions" / "v1" / "adapter_model.safetensors"
        size = file.stat().st_size

        def read_and_hash() -> None:
            hashlib.sha256(file.read_bytes()).hexdigest()

        def serve() -> None:
            adapter = reader.adapter("v1", like=start, base_digest="base")
            loaded = LoadedAdapter(graph_inputs(adapter, shaped, np.float32), adapter.digest, device="cpu")
            router.arms = Arms(ServedVersion("v1", loaded))

        times: dict[str, list[float]] = {"read": [], "serve": []}
        works: dict[str, Callable[[], None]] = {"read": read_and_hash, "serve": serve}
        for _ in range(repeats + 2):
            for name, work in works.items():
                began = time.process_time()
                work()
                times[name].append(time.process_time() - began)
    print(f"an adapter of SmolLM2's shapes, rank 8, {size / 1e6:.1f} MB")
    for name, taken in (("median", statistics.median), ("fastest", min)):
        base, whole = (taken(times[work][2:]) for work in works)
        print(
            f"{name} of {repeats}: read and SHA-256 {base * 1e3:.1f} ms, "
            f"verified, packed and in the router {whole * 1e3:.1f} ms: {whole / base:.1f} ×"
        )
    print()


PARTS: dict[str, Callable[[], None]] = {"crowd": crowd, "memory": memory, "share": share, "swap": swap, "load": load}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS)
    only = parser.parse_args().only
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    for name, part in PARTS.items():
        if only in (None, name):
            part()


if __name__ == "__main__":
    main()
