"""A server made with the Python SDK of both eras. eras_old.py offers the same.

eras_new.py                  over stdio
eras_new.py PORT             over streamable HTTP
eras_new.py PORT --only-new  the same, and nothing older than 2026-07-28
"""

import sys
from typing import Annotated

import uvicorn
from mcp.server import MCPServer
from mcp.server.mcpserver import Context, Elicit, Resolve
from mcp_types import ToolAnnotations
from pydantic import BaseModel
from starlette.middleware import Middleware
from starlette.responses import JSONResponse

server = MCPServer("eras", version="2.0.0", instructions="Add, ask, work and grow.")


class Name(BaseModel):
    name: str


async def who() -> Elicit[Name]:
    return Elicit("Who are you?", Name)


@server.tool(annotations=ToolAnnotations(read_only_hint=True, idempotent_hint=True))
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
async def ask(answer: Annotated[Name, Resolve(who)]) -> str:
    """Asks the user who they are."""
    return f"Hello, {answer.name}!"


@server.tool()
async def work(steps: int, context: Context) -> str:
    """Works, and tells how far it is."""
    for step in range(1, steps + 1):
        await context.report_progress(step, steps)
    return f"{steps} steps done."


@server.tool()
async def grow(name: str, context: Context) -> str:
    """Grows another tool, and says that it has, in either era."""
    server.add_tool(lambda: name, name=name, description="A tool that was grown.")
    await context.notify_tools_changed()
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


class OnlyNew:
    """Responds like a server that does not support sessions."""

    NEW = "2026-07-28"

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http":
            version = dict(scope["headers"]).get(b"mcp-protocol-version", b"").decode()
            if scope["method"] != "POST":
                return await JSONResponse({}, status_code=405, headers={"allow": "POST"})(scope, receive, send)
            if version != self.NEW:
                data = {"supported": [self.NEW], "requested": version}
                error = {"code": -32022, "message": "Unsupported protocol version", "data": data}
                answer = JSONResponse({"jsonrpc": "2.0", "id": None, "error": error}, status_code=400)
                return await answer(scope, receive, send)
        await self.app(scope, receive, send)


if len(sys.argv) == 1:
    server.run()
else:
    app = server.streamable_http_app()
    if "--only-new" in sys.argv:
        app.user_middleware.insert(0, Middleware(OnlyNew))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="info")
