// The live page of a run: status.json as numbers, metrics.jsonl as curves. It shows whatever is there; what it knows has a title and a place.

import { askForToken, get, pageSettings, pause, takeTokenFromAddress } from "./api.js";
import { Chart, Series, short } from "./chart.js";

const $ = (id) => document.getElementById(id);
const EVERY = 2; // seconds
const STALE = 10; // seconds without a word of the run after which something is wrong

// Charts in the order in which they are read: title, {metric: its name in the chart}. Every other metric has a chart of its own below them.
const CHARTS = [
  ["Return (true reward)", { "train/return": "training", "eval/return": "greedy", "eval/return_sampled": "sampled" }],
  ["Predicted reward per step", { "pref/reward_mean": "mean", "pref/reward_std": "spread" }],
  ["Policy entropy", { "train/entropy": "entropy" }],
  ["Labels", { "pref/labels": "given", "pref/labels_wanted": "wanted" }],
  ["Labels per minute", { "pref/label_rate": "rate" }],
  ["Accuracy without ties", { "pref/validation_accuracy": "validation", "pref/accuracy": "training" }],
  ["Loss per label", { "pref/loss": "training", "pref/validation_loss": "validation" }],
  ["Reward version", { "pref/reward_version": "in use", "pref/version": "newest" }],
  ["Staleness, labels", { "pref/staleness": "unknown to the reward" }],
  ["Queues", { "pref/clips": "clips", "pref/waiting": "pairs waiting", "pref/leased": "pairs held" }],
  ["Dropped", { "pref/clips_dropped": "clips", "pref/loads_dropped": "loads" }],
  ["Predicted against true reward", { "pref/reward_correlation": "correlation" }],
];
// Numbers of status.json in the order in which they are read; every other one follows under its own name. "": said elsewhere.
const NOW = {
  steps: "steps", total_steps: "steps in all", labels: "labels", label_budget: "label budget", labels_wanted: "wanted now", waiting: "pairs waiting",
  leased: "pairs held", reward_version: "reward version", staleness: "staleness, labels", clips: "clips at hand", clips_dropped: "clips dropped", time: "", over: "",
};

const series = new Map(); // metric -> Series
const charts = new Map(); // group -> Chart
let cursor = "";
let rounds = 0;

async function begin() {
  takeTokenFromAddress();
  let settings;
  for (;;) {
    try {
      settings = await pageSettings();
      document.querySelector("header .button").title = settings.title;
      break;
    } catch (error) {
      trouble(error.message);
      await pause(EVERY);
    }
  }
  for (;;) {
    if (!document.hidden) {
      try {
        await update();
        trouble("");
      } catch (error) {
        trouble(error.message);
        if (error.status === 403 && settings.needs_token) await askForToken(error.message); // a labeller's
      }
    }
    await pause(EVERY);
  }
}

function trouble(text) {
  if ($("trouble").textContent !== text) $("trouble").textContent = text;
  $("trouble").hidden = !text;
}

async function update() {
  showNow(await get("v1/run"));
  if (rounds++ % 5 === 0) showPeople(await people());
  for (let more = true; more; ) {
    const found = await get(`v1/metrics?cursor=${encodeURIComponent(cursor)}`);
    if (found.reset) forget();
    ({ cursor, more } = found);
    for (const { step, ...values } of found.lines) {
      for (const [name, value] of Object.entries(values)) {
        if (!series.has(name)) series.set(name, new Series());
        series.get(name).add(step ?? series.get(name).points.length, value);
      }
    }
  }
  showCurves();
}

/** The labellers' figures; none for a token that sees the curves alone. */
async function people() {
  try {
    return (await get("v1/labellers")).labellers;
  } catch (error) {
    if (error.status !== 403) throw error;
    return {};
  }
}

function forget() {
  series.clear();
  charts.clear();
  for (const id of ["charts", "other-charts"]) $(id).replaceChildren();
}

// ---- Now

const words = (name) => spaced(name).replace(/^./, (letter) => letter.toUpperCase());
const isTable = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

function showNow({ name, status, counts }) {
  const { age, over, events, ...told } = status;
  if (name) document.title = $("name").textContent = name;
  const late = age > STALE && !over;
  $("age").textContent = age === undefined ? "" : over ? "over" : late ? `silent for ${ago(age)}` : "live";
  $("age").classList.toggle("stale", late);
  const all = { ...told, ...counts }; // labels go on when the run is over, or silent
  const names = [...Object.keys(NOW).filter((key) => NOW[key] && key in all), ...Object.keys(all).filter((key) => !(key in NOW))];
  fill($("now"), names.filter((key) => !isTable(all[key])).map((key) => row(NOW[key] ?? spaced(key), shown(all[key]), "div")));
  fill($("parts"), names.filter((key) => isTable(all[key]) && Object.keys(all[key]).length).map((key) => part(words(key), all[key])));
  $("events").hidden = !events?.length;
  fill($("event-list"), [...(events ?? [])].reverse().map(({ time, role, what, restarts }) => element("li", `${clock(time)}  ${role}: ${what}; start ${restarts + 1}`)));
}

const clock = (seconds) => new Date(1000 * seconds).toLocaleTimeString();
const spaced = (name) => name.replace(/[_/]+/g, " ");
const ago = (seconds) => (seconds < 120 ? `${Math.round(seconds)} s` : seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`);
const shown = (value) => (Array.isArray(value) ? value.map(shown).join(", ") || "–" : typeof value === "boolean" ? (value ? "yes" : "no") : isTable(value) ? told(value) : short(value));
const told = (table) => Object.entries(table).map(([key, value]) => `${key.replace(/_/g, " ")} ${shown(value)}`).join(" · ");

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function row(name, value, wrap) {
  const pair = [element("dt", name), element("dd", value)];
  if (!wrap) return pair;
  const made = element(wrap);
  made.append(...pair);
  return made;
}

function part(title, table) {
  const made = element("div", undefined, "card");
  made.append(element("h3", title), Object.values(table).every(isTable) ? tableOf(table) : listOf(table));
  return made;
}

function listOf(values) {
  const list = element("dl");
  list.append(...Object.entries(values).flatMap(([key, value]) => row(words(key), shown(value))));
  return list;
}

/** Rows by name, with a column for everything that one of them says. */
function tableOf(rows) {
  const columns = [...new Set(Object.values(rows).flatMap(Object.keys))];
  const made = element("table");
  const head = element("tr");
  head.append(element("th", ""), ...columns.map((column) => element("th", spaced(column))));
  const body = Object.entries(rows).map(([name, values]) => {
    const one = element("tr");
    one.append(element("td", spaced(name)), ...columns.map((column) => element("td", shown(values[column]))));
    return one;
  });
  for (const [tag, lines] of [["thead", [head]], ["tbody", body]]) {
    const place = element(tag);
    place.append(...lines);
    made.append(place);
  }
  return made;
}

/** Replaces what is in an element only where it says something else, so that a reader's place and selection stay. */
function fill(place, items) {
  const before = [...place.children];
  items.forEach((item, n) => {
    if (!before[n]) place.append(item);
    else if (!before[n].isEqualNode(item)) before[n].replaceWith(item);
  });
  before.slice(items.length).forEach((item) => item.remove());
}

function showPeople(labellers) {
  const percent = (value) => (value === null || value === undefined ? "–" : `${Math.round(100 * value)} %`);
  const rows = Object.entries(labellers).map(([name, one]) => {
    const made = element("tr");
    const agreement = one.shared ? `${percent(one.agreement)} of ${one.shared}` : "–";
    const seconds = one.seconds === null || one.seconds === undefined ? "–" : one.seconds.toFixed(1);
    made.append(element("td", name, one.active ? (one.doubts?.length ? "doubt" : "") : "gone"));
    const gold = one.gold ? `${one.gold_right} of ${one.gold}` : "–";
    for (const value of [one.labels, one.ties, one.skips, one.flags, one.revoked, one.late, seconds, percent(one.left_share), agreement, percent(one.noise), gold]) made.append(element("td", value));
    return made;
  });
  $("people").hidden = !rows.length;
  fill($("labellers"), rows);
  const doubtful = Object.entries(labellers).filter(([, one]) => one.active && one.doubts?.length);
  fill($("doubts"), doubtful.map(([name, { doubts }]) => element("p", `Look at ${name}: ${doubts.join("; ")}.`, "doubt")));
}

// ---- Curves

/** The charts of the metrics that there are: [title, {metric: name}, known or not]. Unknown names of three parts, a/b/c, share one with their siblings. */
function groups() {
  const found = CHARTS.map(([title, names]) => [title, Object.fromEntries(Object.entries(names).filter(([name]) => series.has(name))), true]);
  const known = new Set(CHARTS.flatMap(([, names]) => Object.keys(names)));
  const others = new Map();
  for (const name of [...series.keys()].filter((one) => !known.has(one)).sort()) {
    const parts = name.split("/");
    const group = parts.length > 2 ? parts.slice(0, -1).join("/") : name;
    if (!others.has(group)) others.set(group, {});
    if (Object.keys(others.get(group)).length < 6) others.get(group)[name] = spaced(parts.at(-1));
  }
  return [...found.filter(([, names]) => Object.keys(names).length), ...[...others].map(([group, names]) => [words(group), names, false])];
}

function showCurves() {
  const all = groups();
  $("no-curves").hidden = all.length > 0;
  $("others").hidden = all.every(([, , known]) => known);
  for (const [place, [title, names, known]] of all.entries()) {
    const grid = $(known ? "charts" : "other-charts");
    let chart = charts.get(title);
    if (chart?.lines.length !== Object.keys(names).length) {
      chart?.figure.remove();
      chart = chartOf(title, names);
      charts.set(title, chart);
    }
    chart.figure.dataset.place = place;
    const after = [...grid.children].find((figure) => Number(figure.dataset.place) > place || !figure.dataset.place);
    if (chart.figure.parentElement !== grid) grid.insertBefore(chart.figure, after ?? null);
    chart.draw();
  }
}

function chartOf(title, names) {
  const figure = element("figure", undefined, "card");
  const caption = element("figcaption");
  caption.append(element("b", title), element("span", "", "last"));
  figure.append(caption, element("p", Object.keys(names).join(", "), "name"), element("div", undefined, "legend"));
  return new Chart(figure, title, Object.entries(names).map(([metric, name]) => [name, series.get(metric)]));
}

begin();
