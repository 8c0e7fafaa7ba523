// The chat page: plain code for today's browsers, with no library and no build step. Text of models and servers is only
// ever put into the page as text (textContent), never as markup.
"use strict";

const by = (id) => document.getElementById(id);
const talk = by("talk"), question = by("question"), model = by("model"), trouble = by("trouble");
const PARTS = {
  route_s: "reading the request", tokenize_s: "tokenising", queue_s: "waiting for a place", retries_s: "lost attempts",
  wait_s: "waiting on the worker", load_s: "loading KV from the store", prefill_s: "computing the prompt",
  first_hop_s: "messages", transfer_s: "moving KV to the decode worker", first_decode_s: "second token",
};
const KEPT = ["system", "temperature", "max-tokens", "seed"];

let messages = []; // {role, content} of the conversation, without the system prompt
let running = null; // the answer that streams now

// --- what the browser keeps -------------------------------------------------------------------

function kept(storage, name, value) {
  try { // Storage may be switched off.
    if (value === undefined) return storage().getItem(`baton.${name}`) ?? "";
    if (value) storage().setItem(`baton.${name}`, value); else storage().removeItem(`baton.${name}`);
  } catch { /* The page works without it. */ }
  return "";
}
const inBrowser = () => window.localStorage, inTab = () => window.sessionStorage;

function theme(choice) {
  if (choice === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = choice;
  for (const button of document.querySelectorAll("[data-theme-choice]"))
    button.setAttribute("aria-pressed", String(button.dataset.themeChoice === choice));
}

// --- the server ---------------------------------------------------------------------------------

function headers() {
  const key = by("key").value.trim();
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

class ServerError extends Error {}

async function failure(response) {
  const body = await response.json().catch(() => null);
  if (response.status === 401) {
    openSettings(true);
    by("key").focus();
  }
  const said = body?.error?.message ?? `The server answered with status ${response.status}.`;
  const id = response.headers.get("x-request-id");
  return new ServerError(id ? `${said} (status ${response.status}, request ${id})` : said);
}

async function loadModels() {
  const before = model.value || kept(inBrowser, "model");
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (!response.ok) throw await failure(response);
    const { data } = await response.json();
    model.replaceChildren(...data.map((entry) => {
      const option = new Option(entry.parent ? `${entry.id} (adapter of ${entry.parent})` : entry.id, entry.id);
      option.title = entry.max_model_len ? `context of ${entry.max_model_len} tokens` : "";
      return option;
    }));
    if (data.some((entry) => entry.id === before)) model.value = before;
    tell("");
  } catch (error) {
    tell(error instanceof ServerError ? error.message : `The server cannot be reached: ${error.message}`);
  }
}

function tell(text) {
  trouble.textContent = text;
  trouble.hidden = !text;
}

function number(id) {
  const value = by(id).valueAsNumber;
  return Number.isNaN(value) ? undefined : value;
}

function requestBody() {
  const system = by("system").value.trim();
  return {
    model: model.value,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    stream: true,
    stream_options: { include_usage: true },
    baton: { timings: true },
    temperature: number("temperature"),
    max_tokens: number("max-tokens"),
    seed: number("seed"),
  };
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      yield data === "[DONE]" ? null : JSON.parse(data);
    }
  }
}

// --- an answer ------------------------------------------------------------------------------------

async function answer() {
  const view = addMessage("assistant"), abort = new AbortController();
  const now = { view, abort, text: "", thought: "", began: performance.now(), firstMs: null, lastMs: null, pieces: 0 };
  running = now;
  busy(true);
  let wasCut = false;
  try {
    const body = JSON.stringify(requestBody());
    const response = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body, signal: abort.signal });
    if (!response.ok) throw await failure(response);
    await take(now, response);
    if (!now.isDone) throw new ServerError("The stream ended before the answer did.");
  } catch (error) {
    wasCut = true;
    if (error.name === "AbortError") view.note("Stopped.");
    else view.fail(error instanceof ServerError ? error.message : `The connection was lost: ${error.message}`);
  }
  if (now.text) messages.push({ role: "assistant", content: now.text });
  view.draw(now, true);
  busy(false);
  view.figures(now);
  running = null;
  by("said").textContent = now.text && !wasCut ? "The answer is complete." : "";
}

async function take(now, response) {
  for await (const event of events(response)) {
    if (event === null) { now.isDone = true; return; }
    if (event.error) throw new ServerError(event.error.message ?? "The server reports an error.");
    if (event.usage) now.usage = event.usage;
    if (event.baton) now.baton = event.baton;
    const choice = event.choices?.[0];
    if (choice?.finish_reason === "length") now.view.note("Cut off: max tokens, or the model's context, is used up.");
    const text = choice?.delta?.content ?? "", thought = choice?.delta?.reasoning_content ?? "";
    if (!text && !thought) continue;
    now.lastMs = performance.now();
    now.firstMs ??= now.lastMs;
    now.pieces += 1;
    now.text += text;
    now.thought += thought;
    now.view.draw(now, false);
  }
}

function busy(is) {
  by("send").hidden = is;
  by("stop").hidden = !is;
  by("new").disabled = is;
  for (const button of talk.querySelectorAll(".again")) button.remove();
  if (is) return;
  const last = talk.querySelector(".said.assistant:last-of-type .actions");
  last?.append(action("Regenerate", "again", regenerate));
}

function regenerate() {
  if (running) return;
  if (messages.at(-1)?.role === "assistant") messages.pop();
  talk.querySelector(".said.assistant:last-of-type")?.remove();
  answer();
}

function ask() {
  const text = question.value.trim();
  if (!text || running) return;
  if (!model.value) { tell("Pick a model first."); return; }
  if (messages.at(-1)?.role === "user") messages.pop(); // It was never answered, and templates want turns to alternate.
  tell("");
  messages.push({ role: "user", content: text });
  addMessage("user").draw({ text, thought: "" }, true);
  question.value = "";
  answer();
}

function newChat() {
  if (running) return;
  messages = [];
  talk.replaceChildren(empty);
  question.focus();
}
const empty = by("empty");

// --- what is shown ------------------------------------------------------------------------------

function made(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

function action(name, className, run) {
  const button = made("button", className, name);
  button.type = "button";
  button.addEventListener("click", run);
  return button;
}

function addMessage(role) {
  empty.remove();
  const text = made("div", "text"), foot = made("div"), actions = made("div", "actions");
  const name = role === "user" ? "You" : model.selectedOptions[0]?.value ?? "Model";
  const box = made("article", `said ${role}`, made("h2", "", name), text, foot, actions);
  box.setAttribute("aria-label", role === "user" ? "Your message" : "Answer");
  const view = { raw: "", isDue: false };
  const render = (now) => {
    view.isDue = false;
    const isAtEnd = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 60;
    text.replaceChildren();
    if (now.thought) {
      const thought = made("details", "thought", made("summary", "", "Reasoning"), made("div", "plain", now.thought));
      thought.open = !now.text;
      text.append(thought);
    }
    text.append(...markdown(now.text));
    if (isAtEnd) talk.scrollTop = talk.scrollHeight;
  };
  view.draw = (now, isWhole) => {
    view.raw = now.text;
    if (isWhole) {
      box.classList.remove("busy");
      render(now);
    } else if (!view.isDue) { // The page is drawn once a frame, however many tokens arrive.
      view.isDue = true;
      requestAnimationFrame(() => { if (view.isDue) render(now); });
    }
  };
  view.note = (said) => foot.append(made("p", "note", said));
  view.fail = (said) => {
    const failed = made("div", "failed", said);
    failed.setAttribute("role", "alert");
    foot.append(failed);
  };
  view.figures = (now) => {
    const isAtEnd = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 60;
    foot.append(...figures(now));
    if (isAtEnd) talk.scrollTop = talk.scrollHeight;
  };
  actions.append(action("Copy", "", (event) => copy(view.raw, event.currentTarget)));
  if (role === "assistant") box.classList.add("busy");
  talk.append(box);
  talk.scrollTop = talk.scrollHeight;
  return view;
}

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // Browsers offer their clipboard to pages of HTTPS and of this machine only.
    const area = made("textarea", "unseen");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

const ms = (seconds) => (seconds >= 10 ? `${seconds.toFixed(1)} s` : `${(seconds * 1000).toFixed(seconds < 0.1 ? 1 : 0)} ms`);

function figures(now) {
  const { baton, usage } = now, rows = [];
  const ttftS = baton?.ttft_s ?? (now.firstMs === null ? null : (now.firstMs - now.began) / 1000);
  const measuredS = now.pieces > 1 ? (now.lastMs - now.firstMs) / 1000 / (now.pieces - 1) : null;
  const tpotS = baton ? baton.tpot_s : measuredS;
  if (ttftS !== null && ttftS !== undefined) rows.push(["TTFT", ms(ttftS)]);
  if (tpotS) rows.push(["TPOT", ms(tpotS)], ["tokens/s", (1 / tpotS).toFixed(1)]);
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    rows.push(["tokens", `${usage.prompt_tokens} in, ${usage.completion_tokens} out`], ["cached", `${cached} of ${usage.prompt_tokens}`]);
  }
  if (baton?.prefill_worker && baton.prefill_worker === baton.decode_worker) rows.push(["prefill and decode", baton.decode_worker]);
  else if (baton?.prefill_worker) rows.push(["prefill", baton.prefill_worker], ["decode", baton.decode_worker]);
  if (baton?.attempts > 1) rows.push(["attempts", String(baton.attempts)]);
  if (!rows.length) return [];
  const list = made("dl", "figures", ...rows.map(([name, value]) => made("div", "", made("dt", "", name), made("dd", "", value))));
  list.setAttribute("aria-label", "Timings");
  return baton?.timings ? [list, breakdown(baton.timings)] : [list];
}

function breakdown(timings) {
  const rows = Object.entries(PARTS).filter(([part]) => timings[part] !== undefined)
    .map(([part, name]) => made("tr", "", made("td", "", name), made("td", "", ms(timings[part]))));
  return made("details", "parts", made("summary", "", "Where the time went"), made("table", "", made("tbody", "", ...rows)));
}

// --- a little Markdown: fenced code, lists, headings, bold, inline code -------------------------

function markdown(text) {
  const nodes = [];
  text.split(/^```/m).forEach((piece, at) => {
    if (at % 2 === 0) nodes.push(...blocks(piece));
    else nodes.push(made("pre", "", made("code", "", piece.replace(/^[^\n]*\n?/, "").replace(/\n$/, ""))));
  });
  return nodes;
}

function blocks(text) {
  const nodes = [];
  let lines = [], list = null;
  const flush = () => {
    const paragraph = lines.join("\n").trim();
    if (paragraph) nodes.push(made("p", "", ...inline(paragraph)));
    lines = [];
  };
  for (const line of text.split("\n")) {
    const item = /^\s*(?:[-*]|(\d{1,3})[.)])\s+(.*)$/.exec(line), heading = /^#{1,6}\s+(.*)$/.exec(line);
    if (item) {
      flush();
      const tag = item[1] === undefined ? "UL" : "OL";
      if (list?.tagName !== tag) {
        nodes.push(list = made(tag));
        if (item[1] !== undefined) list.start = Number(item[1]);
      }
      list.append(made("li", "", ...inline(item[2])));
      continue;
    }
    if (line.trim()) list = null;
    if (heading) {
      flush();
      nodes.push(made("h3", "", ...inline(heading[1])));
    } else if (line.trim()) lines.push(line);
    else flush();
  }
  flush();
  return nodes;
}

function inline(text) {
  return text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/).filter(Boolean).map((piece) => {
    if (/^`[^`]+`$/.test(piece)) return made("code", "", piece.slice(1, -1));
    if (/^\*\*[^*]+\*\*$/.test(piece)) return made("strong", "", piece.slice(2, -2));
    return piece;
  });
}

// --- controls -------------------------------------------------------------------------------------

function openSettings(is) {
  by("settings").classList.toggle("open", is);
  by("show-settings").setAttribute("aria-expanded", String(is));
}

by("ask").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
question.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); ask(); }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort.abort(); });
by("stop").addEventListener("click", () => { running?.abort.abort(); question.focus(); });
by("new").addEventListener("click", newChat);
by("show-settings").addEventListener("click", () => openSettings(!by("settings").classList.contains("open")));
by("key").value = kept(inTab, "key");
by("key").addEventListener("change", () => { kept(inTab, "key", by("key").value.trim()); loadModels(); });
model.addEventListener("change", () => kept(inBrowser, "model", model.value));
for (const id of KEPT) {
  by(id).value = kept(inBrowser, id) || (id === "temperature" ? "0.3" : "");
  by(id).addEventListener("change", () => kept(inBrowser, id, by(id).value));
}
for (const button of document.querySelectorAll("[data-theme-choice]"))
  button.addEventListener("click", () => { theme(button.dataset.themeChoice); kept(inBrowser, "theme", button.dataset.themeChoice); });
theme(kept(inBrowser, "theme") || "auto");
document.addEventListener("visibilitychange", () => { if (!document.hidden && !running) loadModels(); });
loadModels();
