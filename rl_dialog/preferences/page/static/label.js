// The page for labelling: one pair on the screen, the next one ready behind it, answers on their way to the log.
// Text from the server is only ever set as text, never as markup.

import { askForToken, get, getBlob, kept, pageSettings, pause, post, takeTokenFromAddress } from "./api.js";
import { markDifference } from "./difference.js";
import { exampleOf, markdown, messageOf } from "./markdown.js";
import { Outbox } from "./outbox.js";
import { Player } from "./player.js";

const $ = (id) => document.getElementById(id);
const READY = 2; // pairs held at a time: the one on the screen and the next
const EMPTY = 1; // seconds between two questions for a pair while there is none
const FLASH = 0.12; // seconds that an answer is shown before the next pair
const SPEEDS = [0.25, 0.5, 1, 2, 4];
const CHOICES = { left: "left is better", right: "right is better", tie: "equal", skip: "can’t tell" };
const STRENGTHS = { 1: "slightly", 2: "much" };
const READING = 8; // seconds that a notice stays
const DECIDING = 30; // where something can be done about it
const NO_PLAN = { goal: 0, session: 0, strength: false, reasons: [], guideline: "" };
const KEYS = {
  ArrowLeft: "left", l: "left", ArrowRight: "right", r: "right", ArrowUp: "tie", e: "tie", ArrowDown: "skip", " ": "skip", Enter: "skip",
};

const sides = [$("left"), $("right")];
const player = new Player(sides);
const state = {
  settings: null, // what page.json says
  queue: [], // pairs that are ours, the first one is on the screen: {query, pictures: a promise}
  shown: null, // the entry of the queue whose pictures are on the screen
  busy: false, // an answer is being shown
  answered: new Set(), // queries that were answered here
  saved: 0, // answers of this visit that the log has
  away: false,
  active: Date.now(), // when somebody last did something
  offline: false,
  status: null,
  plan: NO_PLAN, // what the status says of how the run is labelled
  remarks: { reasons: [], flag: null }, // of the pair on the screen
  difference: kept.get("difference") ?? true, // are differences of replies marked?
  plain: kept.get("plain") ?? false, // are replies shown as they were written?
  onBreak: false,
};
const outbox = new Outbox({ changed: () => tell(), done: wasTaken, refused: wasRefused });

// ---- Beginning

async function begin() {
  takeTokenFromAddress();
  $("waiting").hidden = false;
  for (;;) {
    try {
      state.settings = await pageSettings();
      break;
    } catch (error) {
      $("waiting-text").textContent = `${error.message} Trying again …`;
      await pause(2);
    }
  }
  document.title = $("title").textContent = state.settings.title;
  $("leave").hidden = !state.settings.needs_token;
  await takeBack(kept.get("queue") ?? []);
  outbox.send();
  fill();
  beat();
  watch();
}

/** Pairs that this window held before it was loaded again, as far as nobody else got them. */
async function takeBack(queries) {
  const answered = new Set(outbox.operations.map((operation) => operation.query));
  const ours = queries.filter((query) => !answered.has(query.id));
  if (!ours.length) return;
  const { held } = await post("v1/renew", { queries: ours.map((query) => query.id) }).catch(() => ({ held: [] }));
  state.queue = ours.filter((query) => held.includes(query.id)).map(entry);
  present();
}

// ---- Pairs: leased, renewed, given back

let filling = false;

async function fill() {
  if (filling) return;
  filling = true;
  while (state.queue.length < READY && !state.away) {
    try {
      const { query } = await post("v1/lease");
      state.offline = false;
      if (query && (state.away || state.queue.length >= READY)) {
        release([query.id]); // meanwhile somebody left, or took an answer back
      } else if (query) {
        state.queue.push(entry(query));
        present();
      } else {
        tell();
        await pause(EMPTY);
      }
    } catch (error) {
      state.offline = !error.status;
      tell(error.message);
      if (error.status === 403 && state.settings.needs_token) await askForToken(error.message); // an operator's, from the page of the run
      else await pause(2 * EMPTY);
    }
  }
  filling = false;
}

function entry(query) {
  return { query, pictures: pictures(query) };
}

/** The pictures of both sides; tried again until they are there. A pair whose pictures the server does not have is put aside; its lease just ends. */
async function pictures(query) {
  if (query.left.kind !== "clip") return [];
  for (;;) {
    try {
      return await Promise.all([query.left, query.right].map(async ({ id }) => createImageBitmap(await getBlob(`v1/segments/${id}.png`))));
    } catch (error) {
      if (!state.queue.some((one) => one.query === query)) return [];
      notice(`A clip could not be loaded: ${error.message}`);
      if (error.status) return putAside(query);
      await pause(2);
    }
  }
}

function putAside(query) {
  state.queue = state.queue.filter((one) => one.query !== query);
  present();
  fill();
  return [];
}

/** While somebody is there, the leases go on; when nobody is, the pairs go back for others. */
async function beat() {
  for (;;) {
    await pause(state.settings.lease / 3);
    if (Date.now() - state.active > 1000 * state.settings.idle) leave();
    else await renew();
  }
}

async function renew() {
  const queries = state.queue.map(({ query }) => query.id);
  if (!queries.length) return;
  try {
    const { held, answered } = await post("v1/renew", { queries });
    state.offline = false;
    const lost = queries.filter((id) => !held.includes(id) && !state.answered.has(id)); // an answer may have overtaken this request
    const gone = state.shown?.query.id;
    if (answered.includes(gone) && lost.includes(gone)) notice("You have answered this pair in another window. Here is another one.");
    else if (lost.includes(gone)) notice("The pair went to somebody else while this page was out of reach. Here is another one.");
    state.queue = state.queue.filter(({ query }) => !lost.includes(query.id));
    present();
    fill();
  } catch (error) {
    state.offline = !error.status;
  }
  tell();
}

/** Gives the pairs back. */
function leave() {
  if (state.away) return;
  state.away = true;
  giveBack();
  state.queue = [];
  present();
}

const giveBack = (options) => release(state.queue.map(({ query }) => query.id), options);

function release(queries, options) {
  if (queries.length) post("v1/release", { queries }, options).catch(() => {}); // else the leases end by themselves
}

function somebodyIsThere() {
  state.active = Date.now();
  if (!state.away || state.onBreak) return;
  state.away = false;
  present();
  fill();
}

for (const name of ["keydown", "pointerdown", "pointermove", "wheel", "touchstart"]) addEventListener(name, somebodyIsThere, { passive: true, capture: true });
addEventListener("pagehide", () => giveBack({ keepalive: true }));
addEventListener("pageshow", (event) => event.persisted && renew());
addEventListener("online", () => renew());
document.addEventListener("visibilitychange", () => !document.hidden && state.settings && renew());
addEventListener("beforeunload", (event) => outbox.size && event.preventDefault());

// ---- The screen

/** Shows the first pair of the queue, or that there is none. `why` is told to screen readers with it. */
async function present(why = "") {
  kept.set("queue", state.queue.map(({ query }) => query));
  if (state.shown !== state.queue[0]) clearRemarks();
  const first = state.queue[0] ?? null;
  if (state.shown === first && first) return tell();
  state.shown = null;
  for (const side of sides) side.classList.remove("chosen", "passed");
  for (const button of document.querySelectorAll(".choice")) button.classList.remove("pressed");
  if (!first) player.clear();
  $("pair").hidden = !first;
  tell();
  if (!first) {
    $("task").textContent = "";
    return;
  }
  const found = await first.pictures;
  if (state.queue[0] !== first || state.shown === first) return;
  const { query } = first;
  $("task").textContent = query.task;
  const clips = query.left.kind === "clip";
  $("pair").classList.toggle("clips", clips);
  $("pair").classList.toggle("replies", !clips);
  document.body.classList.toggle("no-clips", !clips);
  if (clips) showClips(query, found);
  else showReplies(query);
  state.shown = first;
  const kinds = { clip: "clips", reply: "replies", conversation: "conversations" };
  say(`${why}${query.task ? `${query.task} ` : ""}A pair of ${kinds[query.left.kind]}.`);
  tell();
}

function showClips(query, found) {
  $("context").hidden = true;
  sides.forEach((side, n) => {
    const clip = query[side.id];
    side.querySelector(".reply").replaceChildren();
    side.querySelector("canvas").setAttribute("aria-label", `${side.id} clip, ${found[n] ? clip.frames : 0} frames${clip.ended ? ", the episode ends" : ""}`);
  });
  player.show([query.left, query.right].map((clip, n) => ({ ...clip, picture: found[n] })));
}

function showReplies(query) {
  player.clear();
  $("context").replaceChildren(...query.left.context.map(bubble));
  $("context").hidden = query.left.context.length === 0;
  const replies = sides.map((side) => side.querySelector(".reply"));
  const whole = query.left.kind === "conversation";
  sides.forEach((side, n) => {
    replies[n].classList.toggle("text", !whole);
    if (whole) replies[n].replaceChildren(talk(query[side.id].messages));
    else write(replies[n], query[side.id].text, "assistant");
  });
  for (const reply of replies) reply.scrollTop = 0;
  $("show-difference").hidden = whole; // they are not the same but for a few words
  $("pair").classList.toggle("whole", whole);
  const marked = state.difference && !whole && markDifference(...replies);
  $("show-difference").classList.toggle("in-vain", state.difference && !marked);
  $("pair").style.setProperty("--context", `${$("context").scrollHeight}px`);
  $("pair").scrollTop = 0;
  $("context").scrollTop = $("context").scrollHeight;
}

function talk(messages) {
  const list = document.createElement("ol");
  list.className = "talk";
  list.replaceChildren(...messages.map(bubble));
  return list;
}

/** A message of a conversation, with who said it. */
function bubble({ role, content }) {
  const names = { user: "User", assistant: "Bot", system: "Instructions", tool: "Tool" };
  const item = $("message-template").content.cloneNode(true).querySelector("li");
  item.classList.add(role);
  item.querySelector(".role").textContent = names[role] ?? role;
  write(item.querySelector(".text"), content, role);
  return item;
}

/** Markdown, calls of tools, or as it was written. */
function write(place, text, role) {
  place.classList.toggle("plain", state.plain);
  place.replaceChildren(...(state.plain ? (text ? [text] : []) : messageOf(text, role)));
}

/** Turns differences or plain text on or off, for this pair and those to come. */
function toggleView(name) {
  state[name] = !state[name];
  kept.set(name, state[name]);
  tellViews();
  if (state.shown && state.shown.query.left.kind !== "clip") showReplies(state.shown.query);
}

function tellViews() {
  $("show-difference").setAttribute("aria-pressed", state.difference);
  $("show-plain").setAttribute("aria-pressed", state.plain);
}

// ---- The plan: reasons, strength, guideline, progress, breaks

/** Takes what the status says of the plan, where it is something else than before. */
function takePlan(plan) {
  if (JSON.stringify(plan) === JSON.stringify(state.plan)) return;
  state.plan = plan;
  for (const button of document.querySelectorAll(".much")) button.hidden = !plan.strength;
  $("choices").classList.toggle("strengths", plan.strength);
  for (const part of document.querySelectorAll("[data-if]")) part.hidden = !(plan[part.dataset.if]?.length ?? plan[part.dataset.if]);
  $("guide-button").hidden = !plan.guideline;
  $("reasons").hidden = !plan.reasons.length;
  $("reasons").replaceChildren(...plan.reasons.map(reasonButton));
  clearRemarks();
  if (plan.guideline && remembered("guideline") !== plan.guideline) openGuide();
}

function reasonButton(reason) {
  const button = Object.assign(document.createElement("button"), { type: "button", textContent: reason });
  button.setAttribute("aria-pressed", false);
  button.addEventListener("click", () => toggleReason(reason));
  return button;
}

function toggleReason(reason) {
  if (!state.shown || state.busy) return;
  const { reasons } = state.remarks;
  state.remarks.reasons = reasons.includes(reason) ? reasons.filter((one) => one !== reason) : [...reasons, reason];
  tellRemarks();
}

function clearRemarks() {
  state.remarks = { reasons: [], flag: null };
  tellRemarks();
}

function tellRemarks() {
  const { reasons, flag } = state.remarks;
  for (const button of $("reasons").children) button.setAttribute("aria-pressed", reasons.includes(button.textContent));
  $("flag").setAttribute("aria-pressed", flag !== null);
  $("flag").querySelector("span").textContent = flag === null ? "Flag" : "Flagged";
}

function openFlag() {
  if (!state.shown || state.busy) return;
  $("flag-text").value = state.remarks.flag ?? "";
  $("flag-drop").hidden = state.remarks.flag === null;
  $("flag-dialog").showModal();
}

function setFlag(flag) {
  state.remarks.flag = flag;
  $("flag-dialog").close();
  tellRemarks();
}

async function openGuide() {
  if ($("guide-dialog").open) return;
  const { text } = await get("v1/guideline").catch((error) => ({ text: error.message }));
  $("guide").replaceChildren(...markdown(text, { example: exampleOf }));
  if (!document.querySelector("dialog[open]")) $("guide-dialog").showModal();
  $("guide").scrollTop = 0;
  remember("guideline", state.plan.guideline);
}

/** Kept beyond this window, so that a guideline that was read does not open by itself again. */
function remember(name, value) {
  try {
    localStorage.setItem(`rl_dialog.labels.${name}`, value);
  } catch {
    kept.set(name, value);
  }
}

function remembered(name) {
  try {
    return localStorage.getItem(`rl_dialog.labels.${name}`);
  } catch {
    return kept.get(name);
  }
}

/** Answers since the last break, and when the first of them was given. */
const session = kept.get("session") ?? { answers: 0, began: Date.now() };

function countForBreak() {
  if (!session.answers) session.began = Date.now();
  session.answers += 1;
  const { session: size, goal } = state.plan;
  const own = state.status?.own.answers ?? 0;
  if (size && session.answers >= size && !(goal && own >= goal)) takeBreak(own);
  kept.set("session", session);
}

function takeBreak(own) {
  const minutes = Math.max(1, Math.round((Date.now() - session.began) / 60_000));
  const { goal } = state.plan;
  const many = `${session.answers} answers in ${minutes} minute${minutes === 1 ? "" : "s"}.`;
  $("break-text").textContent = goal ? `${many} You have given ${own.toLocaleString()} of ${goal.toLocaleString()}.` : `${many} ${own.toLocaleString()} in all.`;
  $("break-dialog").querySelector(".bar-of").hidden = !goal;
  $("break-dialog").style.setProperty("--share", goal ? Math.min(1, own / goal) : 0);
  state.onBreak = true;
  session.answers = 0;
  leave();
  $("break-dialog").showModal();
}

function endBreak() {
  if (!state.onBreak) return;
  state.onBreak = false;
  somebodyIsThere();
}

/** Is an answer being taken back? Until its pair is there again, no other one is answered. */
const undoing = () => outbox.operations.some(({ kind }) => kind === "undo");

/** Everything that says how it stands. */
function tell(problem = "") {
  const { status, away, offline } = state;
  for (const button of document.querySelectorAll(".choice")) button.disabled = !state.busy && (!state.shown || undoing());
  $("undo").disabled = !state.settings || undoing();
  $("flag").disabled = !state.shown;
  $("waiting").hidden = Boolean(state.queue.length);
  if (!state.queue.length) {
    $("waiting-title").textContent = away ? "You were away" : offline ? "No connection" : "Waiting for the next pair";
    const { goal } = state.plan;
    if (goal && status?.own.answers >= goal) {
      $("waiting-title").textContent = "You have given all your answers. Thank you!";
      $("waiting-text").textContent = `${status.own.answers.toLocaleString()} of ${goal.toLocaleString()}.`;
      return tellRest();
    }
    if (status?.over && !away && !offline && !problem) {
      $("waiting-title").textContent = "The run is over. Thank you!";
      $("waiting-text").textContent = "Should it go on, a pair appears here by itself.";
      return tellRest();
    }
    const none = status?.labels_wanted === 0 ? "No label is wanted just now. When one is, a pair appears here by itself." : "It appears here by itself.";
    $("waiting-text").textContent = away ? "Your pair went back for others. Touch the page or press a key to go on." : problem || offline ? `${problem} Trying again …`.trim() : none;
  }
  tellRest();
}

function tellRest() {
  const waiting = outbox.operations.filter(({ kind }) => kind === "answer").length;
  const many = `${waiting} answer${waiting === 1 ? "" : "s"}`;
  const fate = waiting ? `${many} ${waiting === 1 ? "is" : "are"} kept here and sent again.` : "Your last answer is taken back when it can be reached.";
  if (outbox.size && outbox.problem) notice(`${outbox.problem} ${fate} Leave this page open.`, "unsent");
  else if ($("notice").dataset.kind === "unsent") notice("");
  $("saved").textContent = undoing() ? "taking back …" : waiting ? `${many} being saved` : state.saved ? `${state.saved} saved` : "";
  showStatus(state.status);
}

/** A labeller's own progress; that of the run for those who look after it. */
function showStatus(status) {
  if (!status) return;
  const { counts, own, sees_all: seesAll, labels_wanted: wanted, label_budget: budget } = status;
  const { goal, session: size } = state.plan;
  const of = goal || (seesAll ? budget : 0);
  const done = goal || !seesAll ? own.answers : counts.labels;
  const name = goal || !seesAll ? "answer" : "label";
  const parts = [of ? `${done.toLocaleString()} of ${of.toLocaleString()} ${name}s` : `${done.toLocaleString()} ${name}${done === 1 ? "" : "s"}`];
  if (size) parts.push(`break in ${Math.max(0, size - session.answers)}`);
  else if (wanted !== null) parts.push(`${wanted} wanted now`);
  else if (seesAll) parts.push(`${counts.waiting} pair${counts.waiting === 1 ? "" : "s"} waiting`);
  $("numbers").textContent = parts.join(" · ");
  $("progress").hidden = !of;
  if (of) {
    $("progress").style.setProperty("--share", Math.min(1, done / of));
    for (const [key, value] of [["valuemin", 0], ["valuemax", of], ["valuenow", done]]) $("progress").setAttribute(`aria-${key}`, value);
  }
}

let clearing = 0;

/** Says something above the pair. "unsent" stays until all is sent; `action`: a button behind the text. */
function notice(text, kind = "", action = null) {
  clearTimeout(clearing);
  if (action) $("notice").replaceChildren(`${text} `, action);
  else if ($("notice").textContent !== text) $("notice").textContent = text;
  $("notice").dataset.kind = kind;
  $("notice").hidden = !text;
  if (text && kind !== "unsent") clearing = setTimeout(() => notice(""), 1000 * (action ? DECIDING : READING));
}

function say(text) {
  $("announcer").textContent = text;
}

async function watch() {
  for (;;) {
    if (!document.hidden) {
      await get("v1/status").then((status) => ((state.status = status), takePlan(status.plan)), () => {});
      $("run-link").hidden = !state.status?.sees_run;
      tell();
    }
    await pause(4);
  }
}

// ---- Answers

async function choose(choice, much = false) {
  if (!state.shown || state.busy || undoing()) return;
  state.busy = true;
  const { query } = state.shown;
  const strength = state.plan.strength && (choice === "left" || choice === "right") ? (much ? 2 : 1) : null;
  const { reasons, flag } = state.remarks;
  const remarks = { ...(strength && { strength }), ...(reasons.length && { reasons }), ...(flag !== null && { flag }) };
  document.querySelector(`.choice[data-choice="${choice}"]${strength === 2 ? ".much" : ":not(.much)"}`).classList.add("pressed");
  for (const side of sides) {
    side.classList.toggle("chosen", side.id === choice || choice === "tie");
    side.classList.toggle("passed", choice === "skip" || (choice !== "tie" && side.id !== choice));
  }
  state.answered.add(query.id);
  outbox.add({ kind: "answer", query: query.id, choice, remarks });
  say(`Your answer: ${inWords({ choice, strength })}.`);
  await pause(FLASH);
  state.busy = false;
  state.queue = state.queue.filter((one) => one.query.id !== query.id);
  present();
  fill();
}

/** Takes back this person's last answer: after what is on its way, so that it is the one they mean. Its pair comes back when the log says which. */
async function undo() {
  while (state.busy) await pause(FLASH / 4);
  if (state.settings && !undoing()) outbox.add({ kind: "undo" });
}

function wasTaken({ kind, choice, remarks, query: named }, { query, earlier }) {
  if (earlier) {
    tellEarlier(query, earlier, { choice, ...remarks });
  } else if (kind === "answer") {
    state.saved += 1;
    if (state.status) state.status.own.answers += 1;
    if (state.status?.sees_all && choice !== "skip") state.status.counts.labels += 1;
    countForBreak();
  } else if (!query) {
    notice("There is no answer to take back.");
  } else {
    const here = named ? 0 : 1; // one that is named was given in another window
    state.saved = Math.max(0, state.saved - here);
    if (state.status) state.status.own.answers = Math.max(0, state.status.own.answers - 1);
    session.answers = Math.max(0, session.answers - here);
    const others = state.queue.filter((one) => one.query.id !== query.id);
    release(others.splice(READY - 1).map((one) => one.query.id));
    state.away = false;
    state.queue = [entry(query), ...others];
    state.answered.delete(query.id);
    present("Your last answer is taken back. ");
  }
  tell();
}

/** This person had answered the pair before, in another window, and said something else. That stands, and can be taken back here. */
function tellEarlier(query, earlier, now) {
  const again = Object.assign(document.createElement("button"), { type: "button", textContent: "Take it back and answer anew" });
  again.addEventListener("click", () => {
    if (undoing()) return;
    notice("");
    outbox.add({ kind: "undo", query });
  });
  notice(`You had answered that pair in another window: “${inWords(earlier)}” stands, and “${inWords(now)}” was not kept.`, "", again);
}

/** An answer with all that was said beside it. */
function inWords({ choice, strength, reasons, flag }) {
  const side = strength ? `${choice} is ${STRENGTHS[strength]} better` : CHOICES[choice];
  return [side, ...(reasons ?? []), ...(flag ? [`flag: ${flag}`] : flag === "" ? ["flag"] : [])].join(", ");
}

function wasRefused({ kind, query }, error) {
  notice(`${kind === "undo" ? "It could not be taken back" : "An answer was not accepted"}: ${error.message}`);
  state.queue = state.queue.filter((one) => one.query.id !== query);
  present();
  fill();
}

// ---- Keys, buttons, dialogs

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || document.querySelector("dialog[open]")) return;
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  const target = event.target;
  const control = target.closest?.("button, a");
  if (control && (key === "Enter" || key === " ")) return; // the control's own
  const scrolls = target.scrollHeight > target.clientHeight && target.matches("[tabindex='0']");
  if (scrolls && ["ArrowUp", "ArrowDown", " "].includes(key)) return;
  if (KEYS[key]) choose(KEYS[key], event.shiftKey);
  else if (/^[1-9]$/.test(key) && state.plan.reasons[key - 1]) toggleReason(state.plan.reasons[key - 1]);
  else if (key === "f") openFlag();
  else if (key === "g" && state.plan.guideline) openGuide();
  else if (key === "d") toggleView("difference");
  else if (key === "m") toggleView("plain");
  else if (key === "u" || key === "Backspace") undo();
  else if (key === "p") togglePlay();
  else if (key === "+" || key === "=" || key === "-") faster(key === "-" ? -1 : 1);
  else if (key === "?") $("help-dialog").showModal();
  else return;
  event.preventDefault();
});

for (const button of document.querySelectorAll(".choice")) button.addEventListener("click", () => choose(button.dataset.choice, button.dataset.strength === "2"));
$("undo").addEventListener("click", undo);
// A button that was touched keeps no focus: Space and Enter mean "can't tell" again.
document.querySelector("footer").addEventListener("click", (event) => event.detail && $("stage").focus({ preventScroll: true }));

function togglePlay() {
  player.playing = !player.playing;
  $("play").classList.toggle("paused", !player.playing);
  $("play").setAttribute("aria-label", player.playing ? "Pause" : "Play");
}

function setSpeed(speed) {
  player.speed = speed;
  kept.set("speed", speed);
  for (const button of document.querySelectorAll("[data-speed]")) button.setAttribute("aria-pressed", Number(button.dataset.speed) === speed);
}

function faster(steps) {
  setSpeed(SPEEDS[Math.max(0, Math.min(SPEEDS.length - 1, SPEEDS.indexOf(player.speed) + steps))]);
}

$("play").addEventListener("click", togglePlay);
for (const button of document.querySelectorAll("[data-speed]")) button.addEventListener("click", () => setSpeed(Number(button.dataset.speed)));
setSpeed(kept.get("speed") ?? 1);

$("flag").addEventListener("click", openFlag);
$("flag-set").addEventListener("click", () => setFlag($("flag-text").value.trim()));
$("flag-drop").addEventListener("click", () => setFlag(null));
$("guide-button").addEventListener("click", openGuide);
$("show-difference").addEventListener("click", () => toggleView("difference"));
$("show-plain").addEventListener("click", () => toggleView("plain"));
tellViews();
$("break-over").addEventListener("click", () => $("break-dialog").close());
$("break-dialog").addEventListener("close", endBreak);
// Space and Enter mean "can't tell" again, and not the button that opened the dialog.
for (const dialog of document.querySelectorAll("#flag-dialog, #guide-dialog, #break-dialog")) dialog.addEventListener("close", () => $("stage").focus({ preventScroll: true }));

for (const button of document.querySelectorAll("[data-close]")) button.addEventListener("click", () => button.closest("dialog").close());
$("help-button").addEventListener("click", () => $("help-dialog").showModal());
$("me-button").addEventListener("click", async () => {
  const [status, everybody] = await Promise.all([get("v1/status"), get("v1/labellers")]).catch((error) => [null, error]);
  if (!status) return notice(everybody.message);
  const { labeller, counts } = status;
  const mine = everybody.labellers[labeller];
  const share = (value) => (value === null || value === undefined ? "–" : `${Math.round(100 * value)} %`);
  const numbers = {
    labels: mine?.labels ?? 0,
    equal: mine?.ties ?? 0,
    "can’t tell": mine?.skips ?? 0,
    "taken back": mine?.revoked ?? 0,
    "seconds per answer": mine?.seconds?.toFixed(1) ?? "–",
    "left preferred": share(mine?.left_share),
    ...(status.sees_all && { "agreement with others": share(mine?.agreement), "labels of all": counts.labels }),
  };
  $("me-heading").textContent = labeller;
  $("me-numbers").replaceChildren(...Object.entries(numbers).map(([name, value]) => numberOf(name, value)));
  $("me-dialog").showModal();
});

function numberOf(name, value) {
  const item = document.createElement("div");
  for (const [tag, text] of [["dt", name], ["dd", value]]) item.append(Object.assign(document.createElement(tag), { textContent: text }));
  return item;
}

$("leave").addEventListener("click", () => {
  $("me-dialog").close();
  if (outbox.size) return notice("Your last answers are not saved yet: wait a moment, then leave.");
  giveBack({ keepalive: true });
  for (const name of ["token", "queue"]) kept.drop(name);
  state.queue = [];
  location.reload();
});

begin();
