// A client with the TypeScript SDK of both eras; it runs the steps of eras_new.py. Each output line is a step with its
// result, as JSON.
//
// eras_new.mjs URL ERA NAME   ERA is `auto`, or `legacy` for the era with sessions; NAME is a tool for the server to add
//
// MCP_CLIENTS_DIR is the directory in which package.json is installed.
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const [url, era, name] = process.argv.slice(2);
const sdk = join(process.env.MCP_CLIENTS_DIR, "node_modules/@modelcontextprotocol/client/dist/index.mjs");
const { Client, StreamableHTTPClientTransport } = await import(pathToFileURL(sdk));

const say = (step, seen) => console.log(JSON.stringify({ step, ...seen }));
const { promise: heard, resolve: hear } = Promise.withResolvers();
const client = new Client(
  { name: "ts", version: "2.0.0" },
  { capabilities: { elicitation: {} }, versionNegotiation: { mode: era } },
);
client.setNotificationHandler("notifications/tools/list_changed", () => hear(true));
client.setRequestHandler("elicitation/create", () => ({ action: "accept", content: { name: "Ada" } }));
await client.connect(new StreamableHTTPClientTransport(new URL(url)));
say("connect", { server: client.getServerVersion()?.name, version: client.getNegotiatedProtocolVersion() });

const tools = async () => (await client.listTools()).tools.map((tool) => tool.name);
const call = async (name, args, options) => {
  const result = await client.callTool({ name, arguments: args }, options);
  return [result.isError ?? false, result.content[0].text];
};

const known = ["add", "ask", "work", "grow"];
say("list", { tools: (await tools()).filter((tool) => known.includes(tool)) });
say("call", { said: await call("add", { a: 2, b: 40 }) });
say("ask", { said: await call("ask", {}) });
say("read", { said: (await client.readResource({ uri: "note://today" })).contents[0].text });
const prompt = await client.getPrompt({ name: "review", arguments: { code: "1 + 1" } });
say("prompt", { said: prompt.messages[0].content.text });
const progress = [];
const worked = await call("work", { steps: 3 }, { onprogress: (at) => progress.push([at.progress, at.total]) });
say("work", { said: worked, progress });
const [failed, why] = await call("add", { a: 2 });
say("fail", { failed, says: why.includes("b") });
say("miss", { found: await client.readResource({ uri: "note://nowhere" }).then(() => true, () => false) });
if (client.getNegotiatedProtocolVersion() === "2026-07-28") await client.listen({ toolsListChanged: true });
await call("grow", { name });
say("grow", { heard: await heard, listed: (await tools()).includes(name), said: await call(name, {}) });
await client.close();
