"""trajectories → pairs → per-unit gradients → noisy steps → `PrivateUpdate`.

`trainer.train_privately` is the way through, top to bottom.
"""

from edge_node.training.dpo import dpo_losses

OBJECTIVES = {"dpo": dpo_losses}
"""Objective name in a round plan to its loss per unit."""
