// The script of the console. A page is complete without it; the script keeps the page up to date, sends changes, and
// makes grids usable by keys.
//
// One stream per visible page brings instances (`reset`, `delta`, `tick`) and events. A browser opens only six
// connections to a server, and its tabs share them. Therefore two tabs have a stream, and the others fetch what is new
// every second until one of the two closes. A hidden page ends its stream after a while. Each page continues from its
// own position.

const body = document.body;
const root = body.dataset.root ?? "";
const api = (path) => `${root}../v1/${path}`;
const byId = (id) => document.getElementById(id);
const csrf = document.querySelector("meta[name=csrf]")?.content;

const TICK_TIMEOUT = 5000; // Milliseconds without a tick, which comes every 2 s, after which the page is out of date.
const RETRY_MIN = 500;
const RETRY_MAX = 5000;
const HIDDEN_MAX = 15000;
const STREAMS_MAX = 2; // Streams of all tabs of this browser.
const FETCH_PAUSE = 1000;
const TEXT_MAX = 4096;
const EVENTS_MAX = 1000;
const NEW_CALLS_MAX = 100;

/** Creates an element. Strings become text, never HTML. */
function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") made.className = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

/** Returns text as it is shown: cut, and without characters that reorder text or end lines. */
function shown(value, max = TEXT_MAX) {
  let text = typeof value === "string" ? value : JSON.stringify(value) ?? "";
  if (text.length > max) text = `${text.slice(0, max)}… (${text.length} characters)`;
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g, "\ufffd");
}

/** Returns text and commands, which are in backquotes. */
const withCommands = (text) => shown(text).split("`").map((part, nth) => (nth % 2 ? element("code", {}, part) : part));

function notify(text) {
  const notice = byId("notice");
  if (!notice) return;
  notice.textContent = shown(text);
  clearTimeout(notify.timer);
  notify.timer = setTimeout(() => notice.replaceChildren(), 8000);
}

/** Sends a request to the API. Throws an Error with the detail and the next step of a problem document. */
async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (options.method && options.method !== "GET") headers["X-CSRF-Token"] = csrf ?? "";
  const response = await fetch(path, { ...options, headers, credentials: "same-origin" });
  // A page is answered with the way to the login page.
  if (response.status === 401 || response.redirected) {
    sessionStorage.setItem("note", "The login has ended: it expired or was logged out, its token was removed, or the satellite was restarted.");
    const here = location.pathname.split("/console/").at(-1) + location.search;
    location.assign(`${root}login?next=${encodeURIComponent(here)}`);
    throw new Error("the login has ended");
  }
  if (!response.ok) {
    const problem = await response.json().catch(() => ({}));
    const step = problem.next_step ? `; next step: ${problem.next_step}` : "";
    const error = new Error(`${problem.detail ?? problem.error?.message ?? `HTTP ${response.status}`}${step}`);
    throw Object.assign(error, { status: response.status });
  }
  return response;
}

const post = (path, value) =>
  request(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(value) });

/** Reads server-sent events from a response until it ends. */
async function readEvents(response, handle) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let parts = [];
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    parts.push(value);
    if (!value.includes("\n")) continue;
    const frames = parts.join("").split(/\r?\n\r?\n/);
    parts = [frames.pop()];
    for (const frame of frames) {
      const event = { name: "message", data: "" };
      for (const line of frame.split(/\r?\n/)) {
        const [, field, text] = /^(\w*):? ?(.*)$/s.exec(line) ?? [];
        if (field === "event") event.name = text;
        else if (field === "id") event.id = text;
        else if (field === "data") event.data += (event.data && "\n") + text;
      }
      if (event.data) handle(event);
    }
  }
}

// ---- Time and freshness

const offset = Date.parse(body.dataset.at ?? "") - Date.now() || 0; // The clock of the satellite may differ.
const position = { boot: body.dataset.boot, revision: Number(body.dataset.revision ?? 0), at: Date.parse(body.dataset.at ?? "") };
// The server renders the parts of such a page again: the page has their revision, not that of the stream.
const isRendered = body.dataset.page !== "overview" && Boolean(document.querySelector("[data-live]"));

function duration(milliseconds) {
  const seconds = Math.max(0, Math.round(milliseconds / 1000));
  if (seconds < 120) return `${seconds} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86400)} d`;
}

const clock = (time) => new Date(time).toLocaleTimeString("en-GB");

function showTimes(within = document) {
  const now = Date.now() + offset;
  for (const time of within.querySelectorAll("time.since")) {
    const since = time.dataset.since ? Number(time.dataset.since) : Date.parse(time.dateTime);
    const text = `${duration(now - since)} ago`;
    if (time.textContent !== text) time.textContent = text;
    if (!time.title) time.title = new Date(since).toISOString();
  }
  for (const left of within.querySelectorAll(".countdown")) {
    left.dataset.until ??= now + Number(left.dataset.ms);
    left.textContent = duration(Number(left.dataset.until) - now);
  }
  const age = byId("age");
  if (age) age.textContent = `of ${clock(position.at)}, ${duration(now - position.at)} old`;
}

function showLink(state, text) {
  const link = byId("link");
  if (!link) return;
  if (link.textContent !== state) link.textContent = state;
  link.className = state === "live" ? "live" : "cut";
  body.classList.toggle("stale", state !== "live");
  const note = byId("stale");
  note.hidden = !text;
  note.textContent = text ?? "";
}

// ---- The stream

let freeStream; // Function that gives the stream of this tab to another one
let taking;

/** Takes one of the streams of this browser for this tab. Returns false if other tabs have them. */
const takeStream = () => (taking ??= lockStream().finally(() => (taking = undefined)));

async function lockStream() {
  // Browsers have locks on loopback addresses and over HTTPS only; elsewhere each tab has its own stream.
  if (!navigator.locks) return true;
  for (let nth = 0; nth < STREAMS_MAX && !freeStream; nth++) {
    await new Promise((tried, failed) => {
      const hold = (lock) => {
        const held = lock && new Promise((free) => (freeStream = () => ((freeStream = undefined), free())));
        tried();
        return held;
      };
      navigator.locks.request(`satellite-stream-${nth}`, { ifAvailable: true }, hold).catch(failed);
    });
  }
  return Boolean(freeStream);
}

/** Keeps a stream open. `address` returns its URL for the current position; `handle` gets each event. */
function keepStream(address, handle) {
  let pause = RETRY_MIN;
  let current; // AbortController of the open stream
  let lastTick = 0;
  let hiddenSince = document.hidden ? Date.now() : 0;

  async function open() {
    const controller = (current = new AbortController());
    const { signal } = controller;
    lastTick = Date.now();
    const read = async (more) => {
      const response = await request(`${address()}${more}`, { headers: { Accept: "text/event-stream" }, signal });
      await readEvents(response, (event) => {
        if (controller !== current) return;
        if (event.name === "tick") {
          lastTick = Date.now();
          pause = RETRY_MIN;
          const tick = JSON.parse(event.data);
          if (tick.boot !== position.boot) return restarted(tick.boot);
          moved(tick.revision, tick.at);
          if (refreshFailure) refresh();
          else showLink("live");
        }
        handle(event);
      });
    };
    try {
      while (!(await takeStream())) {
        // One tab after the other, so that connections are left for other requests.
        await navigator.locks.request("satellite-fetch", { signal }, () => read("&once=true"));
        await new Promise((passed) => setTimeout(passed, FETCH_PAUSE));
        if (controller !== current) return;
      }
      await read("");
      if (controller === current) ended("The satellite has closed the stream.");
    } catch (error) {
      if (controller === current) ended(`The stream has ended: ${error.message}.`);
    }
  }

  function ended(why) {
    current = undefined;
    showLink("not live", `${shown(why)} The page shows the state of ${clock(position.at)} and is connecting again.`);
    pause = Math.min(pause * 2, RETRY_MAX);
    setTimeout(() => !current && !document.hidden && open(), pause);
  }

  function cut(why) {
    current?.abort();
    current = undefined;
    ended(why);
  }

  setInterval(() => {
    if (current && Date.now() - lastTick > TICK_TIMEOUT) cut("Nothing has arrived for 5 s.");
    if (hiddenSince && Date.now() - hiddenSince > HIDDEN_MAX) {
      freeStream?.();
      if (!current) return;
      current.abort();
      current = undefined;
      showLink("not live", "The page was hidden and is connecting again.");
    }
  }, 1000);
  document.addEventListener("visibilitychange", () => {
    hiddenSince = document.hidden ? Date.now() : 0;
    if (!document.hidden && !current) open();
  });
  open();
  return { restart: () => (current?.abort(), open()) };
}

/** Records the position of the stream. */
function moved(revision, at) {
  position.revision = Math.max(position.revision, revision);
  if (!isRendered) showPosition(position.revision, at);
}

/** Shows the revision of the page and its time. */
function showPosition(revision, at) {
  position.at = Math.max(position.at, Date.parse(at));
  const shownRevision = byId("revision");
  if (shownRevision) shownRevision.textContent = `revision ${revision}`;
}

/** Another process of the satellite answers: everything on the page may have changed. */
function restarted(boot) {
  sessionStorage.setItem("note", `The satellite was restarted at ${clock(Number(boot))}.`);
  location.reload();
}

const feedQuery = () => `position=${encodeURIComponent(`${position.boot}-${position.revision}`)}`;

// ---- Parts of the page that the server renders again

const FOCUSABLE = "a, button, input, summary, [tabindex]";
const REFRESH_PAUSE = 300; // Milliseconds between two refreshes because of changes
const rendered = new Map(); // part → its HTML as the server sent it; the page adds times, and states of buttons
for (const part of document.querySelectorAll("[data-live]")) rendered.set(part, part.innerHTML);
let refreshing = false;
let refreshAgain = false;
let refreshFailure = false;
let lastRefresh = 0;
let refreshTimer;

async function refresh() {
  if (refreshing) {
    refreshAgain = true;
    return;
  }
  refreshing = true;
  lastRefresh = Date.now();
  try {
    const address = new URL(location.href);
    if (["overview", "instance", "playground"].includes(body.dataset.page)) address.searchParams.set("live", "true");
    const response = await request(address);
    const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
    // Another role has other buttons.
    if (fresh.body.dataset.role !== body.dataset.role) return location.reload();
    const isWhole = [...rendered.keys()].map((part) => renderAgain(part, fresh.getElementById(part.id))).every(Boolean);
    if (isRendered && isWhole) showPosition(Number(fresh.body.dataset.revision), fresh.body.dataset.at);
    body.classList.remove("removed");
    refreshFailure = false;
    showTimes();
  } catch (error) {
    refreshFailure = error.status !== 404 || body.dataset.page !== "instance";
    if (!refreshFailure) showRemoved();
    else showLink("not live", `Cannot read the page again: ${shown(error.message)}. It shows the state of ${clock(position.at)}.`);
  } finally {
    refreshing = false;
    if (refreshAgain) {
      refreshAgain = false;
      refreshSoon();
    }
  }
}

/** Replaces a part. Returns false if the person uses its text or its input, so that it stays as it is. */
function renderAgain(part, later) {
  if (!later || later.innerHTML === rendered.get(part)) return true;
  const focus = [...part.querySelectorAll(FOCUSABLE)].indexOf(document.activeElement);
  if (document.activeElement.matches("input") && focus >= 0) return false;
  // A status is more important than the selection of its text.
  const selection = getSelection();
  if (part.id !== "state" && !selection.isCollapsed && selection.getRangeAt(0).intersectsNode(part)) return false;
  const open = [...part.querySelectorAll("details")].map((details) => details.open);
  rendered.set(part, later.innerHTML);
  part.replaceChildren(...later.childNodes);
  part.querySelectorAll("details").forEach((details, nth) => (details.open = open[nth] ?? details.open));
  part.querySelectorAll(FOCUSABLE)[focus]?.focus();
  return true;
}

/** Refreshes the page after a change; several changes within a short time cause one refresh. */
function refreshSoon() {
  refreshTimer ??= setTimeout(() => {
    refreshTimer = undefined;
    refresh();
  }, Math.max(0, lastRefresh + REFRESH_PAUSE - Date.now()));
}

/** Refreshes the page every few seconds while it is shown and connected. */
const refreshEvery = (milliseconds) =>
  setInterval(() => document.hidden || body.classList.contains("stale") || body.classList.contains("removed") || refresh(), milliseconds);

// ---- Changes

const QUESTIONS = {
  stop: "Its clients lose their tools.",
  remove: "Its process ends and its clients lose their tools. This lasts until the configuration is applied again, by a reload or a restart of the satellite.",
};

/** Shows the response to a change: beside the buttons of an instance, elsewhere for a while. */
function report(text) {
  const place = byId("response");
  if (place) place.textContent = shown(text);
  else notify(text);
}

function describeResult(action, { success, status, status_message: message, next_step: step, not_durable: notStored }) {
  const state = status.replaceAll("_", " ");
  const outcome = action === "remove" ? "removed" : success === false ? `failed; ${state}` : state;
  const parts = [`${outcome}.`, action !== "remove" && message, step && `Next: ${step}.`, notStored && `The command is not stored: ${notStored}`];
  return parts.filter(Boolean).join(" ");
}

document.addEventListener("click", async (click) => {
  const button = click.target.closest("button");
  if (!button) return;
  const { action, instance, copy } = button.dataset;
  if (button.dataset.repeat) {
    await repeat(button);
  } else if (copy !== undefined) {
    // Browsers have a clipboard on loopback addresses and over HTTPS only.
    const copied = navigator.clipboard?.writeText(copy) ?? Promise.reject(new Error("this connection is not encrypted"));
    await copied.then(() => notify("Copied."), (error) => notify(`Cannot copy: ${error.message}. Select the text and copy it.`));
  } else if (action) {
    if (QUESTIONS[action] && !confirm(`${action} ${instance}? ${QUESTIONS[action]}`)) return;
    button.disabled = true;
    report(`${action} ${instance} …`);
    try {
      const path = api(`instances/${encodeURIComponent(instance)}`);
      const response = await (action === "remove" ? request(path, { method: "DELETE" }) : post(`${path}/${action}`, {}));
      report(`${action} ${instance}: ${describeResult(action, await response.json())}`);
    } catch (error) {
      report(`Cannot ${action} ${instance}: ${error.message}`);
    } finally {
      button.disabled = body.classList.contains("removed");
      // A disabled button loses the focus, and a refresh may have replaced it.
      const isSame = (other) => other.dataset.action === action && other.dataset.instance === instance;
      const current = button.isConnected ? button : [...document.querySelectorAll("button")].find(isSame);
      if (document.activeElement === body) current?.focus();
    }
  } else if (button.id === "theme") {
    const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
    const theme = (document.documentElement.dataset.theme ?? (isDark ? "dark" : "light")) === "dark" ? "light" : "dark";
    localStorage.setItem("theme", theme);
    document.documentElement.dataset.theme = theme;
  } else if (button.id === "logout") {
    await request(`${root}logout`, { method: "POST" }).catch((error) => notify(error.message));
    location.assign(`${root}login`);
  }
});

document.addEventListener("submit", async (submit) => {
  const form = submit.target;
  if (!form.matches(".configure")) return;
  submit.preventDefault();
  try {
    const set = Object.fromEntries(new FormData(form));
    await post(api(`instances/${encodeURIComponent(form.dataset.instance)}/configure`), { set });
    form.reset();
    document.activeElement?.blur();
    notify("The values are set.");
    refresh();
  } catch (error) {
    notify(error.message);
  }
});

// ---- Overview

const COLUMNS = JSON.parse(byId("rows")?.textContent ?? "{}").columns ?? [];

function overview() {
  const rows = new Map(); // name → {…columns, cell}
  const teams = byId("teams");
  const hasNames = teams.className === "tiles";
  let active; // the row that the keys have selected

  const read = (values) => Object.fromEntries(COLUMNS.map((column, nth) => [column, values[nth]]));
  const isDormant = (row) => (row.flags ?? 0) & 1;
  const isStopped = (row) => (row.flags ?? 0) & 2;
  const kind = (row) =>
    row.status === "online" && isDormant(row) ? "asleep" : row.status === "offline" && isStopped(row) ? "stopped" : row.status;
  const text = (kind) => kind.replaceAll("_", " ");
  const link = (row, label) => element("a", { href: `instances/${encodeURIComponent(row.name)}` }, shown(label));

  function show(row) {
    const classes = `${kind(row)}${row.out ? " out" : ""}${row === active ? " at" : ""}`;
    if (row.cell.className !== classes) row.cell.className = classes;
    if (hasNames) row.cell.lastChild.textContent = text(kind(row));
    else row.cell.ariaLabel = `${row.server}, ${row.user}: ${text(kind(row))}`;
  }

  function grid(team) {
    const found = [...teams.children].find((section) => section.dataset.team === team);
    if (found) return found.querySelector(".grid");
    const made = element("div", { class: "grid", role: "listbox", tabindex: 0, "aria-label": `Instances of ${team}` });
    const section = element("section", { class: "team", "data-team": team, "aria-label": team },
      element("h3", {}, `${shown(team)} `, element("span", { class: "count" })), made);
    const next = [...teams.children].find((other) => other.dataset.team > team);
    teams.insertBefore(section, next ?? null);
    return made;
  }

  function put(values) {
    const row = read(values);
    const before = rows.get(row.name);
    row.cell = before?.cell;
    if (!row.cell) {
      row.cell = element("i", { role: "option" });
      if (hasNames) row.cell.append(element("b", {}, shown(row.server)), ` ${shown(row.user)} `, element("small", {}));
      grid(row.team).append(row.cell);
    }
    row.cell.row = row;
    rows.set(row.name, row);
    if (active === before && before) active = row;
    row.out = filterText && !matches(row);
    show(row);
  }

  function remove(name) {
    const row = rows.get(name);
    if (!row) return;
    row.cell.remove();
    rows.delete(name);
    const section = [...teams.children].find((section) => section.dataset.team === row.team);
    if (section && !section.querySelector("i")) section.remove();
  }

  function showSummary() {
    const counts = new Map();
    const urgent = [];
    for (const row of rows.values()) {
      counts.set(kind(row), (counts.get(kind(row)) ?? 0) + 1);
      if (row.urgency) urgent.push(row);
    }
    const order = byId("counts").dataset.order.split(" ");
    byId("counts").replaceChildren(...order.filter((status) => counts.has(status)).map((status) =>
      element("li", {}, element("span", { class: `dot ${status}` }), element("b", {}, `${counts.get(status)}`), ` ${text(status)}`)));
    byId("total").textContent = rows.size;
    for (const section of teams.children) section.querySelector(".count").textContent = section.querySelectorAll("i").length;
    const list = byId("attention");
    const max = Number(list.dataset.max);
    // Instances that recover by themselves keep their places although their status changes often.
    const since = (row) => (isRecovering(row) ? 0 : row.since);
    const byName = (one, other) => (one.name < other.name ? -1 : 1);
    urgent.sort((one, other) => one.urgency - other.urgency || since(one) - since(other) || byName(one, other));
    byId("attention-count").textContent = urgent.length;
    byId("attention-none").hidden = urgent.length > 0;
    byId("attention-more").hidden = urgent.length <= max;
    const hadFocus = list.contains(document.activeElement);
    const items = new Map([...list.children].map((item) => [item.dataset.name, item]));
    const listed = urgent.slice(0, max).map((row) => updatedItem(items.get(row.name), attentionItem(row)));
    for (const item of items.values()) if (!listed.includes(item)) item.remove();
    listed.forEach((item, nth) => list.children[nth] === item || list.insertBefore(item, list.children[nth] ?? null));
    if (hadFocus && !list.contains(document.activeElement)) list.focus();
    showTimes(list);
  }

  /** Brings an item up to date. Its unchanged buttons stay: a click needs the same button for press and release. */
  function updatedItem(item, fresh) {
    [...(item ? fresh.children : [])].forEach((part, nth) => {
      const old = item.children[nth];
      const isSame = part.matches(".buttons") ? old.textContent.trim() === part.textContent.trim() : old.isEqualNode(part);
      if (!isSame) old.replaceWith(part);
    });
    return item ?? fresh;
  }

  function attentionItem(row) {
    const action = { restart: "restart", start: "start", reconnect: "reconnect" }[row.remedy];
    const item = element("li", { "data-name": row.name },
      element("span", { class: `status ${kind(row)}` }, text(kind(row))), " ",
      link(row, `${row.server} · ${row.team}/${row.user}`), " ",
      element("time", { class: "since", "data-since": row.since }), " ",
      element("span", { class: "why" }, shown(row.message ?? ""), " · ",
        element("span", { class: "step" }, ...(row.step ? ["Next: ", ...withCommands(row.step)] : recovery(row)))));
    const buttons = element("span", { class: "buttons" });
    const label = `${action}${isRecovering(row) ? " now" : ""}`;
    if (action && "operates" in byId("attention").dataset) buttons.append(element("button", { type: "button", "data-action": action, "data-instance": row.name }, label), " ");
    const needsInput = row.remedy === "configure" || row.remedy === "authorize" || !("logs" in byId("attention").dataset);
    const target = `instances/${encodeURIComponent(row.name)}${needsInput ? "" : "#output-title"}`;
    buttons.append(element("a", { class: "button", href: target }, needsInput ? "open" : "logs"));
    item.append(buttons);
    return item;
  }

  const isRecovering = (row) => row.urgency >= Number(byId("attention").dataset.recovering);

  /** Returns the next step of the satellite for an instance that recovers by itself. */
  function recovery(row) {
    const verb = row.remedy === "reconnect" ? "Connects again" : "Restarts";
    if (row.retry) return [`${verb} in `, element("b", { class: "countdown", "data-until": row.retry }), "."];
    return [row.remedy ? `${verb} now.` : "It recovers by itself."];
  }

  function showDetail(row) {
    const parts = row
      ? [link(row, row.name), ` — ${text(kind(row))} for ${duration(Date.now() + offset - row.since)}`,
         row.restarts ? `, ${row.restarts} restarts` : "", row.message ? `: ${shown(row.message)}` : ""]
      : ["\u00a0"];
    byId("detail").replaceChildren(...parts);
  }

  function activate(row, grid) {
    const before = active;
    active = row;
    if (before) {
      show(before);
      before.cell.removeAttribute("id");
      before.cell.removeAttribute("aria-selected");
    }
    if (!row) return;
    row.cell.id = "active";
    row.cell.setAttribute("aria-selected", "true");
    grid.setAttribute("aria-activedescendant", "active");
    show(row);
    showDetail(row);
    row.cell.scrollIntoView({ block: "nearest" });
  }

  // Cells of the page and rows of its data are in the same order.
  const initial = JSON.parse(byId("rows").textContent);
  const cells = new Map([...teams.children].map((section) => [section.dataset.team, section.querySelectorAll("i")]));
  const next = new Map();
  let filterText = "";
  for (const values of initial.rows) {
    const row = read(values);
    const nth = next.get(row.team) ?? 0;
    next.set(row.team, nth + 1);
    row.cell = cells.get(row.team)[nth];
    row.cell.row = row;
    rows.set(row.name, row);
    show(row);
  }
  byId("rows").remove();
  position.revision = initial.revision;
  showTimes();

  teams.addEventListener("mouseover", (event) => event.target.closest("i") && showDetail(event.target.closest("i").row));
  teams.addEventListener("click", (event) => {
    const cell = event.target.closest("i");
    if (cell) location.assign(`instances/${encodeURIComponent(cell.row.name)}`);
  });
  teams.addEventListener("focusin", (event) => {
    const grid = event.target.closest(".grid");
    if (grid && active?.cell.parentNode !== grid) activate(grid.querySelector("i")?.row, grid);
  });
  teams.addEventListener("keydown", (event) => {
    const grid = event.target.closest(".grid");
    if (!grid || !active) return;
    const all = [...grid.children];
    const at = all.indexOf(active.cell);
    const perLine = Math.max(1, all.filter((cell) => cell.offsetTop === all[0].offsetTop).length);
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: perLine, ArrowUp: -perLine, Home: -at, End: all.length - 1 - at };
    if (event.key === "Enter") return location.assign(`instances/${encodeURIComponent(active.name)}`);
    if (!(event.key in moves)) return;
    event.preventDefault();
    let to = at + moves[event.key];
    // The last line may be short. Beyond the first and the last line is nothing.
    if (event.key === "ArrowDown" && to >= all.length && all.at(-1).offsetTop > active.cell.offsetTop) to = all.length - 1;
    if (all[to]) activate(all[to].row, grid);
  });

  /** Returns true if name or status contain each word of the filter. */
  function matches(row) {
    const words = `${row.name} ${row.server} ${row.team} ${row.user} ${text(kind(row))}`.toLowerCase();
    return filterText.split(/\s+/).every((word) => words.includes(word));
  }
  byId("filter").addEventListener("input", (event) => {
    filterText = event.target.value.trim().toLowerCase();
    const found = [];
    for (const row of rows.values()) {
      row.out = filterText && !matches(row);
      if (filterText && !row.out) found.push(row);
      show(row);
    }
    byId("found").replaceChildren(...found.slice(0, 30).map((row) => element("li", {}, link(row, row.name), ` ${text(kind(row))}`)));
    if (filterText && !found.length) byId("found").append(element("li", {}, "No instance matches."));
    if (found.length > 30) byId("found").append(element("li", {}, `and ${found.length - 30} more`));
  });

  keepStream(() => api(`instances/stream?${feedQuery()}`), (event) => {
    if (event.name !== "reset" && event.name !== "delta") return;
    const data = JSON.parse(event.data);
    if (event.name === "reset") {
      if (data.boot !== position.boot) return restarted(data.boot);
      const names = new Set(data.rows.map(([name]) => name));
      for (const name of rows.keys()) if (!names.has(name)) remove(name);
      data.rows.forEach(put);
    } else {
      if (data.revision <= position.revision) return;
      if (data.from > position.revision) {
        position.revision = 0; // A delta is missing: the next stream begins with all rows.
        throw new Error("a change is missing");
      }
      data.gone.forEach(remove);
      data.set.forEach(put);
    }
    moved(data.revision, data.at);
    showSummary();
  });
  refreshEvery(5000); // The warnings
}

// ---- Events and output

const IDS = new Set(["installation_id", "team_id", "user_id", "process_id", "server_slug"]);

/** Returns the content of an event as one line. */
function describe(data) {
  const parts = [];
  for (const [name, value] of Object.entries(data)) {
    if (IDS.has(name) || value === null || value === undefined) continue;
    if (name === "logs") parts.push(value.map((line) => line.message).join(" ⏎ "));
    else if (name === "actor") parts.push(`by ${value.kind}${value.name ? ` ${value.name}` : ""} via ${value.via}`);
    else if (name === "target") parts.push(value.process_id);
    else parts.push(`${name.replaceAll("_", " ")} ${typeof value === "object" ? JSON.stringify(value) : value}`);
  }
  return parts.join(" · ");
}

function eventItem(event, hasInstance) {
  if (event.type === "events.dropped") {
    const { from_seq: from, to_seq: to } = event.data;
    return element("li", { "data-seq": event.seq }, element("span", { class: "lost" }, `Events ${from}–${to} are lost: too many waited to be stored.`));
  }
  const name = event.data.process_id;
  const item = element("li", { "data-seq": event.seq },
    element("span", { class: "seq" }, `${event.seq}`),
    element("time", { datetime: event.timestamp }, event.timestamp.slice(0, 23).replace("T", " ")),
    element("span", { class: "kind" }, shown(event.type.replace(/^mcp\./, ""))));
  if (hasInstance && name) item.append(element("a", { href: `${root}instances/${encodeURIComponent(name)}` }, shown(name)), " ");
  item.append(element("span", {}, shown(describe(event.data))));
  return item;
}

/** Shows the events of the stream in a list; the newest is first. */
function eventList(list) {
  const instance = list.dataset.instance;
  const output = byId("output");
  if (output) output.scrollTop = output.scrollHeight;
  let since = Number(list.dataset.since);
  let outputSince = Number(output?.dataset.through ?? since);
  let queue = [];

  function flush() {
    const items = queue.reverse().map((event) => eventItem(event, !instance));
    queue = [];
    list.prepend(...items);
    if (list.children.length <= EVENTS_MAX) return;
    while (list.children.length > EVENTS_MAX) list.lastChild.remove();
    const older = byId("older");
    if (!older) return;
    older.hidden = false;
    older.firstChild.href = `${root}events?before=${list.lastChild.dataset.seq}${list.dataset.filter ?? ""}`;
  }

  function addOutput(event) {
    const atEnd = output.scrollHeight - output.scrollTop - output.clientHeight < 40;
    for (const line of event.data.logs) {
      output.append(element("div", { class: line.level, title: line.timestamp }, shown(line.message)));
    }
    while (output.children.length > EVENTS_MAX) output.firstChild.remove();
    byId("output-none").hidden = true;
    if (atEnd) output.scrollTop = output.scrollHeight;
  }

  return {
    query: () => `since=${Math.min(since, outputSince)}${list.dataset.filter ?? ""}${instance ? `&instance=${encodeURIComponent(instance)}` : ""}`,
    add(event) {
      if (event.name === "reset" || event.name === "delta" || event.name === "tick") return;
      const envelope = JSON.parse(event.data);
      if (typeof envelope.seq !== "number") return;
      const isNew = envelope.seq > since;
      if (instance && envelope.type === "mcp.server.logs") {
        if (output && envelope.seq > outputSince) addOutput(envelope);
      } else if (isNew && queue.push(envelope) === 1) {
        requestAnimationFrame(flush);
      }
      // The list and the output may begin after different events.
      since = Math.max(since, envelope.seq);
      outputSince = Math.max(outputSince, envelope.seq);
    },
  };
}

function events() {
  const list = eventList(byId("events"));
  const follow = byId("follow");
  if (!follow) return polled();
  const isOn = () => follow.getAttribute("aria-pressed") === "true";
  const query = () => `rows=false&${feedQuery()}${isOn() ? `&events=true&${list.query()}` : ""}`;
  const stream = keepStream(() => api(`instances/stream?${query()}`), (event) => {
    if (isOn()) list.add(event);
  });
  follow.addEventListener("click", () => {
    follow.setAttribute("aria-pressed", !isOn());
    // The events of the pause are in the journal: the new stream begins after the last shown one.
    if (isOn()) stream.restart();
  });
}

function instance() {
  const list = eventList(byId("events"));
  const name = byId("events").dataset.instance;
  keepStream(() => api(`instances/stream?events=true&${feedQuery()}&${list.query()}`), (event) => {
    list.add(event);
    if (event.name === "reset" || event.name === "delta") {
      const data = JSON.parse(event.data);
      if (event.name === "reset" && data.boot !== position.boot) return restarted(data.boot);
      moved(data.revision, data.at);
      if (event.name === "reset" ? !data.rows.length : data.gone.includes(name)) showRemoved();
      else refresh();
    }
  });
  refreshEvery(5000);
}

function showRemoved() {
  const state = byId("state");
  body.classList.add("removed");
  state.replaceChildren(element("p", { class: "state" }, "This instance was removed. It returns when the configuration is applied again."));
  for (const button of document.querySelectorAll(".actions button")) button.disabled = true;
  // Both are rendered again if the instance returns.
  for (const part of [state, byId("actions")]) rendered.set(part, "");
}

/** A page whose parts are rendered again every few seconds, and when instances change if `instances` selects any. */
function polled(instances = "&rows=false") {
  keepStream(() => api(`instances/stream?${feedQuery()}${instances}`), (event) => {
    if (event.name !== "reset" && event.name !== "delta") return;
    const data = JSON.parse(event.data);
    if (event.name === "reset" && data.boot !== position.boot) return restarted(data.boot);
    moved(data.revision, data.at);
    refreshSoon();
  });
  if (isRendered) refreshEvery(2000);
}

// ---- Calls

/** Offers the calls that were stored since the page was loaded. */
function calls() {
  const fresh = byId("new-calls");
  const through = Number(fresh.dataset.through);
  const filter = new URLSearchParams([...new URLSearchParams(location.search)].filter(([key, value]) => value && key !== "cursor"));
  let since = through;
  let timer;
  const count = async () => {
    timer = undefined;
    // The server knows which of them match the filter.
    const { calls } = await (await request(api(`calls?${filter}&limit=${NEW_CALLS_MAX}`))).json();
    const later = calls.filter((call) => call.seq > through).length;
    fresh.hidden = !later;
    fresh.firstChild.textContent = `${later}${later === NEW_CALLS_MAX ? " or more" : ""} new call${later === 1 ? "" : "s"}`;
    fresh.firstChild.href = `?${filter}`;
  };
  const query = () => `rows=false&events=true&types=mcp.request.logs&since=${since}&${feedQuery()}`;
  keepStream(() => api(`instances/stream?${query()}`), (event) => {
    if (event.name !== "mcp.request.logs") return;
    since = Math.max(since, JSON.parse(event.data).seq);
    timer ??= setTimeout(() => count().catch((error) => notify(`Cannot count new calls: ${error.message}`)), FETCH_PAUSE);
  });
}

// ---- Start

function login() {
  const code = location.hash.slice(1);
  if (!code) return;
  // The code must not stay in the history.
  history.replaceState(null, "", location.pathname);
  byId("token").value = code;
  byId("login").submit();
}

const theme = localStorage.getItem("theme");
if (theme) document.documentElement.dataset.theme = theme;
const note = sessionStorage.getItem("note");
if (note) {
  sessionStorage.removeItem("note");
  notify(note);
}
if (byId("age")) {
  showTimes();
  setInterval(showTimes, 1000);
}
const pages = { overview, instance, events, playground, login, calls, instances: () => polled(""), fleet: () => polled(), clients: () => polled(), tree: () => polled() };
pages[body.dataset.page]?.();
performance.mark("usable");
