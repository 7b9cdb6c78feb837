// The repetition of stored calls. Part of the script of the console: see console.js.

/** Returns JSON text with sorted keys: a stored result may have another order than the server sent. */
function sorted(value) {
  const isObject = (part) => part && typeof part === "object" && !Array.isArray(part);
  return JSON.stringify(value, (_, part) => (isObject(part) ? Object.fromEntries(Object.entries(part).sort()) : part));
}

/** Compares a stored result with a new one. */
function comparison(stored, result) {
  if (stored === undefined) return "The results cannot be compared: the stored one is too long";
  const before = parseExact(stored);
  // A result that was cut when it was stored is a string.
  if (typeof before === "string") return "The results cannot be compared: the stored one was cut";
  if (sorted(before) === sorted(result)) return "The same result";
  return stored.includes("[secret]") ? "The results cannot be compared: secrets in the stored one are masked" : "Another result";
}

/** Repeats a stored call after a confirmation, and compares the results. */
async function repeat(button) {
  const { repeat: tool, instance, arguments: text, result: stored, fate } = button.dataset;
  const path = `instances/${encodeURIComponent(instance)}`;
  const place = button.parentNode.querySelector(".after");
  const show = (title, detail) => place.replaceChildren(element("h3", {}, title), ...detail);
  // A call whose tool reported an error has a result.
  const hadNoResult = fate && fate !== "tool_error";
  let failure = "The call was not repeated";
  button.disabled = true;
  try {
    const tools = await (await request(api(`${path}/tools`))).json();
    const { readOnlyHint, idempotentHint } = tools.find((entry) => entry.tool.name === tool)?.tool.annotations ?? {};
    const isSafe = readOnlyHint === true || idempotentHint === true;
    const question = `Call ${tool} of ${instance} again? The server does not say that a repetition is harmless.`;
    if (!isSafe && !confirm(question)) return;
    failure = hadNoResult ? "The call failed again" : "The call failed now; the stored call was answered";
    const response = await post(api(`${path}/call`), { tool, arguments: parseExact(text) });
    const { result, duration_ms: took } = parseExact(await response.text());
    const title = hadNoResult ? "Answered now; the stored call failed" : comparison(stored, result);
    show(`${title} · ${took} ms`, longText("pre", JSON.stringify(result, null, 2)));
  } catch (error) {
    show(failure, [element("p", { class: "error" }, shown(error.message))]);
  } finally {
    button.disabled = false;
  }
}
