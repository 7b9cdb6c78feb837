"""The steps of clients of both eras with the servers tests/servers/eras_old.py and eras_new.py."""

import asyncio
import json
import sys


async def run_command(adapter, words):
    """Runs what the command line requests."""
    match words:
        case []:
            await call_per_line(adapter)
        case [name]:
            await run_all_steps(adapter, name)
        case [view, *servers]:
            await trigger_requests(adapter, view, servers)


def say(step, **seen):
    print(json.dumps({"step": step, **seen}), flush=True)


async def run_all_steps(adapter, name):
    tools = await adapter.tools()
    say("list", tools=[tool for tool in tools if tool in ("add", "ask", "work", "grow")])
    say("call", said=await adapter.call("add", {"a": 2, "b": 40}))
    say("ask", said=await adapter.call("ask", {}))
    say("read", said=await adapter.read("note://today"))
    say("prompt", said=await adapter.prompt("review", {"code": "1 + 1"}))

    reported = []

    async def on_progress(done, total, _message):
        reported.append([int(done), int(total)])

    say("work", said=await adapter.call("work", {"steps": 3}, on_progress), progress=reported)
    failed, said = await adapter.call("add", {"a": 2})
    say("fail", failed=failed, says="b" in said)
    try:
        await adapter.read("note://nowhere")
        say("miss", found=True)
    except Exception:
        say("miss", found=False)
    heard = await adapter.wait_for_list_changed(lambda: adapter.call("grow", {"name": name}))
    say("grow", heard=heard, listed=name in await adapter.tools(), said=await adapter.call(name, {}))


async def trigger_requests(adapter, view, servers):
    """Makes servers send their elicitation through a combined view: the meta-tools, or the list of flat mode."""
    for server in servers:
        through = {
            "tools": ("execute_mcp_tool", {"tool_path": f"{server}:ask", "arguments": {}}),
            "flat": (f"{server}__ask", {}),
        }
        say("ask", server=server, said=await adapter.call(*through[view]))


async def call_per_line(adapter):
    """Makes a call for each line on stdin."""
    while await asyncio.to_thread(sys.stdin.readline):
        try:
            say("call", said=await adapter.call("add", {"a": 2, "b": 40}))
        except Exception as error:
            say("call", error=repr(error))
