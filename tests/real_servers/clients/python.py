"""A client with the Python SDK. Each output line is a step with its result, as JSON.

python.py TARGET instance   all steps with server-everything, directly or through `/i/NAME/mcp`
python.py TARGET both       the steps that both eras have in common
python.py TARGET flat       the same in flat mode
python.py TARGET tools      the meta-tools, with server-everything behind them
python.py TARGET time       a call of mcp-server-time
python.py TARGET restart    a call in flight while the test restarts the satellite, and the next call

TARGET is a URL, or the command of a server on stdin and stdout as a JSON array. MCP_TOKEN is the bearer token, if one is needed. MCP_MODE is the mode of the SDK; by default it opens a session.
"""

import asyncio
import json
import os
import sys
import warnings

import mcp_types as types
from mcp import Client, MCPError
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client

# The SDK marks features of 2025-11-25, which are tested here, as deprecated.
warnings.simplefilter("ignore")


def say(step, **seen):
    print(json.dumps({"step": step, **seen}), flush=True)


def text(result):
    return "\n".join(content.text for content in result.content if content.type == "text")


async def sample(_context, params):
    said = params.messages[0].content
    content = types.TextContent(type="text", text=f"python has read: {said.text}")
    return types.CreateMessageResult(role="assistant", model="python-model", content=content)


async def elicit(_context, _params):
    return types.ElicitResult(action="accept", content={"name": "Python", "check": True})


async def roots(_context):
    return types.ListRootsResult(roots=[types.Root(uri="file:///python", name="python-root")])


logged = []


async def log(params):
    logged.append(params.data)


async def wait_until(holds):
    for _ in range(400):
        if holds():
            return
        await asyncio.sleep(0.05)


async def both(client, name="", uri=""):
    """Runs the common steps of both eras; `name` and `uri` are prefixes of names and URIs."""
    say("call", text=text(await client.call_tool(f"{name}get-sum", {"a": 2, "b": 40})))
    read = (await client.read_resource(f"{uri}demo://resource/dynamic/text/1")).contents[0]
    say("read", uri=str(read.uri), text=read.text)
    prompt = await client.get_prompt(f"{name}args-prompt", {"city": "Paris"})
    say("prompt", text=prompt.messages[0].content.text)
    reference = types.PromptReference(type="ref/prompt", name=f"{name}completable-prompt")
    completion = (await client.complete(reference, {"name": "department", "value": "E"})).completion
    say("complete", values=completion.values)

    progress = []

    async def on_progress(done, total, _message):
        progress.append({"progress": done, "total": total})

    long = f"{name}trigger-long-running-operation"
    done = await client.call_tool(long, {"duration": 0.4, "steps": 4}, progress_callback=on_progress)
    say("progress", progress=progress, text=text(done))

    began = asyncio.Event()

    async def on_begin(*_):
        began.set()

    call = asyncio.create_task(client.call_tool(long, {"duration": 60, "steps": 600}, progress_callback=on_begin))
    await began.wait()
    call.cancel()
    try:
        await call
        cancelled = None
    except asyncio.CancelledError:
        cancelled = "cancelled"
    await client.call_tool(f"{name}get-sum", {"a": 1, "b": 1})
    say("cancel", error=cancelled)

    sampling = {"prompt": "what is this?", "maxTokens": 10}
    say("sample", text=text(await client.call_tool(f"{name}trigger-sampling-request", sampling)))
    say("elicit", text=text(await client.call_tool(f"{name}trigger-elicitation-request", {})))


async def instance(client):
    await both(client)
    await client.send_ping()
    # The server requests the roots at any time, and the tool returns only those that it has by then.
    known = ""
    for _ in range(200):
        known = text(await client.call_tool("get-roots-list", {}))
        if "file:///python" in known:
            break
        await asyncio.sleep(0.05)
    say("roots", text=known)
    await client.set_logging_level("debug")
    await client.call_tool("toggle-simulated-logging", {})
    await wait_until(lambda: logged)
    await client.call_tool("toggle-simulated-logging", {})
    say("log", logged=bool(logged))


async def flat(client):
    await both(client, "everything__", "everything|")


async def tools(client):
    found = await client.call_tool("discover_mcp_tools", {"query": "sum of two numbers"})
    say("discover", paths=[tool["tool_path"] for tool in found.structured_content["tools"]])
    sum_of = {"tool_path": "everything:get-sum", "arguments": {"a": 2, "b": 40}}
    say("call", text=text(await client.call_tool("execute_mcp_tool", sum_of)))
    uri = {"uri": "everything|demo://resource/dynamic/text/1"}
    read = await client.call_tool("read_mcp_resource", uri)
    say("read", text=read.content[0].resource.text)


async def clock(client):
    say("time", text=text(await client.call_tool("get_current_time", {"timezone": "Asia/Tokyo"})))


async def restart(client):
    began = asyncio.Event()

    async def on_begin(*_):
        began.set()

    long = {"duration": 600, "steps": 6000}
    call = asyncio.create_task(client.call_tool("trigger-long-running-operation", long, progress_callback=on_begin))
    await began.wait()
    say("called")
    try:
        say("lost", result=text(await call))
    except MCPError as error:
        say("lost", code=error.error.code, message=error.error.message, data=error.error.data)
    say("again", text=text(await client.call_tool("get-sum", {"a": 2, "b": 40})))


FACES = {"instance": instance, "both": both, "flat": flat, "tools": tools, "time": clock, "restart": restart}


async def main():
    target, face = sys.argv[1:]
    token = os.environ.get("MCP_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    asked = []

    async def note(response):
        if response.request.method == "POST":
            error = json.loads(await response.aread())["error"]["code"] if response.status_code == 400 else None
            asked.append([json.loads(response.request.content).get("method"), response.status_code, error])

    async with create_mcp_http_client(headers=headers) as http:
        http.event_hooks["response"].append(note)
        callbacks = {
            "sampling_callback": sample,
            "elicitation_callback": elicit,
            "list_roots_callback": roots,
            "logging_callback": log,
        }
        if target.startswith("["):
            command, *arguments = json.loads(target)
            server = StdioServerParameters(command=command, args=arguments, env=dict(os.environ))
            transport = stdio_client(server)
        else:
            transport = streamable_http_client(target, http_client=http)
        async with Client(transport, mode=os.environ.get("MCP_MODE", "legacy"), **callbacks) as client:
            say("connect", server=client.server_info.name, version=client.protocol_version, asked=asked[:2])
            listed = await client.list_tools()
            say("list", tools=[tool.name for tool in listed.tools])
            await FACES[face](client)
    say("end", errors=[])


asyncio.run(main())
