"use strict";
// How the engine of the chosen model fares: read from /health and /metrics once a second, while the page is seen.

const EVERY_MS = 1000, KEPT = 60;

// Prometheus text as {name: number}: of one model, prefixes ("vllm:") and "_total" taken off.
function readMetrics(text, model) {
  const found = {};
  for (const line of text.split("\n")) {
    const match = /^(?:\w+:)?(\w+?)(?:_total)?(?:\{(.*)\})? (\S+)/.exec(line);
    if (!match || line.startsWith("#")) continue;
    const [, name, labels = "", value] = match;
    const named = /(?:^|,)model(?:_name)?="((?:[^"\\]|\\.)*)"/.exec(labels);
    if (named && JSON.parse(`"${named[1]}"`) !== model) continue;
    found[name] = (found[name] ?? 0) + Number(value);
  }
  return found;
}

class EngineView {
  constructor(fetchText, chosen) {
    this.fetchText = fetchText; // path → {status, text}
    this.chosen = chosen; // → the model's name
    this.forget();
    const turn = async () => {
      if (document.visibilityState === "visible") await this.look();
      setTimeout(turn, EVERY_MS);
    };
    turn();
  }

  forget() { this.before = null; this.speeds = []; }

  async look() {
    const model = this.chosen();
    try {
      const health = await this.fetchText("/health");
      this.tell(health.status === 200 ? "healthy" : "not healthy", health.status === 200 ? "good" : "bad");
      const metrics = await this.fetchText("/metrics");
      if (model !== this.chosen()) return;
      if (metrics.status === 200) this.show(readMetrics(metrics.text, model));
      else note(metrics.status === 401 ? "needs a key" : "not known");
    } catch {
      this.tell("no answer", "bad");
    }
  }

  tell(word, kind) {
    const pill = element("health");
    if (pill.textContent === word) return;
    pill.textContent = word;
    pill.className = `pill ${kind}`;
  }

  show(now) {
    const at = performance.now(), known = now.num_requests_running !== undefined;
    note(known ? "" : "of this model nothing is known here");
    write("running", now.num_requests_running);
    write("waiting", now.num_requests_waiting);
    write("preempted", now.num_preemptions);
    share("kv", now.kv_cache_usage_perc);
    share("hits", now.prefix_cache_queries ? now.prefix_cache_hits / now.prefix_cache_queries : known ? 0 : undefined);
    const made = now.generation_tokens;
    if (this.before && made >= this.before.made) {
      this.speeds = [...this.speeds, (made - this.before.made) * 1000 / (at - this.before.at)].slice(-KEPT);
      write("speed", Math.round(this.speeds.at(-1)));
      this.draw();
    }
    this.before = made === undefined ? null : { made, at };
  }

  draw() {
    const most = Math.max(1, ...this.speeds), step = 240 / (KEPT - 1), first = KEPT - this.speeds.length;
    const points = this.speeds.map((speed, place) => `${(first + place) * step},${46 - 44 * speed / most}`);
    element("history").querySelector("polyline").setAttribute("points", points.join(" "));
  }
}

function element(id) { return document.getElementById(id); }
function note(words) { element("engine-note").textContent = words; }
function write(id, value) { element(id).textContent = value === undefined ? "–" : String(value); }
function share(id, value) {
  element(id).textContent = value === undefined ? "–" : `${(100 * value).toFixed(1)}%`;
  element(`${id}-bar`).value = value ?? 0;
}
