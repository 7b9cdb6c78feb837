"""A client with the Python SDK of both eras; eras_old.py does the same. Each output line is a step with its result, as JSON.

eras_new.py URL ERA NAME           all steps; ERA is `auto`, or `legacy` for the era with sessions; NAME is a tool for the server to add
eras_new.py URL ERA VIEW SERVER…   elicitations through a combined view: the meta-tools (`tools`) or the list of flat mode (`flat`)
eras_new.py URL ERA                a call for each line on stdin, over one connection
"""

import asyncio
import sys

import mcp_types as types
from eras import run_command, say
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client


async def elicit(_context, _params):
    return types.ElicitResult(action="accept", content={"name": "Ada"})


class Adapter:
    """The common interface of both SDKs."""

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

    async def wait_for_list_changed(self, change):
        """Makes the change and waits for its notification."""
        if self.client.protocol_version != "2026-07-28":
            await change()
            return await self.changed.wait()
        async with self.client.listen(tools_list_changed=True) as changes:
            await change()
            async for _ in changes:
                return True


async def main():
    url, era, *words = sys.argv[1:]
    changed = asyncio.Event()

    async def handle_message(message):
        if isinstance(message, types.ToolListChangedNotification):
            changed.set()

    async with create_mcp_http_client() as http:
        transport = streamable_http_client(url, http_client=http)
        callbacks = {"elicitation_callback": elicit, "message_handler": handle_message}
        async with Client(transport, mode=era, **callbacks) as client:
            say("connect", server=client.server_info.name, version=client.protocol_version)
            await run_command(Adapter(client, changed), words)


asyncio.run(main())
