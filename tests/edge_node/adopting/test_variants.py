"""A/B comparisons: versions that the site's settings add to what the channel names."""

from __future__ import annotations

from deploy.world import World
from edge_node.config import VariantSettings
from edge_node.node import EdgeNode
from model_hub.repository import Channel
from tests.edge_node.adopting.test_adopt import publish_canary


def test_a_variant_is_served_beside_the_arms_and_an_unknown_one_left_out(world: World) -> None:
    canary = publish_canary(world)
    current = world.hub.repository.channel()
    assert current is not None
    world.hub.repository.point(Channel(current.sequence + 1, current.stable, None, 0.0))
    variants = {
        "b": VariantSettings(version=canary, share=0.4),
        "c": VariantSettings(version="v77", share=0.4),
    }
    config = world.setups[0].config.model_copy(update={"variants": variants})
    node = EdgeNode(config, clock=world.clock)
    node.look_again()
    arms = node.router.arms
    assert [(variant.name, variant.version.id, variant.share) for variant in arms.variants] == [("b", canary, 0.4)]
    assert {node.router.choose(str(index)).arm for index in range(50)} == {"stable", "b"}
    assert node.probe.reports[canary].matches
    node.close()
    again = EdgeNode(config, clock=world.clock)  # from its own copies, before it sees the hub
    assert [variant.version.id for variant in again.router.arms.variants] == [canary]
    again.close()
