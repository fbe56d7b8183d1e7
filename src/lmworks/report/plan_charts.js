// Drawings of a plan. Each function takes figures of `--json` and returns an element. Nothing is ever parsed as HTML:
// text goes in as text nodes, so a name with a tag in it is shown, not run.
"use strict";

const SVG = new Set(["svg", "g", "path", "circle", "line", "text", "rect", "polyline"]);

function el(name, attributes = {}, ...children) {
  const made = SVG.has(name)
    ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// --- figures, as record/formatting.py writes them ---

const digits = (value, count = 3) => String(Number(value.toPrecision(count)));
const gib = bytes => `${(bytes / 2 ** 30).toFixed(1)} GiB`;
const percent = (part, places = 1) => part === null ? "–" : `${(100 * part).toFixed(places)}%`;

function short(number) {
  for (const unit of ["", "k", "M", "G", "T"]) {
    if (Math.abs(number) < 999.5) return digits(number) + unit;
    number /= 1000;
  }
  return `${digits(number)}P`;
}

// 2.13 TB: the letter that `short` ends with belongs to the unit.
const quantity = (number, unit) => short(number).replace(/[a-zA-Z]?$/, letter => ` ${letter}${unit}`);

function duration(seconds) {
  const size = Math.abs(seconds);
  if (size >= 999.5) return `${seconds.toFixed(0)} s`;
  if (size >= 0.9995 || size === 0) return `${digits(seconds)} s`;
  return size >= 0.9995e-3 ? `${digits(seconds * 1e3)} ms` : `${digits(seconds * 1e6)} µs`;
}

// --- small pieces ---

function table(columns, rows, numeric) {
  const cells = (tag, row) => row.map((cell, index) =>
    el(tag, index >= columns.length - numeric ? { class: "number" } : {}, cell));
  return el("table", {}, el("thead", {}, el("tr", {}, ...cells("th", columns))),
    el("tbody", {}, ...rows.map(row => el("tr", {}, ...cells("td", row)))));
}

// entries: [name, colour class or style, class of the swatch]
function legend(entries) {
  return el("ul", { class: "legend" }, ...entries.map(([name, colour, swatch]) =>
    el("li", colour.startsWith("s") ? { class: colour } : { style: colour }, el("i", { class: swatch }), name)));
}

function ticks(low, high, most) {
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(factor => factor * power).find(size => size >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) found.push(i * step);
  return found;
}

// A piece of a bar from `left` to `right`, both as parts of the whole track.
function piece(left, right, kind, title) {
  return el("i", { class: kind, title, style: `left:${100 * left}%;width:${100 * (right - left)}%` });
}

// --- memory: one stacked bar a pipeline rank, with the edge of the GPU ---

const HELD = [["parameters", "s0"], ["gradients", "s1"], ["master", "s7"], ["optimizer", "s2"],
  ["activations", "s3"], ["logits", "s5"], ["buffers", "s6"], ["others", "s0 hatched"], ["engine", "s7 hatched"]];

// Bytes at the highest moment: gradients that are not made yet then (`absent`) take no room.
const there = (stage, name) => name === "gradients" ? stage.gradients - stage.absent : stage[name];

function memoryBars(stages, capacity, usable) {
  const whole = 1.04 * Math.max(capacity, ...stages.map(stage => stage.reserved));
  const rows = stages.map((stage, rank) => {
    let at = 0;
    const grow = (bytes, kind, name) =>
      piece(at / whole, (at += bytes) / whole, kind, `${name}: ${gib(bytes)}`);
    const pieces = HELD.map(([name, colour]) => grow(Math.max(0, there(stage, name)), colour, name));
    pieces.push(grow(stage.reserved - stage.allocated, "s4 hatched", "allocator"));
    if (usable) pieces.push(piece(usable / whole, usable / whole, "mark faint", `usable: ${gib(usable)}`));
    pieces.push(piece(capacity / whole, capacity / whole, "mark", `the GPU has ${gib(capacity)}`));
    return el("tr", { class: stage.reserved > (usable || capacity) ? "does-not-fit" : "" },
      el("td", {}, stages.length > 1 ? `rank ${rank}` : "every rank"),
      el("td", { class: "wide" }, el("div", { class: "track" }, ...pieces)),
      el("td", { class: "number" }, gib(stage.reserved)));
  });
  const used = HELD.filter(([name]) => stages.some(stage => stage[name] > 0));
  return [
    el("table", { class: stages.length > 16 ? "bars dense" : "bars" }, el("tbody", {}, ...rows)),
    legend([...used.map(([name, colour]) => [name, colour, "box"]), ["allocator", "s4", "box hatched"]]),
    el("p", { class: "note" }, `Full line: the GPU has ${gib(capacity)}.` +
      (usable ? ` Dashed: ${gib(usable)} of it can be used.` : "")),
  ];
}

function memoryTable(stages) {
  const names = [...HELD.map(([name]) => name), "absent", "allocated", "reserved", "host"];
  const shown = names.filter(name => stages.some(stage => stage[name] > 0));
  return table(["rank", ...shown],
    stages.map((stage, rank) => [rank, ...shown.map(name => (stage[name] / 2 ** 30).toFixed(2))]), shown.length);
}

// --- time: parts that add up to the step; hatched, before its part, what of it hides behind other work ---

const PARTS = { tp: "tensor parallel", cp: "context parallel", ep: "expert parallel", dp: "data parallel",
  pp: "pipeline messages", bubble: "pipeline waits", host: "host", matmul: "matrix products" };

function waterfall(parts, hidden, tags, total, interval) {
  const whole = 1.02 * Math.max(total, interval[1]);
  const names = Object.keys(parts).filter(name => Math.abs(parts[name]) > 1e-4 * total || hidden[name] > 1e-4 * total);
  let at = 0;
  const rows = names.map(name => {
    const begin = at, seconds = parts[name], behind = hidden[name] || 0;
    at += seconds;
    const ends = [begin, at].sort((a, b) => a - b).map(second => second / whole);
    const pieces = [piece(...ends, seconds < 0 ? "s4" : "s0", `${name}: ${duration(seconds)}`)];
    if (behind) {
      const from = Math.max(0, begin - behind);
      pieces.unshift(piece(from / whole, (from + behind) / whole, "s2 hatched", `${name}, hidden: ${duration(behind)}`));
    }
    return el("tr", { "data-part": name }, el("td", {}, PARTS[name] || name),
      el("td", { class: "wide" }, el("div", { class: "track" }, ...pieces)),
      el("td", { class: "number" }, duration(seconds)), el("td", { class: "number share" }, percent(seconds / total)),
      el("td", { class: "number tag" }, behind ? `+ ${duration(behind)} hidden` : ""), el("td", { class: "tag" }, tags[name] || ""));
  });
  rows.push(el("tr", { class: "total" }, el("td", {}, "step"),
    el("td", { class: "wide" }, el("div", { class: "track" }, piece(0, total / whole, "s3", duration(total)),
      piece(interval[0] / whole, interval[1] / whole, "span", "nine in ten lie within"),
      ...interval.map(end => piece(end / whole, end / whole, "mark", duration(end))))),
    el("td", { class: "number" }, duration(total)), el("td", { class: "number share" }, "100.0%"), el("td"), el("td")));
  return [
    el("table", { class: "bars" }, el("tbody", {}, ...rows)),
    legend([["takes time", "s0", "box"], ["hidden behind other work", "s2", "box hatched"]]),
    el("p", { class: "note" },
      `Nine in ten steps lie within ${duration(interval[0])} and ${duration(interval[1])}.`),
  ];
}

// --- the pipeline in time ---

const KINDS = { F: ["forward", "s0"], B: ["backward", "s1"], I: ["backward for inputs", "s1"],
  W: ["backward for weights", "s2"] };

function timelineChart(spans, width, readout) {
  const left = 58, bottom = 24, most = at => spans.reduce((found, span) => Math.max(found, span[at]), 0);
  const ranks = 1 + most(0), end = most(5), start = spans.reduce((found, span) => Math.min(found, span[4]), end);
  const high = ranks > 32 ? 10 : ranks > 12 ? 16 : 24, height = ranks * high;
  const x = time => left + (time - start) / (end - start) * (width - left - 12);
  const seen = new Set(), outlines = new Map(), labels = [];
  for (const [rank, stage, kind, batch, begin, stop] of spans) {
    const second = Math.floor(stage / ranks) % 2, key = `${KINDS[kind][1]}${second ? " second" : ""}`;
    const from = x(begin), wide = x(stop) - from;
    seen.add(kind);
    outlines.set(key, (outlines.get(key) || "") +
      `M${from.toFixed(1)} ${rank * high + 1}h${wide.toFixed(1)}v${high - 2}h${(-wide).toFixed(1)}z`);
    if (wide > 15 && high > 12)
      labels.push(el("text", { class: "batch", x: from + wide / 2, y: rank * high + high / 2 + 3.5 }, batch));
  }
  const every = Math.ceil(14 / high);
  const names = Array.from({ length: ranks }, (_, rank) => rank).filter(rank => rank % every === 0).map(rank =>
    el("text", { class: "axis end", x: left - 8, y: rank * high + high / 2 + 4 }, `rank ${rank}`));
  const times = ticks(0, end - start, width / 110).map(time =>
    el("text", { class: "axis mid", x: x(start + time), y: height + 18 }, duration(time)));
  const drawn = el("svg", { width, height: height + bottom, viewBox: `0 0 ${width} ${height + bottom}`, role: "img",
    class: (width - left) * ranks / spans.length > 5 ? "roomy" : "", "aria-label": `${ranks} pipeline ranks over ${duration(end - start)}` },
    el("rect", { class: "row", x: left, y: 0, width: width - left - 12, height }), ...names, ...times,
    ...[...outlines].map(([key, d]) => el("path", { class: key, d })), ...labels);
  drawn.addEventListener("pointermove", event => {
    const rank = Math.floor(event.offsetY / high);
    const time = start + (event.offsetX - left) / (width - left - 12) * (end - start);
    const span = spans.find(span => span[0] === rank && span[4] <= time && time < span[5]);
    readout.textContent = span ? `rank ${rank}: ${KINDS[span[2]][0]} of micro-batch ${span[3]}, stage ${span[1]}, ` +
      `${duration(span[4] - start)} to ${duration(span[5] - start)}` : rank < ranks ? `rank ${rank}: waits` : "";
  });
  return [drawn, legend([...seen].map(kind => [...KINDS[kind], "box"]))];
}

// --- the front: speed against free memory ---

const clusterOf = one => `${one.gpus} × ${one.gpu}`;

function paretoChart(layouts, width, chosen, colourOf) {
  const height = Math.max(260, Math.min(400, width * 0.5)), left = 62, right = 16, top = 26, bottom = 44;
  const xs = layouts.map(one => 100 * one.headroom), ys = layouts.map(one => one.tokens_per_s);
  const range = (values, pad) => {
    const low = Math.min(...values), high = Math.max(...values), room = (high - low) * pad || Math.abs(high) * pad || 1;
    return [low - room, high + room];
  };
  const [x0, x1] = range(xs, 0.05), [y0, y1] = range(ys, 0.08);
  const x = value => left + (value - x0) / (x1 - x0) * (width - left - right);
  const y = value => height - bottom - (value - y0) / (y1 - y0) * (height - top - bottom);
  const marks = [];
  for (const value of ticks(y0, y1, 5)) marks.push(
    el("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
    el("text", { class: "axis end", x: left - 8, y: y(value) + 4 }, short(value)));
  for (const value of ticks(x0, x1, width / 90)) marks.push(
    el("line", { class: "grid", x1: x(value), x2: x(value), y1: top, y2: height - bottom }),
    el("text", { class: "axis mid", x: x(value), y: height - bottom + 17 }, `${digits(value)}%`));
  const order = layouts.map((_, index) => index).sort((a, b) => xs[a] - xs[b]);
  const fronts = new Map(); // what lies on one line can be had on one cluster
  for (const index of order) {
    const cluster = clusterOf(layouts[index]), spot = `${x(xs[index]).toFixed(1)},${y(ys[index]).toFixed(1)}`;
    fronts.set(cluster, [...(fronts.get(cluster) || []), spot]);
  }
  const points = order.map(index => {
    const one = layouts[index], is = one === chosen;
    return el("circle", { class: `point${is ? " chosen" : ""}`, cx: x(xs[index]), cy: y(ys[index]), r: (is ? 9 : 6.5) * (width < 500 ? 0.75 : 1),
      style: `--c:${colourOf(one)}`, tabindex: is ? 0 : -1, role: "radio", "aria-checked": is,
      "aria-label": `${one.text}: ${short(one.tokens_per_s)} tokens/s, ${percent(one.headroom, 0)} free`,
      "data-index": one.index });
  });
  return el("svg", { class: "plot", width, height, viewBox: `0 0 ${width} ${height}`, role: "radiogroup",
    "aria-label": "layouts by tokens a second and free memory" },
    ...marks, ...[...fronts].map(([cluster, spots]) =>
      el("polyline", { class: "frontier", points: spots.join(" "), "data-cluster": cluster })),
    el("text", { class: "axis", x: 8, y: 12 }, "tokens/s"),
    el("text", { class: "axis end", x: width - right, y: height - 6 }, "memory of a GPU that stays free"), ...points);
}
