// The repetition of stored calls. Part of the script of the console: see console.js.

/** Returns JSON text with sorted keys: a stored result may have another order than the server sent. */
function sorted(value) {
  const isObject = (part) => part && typeof part === "object" && !Array.isArray(part);
  return JSON.stringify(value, (_, part) => (isObject(part) ? Object.fromEntries(Object.entries(part).sort()) : part));
}

/** Repeats a stored call after a confirmation, and compares the results. */
async function repeat(button) {
  const { repeat: tool, instance, arguments: text } = button.dataset;
  const path = `instances/${encodeURIComponent(instance)}`;
  const place = button.parentNode.querySelector(".after");
  button.disabled = true;
  try {
    const tools = await (await request(api(`${path}/tools`))).json();
    const { readOnlyHint, idempotentHint } = tools.find((entry) => entry.tool.name === tool)?.tool.annotations ?? {};
    const isSafe = readOnlyHint === true || idempotentHint === true;
    const question = `Call ${tool} of ${instance} again? The server does not say that a repetition is harmless.`;
    if (!isSafe && !confirm(question)) return;
    const { result, duration_ms: took } = await (await post(api(`${path}/call`), { tool, arguments: JSON.parse(text) })).json();
    let before = button.parentNode.querySelector(".before").textContent;
    try {
      before = sorted(JSON.parse(before));
    } catch {
      // A result that was cut when it was stored.
    }
    place.replaceChildren(
      element("h3", {}, before === sorted(result) ? "The same result" : "Another result", ` after ${took} ms`),
      element("pre", { tabindex: 0 }, shown(JSON.stringify(result, null, 2))));
  } catch (error) {
    place.replaceChildren(element("p", { class: "error" }, shown(error.message)));
  } finally {
    button.disabled = false;
  }
}
