// The page as a whole: what is chosen stands in the address, what is shown follows from it and from the stores.

import { el, records, redraw, said } from "./draw.js";
import { PAGES, forget, stop } from "./pages.js";

const $ = (id) => document.getElementById(id);
const NUMBERS = ["run", "round", "epoch", "row"];
let runs = [], view = null, shown = "", turn = 0;

function chosen() {
  const given = new URLSearchParams(location.hash.slice(1)), page = given.get("page");
  const whole = (name) => (/^\d+$/.test(given.get(name) ?? "") ? Number(given.get(name)) : null);
  const state = Object.fromEntries(NUMBERS.map((name) => [name, whole(name)]));
  return { ...state, run: state.run ?? 0, page: Object.hasOwn(PAGES, page ?? "") ? page : "overview" };
}

function go(change) {
  const state = { ...chosen(), ...change };
  const given = Object.entries(state).filter(([, value]) => value !== null);
  history.replaceState(null, "", `#${new URLSearchParams(given)}`);
  return show();
}

// What was answered before is not sent again while it is true: then the very same object is the answer.
const held = new Map();
async function ask(name, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined);
  const url = `api/${name}?${new URLSearchParams(given)}`, before = held.get(url);
  const answer = await fetch(url, before ? { headers: { "If-None-Match": before.tag } } : {});
  if (answer.status === 304) return before.body;
  const body = await answer.json().catch(() => ({ error: "The server's answer cannot be read." }));
  if (!answer.ok) throw new Error(body.error ?? answer.statusText);
  if (held.size > 40) held.clear();
  held.set(url, { tag: answer.headers.get("ETag"), body });
  return body;
}

function complain(error) {
  $("error").hidden = !error;
  $("error").textContent = error ? `${error.message}` : "";
}

// Draws what is chosen. A view that can follow is not built again unless stores have changed.
async function show(fresh = false) {
  const state = chosen(), mine = ++turn, key = JSON.stringify([state.page, state.run, state.round]);
  header(state);
  try {
    if (!fresh && view?.update && shown === key) await view.update(state);
    else {
      const next = await PAGES[state.page]({ state, ask, go, runs });
      if (mine !== turn) return;
      const { scrollX, scrollY } = window;
      [view, shown] = [next, key];
      $("main").replaceChildren(next.node);
      if (fresh) window.scrollTo(scrollX, scrollY);
    }
    complain(null);
  } catch (error) {
    if (mine === turn) complain(error);
  }
}

let offered = "";
function header(state) {
  const run = runs[state.run], offer = JSON.stringify([state.page, state.run, runs.map((each) => [each.name, each.path])]);
  if (offer !== offered) { // an open list of runs is left alone while nothing in it changes
    offered = offer;
    $("pages").replaceChildren(...Object.keys(PAGES).map((page) =>
      el("button", { class: page === state.page ? "chosen" : "", "data-page": page, onclick: () => { stop(); go({ page }); } }, page)));
    $("run").replaceChildren(...runs.map((each) => el("option", { value: each.run, selected: each.run === state.run, title: each.path },
      runs.filter((other) => other.name === each.name).length > 1 ? `${each.name} (${each.run})` : each.name)));
  }
  const about = run?.state ? records(run.state)[0] : null;
  const words = !run ? "no run" : run.broken ? "broken" : [about.state, `round ${about.round}${about.planned === null ? "" : ` of ${about.planned}`}`,
    about.age === null ? "" : `${said(about.age, "s")} ago`, about.open ? `${about.open} open incident${about.open > 1 ? "s" : ""}` : ""].filter(Boolean).join(" · ");
  $("state").textContent = words;
  $("state").className = `pill ${about?.open || run?.broken ? "down" : about?.state === "running" ? "up" : ""}`;
  if (run?.broken) complain(new Error(run.broken));
  document.title = `${run ? run.name : "no run"}: Esper`;
}

// Between two drawings for news pass so many milliseconds, and so many times as long as the last one took: whoever trains here
// too shall not notice.
const PAUSE = 8000, TIMES = 200;
let stream = null, heard = null, drawn = null, waiting = null, due = 0; // versions of the stores, a timer, when it may be set for
function listen() {
  if (stream || document.hidden) return;
  stream = new EventSource("api/events");
  stream.onopen = () => { $("live").textContent = "● live"; };
  stream.onerror = () => { $("live").textContent = "○ not connected"; };
  stream.onmessage = ({ data }) => {
    heard = data;
    drawn ??= heard; // what was drawn first
    if (heard === drawn) tell();
    else plan();
  };
}
const plan = () => { waiting ??= setTimeout(follow, Math.max(0, due - performance.now())); };
async function tell() {
  try {
    runs = await ask("runs");
    header(chosen());
  } catch (error) { complain(error); }
}
async function follow() {
  const began = performance.now(), version = heard;
  await tell();
  forget();
  await show(true);
  await painted();
  const now = performance.now();
  [waiting, drawn, due] = [null, version, now + Math.max(PAUSE, TIMES * (now - began))];
  if (heard !== drawn && !document.hidden) plan();
}
const painted = () => new Promise((done) => { requestAnimationFrame(() => setTimeout(done)); setTimeout(done, 1000); });
function rest() { // a hidden page costs nothing
  if (!document.hidden) return listen();
  stop();
  clearTimeout(waiting);
  stream?.close();
  stream = waiting = null;
}

const repaint = () => { redraw(); show(true); };
function dress(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
}
$("theme").addEventListener("click", () => {
  const dark = getComputedStyle(document.documentElement).colorScheme.trim() === "dark"
    || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  dress(dark ? "light" : "dark");
  localStorage.setItem("esper theme", document.documentElement.dataset.theme);
  repaint();
});
$("run").addEventListener("change", (event) => { stop(); go({ run: +event.target.value, round: null, epoch: null, row: null }); });
addEventListener("hashchange", () => show());
document.addEventListener("visibilitychange", rest);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
dress(localStorage.getItem("esper theme"));
try { runs = await ask("runs"); } catch (error) { complain(error); }
await show();
listen();
