"""A server made with fastmcp, over streamable HTTP: a small copy of a typical deployment.

fastmcp_server.py PORT [--json] [--no-get]
"""

import argparse

from fastmcp import FastMCP
from starlette.middleware import Middleware

from without_get import WithoutGet

arguments = argparse.ArgumentParser()
arguments.add_argument("port", type=int)
arguments.add_argument("--json", action="store_true", help="answer with JSON instead of an event stream")
arguments.add_argument("--no-get", action="store_true", help="answer 405 to a GET")
arguments = arguments.parse_args()

server = FastMCP("fastmcp", version="1.0.0", instructions="Add, and greet.")


@server.tool(annotations={"readOnlyHint": True, "idempotentHint": True})
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool
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


@server.prompt
def review(code: str) -> str:
    """Asks for a review."""
    return f"Please review:\n\n{code}"


server.run(
    transport="http",
    host="127.0.0.1",
    port=arguments.port,
    path="/mcp",
    show_banner=False,
    log_level="INFO",
    json_response=arguments.json,
    middleware=[Middleware(WithoutGet)] if arguments.no_get else [],
)
