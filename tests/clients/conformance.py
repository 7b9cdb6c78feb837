"""What the conformance suite tests as a client: a satellite of its own, between the suite's server and the Python SDK.

conformance.py SATELLITE URL   the binary, and where the suite's server is

MCP_CONFORMANCE_SCENARIO, MCP_CONFORMANCE_PROTOCOL_VERSION and MCP_CONFORMANCE_CONTEXT are of the suite. The satellite is told the address,
and credentials where there are some. What a server speaks it finds out by itself; but where the suite counts the very first
message as one of 2026-07-28, it must be told. It is walked through a user's consent by `satellite auth`, and each tool, prompt
and resource that it then offers is used through its endpoint.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
import warnings
from pathlib import Path

import mcp_types as types
from mcp import Client

# What is of 2025-11-25 is deprecated in the SDK, and is tested here, too.
warnings.simplefilter("ignore")

SCENARIO = os.environ["MCP_CONFORMANCE_SCENARIO"]
VERSION = os.environ["MCP_CONFORMANCE_PROTOCOL_VERSION"]
CONTEXT = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT", "{}"))

# Nobody is walked through more: a server that is never content must not be believed for ever.
CONSENTS = 2
# When a state that was waited for is given up. The suite gives up the whole of it later.
GIVE_UP = 40

CONFIGURATION = """
[gateway]
listen = "127.0.0.1:0"
auth = "none"

[[teams]]
id = "team_acme"
slug = "acme"

[[teams.users]]
id = "user_alice"
slug = "alice"

[[teams.installations]]
id = "abc123"
server = "suite"
transport = "http"
url = {url}
"""


class Satellite:
    def __init__(self, binary, url, home):
        self.binary, self.home, self.consents = binary, home, 0
        config = home / "satellite.toml"
        config.write_text(CONFIGURATION.format(url=json.dumps(url)) + protocol() + credentials())
        command = [binary, "run", "--config", config, "--data-dir", home / "data"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        said = next((line for line in self.process.stdout if "MCP: http" in line), None)
        if said is None:
            sys.exit(f"the satellite does not say where it listens: {self.process.wait()}")
        self.endpoint = re.search(r"http://\S+", said)[0].replace("/mcp", "/i/suite/mcp")

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.stdout.close()
        self.process.wait()

    def says(self, *verb):
        command = [self.binary, *verb, "--json", "--data-dir", self.home / "data"]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    def view(self):
        return self.says("status")[0]

    def until(self, holds, seconds=GIVE_UP):
        """What is known of the server, once this holds, or it is given up."""
        began = time.monotonic()
        while not holds(view := self.view()) and time.monotonic() - began < seconds:
            time.sleep(0.1)
        return view

    def until_online(self):
        while (view := self.until(lambda view: view["status"] in ("online", "requires_reauth")))["status"] != "online":
            if view["status"] != "requires_reauth":
                sys.exit(f"the server is not online: {view['status']}: {view['status_message']}")
            self.consent(view)

    def consent(self, view):
        """Does what a user does: asks for the address, goes there, and lets the browser follow wherever it is sent."""
        if self.consents == CONSENTS:
            sys.exit(f"{CONSENTS} consents are not enough: {view['status_message']}")
        self.consents += 1
        command = [self.binary, "auth", "suite", "--no-wait", "--data-dir", self.home / "data"]
        asking = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        said = []
        for line in asking.stdout:
            said.append(line)
            if address := re.search(r"https?://\S+[?&]response_type=code\S*", line):
                urllib.request.urlopen(address[0], timeout=GIVE_UP).close()
        if asking.wait() != 0:
            sys.exit(f"no consent: {''.join(said)}")
        # It goes on by itself, sooner or later.
        self.until(lambda view: view["status"] != "requires_reauth", seconds=3)


def protocol():
    return 'protocol = "2026-07-28"\n' if VERSION == "2026-07-28" and not SCENARIO.startswith("auth/") else ""


def credentials():
    """What the suite has given, as an operator writes it."""
    if SCENARIO == "auth/basic-cimd":
        return 'oauth = { client_metadata_url = "https://conformance-test.local/client-metadata.json" }\n'
    if "client_secret" not in CONTEXT:
        return ""
    os.environ["SUITE_SECRET"] = CONTEXT["client_secret"]
    grant = 'grant = "client_credentials", ' if SCENARIO.startswith("auth/client-credentials") else ""
    return f'oauth = {{ {grant}client_id = "{CONTEXT["client_id"]}", client_secret = "env:SUITE_SECRET", issuer = {json.dumps(issuer())} }}\n'


def issuer():
    """Who authorizes, as an operator knows it."""
    server = urllib.parse.urlsplit(sys.argv[2])
    well_known = f"{server.scheme}://{server.netloc}/.well-known/oauth-protected-resource"
    for address in (well_known + server.path, well_known):
        try:
            with urllib.request.urlopen(address, timeout=GIVE_UP) as answer:
                authority = json.load(answer)["authorization_servers"][0]
        except OSError:
            continue
        described = urllib.parse.urlsplit(authority)
        address = f"{described.scheme}://{described.netloc}/.well-known/oauth-authorization-server{described.path.rstrip('/')}"
        with urllib.request.urlopen(address, timeout=GIVE_UP) as answer:
            return json.load(answer)["issuer"]
    sys.exit("the suite's server does not say who authorizes")


def value_of(schema):
    """What fits, for a person who has no opinion."""
    if "default" in schema:
        return schema["default"]
    if "enum" in schema:
        return schema["enum"][0]
    return {"number": 1.5, "integer": 2, "boolean": True, "array": [], "object": {}, "null": None}.get(schema.get("type"), "some")


async def elicit(_context, params):
    fields = params.requested_schema.get("properties", {})
    return types.ElicitResult(action="accept", content={name: value_of(schema) for name, schema in fields.items()})


async def sample(_context, params):
    content = types.TextContent(type="text", text="sampled")
    return types.CreateMessageResult(role="assistant", model="model", content=content)


async def roots(_context):
    return types.ListRootsResult(roots=[types.Root(uri="file:///conformance", name="conformance")])


def calls_of(tools):
    """Which tools are called with what: all of them, unless the suite says."""
    if "toolCalls" in CONTEXT:
        return [(call["name"], call["arguments"]) for call in CONTEXT["toolCalls"]]
    if SCENARIO == "json-schema-ref-no-deref":
        # Its server has a tool to look at, and none to call.
        return []
    schemas = {tool["name"]: tool["inputSchema"] for tool in tools}
    calls = []
    for name, schema in schemas.items():
        fields = schema.get("properties", {})
        arguments = {field: value_of(fields[field]) for field in schema.get("required", [])}
        if name == "json_schema_echo":
            arguments = {"schema": schemas["json_schema_2020_12_tool"]}
        calls.append((name, arguments))
    return calls


async def uses_all(satellite):
    # What the satellite offers: the SDK leaves out by itself what a client must not call.
    tools = [entry["tool"] for entry in satellite.says("tools")]
    mode = "legacy" if VERSION <= "2025-11-25" else "auto"
    callbacks = {"elicitation_callback": elicit, "sampling_callback": sample, "list_roots_callback": roots}
    async with Client(satellite.endpoint, mode=mode, **callbacks) as client:
        print(f"{client.protocol_version} with the endpoint; tools: {[tool['name'] for tool in tools]}", flush=True)
        await client.list_tools()
        for name, arguments in calls_of(tools):
            result = await client.call_tool(name, arguments)
            said = "\n".join(content.text for content in result.content)
            if result.is_error:
                raise RuntimeError(f"{name} has failed: {said}")
            print(f"{name}: {said}", flush=True)
        offers = client.server_capabilities
        if offers.resources:
            for resource in (await client.list_resources()).resources:
                await client.read_resource(str(resource.uri))
        if offers.prompts:
            for prompt in (await client.list_prompts()).prompts:
                await client.get_prompt(prompt.name)


def goes_on(satellite):
    """Uses the server; a user who is asked for another consent gives it, and begins again."""
    while True:
        satellite.until_online()
        try:
            asyncio.run(uses_all(satellite))
            return
        except Exception as error:
            view = satellite.view()
            print(f"{view['status']}: {view['status_message']}: {error!r}", flush=True)
            if view["status"] == "online" and "satellite auth" in repr(error):
                # More is asked for than was granted, for this call only.
                satellite.consent(view)
            elif view["status"] != "requires_reauth":
                raise


def main():
    binary, url = sys.argv[1:]
    with tempfile.TemporaryDirectory() as home:
        satellite = Satellite(binary, url, Path(home))
        try:
            goes_on(satellite)
        finally:
            satellite.end()


main()
