"""A real MCP server for tests: `python mcp_site.py` speaks stdio; `app()` is the same over streamable HTTP."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError


def server() -> MCPServer:
    made = MCPServer("site")

    @made.tool()
    def note(text: str) -> str:
        """Write a line down."""
        with Path(os.environ["NOTES"]).open("a") as file:
            file.write(f"{text}\n")
        return f"noted {text}"

    @made.tool()
    def fails() -> str:
        """Fail."""
        raise ToolError("no such record")

    @made.tool()
    def picture() -> Image:
        """Show a picture."""
        return Image(data=b"\x89PNG", format="png")

    @made.tool()
    def slow(seconds: float) -> str:
        """Take a while."""
        time.sleep(seconds)
        return "late"

    @made.tool(name="odd.name")
    def odd() -> dict[str, Any]:
        """Has a name that the API does not allow."""
        return {"environment": sorted(os.environ)}

    @made.tool()
    def dies() -> str:
        """End the server."""
        os._exit(3)

    return made


if __name__ == "__main__":
    if sys.argv[1:] == ["not-mcp"]:
        print("hello")
        sys.exit(0)
    if sys.argv[1:] == ["deaf"]:
        time.sleep(600)
    server().run()
