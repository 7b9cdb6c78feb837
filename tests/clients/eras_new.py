"""The client of the Python SDK of both eras; eras_old.py does the same. Each line that it prints is a step, and what it has seen, as JSON.

eras_new.py URL ERA NAME          ERA is `auto`, or `legacy` for the old one; NAME a tool to grow
eras_new.py URL ERA WAY SERVER…   where all servers are offered at once: behind the meta-tools (`tools`), or in a list (`flat`)
eras_new.py URL ERA               a call for each line that it reads, over the one connection
"""

import asyncio
import sys

import mcp_types as types
from eras import does, say
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client


async def elicit(_context, _params):
    return types.ElicitResult(action="accept", content={"name": "Ada"})


class Face:
    """What is called the same in both SDKs."""

    def __init__(self, client, changed):
        self.client, self.changed = client, changed

    async def tools(self):
        return [tool.name for tool in (await self.client.list_tools(cache_mode="bypass")).tools]

    async def call(self, name, arguments, on_progress=None):
        result = await self.client.call_tool(name, arguments, progress_callback=on_progress)
        return result.is_error, result.content[0].text

    async def read(self, uri):
        return (await self.client.read_resource(uri)).contents[0].text

    async def prompt(self, name, arguments):
        return (await self.client.get_prompt(name, arguments)).messages[0].content.text

    async def hears(self, growing):
        """Whether the change is heard of that this makes."""
        if self.client.protocol_version != "2026-07-28":
            await growing()
            return await self.changed.wait()
        async with self.client.listen(tools_list_changed=True) as changes:
            await growing()
            async for _ in changes:
                return True


async def main():
    url, era, *words = sys.argv[1:]
    changed = asyncio.Event()

    async def heard(message):
        if isinstance(message, types.ToolListChangedNotification):
            changed.set()

    async with create_mcp_http_client() as http:
        transport = streamable_http_client(url, http_client=http)
        callbacks = {"elicitation_callback": elicit, "message_handler": heard}
        async with Client(transport, mode=era, **callbacks) as client:
            say("connect", server=client.server_info.name, version=client.protocol_version)
            face = Face(client, changed)
            await does(face, words)


asyncio.run(main())
