"""An agent for sites that have none: model, tools, memory.

    conversation → Agent (loop.py) → model behind the OpenAI API
                     ↑ results ↓ calls
                   Toolbox (tools.py, mcp_tools.py)

What is asked goes through the node's API like any other agent's requests, so it is
routed, recorded and learned from in the same way.
"""

from __future__ import annotations

from edge_node.agent.loop import Agent, Limits, ModelUnavailable, Turn
from edge_node.agent.memory import Window
from edge_node.agent.tools import Tool, Toolbox, load_tool, tool_from

__all__ = ["Agent", "Limits", "ModelUnavailable", "Tool", "Toolbox", "Turn", "Window", "load_tool", "tool_from"]
