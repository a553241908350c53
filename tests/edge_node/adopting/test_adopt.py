"""Adoption against a table of tampered repositories: refused, and what is served does not change."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from common.adapter import Adapter
from common.errors import TransportError, TrustError
from common.identity import SigningKey, canonical
from deploy.world import World
from edge_node.node import EdgeNode
from model_hub.repository import Channel, Repository
from model_hub.version import Lineage
from tests.conftest import changed


def publish_canary(world: World, *, seed: int = 1) -> str:
    start = world.hub.adapter("v0")
    version = world.hub.submit(
        changed(start, seed=seed, scale=0.01),
        lineage=Lineage(world.hub.stable.lineage.base_digest),
        largest_change=100.0,
    )
    world.hub.start_canary(version)
    return version.id


def test_both_arms_follow_the_hub(world: World, node: EdgeNode) -> None:
    assert node.router.arms.stable.id == "v0"
    version = publish_canary(world)
    node.look_again()
    canary = node.router.arms.canary
    assert canary is not None
    assert canary.id == version
    assert canary.adapter.digest == world.hub.adapter(version).digest
    assert node.router.arms.canary_share == 0.05


def test_a_restarted_node_serves_what_was_adopted(world: World, node: EdgeNode) -> None:
    version = publish_canary(world)
    node.look_again()
    shutil.rmtree(world.setups[0].config.hub)  # the hub is out of reach
    node.close()
    again = EdgeNode(world.setups[0].config, clock=world.clock)
    canary = again.router.arms.canary
    again.look_again()
    assert again.router.arms.canary == canary
    again.close()
    assert canary is not None
    assert canary.id == version


FOREIGN = SigningKey(Ed25519PrivateKey.generate())


def _edit_json(path: Path, change: Callable[[dict], None]) -> None:
    fields = json.loads(path.read_text())
    change(fields)
    path.write_bytes(canonical(fields))


def _flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def _forge_channel(repository: Path) -> None:
    Repository(repository, FOREIGN).point(Channel(99, "v1", None, 0.0))


def _other_version_in_its_place(repository: Path) -> None:
    shutil.rmtree(repository / "versions" / "v1")
    shutil.copytree(repository / "versions" / "v0", repository / "versions" / "v1")


TAMPERED: dict[str, Callable[[Path], object]] = {
    "channel garbage": lambda r: (r / "channel.json").write_bytes(b"\xff"),
    "channel empty": lambda r: (r / "channel.json").write_bytes(b""),
    "channel not an object": lambda r: (r / "channel.json").write_bytes(b"[1]"),
    "channel gone": lambda r: (r / "channel.json").unlink(),
    "channel forged": _forge_channel,
    "channel share raised": lambda r: _edit_json(
        r / "channel.json", lambda f: f.update(payload=f["payload"].replace("0.05", "1.0"))
    ),
    "manifest changed": lambda r: _edit_json(r / "versions/v1/manifest.json", lambda f: f.update(rank=16)),
    "manifest gone": lambda r: (r / "versions/v1/manifest.json").unlink(),
    "signature gone": lambda r: (r / "versions/v1/manifest.sig").unlink(),
    "signature flipped": lambda r: _flip_last_byte(r / "versions/v1/manifest.sig"),
    "adapter flipped": lambda r: _flip_last_byte(r / "versions/v1/adapter_model.safetensors"),
    "adapter truncated": lambda r: (r / "versions/v1/adapter_model.safetensors").write_bytes(b"x"),
    "adapter gone": lambda r: (r / "versions/v1/adapter_model.safetensors").unlink(),
    "other version": _other_version_in_its_place,
}


@pytest.mark.parametrize("name", TAMPERED)
def test_a_tampered_repository_changes_nothing(world: World, node: EdgeNode, name: str) -> None:
    publish_canary(world)
    before = node.router.arms
    TAMPERED[name](world.setups[0].config.hub)
    with pytest.raises((TrustError, TransportError)):
        node._adopter.look_again()
    node.look_again()  # goes on serving, without raising
    assert node.router.arms == before
    node.close()
    again = EdgeNode(world.setups[0].config, clock=world.clock)
    assert again.router.arms.stable.id == "v0"
    assert again.router.arms.canary is None
    again.close()


def test_damaged_copies_are_not_served(world: World, node: EdgeNode) -> None:
    version = publish_canary(world)
    node.look_again()
    kept = world.setups[0].config.data_dir / "adopted"
    _flip_last_byte(kept / "versions" / version / "adapter_model.safetensors")
    node.close()
    again = EdgeNode(world.setups[0].config, clock=world.clock)
    assert again.router.arms.stable.id == "base"
    again.look_again()  # the hub has good ones: they replace the copies
    canary = again.router.arms.canary
    assert canary is not None
    assert canary.id == version
    again.close()
    again = EdgeNode(world.setups[0].config, clock=world.clock)
    assert again.router.arms.canary is not None
    again.close()
    (kept / "channel.json").write_bytes(b"")
    again = EdgeNode(world.setups[0].config, clock=world.clock)
    with pytest.raises(TrustError):
        again._adopter.look_again()  # its memory of what it adopted is gone, so nothing newer is believed
    again.close()


def test_an_older_channel_is_refused_also_after_a_restart(world: World, node: EdgeNode) -> None:
    channel = world.setups[0].config.hub / "channel.json"
    old = channel.read_bytes()
    publish_canary(world)
    node.look_again()
    channel.write_bytes(old)
    with pytest.raises(TrustError, match="older than 2"):
        node._adopter.look_again()
    node.close()
    again = EdgeNode(world.setups[0].config, clock=world.clock)
    with pytest.raises(TrustError, match="older than 2"):
        again._adopter.look_again()
    again.close()


def test_a_version_for_another_base_or_shape_is_refused(world: World, node: EdgeNode, start: Adapter) -> None:
    repository, hub = world.hub.repository, node._adopter
    foreign_shape = Adapter(dataclasses.replace(start.shape, alpha=1.0), start.tensors)
    repository.publish("w1", start, parent=None, lineage=Lineage("0" * 64), base="x")
    repository.publish("w2", foreign_shape, parent=None, lineage=Lineage(node.model.digest), base="x")
    for version, expected in (("w1", "another base"), ("w2", "another LoRA shape"), ("../x", "not a version id")):
        with pytest.raises(TrustError, match=expected):
            hub.fetch(version)


def test_a_published_version_never_changes(world: World, start: Adapter) -> None:
    with pytest.raises(TrustError, match="cannot change"):
        world.hub.repository.publish("v0", changed(start, seed=3), parent=None, lineage=Lineage(""), base="x")
