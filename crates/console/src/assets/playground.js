// The playground: an MCP client in the name of the instance's user. Part of the script of the console: see console.js.

const RESULT_MAX = 262144; // Characters of a result that are shown at once.
const QUESTIONS_MAX = 20; // Requests of the server that wait for an answer.

function playground() {
  const place = byId("playground");
  const address = api(`instances/${encodeURIComponent(place.dataset.instance)}/mcp`);
  const tools = JSON.parse(byId("tools").textContent);
  const [select, form, result, question, bar, progress] = ["tool", "arguments", "result", "question", "bar", "progress"].map(byId);
  let session, protocol, nextId = 1, running;
  const answers = new Map(); // id of a request → function that takes its response

  const log = (direction, message) => {
    const messages = byId("messages");
    messages.append(element("li", {}, ...longText("span", `${direction} ${JSON.stringify(message)}`, TEXT_MAX)));
    while (messages.children.length > 200) messages.firstChild.remove();
  };

  async function send(message) {
    log("→", message);
    const headers = { "Content-Type": "application/json", Accept: "application/json, text/event-stream" };
    if (session) headers["Mcp-Session-Id"] = session;
    if (protocol) headers["Mcp-Protocol-Version"] = protocol;
    const response = await request(address, { method: "POST", headers, body: JSON.stringify(message) });
    session ??= response.headers.get("Mcp-Session-Id") ?? undefined;
    const type = response.headers.get("Content-Type") ?? "";
    if (type.startsWith("text/event-stream")) await readEvents(response, (event) => receive(parseExact(event.data)));
    else if (type.startsWith("application/json")) receive(parseExact(await response.text()));
  }

  function call(method, params) {
    const id = nextId++;
    const answer = new Promise((resolve, reject) => answers.set(id, { resolve, reject }));
    send({ jsonrpc: "2.0", id, method, params }).then(
      () => answers.get(id)?.reject(new Error("the server closed the connection without a response")),
      (error) => answers.get(id)?.reject(error));
    return { id, answer: answer.finally(() => answers.delete(id)) };
  }

  function receive(message) {
    log("←", message);
    if (message.method === "notifications/progress") {
      const { progress: done, total, message: text, progressToken } = message.params;
      if (progressToken !== running?.token) return; // A cancelled call may still report.
      bar.hidden = false;
      if (Number.isFinite(total) && total > 0 && Number.isFinite(done)) Object.assign(bar, { max: total, value: done });
      else bar.removeAttribute("value");
      progress.textContent = shown(text ?? `${JSON.stringify(done)}${total ? ` of ${JSON.stringify(total)}` : ""}`);
    } else if (message.method === "notifications/cancelled") {
      dropQuestions((waiting) => waiting.id === message.params?.requestId);
    } else if (message.method && message.id !== undefined) {
      ask(message);
    } else if (message.id !== undefined) {
      const waiting = answers.get(message.id);
      if (message.error) waiting?.reject(new Error(`${message.error.message} (code ${message.error.code})`));
      else waiting?.resolve(message.result);
    }
  }

  const reply = (id, result) => send({ jsonrpc: "2.0", id, result }).catch((error) => notify(error.message));

  const questions = []; // Requests of the server that wait for an answer. The first one is shown.

  /** Shows a request of the server, after those that wait already. */
  function ask(message) {
    const { id, method } = message;
    if (method === "ping") return reply(id, {});
    const refuse = (code, text) => send({ jsonrpc: "2.0", id, error: { code, message: text } }).catch((error) => notify(error.message));
    const isKnown = method === "elicitation/create" || method === "sampling/createMessage";
    if (!isKnown) return refuse(-32601, "the console does not answer this request");
    if (questions.length >= QUESTIONS_MAX) return refuse(-1, "too many requests wait for the user");
    if (questions.push(message) === 1) showQuestion();
  }

  function dropQuestions(isDropped = () => true) {
    const [first] = questions;
    for (let nth = questions.length; nth--;) if (isDropped(questions[nth])) questions.splice(nth, 1);
    if (questions[0] !== first) showQuestion();
  }

  /** Shows the first of the waiting requests: a question to the user, or a request for a model's answer. */
  function showQuestion() {
    question.replaceChildren();
    if (!questions.length) return;
    const [message] = questions;
    const { id, method, params } = message;
    const isQuestion = method === "elicitation/create";
    const fields = element("form", {});
    let read;
    if (isQuestion) {
      read = schemaForm(fields, params.requestedSchema ?? {});
    } else {
      const texts = (params.messages ?? []).map(({ role, content }) => `${role}: ${content?.text ?? JSON.stringify(content)}`);
      const box = element("textarea", { "aria-label": "Answer of the model" });
      fields.append(element("p", { class: "help" }, shown(texts.join("\n"))), box);
      read = () => box.value;
    }
    const accept = element("button", { type: "submit" }, "Answer");
    const decline = element("button", { type: "button" }, "Decline");
    fields.append(accept, decline);
    fields.addEventListener("submit", (submit) => {
      submit.preventDefault();
      let value;
      try {
        value = read();
      } catch (error) {
        return notify(error.message);
      }
      dropQuestions((waiting) => waiting === message);
      reply(id, isQuestion ? { action: "accept", content: value }
        : { role: "assistant", model: "person", stopReason: "endTurn", content: { type: "text", text: value } });
    });
    decline.addEventListener("click", () => {
      dropQuestions((waiting) => waiting === message);
      if (isQuestion) reply(id, { action: "decline" });
      else send({ jsonrpc: "2.0", id, error: { code: -1, message: "the user declined" } }).catch((error) => notify(error.message));
    });
    const title = isQuestion ? "The server asks" : "The server wants an answer of a model";
    question.replaceChildren(element("h3", {}, title), element("p", {}, shown(params.message ?? params.systemPrompt ?? "")), fields);
    fields.querySelector("input, select, textarea")?.focus();
  }

  async function connect() {
    if (session) return;
    const started = call("initialize", {
      protocolVersion: "2025-11-25",
      capabilities: { sampling: {}, elicitation: {} },
      clientInfo: { name: "mcp-satellite console", version: "1" },
    });
    protocol = (await started.answer).protocolVersion;
    await send({ jsonrpc: "2.0", method: "notifications/initialized" });
  }

  let listening; // AbortController of the stream of the session

  /**
   * Receives requests of the server that belong to no call. Only a visible page listens, and only during a call: all
   * tabs of a browser share six connections to the satellite.
   */
  async function listen() {
    if (listening || document.hidden) return;
    const { signal } = (listening = new AbortController());
    const headers = { Accept: "text/event-stream", "Mcp-Session-Id": session, "Mcp-Protocol-Version": protocol };
    try {
      await readEvents(await request(address, { headers, signal }), (event) => receive(parseExact(event.data)));
    } catch {
      // The call goes on without it.
    }
  }

  function stopListening() {
    listening?.abort();
    listening = undefined;
  }

  document.addEventListener("visibilitychange", () => {
    if (document.hidden) stopListening();
    else if (running) listen();
  });

  addEventListener("pagehide", () => {
    if (!session) return;
    const headers = { "Mcp-Session-Id": session, "X-CSRF-Token": csrf ?? "" };
    fetch(address, { method: "DELETE", headers, keepalive: true }).catch(() => {});
    session = undefined;
  });

  let readArguments = () => ({});
  function choose() {
    const tool = tools[select.value];
    byId("tool-description").textContent = shown(tool?.description ?? "");
    form.replaceChildren();
    readArguments = schemaForm(form, tool?.inputSchema ?? {});
    byId("call").disabled = !tool || Boolean(running);
  }

  tools.forEach((tool, nth) => select.append(element("option", { value: nth }, shown(tool.name))));
  const selected = tools.findIndex((tool) => tool.name === place.dataset.selected);
  if (selected >= 0) select.value = selected;
  select.addEventListener("change", choose);
  choose();

  form.addEventListener("submit", async (submit) => {
    submit.preventDefault();
    let values;
    try {
      values = readArguments();
    } catch (error) {
      return notify(error.message);
    }
    byId("call").disabled = true;
    byId("cancel").disabled = false;
    progress.textContent = "The call runs.";
    result.replaceChildren();
    const since = performance.now();
    try {
      await connect();
      listen();
      const token = `call-${nextId}`;
      running = call("tools/call", { name: tools[select.value].name, arguments: values, _meta: { progressToken: token } });
      running.token = token;
      const answer = await running.answer;
      progress.textContent = `${answer.isError ? "The tool failed" : "Answered"} after ${Math.round(performance.now() - since)} ms.`;
      showResult(result, answer);
    } catch (error) {
      progress.textContent = `The call failed: ${shown(error.message)}`;
      // The session may have ended with the satellite or the instance.
      if (/session|404/i.test(error.message)) session = protocol = undefined;
    }
    running = undefined;
    stopListening();
    bar.hidden = true;
    dropQuestions();
    byId("call").disabled = false;
    byId("cancel").disabled = true;
  });
  byId("cancel").addEventListener("click", () => {
    if (!running) return;
    const { id } = running;
    send({ jsonrpc: "2.0", method: "notifications/cancelled", params: { requestId: id, reason: "cancelled in the console" } })
      .catch((error) => notify(error.message));
    answers.get(id)?.reject(new Error("cancelled"));
    running = undefined;
  });
  polled(`&instance=${encodeURIComponent(place.dataset.instance)}`);
}

/** Returns an element with a text. A long one is cut, and followed by a button that shows all of it. */
function longText(tag, text, max = RESULT_MAX) {
  const block = element(tag, { tabindex: tag === "pre" && 0 }, shown(text, max));
  if (text.length <= max) return [block];
  const button = element("button", { type: "button" }, `Show all ${text.length} characters`);
  button.addEventListener("click", () => {
    block.textContent = shown(text, Infinity);
    button.remove();
  });
  return [block, " ", button];
}

const IMAGES = new Set(["image/png", "image/jpeg", "image/gif", "image/webp"]);

/** Shows the content of a result. Other images than bitmaps can contain scripts and are shown as text. */
function showResult(place, answer) {
  for (const item of answer.content ?? []) {
    if (item.type === "image" && IMAGES.has(item.mimeType) && /^[A-Za-z0-9+/=\s]*$/.test(item.data ?? "")) {
      place.append(element("img", { src: `data:${item.mimeType};base64,${item.data}`, alt: "Image of the result" }));
    } else if (item.type === "text") {
      let text = item.text;
      try {
        text = JSON.stringify(parseExact(text), null, 2);
      } catch {
        // Plain text.
      }
      place.append(...longText("pre", String(text)));
    } else {
      place.append(...longText("pre", JSON.stringify(item, null, 2)));
    }
  }
  if (answer.structuredContent) {
    place.append(element("h3", {}, "Structured"), ...longText("pre", JSON.stringify(answer.structuredContent, null, 2)));
  }
  if (!place.childNodes.length) place.append(element("p", {}, "The result is empty."));
}
