"""What secure aggregation costs: masking against raw AES-CTR, and a whole round as multiples of masking alone.

    python benchmarks/secure_aggregation.py                       # 20 sites of 5 million parameters
    python benchmarks/secure_aggregation.py --sites 5 --parameters 1000000
    python benchmarks/secure_aggregation.py --rounds secagg:16    # one of secagg:32, secagg:16, secagg_sketch:32

Everything is in multiples of one site's masking in words of 32 bits, also where words have 16.

CPU seconds of one process with one thread; every site and the server run one after the other, messages are bytes as
they would be sent, state is not written to disk.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from common.identity import SigningKey, roster_digest
from common.plan import RoundPlan, Training
from common.secagg import SKETCH, SUM_ONLY, Limits, Member, Paid, ServerSession, SiteSession, Terms, derive_terms
from common.secagg.masking import add_mask
from common.secagg.ring import Ring
from common.secagg.rotation import Rotation
from common.update import PrivateUpdate

_CHUNK = 1 << 20


def cpu_s(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def raw_aes(bytes_sent: int) -> None:
    """The keystream alone, into a buffer that stays in the cache."""
    stream = Cipher(algorithms.AES(bytes(32)), modes.CTR(bytes(16))).encryptor()
    zeros, drawn = bytes(_CHUNK), bytearray(_CHUNK + 16)
    for _ in range(0, bytes_sent, _CHUNK):
        stream.update_into(zeros, drawn)


def masking(parameters: int, *, bits: int, repetitions: int) -> float:
    """Prints masking beside raw AES; CPU seconds of one mask."""
    words_D = np.zeros(parameters, f"u{bits // 8}")
    raw, masked = [], []
    for _ in range(repetitions):  # in turn, so that both see the same machine
        raw.append(cpu_s(lambda: raw_aes(words_D.nbytes))[0])
        masked.append(cpu_s(lambda: add_mask(words_D, bytes(32)))[0])
    one, rival = statistics.median(masked), statistics.median(raw)
    print(f"\none mask of {parameters:,} words of {bits} bits, median of {repetitions} in turn")
    print(f"  raw AES-256-CTR         {words_D.nbytes / rival / 1e9:6.2f} GB/s   1.00")
    print(f"  AES-256-CTR + ring add  {words_D.nbytes / one / 1e9:6.2f} GB/s   {rival / one:.2f}")
    return one


def rounding(sites: int, parameters: int, masks_s: dict[int, float], *, repetitions: int) -> None:
    """Prints what comes before the masks and after the sum, and how far rounding moves one update."""
    update_D = np.random.default_rng(0).normal(size=parameters).astype(np.float32)
    update_D /= np.float32(np.linalg.norm(update_D.astype(np.float64)))
    rotation = Rotation(bytes(32), parameters)
    rings = {32: Ring(1.0, sites), 16: Ring(1.0, sites, rotation)}
    words = {bits: ring.quantise(update_D, weight=1, key=bytes(32)) for bits, ring in rings.items()}
    steps: dict[str, Callable[[], Any]] = {
        "rotating it": lambda: rotation.apply(update_D),
        "clipping, rounding: 32 bits": lambda: rings[32].quantise(update_D, weight=1, key=bytes(32)),
        "… rotating too: 16 bits": lambda: rings[16].quantise(update_D, weight=1, key=bytes(32)),
        "a sum to floats: 32 bits": lambda: rings[32].values(words[32]),
        "… and back: 16 bits": lambda: rings[16].values(words[16]),
    }
    spent: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repetitions):
        for name, step in steps.items():
            spent[name].append(cpu_s(step)[0])
    print(f"\none update of {parameters:,} parameters, multiples of its masking among {sites} sites (32, 16 bits)")
    for name, found in spent.items():
        one = statistics.median(found)
        print(f"  {name:28} {one / (sites * masks_s[32]):6.2f} {one / (sites * masks_s[16]):6.2f}")
    for bits, ring in rings.items():
        moved = float(np.linalg.norm(ring.values(words[bits]) - update_D))
        print(f"  {bits} bits move it by {moved:.1e} of the clip")


@dataclass
class Clock:
    """CPU seconds and bytes by step."""

    site_s: dict[str, list[float]] = field(default_factory=dict)
    server_s: dict[str, float] = field(default_factory=dict)
    sent: int = 0


def a_round(mode: str, bits: int, sites: int, parameters: int) -> tuple[Clock, float]:
    """One honest session; what it took, and the error of the mean relative to its norm."""
    keys = {f"s{i:03}": SigningKey(Ed25519PrivateKey.generate()) for i in range(sites)}
    server_key = SigningKey(Ed25519PrivateKey.generate())
    members = [Member(name, key.public, name) for name, key in keys.items()]
    plan = _plan(members)
    terms = derive_terms(
        plan,
        mode=mode,
        members=members,
        dimension=parameters,
        snapshot="v0",
        limits=Limits(),
        word_bits=bits,
    )
    rng = np.random.default_rng(0)
    common_D = rng.normal(size=parameters).astype(np.float32)
    updates = {}
    for name in keys:
        update_D = common_D + rng.normal(size=parameters).astype(np.float32)
        updates[name] = update_D * np.float32(0.9 / np.linalg.norm(update_D))
    sessions = {name: _session(terms, name, key, server_key, updates[name]) for name, key in keys.items()}
    server = ServerSession(terms, key=server_key, session=os.urandom(32), present=keys)
    clock = Clock()
    requests = server.start()
    step = 0
    while requests:
        replies = {}
        for name, request in requests.items():
            spent, answer = cpu_s(lambda name=name, request=request: sessions[name].answer(request))
            stage = str(sessions[name].stage)
            clock.site_s.setdefault(stage, []).append(spent)
            replies[name] = answer.reply
            clock.sent += len(answer.reply)
        spent, requests = cpu_s(lambda replies=replies: server.advance(replies))
        step += 1
        clock.server_s[stage] = spent
    assert server.result is not None
    included = server.result.included
    mean_D = np.mean([updates[name] for name in included], axis=0, dtype=np.float64)
    return clock, float(np.linalg.norm(server.result.mean_D - mean_D) / np.linalg.norm(mean_D))


def _plan(members: list[Member]) -> RoundPlan:
    return RoundPlan(
        federation="benchmark",
        round=1,
        planned_rounds=1,
        base_digest="0" * 64,
        adapter_version="v0",
        adapter_digest="0" * 64,
        training=Training("rft", "sgd", 1.0, 1, 0.5, 8.0, 1.0, {}),
        lora_phase="B",
        clip_norm=1.0,
        weights={member.name: member.weight for member in members},
        roster_digest=roster_digest({member.name: member.public for member in members}),
        sealing_key="0" * 64,
        deadline_s=1.0,
    )


def _session(terms: Terms, name: str, key: SigningKey, server: SigningKey, update_D: np.ndarray) -> SiteSession:
    return SiteSession(
        terms,
        name=name,
        key=key,
        server=server.public,
        update=PrivateUpdate(terms.plan_digest, {"x": (terms.dimension,)}, update_D, "0" * 64),
        paid=Paid("0" * 64, ""),
        record=None,
        stored_words_D=None,
        history=(),
        entropy=os.urandom,
    )


def report(mode: str, bits: int, sites: int, parameters: int, one_mask_s: float) -> None:
    clock, error = a_round(mode, bits, sites, parameters)
    alone = sites * one_mask_s  # a site masks with itself and with every other
    print(f"\n{mode}, {bits} bits: {sites} sites x {parameters:,} parameters; masking alone: {alone:.2f} s CPU")
    print(f"  {'after this, a site …':26} {'site s':>8} {'x masking':>10} {'server s':>9} {'x masking':>10}")
    per_site = server = 0.0
    for stage, spent in clock.site_s.items():
        each, at_server = statistics.mean(spent), clock.server_s[stage]
        per_site, server = per_site + each, server + at_server
        print(f"  {stage:26} {each:8.3f} {each / alone:10.2f} {at_server:9.3f} {at_server / alone:10.2f}")
    print(f"  {'together':26} {per_site:8.3f} {per_site / alone:10.2f} {server:9.3f} {server / alone:10.2f}")
    print(f"  sent by a site: {clock.sent / sites / parameters:.3f} bytes a parameter; error of the mean {error:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sites", type=int, default=20)
    parser.add_argument("--parameters", type=int, default=5_000_000)
    parser.add_argument("--rounds", nargs="*", default=[f"{SUM_ONLY}:32", f"{SUM_ONLY}:16", f"{SKETCH}:32"])
    given = parser.parse_args()
    masks_s = {bits: masking(given.parameters, bits=bits, repetitions=15) for bits in (32, 16)}
    rounding(given.sites, given.parameters, masks_s, repetitions=7)
    for one in given.rounds:
        mode, _, bits = one.partition(":")
        report(mode, int(bits or 32), given.sites, given.parameters, masks_s[32])


if __name__ == "__main__":
    main()
