"""A client with the last Python SDK that speaks nothing newer than 2025-11-25; see eras_new.py.

eras_old.py URL ERA …   ERA is ignored; eras_new.py needs it
"""

import asyncio
import sys

from eras import run_command, say
from mcp import ClientSession, types
from mcp.client.streamable_http import streamable_http_client
from pydantic import AnyUrl


async def elicit(_context, _params):
    return types.ElicitResult(action="accept", content={"name": "Ada"})


class Adapter:
    def __init__(self, session, changed):
        self.session, self.changed = session, changed

    async def tools(self):
        return [tool.name for tool in (await self.session.list_tools()).tools]

    async def call(self, name, arguments, on_progress=None):
        result = await self.session.call_tool(name, arguments, progress_callback=on_progress)
        return result.isError, result.content[0].text

    async def read(self, uri):
        return (await self.session.read_resource(AnyUrl(uri))).contents[0].text

    async def prompt(self, name, arguments):
        return (await self.session.get_prompt(name, arguments)).messages[0].content.text

    async def wait_for_list_changed(self, change):
        await change()
        return await self.changed.wait()


async def main():
    url, _, *words = sys.argv[1:]
    changed = asyncio.Event()

    async def handle_message(message):
        if isinstance(message, types.ServerNotification) and isinstance(message.root, types.ToolListChangedNotification):
            changed.set()

    async with streamable_http_client(url) as (read, write, _):
        async with ClientSession(read, write, elicitation_callback=elicit, message_handler=handle_message) as session:
            known = await session.initialize()
            say("connect", server=known.serverInfo.name, version=known.protocolVersion)
            await run_command(Adapter(session, changed), words)


asyncio.run(main())
