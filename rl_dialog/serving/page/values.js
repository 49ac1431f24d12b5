// What the bot expected of each token: its colour by Q - V, and its numbers on hover, tap or focus.

const scale = { largest: 0 };
const number = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

/** 0.25 -> "0.25", -1 -> "−1", null -> "none". */
export function figure(value, { sign = false } = {}) {
  if (value === null || value === undefined) return "none";
  const text = number.format(Math.abs(value));
  if (value < 0 && text !== "0") return `−${text}`;
  return sign && text !== "0" ? `+${text}` : text;
}

/** An empty place for the tokens of one reply: one tab stop, arrow keys move inside. */
export function tokenRow() {
  const row = document.createElement("div");
  row.className = "tokens";
  row.setAttribute("role", "listbox");
  row.setAttribute("aria-orientation", "horizontal");
  row.setAttribute("aria-label", "Tokens of the reply with their values; the arrow keys move between them");
  row.addEventListener("keydown", move);
  return row;
}

/** Adds tokens {token, q, v, advantage, logprob} to a row. */
export function addTokens(row, tokens) {
  for (const token of tokens) {
    const first = row.childElementCount === 0;
    const place = document.createElement("span");
    place.className = "token";
    place.textContent = row.textContent ? token.token : token.token.trimStart(); // the reply is shown without the space before it
    place.tabIndex = first ? 0 : -1;
    place.setAttribute("role", "option");
    place.setAttribute("aria-selected", "false");
    place.setAttribute("aria-label", `${spoken(token, "no characters")}: ${facts(token).map((fact) => fact.join(" ")).join(", ")}`);
    if (typeof token.advantage === "number") {
      place.classList.add(token.advantage < 0 ? "worse" : "better");
      place.style.setProperty("--size", Math.abs(token.advantage));
      widen(Math.abs(token.advantage));
    }
    place.addEventListener("pointerenter", () => showDetail(place, token));
    place.addEventListener("pointerleave", hideSoon);
    place.addEventListener("focus", () => select(place, token));
    place.addEventListener("blur", hideDetail);
    row.append(place);
  }
}

/** Adds what the reply says beyond its tokens: bytes at its end that never became a character. */
export function endTokens(row, text) {
  const shown = row.textContent;
  if (text.startsWith(shown)) row.append(text.slice(shown.length));
}

/** Forgets the scale of an earlier chat. */
export function resetScale() {
  scale.largest = 0;
  writeScale();
}

function widen(size) {
  if (size <= scale.largest) return;
  scale.largest = size;
  writeScale();
}

/** Full colour stands for the largest |Q - V| seen in this chat, so replies of one chat can be compared. */
function writeScale() {
  document.documentElement.style.setProperty("--largest", scale.largest || 1);
  document.getElementById("legend-low").textContent = scale.largest ? figure(-scale.largest) : "worse";
  document.getElementById("legend-high").textContent = scale.largest ? figure(scale.largest, { sign: true }) : "better";
}

/** A token without characters is the last one, which ends the reply, or a part of a character that the next one completes. */
function spoken(token, empty) {
  if (token.token === "") return empty;
  return token.token.trim() || (token.token.includes("\n") ? "new line" : "space");
}

function facts(token) {
  return [
    ["Q", figure(token.q)],
    ["V", figure(token.v)],
    ["Q − V", figure(token.advantage, { sign: true })],
    ["log p", figure(token.logprob)],
  ];
}

function move(event) {
  const places = [...event.currentTarget.children];
  const here = places.indexOf(document.activeElement);
  const steps = { ArrowRight: here + 1, ArrowDown: here + 1, ArrowLeft: here - 1, ArrowUp: here - 1, Home: 0, End: places.length - 1 };
  if (event.key === "Escape") hideDetail();
  if (!(event.key in steps)) return;
  event.preventDefault();
  places[Math.min(Math.max(steps[event.key], 0), places.length - 1)]?.focus();
}

function select(place, token) {
  for (const other of place.parentElement.children) {
    other.tabIndex = other === place ? 0 : -1;
    other.setAttribute("aria-selected", String(other === place));
  }
  showDetail(place, token);
}

const detail = document.getElementById("detail");
let hiding = 0;

function showDetail(place, token) {
  clearTimeout(hiding);
  const empty = place.nextElementSibling ? "a part of the next character" : "end of the reply";
  detail.querySelector(".piece").textContent = token.token ? `“${token.token.replaceAll("\n", "↵")}”` : empty;
  detail.querySelector("dl").replaceChildren(...facts(token).flatMap(([name, value]) => [element("dt", name), element("dd", value)]));
  detail.hidden = false;
  const word = place.getClientRects()[0] ?? place.getBoundingClientRect(); // the first line of a token that wraps
  const box = detail.getBoundingClientRect();
  const above = word.top - box.height - 6;
  detail.style.left = `${Math.min(Math.max(8, word.left), document.documentElement.clientWidth - box.width - 8)}px`;
  detail.style.top = `${above < 8 ? word.bottom + 6 : above}px`;
}

function hideSoon() {
  clearTimeout(hiding);
  hiding = setTimeout(hideDetail, 200); // time to reach the numbers with the pointer
}

function hideDetail() {
  clearTimeout(hiding);
  detail.hidden = true;
}

function element(name, text) {
  const made = document.createElement(name);
  made.textContent = text;
  return made;
}

detail.addEventListener("pointerenter", () => clearTimeout(hiding));
detail.addEventListener("pointerleave", hideSoon);
document.addEventListener("keydown", (event) => event.key === "Escape" && hideDetail());
document.addEventListener("scroll", hideDetail, { capture: true, passive: true });
