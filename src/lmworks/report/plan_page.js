// What a reader does to the page: choose a layout, filter, sort, colour. The state is three variables and the controls.

const facts = JSON.parse(document.getElementById("facts").textContent);
const at = id => document.getElementById(id);
const put = (id, ...children) => at(id).replaceChildren(...children);

function memoryPage() {
  put("memory", ...memoryBars(facts.stages, facts.capacity, facts.usable));
  put("memory-table", memoryTable(facts.stages));
}

function searchPage() {
  const layouts = facts.front.map((one, index) => ({ ...one, index }));
  const rows = [...document.querySelectorAll("#front tbody tr")];
  const several = new Set(layouts.map(clusterOf)).size > 1;
  let chosen = layouts[0], visible = layouts;

  const width = () => Math.max(280, at("pareto").clientWidth); // a hidden page has none
  const value = (one, key) => key === "reserved" ? one.memory.reserved : key === "cluster" ? clusterOf(one)
    : key in one.layout ? one.layout[key] : one[key];
  const compare = (a, b) => typeof a === "number" ? a - b : String(a).localeCompare(String(b));
  const describe = one => `${one.text} · ${short(one.tokens_per_s)} tokens/s · ${gib(one.memory.reserved)}, ` +
    `${percent(one.headroom, 0)} of the GPU free`;

  // Numbers have an order, so they share a hue from light to dark; words get hues of their own.
  function colours() {
    const key = at("colour").value;
    const values = [...new Set(layouts.map(one => value(one, key)))].sort(compare);
    const shade = index => typeof values[0] === "number"
      ? `color-mix(in oklab, var(--ramp1) ${values.length > 1 ? 100 * index / (values.length - 1) : 100}%, var(--ramp0))`
      : `var(--s${[0, 1, 2, 5, 3, 6, 7, 4][index % 8]})`;
    return { of: one => shade(values.indexOf(value(one, key))),
      legend: legend(values.map((name, index) => [String(name), `--c:${shade(index)}`, "dot"])) };
  }

  function drawFront() {
    const shades = colours();
    if (visible.length) put("pareto", paretoChart(visible, width(), chosen, shades.of), shades.legend);
    else put("pareto", el("p", { class: "empty" }, "No layout of the front passes these filters."));
    at("pareto-readout").textContent = visible.length ? describe(chosen) : "";
    at("count").textContent = `${visible.length} of ${layouts.length} layouts`;
    for (const row of rows) {
      const one = layouts[row.dataset.index];
      row.hidden = !visible.includes(one);
      row.classList.toggle("chosen", one === chosen);
      row.querySelector("button").setAttribute("aria-pressed", one === chosen);
    }
  }

  function drawTiles() {
    const bill = chosen.bill, tiles = [
      ["cost", bill.dollars == null ? "not known" : `$${short(bill.dollars)}`, bill.dollars == null
        ? "cluster.price_hour sets it" : `for ${short(bill.tokens)} tokens` + (bill.kwh == null ? "" : `, and ${quantity(1e3 * bill.kwh, "Wh")}`)],
      ["time", `${digits(bill.hours / 24)} days`, `${percent(bill.goodput)} of it training, ${digits(bill.stops)} stops`],
      ["step", duration(chosen.step_s), `${duration(chosen.interval[0])} to ${duration(chosen.interval[1])}`],
      ["tokens/s", short(chosen.tokens_per_s), `${short(chosen.tokens_per_s_per_gpu)} a GPU, ${chosen.gpus} GPUs`],
      ["MFU", percent(chosen.mfu), `HFU ${percent(chosen.hfu)}`],
      ["memory", gib(chosen.memory.reserved), `${percent(chosen.headroom, 0)} of the GPU stays free`],
    ];
    put("tiles", ...tiles.map(([name, figure, note]) =>
      el("div", { class: "card" }, el("dt", {}, name), el("dd", {}, figure, el("small", {}, note)))));
  }

  function drawTimeline() {
    const spans = chosen.timeline;
    at("pipeline").hidden = chosen.layout.pp === 1; // every rank runs all layers: there is nothing to draw
    at("zoom").parentElement.hidden = !spans;
    at("timeline-readout").textContent = "\u00a0";
    if (spans) put("timeline", ...timelineChart(spans, Math.max(640, width()) * at("zoom").value, at("timeline-readout")));
    else put("timeline", el("p", { class: "empty" },
      "This page carries no timeline of this layout: only the fastest have one."));
  }

  // As wide as it takes to tell the passes of a rank apart.
  function zoomIn() {
    at("zoom").value = chosen.timeline ? Math.ceil(6 * chosen.timeline.length / chosen.layout.pp / width()) : 1;
  }

  function drawCollectives() {
    const calls = chosen.collectives, sums = new Map();
    for (const call of calls) {
      const key = [call.kind, call.group, call.ranks].join(" "), sum = sums.get(key) || { ...call, count: 0, bytes: 0 };
      sums.set(key, { ...sum, count: sum.count + call.count, bytes: sum.bytes + call.bytes });
    }
    const line = call => [call.ranks, short(call.count), quantity(call.bytes, "B")];
    at("exchanges").hidden = !sums.size;
    put("collectives", table(["kind", "over", "ranks", "calls a step", "bytes a step"],
      [...sums.values()].map(call => [call.kind, call.group, ...line(call)]), 3));
    const present = ["kind", "group", "what", "when", "link"].filter(key => calls.some(call => key in call));
    put("all-collectives", table([...present, "ranks", "calls a step", "bytes a step"],
      calls.map(call => [...present.map(key => call[key]), ...line(call)]), 3));
  }

  function drawChosen() {
    // Free memory is counted from the whole of it.
    const capacity = chosen.capacity || chosen.memory.reserved / (1 - chosen.headroom);
    at("which").textContent = chosen === layouts[0] ? "Fastest layout" : "Layout chosen";
    at("chosen").textContent = chosen.text + (several ? ` on ${clusterOf(chosen)}` : "");
    drawTiles();
    put("memory", ...memoryBars(chosen.stages, capacity, chosen.usable));
    put("memory-table", memoryTable(chosen.stages));
    put("waterfall", ...waterfall(chosen.parts, chosen.hidden, chosen.tags, chosen.step_s, chosen.interval));
    drawTimeline();
    drawCollectives();
  }

  function choose(index) {
    chosen = layouts[index];
    zoomIn();
    drawFront();
    drawChosen();
    const frame = at("front"), row = rows.find(row => row.dataset.index == index);
    const above = row.offsetTop - frame.scrollTop - 40, below = row.offsetTop + row.offsetHeight - frame.scrollTop - frame.clientHeight;
    if (above < 0 || below > 0) frame.scrollTop += above < 0 ? above : below;
  }

  const filters = [...document.querySelectorAll("select[data-filter]")];
  function filter() {
    const most = Number(at("most").value);
    at("most-shown").textContent = `${most} GiB`;
    visible = layouts.filter(one => one.memory.reserved <= most * 2 ** 30 &&
      filters.every(select => !select.value || String(value(one, select.dataset.filter)) === select.value));
    if (visible.length && !visible.includes(chosen)) choose(visible[0].index);
    else drawFront();
  }

  function sort(header) {
    const up = header.getAttribute("aria-sort") === "descending", key = header.dataset.key;
    for (const other of document.querySelectorAll("#front th")) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", up ? "ascending" : "descending");
    const order = (a, b) => compare(value(layouts[a.dataset.index], key), value(layouts[b.dataset.index], key));
    rows.sort((a, b) => up ? order(a, b) : order(b, a));
    document.querySelector("#front tbody").append(...rows);
  }

  // A finger is wider than a point: the nearest one is meant.
  function nearest(event) {
    let best = null, least = 40;
    for (const point of at("pareto").querySelectorAll(".point")) {
      const box = point.getBoundingClientRect();
      const away = Math.hypot(box.x + box.width / 2 - event.clientX, box.y + box.height / 2 - event.clientY);
      if (away < least) [best, least] = [point, away];
    }
    return best;
  }
  at("pareto").addEventListener("pointermove", event => {
    const point = nearest(event);
    if (visible.length) at("pareto-readout").textContent = describe(point ? layouts[point.dataset.index] : chosen);
  });
  at("pareto").addEventListener("click", event => {
    const point = nearest(event);
    if (point) choose(point.dataset.index);
  });
  at("pareto").addEventListener("keydown", event => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const points = [...at("pareto").querySelectorAll(".point")];
    const next = points[points.indexOf(event.target) + step];
    if (!next) return;
    event.preventDefault();
    choose(next.dataset.index);
    at("pareto").querySelector(".chosen").focus();
  });
  for (const row of rows) row.querySelector("button").addEventListener("click", () => choose(row.dataset.index));
  for (const header of document.querySelectorAll("#front th"))
    header.querySelector("button").addEventListener("click", () => sort(header));
  for (const select of filters) select.addEventListener("change", filter);
  at("most").addEventListener("input", filter);
  at("colour").addEventListener("change", drawFront);
  at("zoom").addEventListener("input", drawTimeline);
  at("everything").addEventListener("click", () => { at("controls").reset(); filter(); });
  // Browsers keep what was typed over a reload; the page begins as it was written.
  at("controls").reset();
  zoomIn();
  let drawn = 0;
  new ResizeObserver(() => {
    if (drawn === width()) return;
    drawn = width();
    filter();
    drawChosen();
  }).observe(at("pareto"));
}

if (!facts.front) memoryPage();
else if (facts.front.length) searchPage();
