"""The client that the conformance suite tests: a satellite between the server of the suite and the Python SDK.

conformance.py SATELLITE URL   the binary and the URL of the suite's server

The suite sets MCP_CONFORMANCE_SCENARIO, MCP_CONFORMANCE_PROTOCOL_VERSION and MCP_CONFORMANCE_CONTEXT. The satellite is
configured with the URL and, if there are any, with credentials. It detects the protocol version of a server; only where the
suite expects the very first message in 2026-07-28, the version is configured. `satellite auth` obtains the consent of the
user, and then every tool, prompt and resource is used through the endpoint.
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

# The SDK marks features of 2025-11-25, which are tested here too, as deprecated.
warnings.simplefilter("ignore")

SCENARIO = os.environ["MCP_CONFORMANCE_SCENARIO"]
VERSION = os.environ["MCP_CONFORMANCE_PROTOCOL_VERSION"]
CONTEXT = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT", "{}"))

# Maximum number of consents: a server that always rejects the token must not cause an endless loop.
CONSENTS = 2
# Timeout in seconds of waiting for a state, shorter than the timeout of the suite.
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
            sys.exit(f"the satellite printed no URL: {self.process.wait()}")
        self.endpoint = re.search(r"http://\S+", said)[0].replace("/mcp", "/i/suite/mcp")

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.stdout.close()
        self.process.wait()

    def run_json(self, *verb):
        command = [self.binary, *verb, "--json", "--data-dir", self.home / "data"]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    def view(self):
        return self.run_json("status")[0]

    def wait_until(self, holds, seconds=GIVE_UP):
        """Waits for the condition, at most so long, and returns the status of the server."""
        began = time.monotonic()
        while not holds(view := self.view()) and time.monotonic() - began < seconds:
            time.sleep(0.1)
        return view

    def wait_until_online(self):
        while (view := self.wait_until(lambda view: view["status"] in ("online", "requires_reauth")))["status"] != "online":
            if view["status"] != "requires_reauth":
                sys.exit(f"the server is not online: {view['status']}: {view['status_message']}")
            self.consent(view)

    def consent(self, view):
        """Acts as a user: runs `satellite auth`, opens the printed URL and follows its redirects."""
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
        # The satellite reconnects by itself.
        self.wait_until(lambda view: view["status"] != "requires_reauth", seconds=3)


def protocol():
    return 'protocol = "2026-07-28"\n' if VERSION == "2026-07-28" and not SCENARIO.startswith("auth/") else ""


def credentials():
    """The OAuth configuration for the credentials of the suite."""
    if SCENARIO == "auth/basic-cimd":
        return 'oauth = { client_metadata_url = "https://conformance-test.local/client-metadata.json" }\n'
    if "client_secret" not in CONTEXT:
        return ""
    os.environ["SUITE_SECRET"] = CONTEXT["client_secret"]
    grant = 'grant = "client_credentials", ' if SCENARIO.startswith("auth/client-credentials") else ""
    return f'oauth = {{ {grant}client_id = "{CONTEXT["client_id"]}", client_secret = "env:SUITE_SECRET", issuer = {json.dumps(issuer())} }}\n'


def issuer():
    """The issuer of the authorization server, from its metadata."""
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
    sys.exit("the suite's server names no authorization server")


def value_of(schema):
    """Any value that matches the schema."""
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
    """The tools to call, with arguments: all of them, unless the suite names some."""
    if "toolCalls" in CONTEXT:
        return [(call["name"], call["arguments"]) for call in CONTEXT["toolCalls"]]
    if SCENARIO == "json-schema-ref-no-deref":
        # The tool of this server is only to be listed.
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


async def use_all(satellite):
    # The tools that the satellite offers; the SDK omits tools that a client must not call.
    tools = [entry["tool"] for entry in satellite.run_json("tools")]
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


def use_with_consents(satellite):
    """Uses the server; if it requires another consent, gives it and starts again."""
    while True:
        satellite.wait_until_online()
        try:
            asyncio.run(use_all(satellite))
            return
        except Exception as error:
            view = satellite.view()
            print(f"{view['status']}: {view['status_message']}: {error!r}", flush=True)
            if view["status"] == "online" and "satellite auth" in repr(error):
                # A call needs more scopes than were granted.
                satellite.consent(view)
            elif view["status"] != "requires_reauth":
                raise


def main():
    binary, url = sys.argv[1:]
    with tempfile.TemporaryDirectory() as home:
        satellite = Satellite(binary, url, Path(home))
        try:
            use_with_consents(satellite)
        finally:
            satellite.end()


main()
