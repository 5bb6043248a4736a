"use strict";
// A chat on the server's own API. A model's text is untrusted: its Markdown is rendered, HTML in it is shown as text.

const by = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "seed", "max_tokens"];
const SETTINGS = ["system", ...NUMBERS, "theme"];
// Both are kept in this tab's storage alone.
const KEY = "wisparse-key";
const CHAT = "wisparse-chat";

let model = null;  // what /v1/models says
let turns = [];  // each {question, answers: [{level, text, thought, cost}], box}
let running = null;  // what stops the answer under way

// --- the API ---

async function call(path, options = {}) {
  for (let why = ""; ; why = "The server does not know this key.") {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...(options.headers || {}), ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    const response = await fetch(path, { ...options, headers, credentials: "omit" });
    if (response.status !== 401) return response;
    sessionStorage.removeItem(KEY);
    await askForKey(key ? why || "The server does not know this key." : "");
  }
}

function askForKey(why) {
  by("door-why").textContent = why;
  by("key").value = "";
  by("door").showModal();
  return new Promise((resolve) => {
    by("door-form").onsubmit = (event) => {
      const key = by("key").value.trim();
      if (/^[ -~]+$/.test(key)) {
        sessionStorage.setItem(KEY, key);
        resolve();
      } else {  // no header can hold it
        event.preventDefault();
        by("key").value = "";
        by("door-why").textContent = "A key consists of printable ASCII characters.";
      }
    };
  });
}

async function problem(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

// Every event's JSON, as it comes.
async function* events(response) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      text += decoder.decode(value, { stream: true });
      const parts = text.split("\n\n");
      text = parts.pop();
      for (const part of parts) {
        if (!part.startsWith("data: ")) continue;
        if (part === "data: [DONE]") return;
        yield JSON.parse(part.slice(6));
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function body(turn, level) {
  const sent = { model: model.id, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  for (const name of NUMBERS) if (by(name).value !== "") sent[name] = Number(by(name).value);
  if (level !== null) sent.sparsity = level;
  const messages = by("system").value.trim() ? [{ role: "system", content: by("system").value }] : [];
  for (const other of turns) {
    messages.push({ role: "user", content: other.question });
    if (other === turn) break;
    const said = other.answers.find((answer) => answer.level === level) || other.answers[0];
    messages.push({ role: "assistant", content: said ? said.text : "" });
  }
  return { ...sent, messages };
}

// --- Markdown ---

// No raw HTML, no images, which another host could serve, and no links but to the web.
const markdown = markdownit({ html: false }).disable("image");
markdown.validateLink = (url) => /^(https?:|mailto:)/i.test(url.trim());

markdown.renderer.rules.link_open = (tokens, index, options, env, renderer) => {
  tokens[index].attrSet("target", "_blank");
  tokens[index].attrSet("rel", "noopener noreferrer nofollow");
  return renderer.renderToken(tokens, index, options);
};

// The policy forbids inline styles: a column's alignment becomes a class.
for (const rule of ["th_open", "td_open"]) {
  markdown.renderer.rules[rule] = (tokens, index, options, env, renderer) => {
    const style = tokens[index].attrGet("style");
    if (style) tokens[index].attrs = [["class", style.replace("text-align:", "")]];
    return renderer.renderToken(tokens, index, options);
  };
}

function addCopyButtons(words) {
  if (!navigator.clipboard) return;  // only on HTTPS and localhost
  for (const code of words.querySelectorAll("pre")) {
    const button = element("button", "copy", "Copy");
    button.type = "button";
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(code.querySelector("code").textContent);
      button.textContent = "Copied";
    });
    code.append(button);
  }
}

// --- answering ---

async function answer(turn) {
  const stopping = new AbortController();
  running = stopping;
  busy(true);
  turn.answers = [];
  turn.box.replaceChildren();
  let outcome = "Answered.";
  try {
    // One after the other, so that each has the machine, and its speed, to itself.
    const asked = levelsAsked();
    for (const level of asked) {
      const told = await answerIn(turn, level, stopping.signal);
      outcome += asked.length > 1 ? ` ${levelName(level)}: ${told}` : ` ${told}`;
    }
  } catch (error) {
    outcome = stopping.signal.aborted ? "Stopped." : null;
    if (outcome === null) say(`That failed: ${error.message}`, true);
  }
  if (outcome !== null) say(outcome);
  running = null;
  busy(false);
}

// The elements of an answer, and `show`, which renders what `said` holds so far.
function answerBox(turn, said) {
  const box = element("div", "answer");
  const words = element("div", "words");
  const cost = element("p", "cost");
  const thoughts = element("details", "thoughts");
  const thought = element("div", "thought");
  thoughts.append(element("summary", "", "Thought"), thought);
  box.append(element("p", "who", levelName(said.level)), thoughts, words, cost);
  turn.box.append(box);
  const show = () => {
    const low = nearEnd();
    thoughts.hidden = !said.thought;
    thought.textContent = said.thought;
    words.innerHTML = markdown.render(said.text);
    cost.textContent = said.cost;
    if (low) by("talk").scrollTop = by("talk").scrollHeight;
  };
  return { box, words, thoughts, show };
}

async function answerIn(turn, level, signal) {
  const said = { level, text: "", thought: "", cost: "" };
  const { box, words, thoughts, show } = answerBox(turn, said);
  box.setAttribute("aria-busy", "true");
  turn.answers.push(said);
  const clock = { first: 0, before: 0, tokens: 0 };
  say(`Answering, ${levelName(level).toLowerCase()} …`);
  let reason = null;
  let timer = 0;  // a long answer is rendered at most twenty times a second
  try {
    const response = await call("v1/chat/completions", {
      method: "POST", signal, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body(turn, level)),
    });
    if (!response.ok) throw new Error(await problem(response));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices[0];
      if (choice && choice.delta.reasoning_content) {
        thoughts.open = thoughts.open || !said.thought;
        said.thought += choice.delta.reasoning_content;
      }
      if (choice && choice.delta.content) {
        if (!said.text) thoughts.open = false;
        said.text += choice.delta.content;
      }
      if (choice && choice.finish_reason) reason = choice.finish_reason;
      if (event.usage) said.cost = speed(clock, event.usage.completion_tokens, event.usage.generation_seconds);
      if (!timer) timer = setTimeout(() => { timer = 0; show(); }, 50);
    }
  } finally {
    clearTimeout(timer);
    show();
    addCopyButtons(words);
    box.setAttribute("aria-busy", "false");
    keep();
  }
  const ended = reason === "length" ? " The longest answer's length was reached." : "";
  return `${said.cost}.${ended}`;
}

// Tokens a second since the first came; in the end by the server's clock, as a busy page reads several events at once.
function speed(clock, tokens, told) {
  const now = performance.now();
  if (!clock.first) Object.assign(clock, { first: now, before: tokens });
  // Usage is told once more at the end; only what comes with tokens moves the clock.
  if (tokens > clock.tokens) Object.assign(clock, { tokens, last: now });
  const seconds = told === undefined ? (clock.last - clock.first) / 1000 : told;
  const after = told === undefined ? clock.before : 1;
  const rate = seconds > 0 ? `, ${((clock.tokens - after) / seconds).toFixed(1)} tok/s` : "";
  return `${tokens} token${tokens === 1 ? "" : "s"}${rate}`;
}

function levelsAsked() {
  if (by("levels").hidden) return [null];
  const left = Number(by("left").value);
  return by("both").checked ? [left, Number(by("right").value)] : [left];
}

function levelName(level) {
  const sparsity = level === null ? model.sparsity : level;
  if (sparsity === undefined) return "Answer";
  if (model.bits !== undefined && sparsity !== 0) return `${Math.round(800 * (1 - sparsity)) / 100} bits`;
  return sparsity === 0 ? "Dense" : `${Math.round(sparsity * 1000) / 10}% sparse`;
}

// --- the page ---

function element(kind, name, text = "") {
  const made = document.createElement(kind);
  made.className = name;
  made.textContent = text;
  return made;
}

function nearEnd() {
  const talk = by("talk");
  return talk.scrollHeight - talk.scrollTop - talk.clientHeight < 40;
}

function say(text, wrong = false) {
  by("status").textContent = text;
  by("status").classList.toggle("wrong", wrong);
}

function busy(yes) {
  by("send").hidden = yes;
  by("stop").hidden = !yes;
  by("again").disabled = yes || !turns.length;
  by("clear").disabled = yes || !turns.length;
  if (yes) by("stop").focus();
  else by("message").focus();
}

function addTurn(question) {
  const turn = { question, answers: [], box: element("div", "answers") };
  const whole = element("section", "turn");
  const mine = element("div", "mine");
  mine.append(element("p", "who", "You"), element("div", "words", question));
  whole.append(mine, turn.box);
  whole.setAttribute("aria-label", `Turn ${turns.push(turn)}`);
  by("talk").append(whole);
  by("talk").scrollTop = by("talk").scrollHeight;
  return turn;
}

function ask(event) {
  event.preventDefault();
  const question = by("message").value;
  if (running || !model || !question.trim()) return;
  by("message").value = "";
  answer(addTurn(question));
}

// Conversation and settings survive a reload of the tab.
function keep() {
  const fields = Object.fromEntries(SETTINGS.map((name) => [name, by(name).value]));
  const kept = turns.map(({ question, answers }) => ({ question, answers }));
  try {
    sessionStorage.setItem(CHAT, JSON.stringify({ fields, turns: kept }));
  } catch {
    say("The conversation is too long for this browser to keep it on a reload.", true);
  }
}

function restore() {
  const kept = JSON.parse(sessionStorage.getItem(CHAT) || "null");
  if (!kept) return;
  for (const name of SETTINGS) by(name).value = kept.fields[name];
  for (const { question, answers } of kept.turns) {
    const turn = addTurn(question);
    for (const said of answers) {
      turn.answers.push(said);
      const { words, show } = answerBox(turn, said);
      show();
      addCopyButtons(words);
    }
  }
}

function showTheme() {
  document.documentElement.dataset.theme = by("theme").value;
}

function showLevels() {
  const levels = model.sparsities || [];
  if (levels.length > 1) {
    for (const id of ["left", "right"]) {
      for (const level of levels) by(id).append(new Option(levelName(level), level));
    }
    by("left").value = model.sparsity;
    by("right").value = levels[0] === model.sparsity ? levels[levels.length - 1] : levels[0];
    by("levels").hidden = false;
  } else if (model.sparsity !== undefined) {
    by("in-force").textContent = `In force: ${levelName(null)}. This server cannot switch between dense and sparse.`;
    by("in-force").hidden = false;
  }
}

async function start() {
  by("ask").addEventListener("submit", ask);
  by("message").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) ask(event);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running) running.abort();
  });
  by("stop").addEventListener("click", () => running && running.abort());
  by("again").addEventListener("click", () => !running && turns.length && answer(turns[turns.length - 1]));
  by("clear").addEventListener("click", () => {
    turns = [];
    by("talk").replaceChildren();
    keep();
    say("A new conversation.");
    busy(false);
  });
  by("door").addEventListener("cancel", (event) => event.preventDefault());
  by("theme").addEventListener("change", showTheme);
  addEventListener("pagehide", keep);
  by("fields").addEventListener("submit", (event) => event.preventDefault());
  try {
    const response = await call("v1/models");
    if (!response.ok) throw new Error(await problem(response));
    model = (await response.json()).data[0];
    by("model").textContent = model.id;
    document.title = `${model.id} · WiSparse`;
    by("about").textContent = `WiSparse, context of ${model.max_model_len} tokens`;
    showLevels();
    restore();
    showTheme();
    busy(false);
  } catch (error) {
    say(`The server cannot be reached: ${error.message}`, true);
  }
}

start();
