"""The agent's side of training: watch calls, judge them, tell the node.

openai and AgentScope calls ──▶ AgentCall ──▶ selected? ──▶ reward ──▶ POST /feedback … POST /commit
        hooks.py                 calls.py       training_runner.py          node_client.py

Runs in the process of the agent, which stays as it is. Imports no training or
serving stack.
"""

from edge_node.collecting.selection import Decision, ExplicitMarking, SamplingRate
from edge_node.runner.calls import AgentCall, Response
from edge_node.runner.hooks import agent_call, mark_for_training
from edge_node.runner.training_runner import CallSelection, TrainingRunner

__all__ = [
    "AgentCall",
    "CallSelection",
    "Decision",
    "ExplicitMarking",
    "Response",
    "SamplingRate",
    "TrainingRunner",
    "agent_call",
    "mark_for_training",
]
