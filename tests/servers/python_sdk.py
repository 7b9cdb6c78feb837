"""A server made with the Python SDK, over streamable HTTP: a small copy of a typical deployment.

python_sdk.py PORT [--json] [--no-get]
"""

import argparse

import uvicorn
from mcp.server import MCPServer
from mcp_types import ToolAnnotations
from starlette.middleware import Middleware

from without_get import WithoutGet

arguments = argparse.ArgumentParser()
arguments.add_argument("port", type=int)
arguments.add_argument("--json", action="store_true", help="answer with JSON instead of an event stream")
arguments.add_argument("--no-get", action="store_true", help="answer 405 to a GET")
arguments = arguments.parse_args()

server = MCPServer("python-sdk", version="1.0.0", instructions="Add, and greet.")


@server.tool(annotations=ToolAnnotations(read_only_hint=True, idempotent_hint=True))
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def greet(name: str) -> str:
    """Greets somebody."""
    return f"Hello, {name}!"


@server.resource("note://today")
def today() -> str:
    """What is to be done today."""
    return "Nothing."


@server.resource("note://{day}")
def note(day: str) -> str:
    """What is to be done on a day."""
    return f"Nothing on {day}."


@server.prompt()
def review(code: str) -> str:
    """Asks for a review."""
    return f"Please review:\n\n{code}"


app = server.streamable_http_app(json_response=arguments.json)
if arguments.no_get:
    app.user_middleware.insert(0, Middleware(WithoutGet))
uvicorn.run(app, host="127.0.0.1", port=arguments.port, log_level="info")
