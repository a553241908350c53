"""trajectories → units → per-unit gradients → noisy steps → `PrivateUpdate`.

`trainer.train_privately` is the way through, top to bottom.
"""

from edge_node.training.objectives import OBJECTIVES

__all__ = ["OBJECTIVES"]
