// A client with the TypeScript SDK. Each output line is a step with its result, as JSON.
//
// ts.mjs TARGET instance   all steps with server-everything, directly or through `/i/NAME/mcp`
// ts.mjs TARGET tools      the meta-tools, with server-everything behind them
// ts.mjs TARGET time       a call of mcp-server-time
// ts.mjs TARGET restart    a call in flight while the test restarts the satellite, and the next call
//
// TARGET is a URL, or the command of a server on stdin and stdout as a JSON array. MCP_CLIENTS_DIR is the directory in which package.json is installed; MCP_TOKEN is the bearer token, if one is needed.
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const [target, face] = process.argv.slice(2);
const sdk = (path) =>
  import(pathToFileURL(join(process.env.MCP_CLIENTS_DIR, "node_modules/@modelcontextprotocol/sdk/dist/esm", path)));
const { Client } = await sdk("client/index.js");
const { StdioClientTransport } = await sdk("client/stdio.js");
const { StreamableHTTPClientTransport } = await sdk("client/streamableHttp.js");
const { CreateMessageRequestSchema, ElicitRequestSchema, ListRootsRequestSchema, LoggingMessageNotificationSchema } =
  await sdk("types.js");

const say = (step, seen) => console.log(JSON.stringify({ step, ...seen }));
const text = (result) => result.content.map((content) => content.text).join("\n");

const client = new Client(
  { name: "ts", version: "1.0.0" },
  { capabilities: { sampling: {}, elicitation: {}, roots: { listChanged: true } } },
);
client.setRequestHandler(CreateMessageRequestSchema, ({ params }) => ({
  role: "assistant",
  model: "ts-model",
  content: { type: "text", text: `ts has read: ${params.messages[0].content.text}` },
}));
client.setRequestHandler(ElicitRequestSchema, () => ({ action: "accept", content: { name: "Ts", check: true } }));
client.setRequestHandler(ListRootsRequestSchema, () => ({ roots: [{ uri: "file:///ts", name: "ts-root" }] }));
const logged = [];
client.setNotificationHandler(LoggingMessageNotificationSchema, ({ params }) => logged.push(params.data));

const token = process.env.MCP_TOKEN;
const headers = token ? { Authorization: `Bearer ${token}` } : {};
const isCommand = target.startsWith("[");
const [command, ...args] = isCommand ? JSON.parse(target) : [];
const transport = isCommand
  ? new StdioClientTransport({ command, args, env: process.env })
  : new StreamableHTTPClientTransport(new URL(target), { requestInit: { headers } });
// Only the transport for HTTP records the version.
if (isCommand) transport.setProtocolVersion = (version) => (transport.protocolVersion = version);
const errors = [];
client.onerror = (error) => errors.push(String(error));
await client.connect(transport);
say("connect", { server: client.getServerVersion().name, version: transport.protocolVersion, isCommand });

const { tools } = await client.listTools();
say("list", { tools: tools.map((tool) => tool.name) });

const steps = {
  async instance() {
    say("call", { text: text(await client.callTool({ name: "get-sum", arguments: { a: 2, b: 40 } })) });
    const read = await client.readResource({ uri: "demo://resource/dynamic/text/1" });
    say("read", { uri: read.contents[0].uri, text: read.contents[0].text });
    const prompt = await client.getPrompt({ name: "args-prompt", arguments: { city: "Paris" } });
    say("prompt", { text: prompt.messages[0].content.text });
    const ref = { type: "ref/prompt", name: "completable-prompt" };
    const { completion } = await client.complete({ ref, argument: { name: "department", value: "E" } });
    say("complete", { values: completion.values });

    const long = (duration, steps) => ({ name: "trigger-long-running-operation", arguments: { duration, steps } });
    const progress = [];
    const done = await client.callTool(long(0.4, 4), undefined, { onprogress: (at) => progress.push(at) });
    say("progress", { progress, text: text(done) });

    const controller = new AbortController();
    const options = { signal: controller.signal, onprogress: () => controller.abort("the user has changed their mind") };
    const cancelled = await client.callTool(long(60, 600), undefined, options).then(() => null, String);
    await client.ping();
    say("cancel", { error: cancelled });

    const sampling = { name: "trigger-sampling-request", arguments: { prompt: "what is this?", maxTokens: 10 } };
    say("sample", { text: text(await client.callTool(sampling)) });
    say("elicit", { text: text(await client.callTool({ name: "trigger-elicitation-request", arguments: {} })) });
    // The server requests the roots at any time, and the tool returns only those that it has by then.
    let roots = "";
    for (let tries = 0; tries < 200 && !roots.includes("file:///ts"); tries += 1) {
      roots = text(await client.callTool({ name: "get-roots-list", arguments: {} }));
      await new Promise((resolve) => setTimeout(resolve, 50));
    }
    say("roots", { text: roots });
    await client.setLoggingLevel("debug");
    await client.callTool({ name: "toggle-simulated-logging", arguments: {} });
    for (let tries = 0; tries < 400 && logged.length === 0; tries += 1) {
      await new Promise((resolve) => setTimeout(resolve, 50));
    }
    await client.callTool({ name: "toggle-simulated-logging", arguments: {} });
    say("log", { logged: logged.length > 0 });
  },
  async tools() {
    const found = await client.callTool({ name: "discover_mcp_tools", arguments: { query: "sum of two numbers" } });
    const paths = found.structuredContent.tools.map((tool) => tool.tool_path);
    say("discover", { paths });
    const sum = { tool_path: "everything:get-sum", arguments: { a: 2, b: 40 } };
    say("call", { text: text(await client.callTool({ name: "execute_mcp_tool", arguments: sum })) });
    const uri = "everything|demo://resource/dynamic/text/1";
    const read = await client.callTool({ name: "read_mcp_resource", arguments: { uri } });
    say("read", { text: read.content[0].resource.text });
  },
  async time() {
    const now = await client.callTool({ name: "get_current_time", arguments: { timezone: "Asia/Tokyo" } });
    say("time", { text: text(now) });
  },
  async restart() {
    const long = { name: "trigger-long-running-operation", arguments: { duration: 600, steps: 6000 } };
    const { promise: began, resolve: begin } = Promise.withResolvers();
    const lost = client.callTool(long, undefined, { onprogress: begin }).then(
      (result) => ({ result: text(result) }),
      ({ code, message, data }) => ({ code, message, data }),
    );
    await began;
    say("called", {});
    say("lost", await lost);
    say("again", { text: text(await client.callTool({ name: "get-sum", arguments: { a: 2, b: 40 } })) });
  },
};
await steps[face]();
if (!isCommand) await transport.terminateSession();
await client.close();
say("end", { errors });
