// What is drawn: elements, numbers, tables, charts, networks. Names reach the page as text nodes alone.

const SVG = "http://www.w3.org/2000/svg";
const STAGES = ["GERMINATED", "TRAINING", "BLENDING", "HOLDING", "FOSSILIZED", "PRUNED", "EMBARGOED", "RESETTING"];
const OPS = { WAIT: "·", GERMINATE: "▲", SET_ALPHA_TARGET: "◆", PRUNE: "✕", FOSSILIZE: "■", ADVANCE: "▶" };
export const glyph = (op) => OPS[op] ?? "?";
export const stageClass = (stage) => (STAGES.includes(stage) ? stage.toLowerCase() : "dormant");

function build(node, about, inner) {
  for (const [name, value] of Object.entries(about)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...inner.filter((each) => each !== null && each !== undefined && each !== ""));
  return node;
}
export const el = (tag, about = {}, ...inner) => build(document.createElement(tag), about, inner);
const shape = (tag, about = {}, ...inner) => build(document.createElementNS(SVG, tag), about, inner);

// Ties, which are odd eighths, go to the even digit as they do in Python, so that a page and a terminal never differ.
const TWO = new Intl.NumberFormat("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2, useGrouping: false, roundingMode: "halfEven" });
const two = (value) => (Math.abs((value * 8) % 2) === 1 ? TWO.format(value) : value.toFixed(2));
const tiny = (value) => (Math.abs(value) < 1e-4 ? value.toExponential() : String(value));
// A number as text: two digits where it has a unit or a fraction, a sign where it is in points.
export function said(value, unit) {
  if (value === null || value === undefined) return "-";
  if (Array.isArray(value)) return value.map((each) => said(each, unit)).join(" ");
  if (typeof value !== "number") return String(value);
  if (unit === "s") return saidTime(value);
  if (!unit && unit !== null && Number.isInteger(value)) return String(value); // null: a fraction, though it may be whole
  const small = value !== 0 && Math.abs(value) < 0.01;
  return (unit === "points" && value > 0 ? "+" : "") + (small ? tiny(+value.toPrecision(3)) : two(value));
}
export const withUnit = (value, unit) =>
  value === null || value === undefined || !unit || unit === "s" ? said(value, unit) : `${said(value, unit)} ${unit}`;
function saidTime(seconds) {
  const [, size, unit] = [[172800, 86400, "d"], [7200, 3600, "h"], [120, 60, "min"], [-Infinity, 1, "s"]]
    .find(([least]) => seconds >= least);
  return `${(seconds / size).toFixed(0)} ${unit}`;
}
export const words = (name) => name.replaceAll("_", " ");
const LABELS = { round: "rounds done", age: "since the last round", left: "time left", rate: "pace", gain: "gain of the last round", open: "open incidents",
  seconds: "time", grown_params: "parameters grown", extra_flops: "extra FLOPs" };

// Rows of a table as objects by column.
export const records = (table) => table.rows.map((row) => Object.fromEntries(table.columns.map((name, i) => [name, row[i]])));

export function table(data, { onclick, show = {}, selected } = {}) {
  const head = data.columns.map((name) =>
    el("th", {}, words(name), data.units[name] ? el("small", {}, ` ${data.units[name]}`) : ""));
  const body = records(data).map((record) => {
    const cells = data.columns.map((name) => el("td", { class: typeof record[name] === "number" ? "number" : false },
      show[name] ? show[name](record[name]) : said(record[name], name === "error" ? "±" : data.units[name])));
    const pick = onclick ? { onclick: () => onclick(record), class: selected?.(record) ? "pick chosen" : "pick", tabindex: 0,
      onkeydown: (event) => { if (event.key === "Enter") onclick(record); } } : {};
    return el("tr", pick, ...cells);
  });
  return el("div", { class: "wide" }, el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...body)));
}

// One row as figures with their names. An estimate and the ends of its interval are one figure.
export function figures(data) {
  const [record] = records(data);
  if (!record) return nothing();
  const shown = data.columns.filter((name) => !["low", "high"].includes(name));
  return el("dl", { class: "figures" }, ...shown.map((name) => el("div", {}, el("dt", {}, LABELS[name] ?? words(name)), el("dd", {},
    withUnit(record[name], data.units[name]), name === "gain" && record.low !== null && record.low !== undefined
      ? el("small", {}, ` ${said(record.low, "points")} to ${said(record.high, "points")}`) : ""))));
}

export function bars(data) {
  const numbers = data.columns.slice(1), most = Math.max(1e-9, ...data.rows.map((row) => row[1] ?? 0));
  return el("div", { class: "bars" }, ...records(data).map((record) => {
    const bar = el("i");
    bar.style.width = `${(100 * (record[numbers[0]] ?? 0)) / most}%`;
    const told = numbers.map((name) => `${words(name)} ${withUnit(record[name], data.units[name])}`).join(", ");
    return el("div", { class: record[numbers[0]] ? "bar" : "bar never" }, el("b", {}, String(record[data.columns[0]])),
      el("span", { class: "track" }, bar), el("span", { class: "dim" }, told));
  }));
}
export const nothing = (text = "Nothing was measured yet.") => el("p", { class: "dim" }, text);

function colour(name) {
  const probe = document.body.appendChild(el("i", { class: name, hidden: true }));
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

// Lines: a chart for each unit, a line for each column and name; `low` and `high` are a band around `gain`.
export function lines(data) {
  if (!data.rows.length) return nothing();
  const named = typeof data.rows[0][0] === "string" ? 1 : 0, all = records(data), x = data.columns[named];
  const names = named ? [...new Set(all.map((each) => each[data.columns[0]]))] : [""];
  const units = new Map();
  for (const name of data.columns.slice(named + 1)) {
    if (["low", "high", "n"].includes(name) || all.every((each) => each[name] === null)) continue;
    const key = data.units[name] ?? name;
    units.set(key, [...(units.get(key) ?? []), name]);
  }
  const xs = [...new Set(all.map((each) => each[x]))].sort((a, b) => a - b);
  return el("div", { class: "charts" }, ...[...units.values()].map((columns) => {
    const values = [xs], series = [{}], bands = [], keys = [];
    const add = (name, column, look) => {
      const by = new Map(all.filter((each) => !named || each[data.columns[0]] === name).map((each) => [each[x], each[column]]));
      values.push(xs.map((at) => by.get(at) ?? null));
      series.push({ spanGaps: true, ...look });
    };
    for (const name of names) for (const column of columns) {
      const kind = `c${(keys.length % 6) + 1}`, paint = colour(kind), at = series.length;
      const label = [name, names.length > 1 && columns.length === 1 ? "" : words(column)].filter(Boolean).join(" ");
      add(name, column, { stroke: paint, width: 1.5, points: { show: xs.length < 40, fill: paint, size: 4 } });
      const ends = column === "gain" && all.some((each) => typeof each.low === "number");
      for (const end of ends ? ["high", "low"] : []) add(name, end, { stroke: paint, width: 0.3, points: { show: xs.length === 1, size: 3 } });
      if (ends) bands.push({ series: [at + 1, at + 2], fill: paint.replace(/rgb\((.*)\)/, "rgba($1, 0.15)") });
      keys.push({ kind, label, at, ends, unit: data.units[column], now: el("b") });
    }
    const title = [...new Set([columns.length === 1 && names.length > 1 ? words(columns[0]) : "", data.units[columns[0]] ?? ""])].filter(Boolean).join(", ");
    const where = el("span"), read = (index) => {
      where.textContent = index === null ? "" : `${words(x)} ${xs[index]}`;
      for (const { at, ends, unit: of, now } of keys) {
        const place = index ?? values[at].findLastIndex((value) => value !== null);
        now.textContent = said(values[at][place], of) + (ends && values[at + 1][place] !== null ? ` (${said(values[at + 2][place], of)} to ${said(values[at + 1][place], of)})` : "");
      }
    };
    read(null);
    return el("figure", {}, el("figcaption", {}, title ? el("span", {}, title) : "", ...keys.map(({ kind, label, now }) =>
      el("span", {}, el("i", { class: `key ${kind}` }), `${label} `, now)), where), plot(values, series, bands, read));
  }));
}

function plot(values, series, bands, read) {
  const place = el("div", { class: "plot" }), line = { stroke: colour("dim"), grid: { stroke: colour("grid"), width: 1 },
    ticks: { show: false }, font: "11px system-ui, sans-serif" };
  let drawn = null;
  const watcher = new ResizeObserver(() => {
    const size = { width: Math.max(220, place.clientWidth), height: 170 };
    if (drawn) return drawn.setSize(size);
    const axes = [{ ...line, size: 26, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000] }, { ...line, size: 52, values: (_, at) => at.map((value) => String(+value.toPrecision(3))) }];
    drawn = new globalThis.uPlot({ ...size, series, bands, axes, scales: { x: { time: false } }, cursor: { y: false },
      legend: { show: false }, hooks: { setCursor: [(chart) => read(chart.cursor.idx ?? null)] } }, values, place);
  });
  watcher.observe(place);
  return place;
}

// A host as a picture: its blocks in a row, and over each slot the seed that grows there.
export function network(slots, big) {
  const step = big ? 96 : 46, block = 14, top = big ? 34 : 14, base = big ? 80 : 40, low = big ? 102 : 50;
  const seeds = slots.map((name, i) => {
    const left = i * step + block, right = (i + 1) * step, middle = (left + right) / 2;
    const way = shape("path", { d: `M${left} ${base} C${middle - 14} ${base} ${middle - 14} ${top} ${middle} ${top} S${middle + 14} ${base} ${right} ${base}` });
    const dot = shape("circle", { cx: middle, cy: top, r: 0 }), hint = shape("title");
    const label = big ? shape("text", { x: middle, y: top - 18, "text-anchor": "middle" }) : "";
    const note = big ? shape("text", { x: middle, y: base + 16, "text-anchor": "middle", class: "faint" }, name) : "";
    return { node: shape("g", { class: "seed dormant" }, hint, way, dot, label, note), dot, hint, label };
  });
  const width = slots.length * step + block;
  const blocks = [...slots, ""].map((_, i) => shape("rect", { x: i * step, y: base - 8, width: block, height: 16, rx: 3, class: "block" }));
  const node = shape("svg", { viewBox: `-2 -4 ${width + 4} ${low + 4}`, class: big ? "network big" : "network", role: "img" },
    shape("line", { x1: 0, y1: base, x2: width, y2: base, class: "trunk" }), ...blocks, ...seeds.map((seed) => seed.node));
  const update = (stages, blueprints, alphas) => seeds.forEach((seed, i) => {
    const stage = stages[i] ?? "DORMANT", alpha = alphas[i] ?? 0, kind = stageClass(stage);
    seed.node.setAttribute("class", `seed ${kind}`);
    seed.dot.setAttribute("r", kind === "dormant" ? 0 : (big ? 7 : 5) + (big ? 6 : 4) * alpha);
    seed.hint.textContent = blueprints[i] ? `${slots[i]}: ${blueprints[i]}, ${stage}, alpha ${said(alpha, "alpha")}` : `${slots[i]}: empty`;
    if (big) seed.label.textContent = blueprints[i] ?? "";
  });
  return { node, update };
}

// The life of a host: a row for each slot, a column for each epoch, and below what was decided.
export function strip(slots, epochs, seeds, decisions, epoch, choose) {
  const at = new Map(seeds.map((seed) => [`${seed.slot}/${seed.epoch}`, seed])), said_ = new Map(decisions.map((each) => [each.epoch, each]));
  const span = Array.from({ length: epochs }, (_, i) => i + 1);
  const cell = (slot, number) => {
    const seed = at.get(`${slot}/${number}`), before = at.get(`${slot}/${number - 1}`);
    const born = seed?.blueprint && before?.blueprint !== seed.blueprint;
    const node = el("td", { class: `cell ${stageClass(seed?.stage)}${number === epoch ? " now" : ""}`, onclick: () => choose(number),
      title: seed ? `${seed.blueprint ?? "no seed"}, ${seed.stage}, alpha ${said(seed.alpha, "alpha")}` : "empty" },
    born ? el("span", {}, String(seed.blueprint)) : "");
    let long = 1;
    while (born && at.get(`${slot}/${number + long}`)?.blueprint === seed.blueprint) long++;
    node.style.setProperty("--long", long);
    if (seed) node.style.setProperty("--alpha", 0.25 + 0.75 * (seed.alpha ?? 0));
    return node;
  };
  const decided = (number) => {
    const each = said_.get(number);
    return el("td", {}, el("button", { class: number === epoch ? "decision now" : "decision", onclick: () => choose(number),
      title: each ? `epoch ${number}: ${each.op}` : "" }, glyph(each?.op)));
  };
  return el("div", { class: "wide" }, el("table", { class: "strip" },
    el("tbody", {}, ...slots.map((name, slot) => el("tr", {}, el("th", {}, name), ...span.map((number) => cell(slot, number)))),
      el("tr", {}, el("th", {}, "decision"), ...span.map(decided)))));
}

export function legend(hint) {
  const stages = { training: "incubating", blending: "blending", holding: "holding", fossilized: "kept", pruned: "pruned, resting" };
  const ops = { GERMINATE: "germinate", ADVANCE: "advance", FOSSILIZE: "keep", PRUNE: "prune", WAIT: "wait" };
  return el("p", { class: "legend" }, ...Object.entries(stages).map(([kind, name]) => el("span", {}, el("i", { class: `swatch ${kind}` }), name)),
    ...Object.entries(ops).map(([op, name]) => el("span", {}, el("b", {}, glyph(op)), name)), el("span", {}, hint));
}

const RENDERERS = { text: figures, line: lines, bars, table };
// A node is drawn again only for other figures.
const drawn = new Map();
export const redraw = () => drawn.clear();
export function kept(name, figures, draw) {
  const told = JSON.stringify(figures);
  if (drawn.get(name)?.told !== told) drawn.set(name, { told, node: draw() });
  return drawn.get(name).node;
}
export const card = (data) => kept(data.question, data, () => newCard(data));
function newCard(data) {
  const draw = RENDERERS[data.renderer] ?? table;
  return el("section", { class: `card ${data.renderer}` }, el("h2", {}, data.question), data.rows.length ? draw(data) : nothing(data.none));
}
