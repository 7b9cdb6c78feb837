"""A server made with the last Python SDK that speaks nothing newer than 2025-11-25. eras_new.py offers the same.

eras_old.py          over stdio
eras_old.py PORT     over streamable HTTP
"""

import sys

from mcp.server.fastmcp import Context, FastMCP
from mcp.types import ToolAnnotations
from pydantic import BaseModel

server = FastMCP("eras", instructions="Add, ask, work and grow.")


class Name(BaseModel):
    name: str


@server.tool(annotations=ToolAnnotations(readOnlyHint=True, idempotentHint=True))
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
async def ask(context: Context) -> str:
    """Asks the user who they are."""
    answer = await context.elicit("Who are you?", Name)
    return f"Hello, {answer.data.name}!" if answer.action == "accept" else answer.action


@server.tool()
async def work(steps: int, context: Context) -> str:
    """Works, and tells how far it is."""
    for step in range(1, steps + 1):
        await context.report_progress(step, steps)
    return f"{steps} steps done."


@server.tool()
async def grow(name: str, context: Context) -> str:
    """Grows another tool, and says that it has."""
    server.add_tool(lambda: name, name=name, description="A tool that was grown.")
    await context.session.send_tool_list_changed()
    return "Grown."


@server.resource("note://today")
def today() -> str:
    """What is to be done today."""
    return "Nothing."


@server.prompt()
def review(code: str) -> str:
    """Asks for a review."""
    return f"Please review:\n\n{code}"


if len(sys.argv) == 1:
    server.run()
else:
    server.settings.port = int(sys.argv[1])
    server.run("streamable-http")
