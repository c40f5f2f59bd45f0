// The pages: each takes what is chosen and gives a view, a node and perhaps a way to follow a change without being built again.

import { card, el, glyph, kept, legend, lines, network, nothing, records, said, strip, table, withUnit } from "./draw.js";

const plain = (page, wide) => async ({ state, ask, go }) => {
  const { extent, panels } = await ask("panels", { page, run: state.run, round: state.round });
  const cards = Object.values(panels).map((data) => card(data));
  return { node: el("div", {}, wide ? rounds(extent, state, go) : "", el("div", { class: "cards" }, ...cards)) };
};

// The slider over rounds. Without a choice the page stays with the last one.
function rounds(extent, state, go) {
  if (!extent.rounds) return nothing();
  const [first, last] = extent.rounds;
  return el("label", { class: "slider" }, el("span", {}, `round ${extent.round}`),
    el("input", { id: "round", type: "range", min: first, max: last, value: extent.round, oninput: (event) => go({ round: +event.target.value, epoch: null }) }),
    el("button", { onclick: () => go({ round: null, epoch: null }), class: state.round === null ? "chosen" : "", title: "stay with the last round" }, "latest"));
}

let player = null;
export function stop() {
  clearInterval(player);
  player = null;
}

async function population(context) {
  const { state, ask, go } = context;
  const first = await ask("panels", { names: "hosts,lives", run: state.run, round: state.round, epoch: state.epoch ?? undefined });
  const { extent } = first, { slots, epochs, round } = extent;
  if (!extent.rounds) return { node: el("div", {}, nothing()) };
  const frames = new Map([[state.epoch ?? epochs, records(first.panels.hosts)]]);
  const frame = async (epoch) => {
    if (!frames.has(epoch)) frames.set(epoch, records((await ask("panels", { names: "hosts", run: state.run, round, epoch })).panels.hosts));
    return frames.get(epoch);
  };
  const tiles = new Map(frames.get(state.epoch ?? epochs).map((host) => [host.row, tileOf(host.row, slots, () => go({ row: host.row }))]));
  const slider = el("input", { id: "epoch", type: "range", min: 1, max: epochs, oninput: (event) => go({ epoch: +event.target.value }) });
  const clock = el("span"), detail = el("aside", { id: "detail" });
  const play = el("button", { id: "play", title: "watch them grow", onclick: () => (player ? stop() : start()) }, "▶ grow");
  const start = () => {
    let epoch = current() >= epochs ? 0 : current();
    player = setInterval(() => (epoch >= epochs ? stop() : go({ epoch: ++epoch })), 450);
  };
  let chosen = state;
  const current = () => Math.min(epochs, chosen.epoch ?? epochs);
  const node = el("div", {}, el("div", { class: "controls" }, rounds(extent, state, go),
    el("label", { class: "slider" }, clock, slider, play)), legend("Choose a host to see what grew in it, and why."),
  el("div", { class: "population" }, el("div", { class: "tiles" }, ...[...tiles.values()].map((each) => each.node)), detail),
  kept("lives", [slots, first.panels.lives], () => el("section", { class: "card" }, el("h2", {}, first.panels.lives.question), table(first.panels.lives, {
    show: { slot: (slot) => slots[slot] ?? said(slot) }, onclick: (life) => go({ row: life.row, epoch: life.decided ?? life.born }) }))));
  const update = async (now) => {
    chosen = now;
    const epoch = current();
    slider.value = epoch;
    clock.textContent = `epoch ${epoch} of ${epochs}`;
    const hosts = await frame(epoch);
    if (chosen !== now) return;
    for (const host of hosts) tiles.get(host.row)?.update(host, now.row === host.row, epoch);
    detail.hidden = now.row === null;
    detail.parentElement.classList.toggle("open", !detail.hidden);
    if (now.row !== null) await inspect(detail, { ...context, state: now }, extent, hosts.find((host) => host.row === now.row), () => chosen !== now);
  };
  await update(state);
  const move = (now) => { // what a reader moves is seen to move; news are not, which is cheaper
    node.classList.add("moving");
    return update(now);
  };
  return { node, update: move };
}

// Tiles stay from round to round, and change only where their host does.
const tiled = new Map();
function tileOf(row, slots, onclick) {
  const key = JSON.stringify([row, slots]);
  if (!tiled.has(key)) tiled.set(key, tile(row, slots, onclick));
  return tiled.get(key);
}
function tile(row, slots, onclick) {
  const picture = network(slots, false), gain = el("span"), did = el("b");
  const node = el("button", { class: "tile", "data-row": row, onclick }, el("span", { class: "name" }, el("span", {}, `host ${row} `, did), gain), picture.node);
  let shown = "";
  const update = (host, chosen, epoch) => {
    const over = host.done && host.epoch < epoch, told = JSON.stringify([host, chosen, over]);
    if (told === shown) return;
    shown = told;
    picture.update(host.stages, host.blueprints, host.alphas);
    gain.textContent = said(host.gain, "points");
    gain.className = host.gain > 0 ? "up" : host.gain < 0 ? "down" : "dim";
    did.textContent = host.op && host.op !== "WAIT" ? glyph(host.op) : "";
    node.className = `tile${chosen ? " chosen" : ""}${over ? " over" : ""}${host.rollbacks ? " rolled" : ""}`;
    node.title = `scenario ${host.scenario}: score ${withUnit(host.score, "%")}, twin ${withUnit(host.twin, "%")}, ${host.op}${host.rollbacks ? `, rolled back ${host.rollbacks} times` : ""}`;
  };
  return { node, update };
}

// One host: its network, its life, the decision of the epoch and what speaks for it.
const known = new Map();
export const forget = () => known.clear();
async function inspect(place, { state, ask, go }, extent, host, late) {
  if (!host) return place.replaceChildren(el("p", { class: "dim" }, `There is no host ${state.row} in this round.`));
  const key = JSON.stringify([state.run, extent.round, state.row]), epoch = host.epoch;
  if (!known.has(key)) known.set(key, (await ask("panels", { page: "host", run: state.run, round: extent.round, row: state.row })).panels);
  if (late()) return;
  const panels = known.get(key), seeds = records(panels.slots), decisions = records(panels.decisions), steps = records(panels.host);
  const picture = network(extent.slots, true), choose = (number) => go({ epoch: number });
  picture.update(host.stages, host.blueprints, host.alphas);
  const said_ = decisions.find((each) => each.epoch === epoch), step = steps.find((each) => each.epoch === epoch);
  const acts = { ...panels.decisions, rows: panels.decisions.rows.filter((row) => row[1] !== "WAIT") };
  const scores = { ...panels.host, columns: ["epoch", "score", "twin"], rows: panels.host.rows.map((row) => row.slice(0, 3)) };
  const kept = place.dataset.key === key ? place.querySelector(".curve") : null;
  place.dataset.key = key;
  place.replaceChildren(
    el("h2", {}, `Host ${state.row}, round ${extent.round}, epoch ${epoch} `, el("button", { class: "close", title: "close", onclick: () => go({ row: null }) }, "✕")),
    picture.node, strip(extent.slots, decisions.length, seeds, decisions, epoch, choose),
    why(said_, step, seeds, decisions, extent.slots),
    kept ?? el("div", { class: "curve" }, el("h3", {}, panels.host.question), lines(scores)),
    el("h3", {}, panels.decisions.question), acts.rows.length
      ? table(acts, { onclick: (each) => choose(each.epoch), selected: (each) => each.epoch === epoch, show: { slot: (slot) => (slot === null ? "-" : extent.slots[slot] ?? said(slot)) } })
      : el("p", { class: "dim" }, "It waited in every epoch."));
}

function why(decision, step, seeds, decisions, slots) {
  if (!decision) return nothing();
  const name = (slot) => slots[slot] ?? String(slot), { op, slot, blueprint } = decision;
  const what = [op, blueprint, slot === null ? "" : `in ${name(slot)}`].filter(Boolean).join(" ");
  const parts = ["op", "slot", "blueprint"].filter((head) => decision[`chance_${head}`] !== null).map((head) => `${head} ${withUnit(decision[`chance_${head}`], "%")}`);
  const seen = seeds.filter((seed) => seed.epoch === decision.epoch - 1).map((seed) => {
    const [kind, value] = seed.contribution === null ? ["would bring", seed.preview] : ["brings", seed.contribution];
    const worth = value === null ? "not measured" : `${kind} ${said(value, "points")}${seed.error === null ? "" : ` ± ${said(seed.error)}`} points`;
    return el("li", {}, `${name(seed.slot)}: ${seed.blueprint}, ${seed.stage}, alpha ${said(seed.alpha, "alpha")}, ${worth}`);
  });
  const facts = {
    "how surely": decision.chance === null ? "not drawn" : `${withUnit(decision.chance, "%")}${parts.length ? `: ${parts.join(", ")}` : ""}`,
    "expected from here on": withUnit(decision.value, "points"), "what followed": withUnit(decision.followed, "points"),
    "this epoch": step ? `reward ${withUnit(step.reward, "points")}; score ${withUnit(step.score, "%")}, twin ${withUnit(step.twin, "%")}; ${said(step.params)} parameters grown` : "-",
    ...(decision.fate ? { "what became of the seed": decision.fate } : {}), ...(decision.rolled_back ? { governor: "rolled this host back" } : {}) };
  return el("section", { id: "why", class: "why" }, el("h3", {}, `${glyph(op)} ${what}`),
    el("dl", {}, ...Object.entries(facts).flatMap(([key, value]) => [el("dt", {}, key), el("dd", {}, value)])),
    el("h4", {}, decision.epoch === 1 ? "It saw a host without seeds." : `It saw, after epoch ${decision.epoch - 1}:`),
    decision.epoch > 1 ? el("ul", {}, ...(seen.length ? seen : [el("li", {}, "no seed")])) : "");
}

const VERDICTS = { better: "up", worse: "down" };
async function comparison({ ask, runs }) {
  const [data, ...exams] = await Promise.all([ask("compare"), ...runs.filter((run) => !run.broken).map((run) =>
    ask("panels", { names: "exams", run: run.run }).then(({ panels }) => [run, panels.exams]))]);
  const rows = exams.flatMap(([run, table_]) => table_.rows.filter((row) => row[0] === "learned").map((row) => [`${run.name} (${run.run})`, ...row.slice(1)]));
  const curves = { ...(exams[0]?.[1] ?? { columns: [], units: {} }), rows };
  const verdict = (said_) => el("b", { class: VERDICTS[said_] ?? "dim" }, said_);
  return { node: el("div", { class: "cards" }, el("section", { class: "card table" }, el("h2", {}, data.question), table(data, { show: { verdict } })),
    el("section", { class: "card" }, el("h2", {}, "Examinations of every run, with 95 % intervals"), lines(curves))) };
}

export const PAGES = { overview: plain("overview"), population, tamiyo: plain("tamiyo", true), rewards: plain("rewards", true), compare: comparison };
