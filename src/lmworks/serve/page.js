// The playground: chats and completions, streamed. The key lives in its field, and nowhere else.

const USUAL_TOKENS = 256;
const contexts = new Map(); // by model: the longest sequence, where the server says
const messages = []; // of the chat so far: {role, content}
let running = null; // the AbortController of the answer that is being made
let before = null; // what the text was before it was continued
let mode = "chat";

function headers() {
  const key = element("key").value.trim();
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
}

function complain(words) {
  element("alert").textContent = words;
  element("alert").hidden = !words;
}

async function fetchText(path) {
  const answer = await fetch(path, { headers: headers(), cache: "no-store" });
  return { status: answer.status, text: await answer.text() };
}

async function loadModels() {
  const { status, text } = await fetchText("/v1/models").catch(() => ({ status: 0, text: "" }));
  if (status === 401) {
    complain("This server wants an API key: enter it above.");
    element("key").focus();
  } else if (status !== 200) {
    complain("The server does not say which models it has.");
  } else {
    complain("");
    const select = element("model"), chosen = select.value, models = JSON.parse(text).data;
    select.replaceChildren(...models.map(model => new Option(model.id, model.id)));
    for (const model of models) contexts.set(model.id, model.max_model_len);
    if (contexts.has(chosen)) select.value = chosen;
    fit();
  }
}

// Half of what the model can hold at most, unless somebody has said how many.
function fit() {
  const field = element("max_tokens"), context = contexts.get(element("model").value);
  if (!field.dataset.typed) field.value = Math.min(USUAL_TOKENS, Math.floor((context || Infinity) / 2));
  describe();
}

// --- requests ---------------------------------------------------------------------------------------------

function request(text) {
  const body = { model: element("model").value };
  if (mode === "chat") {
    const system = element("system").value.trim();
    const systemMessages = system ? [{ role: "system", content: system }] : [];
    body.messages = [...systemMessages, ...messages, ...(text ? [{ role: "user", content: text }] : [])];
  } else {
    body.prompt = text;
  }
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    const field = element(name);
    if (field.value !== "" && !field.validity.valid) throw new Error(`${name}: ${field.validationMessage}`);
    if (field.value !== "") body[name] = Number(field.value);
  }
  return body;
}

function path() { return mode === "chat" ? "/v1/chat/completions" : "/v1/completions"; }

// What a shell takes as it is.
function quoted(text) { return `'${text.replaceAll("'", "'\\''")}'`; }

function describe() {
  if (!element("as-curl").open) return;
  try {
    const body = request(mode === "chat" ? element("prompt").value || "Hello" : element("text").value || "Once");
    const key = element("key").value ? ` \\\n  -H "authorization: Bearer $LMWORKS_API_KEY"` : "";
    element("curl").textContent = `curl ${location.origin}${path()}${key} \\\n  -H 'content-type: application/json' \\\n`
      + `  -d ${quoted(JSON.stringify(body))}`;
  } catch (error) {
    element("curl").textContent = error.message;
  }
}

// The events of a stream, as objects.
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function refused(answer) {
  const body = await answer.json().catch(() => ({}));
  const wait = answer.headers.get("retry-after");
  return new Error((body.error?.message ?? `status ${answer.status}`) + (wait ? ` (retry after ${wait} s)` : ""));
}

// Sends a request; `add` gets each piece of text. How it ended: its finish_reason, or "stopped".
async function ask(body, add) {
  const watch = new Stopwatch();
  running = new AbortController();
  busy(true);
  try {
    const whole = { ...body, stream: true, stream_options: { include_usage: true } };
    const answer = await fetch(path(), {
      method: "POST", headers: headers(), body: JSON.stringify(whole), signal: running.signal,
    });
    if (!answer.ok) throw await refused(answer);
    let ended = null;
    for await (const event of events(answer)) {
      if (event.error) throw new Error(event.error.message ?? "the server failed");
      const choice = event.choices?.[0];
      const said = choice?.delta?.content ?? choice?.text;
      if (said !== undefined && said !== null && !choice?.delta?.role) watch.token();
      if (said) add(said);
      ended = choice?.finish_reason ?? ended;
      if (event.usage) watch.count = event.usage.completion_tokens;
    }
    if (!ended) throw new Error("the stream broke off");
    return ended;
  } catch (error) {
    if (error.name === "AbortError") return "stopped";
    throw error.name === "TypeError" ? new Error("the server does not answer") : error;
  } finally {
    watch.show();
    running = null;
    busy(false);
  }
}

class Stopwatch {
  constructor() { this.began = performance.now(); this.count = 0; }

  token() {
    this.last = performance.now();
    this.first ??= this.last;
    this.count += 1;
    this.show();
  }

  show() {
    const parts = [`${this.count} token${this.count === 1 ? "" : "s"}`];
    if (this.first) parts.push(`first after ${Math.round(this.first - this.began)} ms`);
    if (this.count > 1 && this.last > this.first) {
      parts.unshift(`${((this.count - 1) * 1000 / (this.last - this.first)).toFixed(1)} tokens/s`);
    }
    element("figures").textContent = parts.join(" · ");
  }
}

// --- chat -------------------------------------------------------------------------------------------------

function bubble(role, name) {
  const article = document.createElement("article"), head = document.createElement("header");
  const words = document.createElement("div");
  words.className = "words";
  article.className = role;
  head.textContent = name;
  article.append(head, words);
  element("log").append(article);
  return { words, head };
}

// Stays at the end, unless its reader has scrolled up.
function following(change) {
  const log = element("log"), atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

async function say() {
  const text = element("prompt").value.trim();
  if (!text) return;
  const body = request(text);
  element("prompt").value = "";
  following(() => { bubble("user", "you").words.append(made("p", text)); });
  const answer = bubble("assistant", body.model);
  let said = "", due = 0;
  const paint = () => {
    due = 0;
    following(() => answer.words.replaceChildren(...markdown(said)));
  };
  try {
    const ended = await ask(body, piece => {
      said = (said + piece).trimStart(); // many templates leave the first space to the model
      due ||= requestAnimationFrame(paint); // not for every token: a long answer is long to draw
    }).finally(() => { cancelAnimationFrame(due); paint(); });
    if (ended !== "stop") answer.head.textContent += ended === "stopped" ? " · stopped" : ` · ended: ${ended}`;
    messages.push({ role: "user", content: text }, { role: "assistant", content: said });
  } catch (error) {
    if (said) {
      answer.head.textContent += " · broke off";
      messages.push({ role: "user", content: text }, { role: "assistant", content: said });
    } else { // what was not answered was not said
      for (let times = 0; times < 2; times++) element("log").lastElementChild.remove();
      element("prompt").value ||= text;
    }
    throw error;
  }
}

// --- completion -------------------------------------------------------------------------------------------

async function goOn() {
  const field = element("text");
  if (!field.value) return;
  const body = request(field.value);
  before = field.value;
  await ask(body, piece => {
    field.value += piece;
    field.scrollTop = field.scrollHeight;
  });
}

function takeBack() {
  if (mode === "chat") {
    const [question] = messages.splice(-2);
    for (let times = 0; times < 2; times++) element("log").lastElementChild.remove();
    element("prompt").value = question.content;
  } else {
    element("text").value = before;
    before = null;
  }
  busy(false);
}

// --- the controls -----------------------------------------------------------------------------------------

function busy(is) {
  element("send").disabled = is;
  element("stop").disabled = !is;
  element("undo").disabled = is || (mode === "chat" ? !messages.length : before === null);
  element("clear").disabled = is;
  for (const tab of document.querySelectorAll("[role=tab]")) tab.disabled = is;
  element("text").readOnly = is;
  element("log").setAttribute("aria-busy", String(is));
}

async function send() {
  if (running) return;
  complain("");
  try {
    await (mode === "chat" ? say() : goOn());
  } catch (error) {
    complain(error.message);
  }
  busy(false);
  describe();
}

function stop() { running?.abort(); }

function turnTo(wanted) {
  mode = wanted;
  for (const name of ["chat", "completion"]) {
    element(name).hidden = name !== wanted;
    element(`tab-${name}`).setAttribute("aria-selected", String(name === wanted));
    element(`tab-${name}`).tabIndex = name === wanted ? 0 : -1;
  }
  element("system").closest("label").hidden = wanted !== "chat";
  element("send").textContent = wanted === "chat" ? "Send" : "Continue";
  busy(false);
  describe();
}

function clear() {
  messages.length = 0;
  before = null;
  for (const article of document.querySelectorAll("#log article")) article.remove();
  element("text").value = "";
  complain("");
  busy(false);
  element(mode === "chat" ? "prompt" : "text").focus();
}

function dye(theme) {
  document.documentElement.dataset.theme = theme;
  element("theme").textContent = theme === "dark" ? "Light theme" : "Dark theme"; // what a click would do
  element("theme").setAttribute("aria-pressed", String(theme === "dark"));
}

const remembered = { // the theme, where the browser lets us
  get() { try { return localStorage.getItem("theme"); } catch { return null; } },
  set(theme) { try { localStorage.setItem("theme", theme); } catch { /* then it is forgotten */ } },
};
dye(remembered.get() ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));

element("theme").addEventListener("click", () => {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  dye(theme);
  remembered.set(theme);
});
element("ask").addEventListener("submit", event => { event.preventDefault(); send(); });
element("send").addEventListener("click", send);
element("stop").addEventListener("click", stop);
element("undo").addEventListener("click", takeBack);
element("clear").addEventListener("click", clear);
for (const example of document.querySelectorAll("#empty button")) example.addEventListener("click", () => {
  element("prompt").value = example.textContent;
  element("prompt").focus();
});
element("tab-chat").addEventListener("click", () => turnTo("chat"));
element("tab-completion").addEventListener("click", () => turnTo("completion"));
document.querySelector("[role=tablist]").addEventListener("keydown", event => {
  if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
  turnTo(mode === "chat" ? "completion" : "chat");
  element(`tab-${mode}`).focus();
});
element("prompt").addEventListener("keydown", event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
element("text").addEventListener("keydown", event => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send();
});
document.addEventListener("keydown", event => { if (event.key === "Escape") stop(); });
document.addEventListener("input", describe);
element("as-curl").addEventListener("toggle", describe);

const view = new EngineView(fetchText, () => element("model").value);
element("model").addEventListener("change", () => { view.forget(); fit(); });
element("max_tokens").addEventListener("input", event => { event.target.dataset.typed = "yes"; });
element("key").addEventListener("change", loadModels);
element("access").addEventListener("submit", event => event.preventDefault()); // "change" has seen to it
turnTo("chat");
loadModels();
