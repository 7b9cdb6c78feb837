"""What clients of both eras do with tests/servers/eras_old.py and eras_new.py, whatever is between."""

import asyncio
import json
import sys


async def does(face, words):
    """What the words of the command line say."""
    match words:
        case []:
            await goes_on(face)
        case [name]:
            await sees(face, name)
        case [way, *servers]:
            await asks(face, way, servers)


def say(step, **seen):
    print(json.dumps({"step": step, **seen}), flush=True)


async def sees(face, name):
    """All that there is."""
    tools = await face.tools()
    say("list", tools=[tool for tool in tools if tool in ("add", "ask", "work", "grow")])
    say("call", said=await face.call("add", {"a": 2, "b": 40}))
    say("ask", said=await face.call("ask", {}))
    say("read", said=await face.read("note://today"))
    say("prompt", said=await face.prompt("review", {"code": "1 + 1"}))

    told = []

    async def on_progress(done, total, _message):
        told.append([int(done), int(total)])

    say("work", said=await face.call("work", {"steps": 3}, on_progress), progress=told)
    failed, said = await face.call("add", {"a": 2})
    say("fail", failed=failed, says="b" in said)
    try:
        await face.read("note://nowhere")
        say("miss", found=True)
    except Exception:
        say("miss", found=False)
    heard = await face.hears(lambda: face.call("grow", {"name": name}))
    say("grow", heard=heard, listed=name in await face.tools(), said=await face.call(name, {}))


async def asks(face, way, servers):
    """Lets servers ask their question where all of them are offered at once: behind the meta-tools, or under other names."""
    for server in servers:
        through = {
            "tools": ("execute_mcp_tool", {"tool_path": f"{server}:ask", "arguments": {}}),
            "flat": (f"{server}__ask", {}),
        }
        say("ask", server=server, said=await face.call(*through[way]))


async def goes_on(face):
    """A call for each line that comes in."""
    while await asyncio.to_thread(sys.stdin.readline):
        try:
            say("call", said=await face.call("add", {"a": 2, "b": 40}))
        except Exception as error:
            say("call", error=repr(error))
