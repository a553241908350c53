"""An agent for sites that have none: model, tools, memory.

    conversation → Agent (loop.py) → model behind the OpenAI API
                     ↑ results ↓ calls
                   Toolbox (tools.py, mcp_tools.py)

`site_agent.py` makes the one of edge.toml, `http_api.py` serves it with the chat page.
What it asks goes through the node's API like any other agent's requests, so it is
routed, recorded and learned from in the same way.
"""
