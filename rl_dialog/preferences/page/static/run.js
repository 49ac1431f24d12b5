// The live page of a run: status.json as numbers, metrics.jsonl as curves. It shows whatever is there; what it knows has a title and a place.

import { get, pageSettings, pause, takeTokenFromAddress } from "./api.js";
import { Chart, Series, short } from "./chart.js";

const $ = (id) => document.getElementById(id);
const EVERY = 2; // seconds
const STALE = 10; // seconds without a word of the run after which something is wrong

// Known metrics in the order in which they are read, by the end of their names; everything else follows under its own name.
const KNOWN = [
  [/return|episode_reward/, /predict|learned/, "Return (true)"],
  [/(predicted|learned)_(return|reward)/, null, "Predicted reward"],
  [/entropy/, /coef/, "Policy entropy"],
  [/labels_per_(minute|hour|second)|label_rate/, null, "Label rate"],
  [/(^|[/_])labels$/, null, "Labels"],
  [/accuracy/, null, "Accuracy without ties"],
  [/reward_version|(^|\/)version$/, null, "Reward version"],
  [/staleness/, null, "Staleness of the reward"],
  [/depth|queue|waiting/, /drop/, "Queues"],
  [/drop/, /out/, "Dropped"],
  [/tie/, null, "Ties"],
  [/loss/, null, "Loss"],
];

const series = new Map(); // metric -> Series
const charts = new Map(); // group -> Chart
let cursor = "";

async function begin() {
  takeTokenFromAddress();
  for (;;) {
    try {
      const settings = await pageSettings();
      document.querySelector("header .button").title = settings.title;
      break;
    } catch (error) {
      trouble(error.message);
      await pause(EVERY);
    }
  }
  for (;;) {
    if (!document.hidden) await update().then(() => trouble(""), (error) => trouble(error.message));
    await pause(EVERY);
  }
}

function trouble(text) {
  if ($("trouble").textContent !== text) $("trouble").textContent = text;
  $("trouble").hidden = !text;
}

async function update() {
  const [run, people] = [await get("v1/run"), await get("v1/labellers")];
  showNow(run);
  showPeople(people.labellers);
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

function forget() {
  series.clear();
  charts.clear();
  $("charts").replaceChildren();
}

// ---- Now

const words = (name) => name.replace(/[_/]+/g, " ").replace(/^./, (letter) => letter.toUpperCase());
const isTable = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

function showNow({ name, status, counts }) {
  const { age, ...told } = status;
  if (name) document.title = $("name").textContent = name;
  const late = age !== undefined && age > STALE;
  $("age").textContent = age === undefined ? "" : late ? `silent for ${ago(age)}` : "live";
  $("age").classList.toggle("stale", late);
  const plain = Object.entries(told).filter(([, value]) => !isTable(value));
  const own = { labels: counts.labels, waiting: counts.waiting, "being answered": counts.leased };
  const tiles = [...plain, ...Object.entries(own).filter(([key]) => !(key in told))];
  fill($("now"), tiles.map(([key, value]) => row(words(key), shown(value), "div")));
  const parts = Object.entries(told).filter(([, value]) => isTable(value) && Object.keys(value).length);
  fill($("parts"), parts.map(([key, value]) => part(words(key), value)));
}

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
  const list = element("dl");
  list.append(...Object.entries(table).flatMap(([key, value]) => row(words(key), shown(value))));
  made.append(element("h3", title), list);
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
    made.append(element("td", name, one.active ? "" : "gone"));
    for (const value of [one.labels, one.ties, one.skips, one.revoked, one.late, seconds, percent(one.left_share), agreement, percent(one.noise)]) made.append(element("td", value));
    return made;
  });
  $("people").hidden = !rows.length;
  fill($("labellers"), rows);
}

// ---- Curves

/** The chart that a metric belongs to: names with three parts (a/b/c) share one with their siblings. */
function groupOf(name) {
  const parts = name.split("/");
  return parts.length > 2 ? parts.slice(0, -1).join("/") : name;
}

function titleOf(group) {
  const place = KNOWN.findIndex(([fits, not]) => fits.test(group) && !(not && not.test(group)));
  return place < 0 ? [KNOWN.length, words(group.split("/").slice(1).join(" ") || group)] : [place, KNOWN[place][2]];
}

function showCurves() {
  const groups = new Map();
  for (const name of series.keys()) groups.set(groupOf(name), [...(groups.get(groupOf(name)) ?? []), name]);
  $("no-curves").hidden = groups.size > 0;
  for (const [group, names] of groups) {
    const known = charts.get(group);
    if (known?.lines.length === Math.min(6, names.length)) {
      known.draw();
      continue;
    }
    known?.figure.remove();
    charts.set(group, chartOf(group, names.slice(0, 6)));
  }
  const order = (figure) => Number(figure.dataset.place);
  const sorted = [...$("charts").children].sort((a, b) => order(a) - order(b) || a.dataset.group.localeCompare(b.dataset.group));
  sorted.forEach((figure, n) => $("charts").children[n] !== figure && $("charts").insertBefore(figure, $("charts").children[n]));
}

function chartOf(group, names) {
  const [place, title] = titleOf(group);
  const figure = element("figure", undefined, "card");
  Object.assign(figure.dataset, { place, group });
  const caption = element("figcaption");
  caption.append(element("b", title), element("span", "", "last"));
  figure.append(caption, element("p", group, "name"), element("div", undefined, "legend"));
  $("charts").append(figure);
  const chart = new Chart(figure, title, names.map((name) => [name.split("/").at(-1).replace(/_/g, " "), series.get(name)]));
  chart.draw();
  return chart;
}

begin();
