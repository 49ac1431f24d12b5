// The chat page: consent, the conversation, its end. Text from the server is only ever set as text, never as markup.

import { ServerError, call, complete, kept, takeKeyFromAddress, useKeys, userId } from "./api.js";
import { listRatings, openRatings } from "./ratings.js";
import { Reply } from "./reply.js";
import { resetScale } from "./values.js";

const $ = (id) => document.getElementById(id);
const state = {
  page: null, // what GET /page.json says
  chat: null, // {id, has_values, ratings, comments}
  messages: [], // {role, content}; those of the bot also hold their `view`, a Reply, and what reply.js lists
  writing: null, // the AbortController of the reply being streamed
  blocked: 0, // ms since 1970 until which the server wants to hear nothing from us
};

// ---- Beginning

async function begin() {
  state.writing?.abort();
  show("loading");
  takeKeyFromAddress();
  try {
    state.page = await call("GET", "page.json");
    useKeys({ needed: state.page.needs_key, ask: askForKey });
    document.title = $("title").textContent = $("welcome-title").textContent = state.page.title;
    for (const text of document.querySelectorAll(".consent-text")) text.textContent = state.page.consent ?? "";
    const id = kept.get("chat");
    if (!id) return welcome();
    enter(await call("GET", `v1/chats/${encodeURIComponent(id)}`));
  } catch (error) {
    if (error.status === 404 && state.page) {
      kept.drop("chat");
      return welcome("Your earlier chat is not on this server any more.");
    }
    $("trouble-text").textContent = error.message;
    show("trouble");
    if (error.wait) countDown($("trouble-retry"), error.wait);
  }
}

function show(view) {
  for (const name of ["loading", "trouble", "welcome", "chat"]) $(name).hidden = name !== view;
}

function welcome(notice = "") {
  const { consent, bots } = state.page;
  $("welcome-lead").textContent = bots > 1 ? `You will talk to one of ${bots} bots. Which one is drawn at random.` : "You will talk to a bot.";
  $("welcome-notice").textContent = notice;
  $("welcome-notice").hidden = !notice;
  $("consent").hidden = $("decline").hidden = !consent;
  $("start").textContent = consent ? "I agree, start the chat" : "Start the chat";
  $("welcome-delete").hidden = !kept.get("user");
  $("welcome-error").hidden = true;
  show("welcome");
  if (notice) $("welcome-title").focus({ preventScroll: true });
}

/** A new chat on the server, which draws its bot. The agreement is recorded with each. */
async function startChat() {
  const { consent } = state.page;
  const chat = await call("POST", "v1/chats", { user: userId(), ...(consent && { consent }) });
  kept.set("agreed", consent ?? "");
  kept.set("chat", chat.id);
  kept.drop("draft");
  enter(chat);
  $("input").focus();
}

async function newChat(errorPlace) {
  state.writing?.abort();
  if (kept.get("agreed") !== (state.page.consent ?? "")) return welcome();
  try {
    await startChat();
  } catch (error) {
    errorPlace.textContent = `No new chat: ${error.message}`;
    errorPlace.hidden = false;
  }
}

/** Shows a chat, new or as the server kept it. */
function enter(chat) {
  state.chat = { ratings: null, comments: "", ...chat };
  state.messages = [];
  state.blocked = 0;
  resetScale();
  $("messages").replaceChildren();
  $("log-error").hidden = true;
  for (const message of chat.messages ?? []) restore(message);
  $("input").value = kept.get("draft") ?? "";
  if (state.messages.findLast((message) => message.role === "user")?.content === $("input").value) $("input").value = "";
  $("values-bar").hidden = !chat.has_values;
  $("values").checked = coloured();
  $("menu-consent").hidden = !state.page.consent;
  $("menu-key").hidden = !state.page.needs_key && !kept.get("key");
  show("chat");
  follow.end();
  draw();
}

function restore({ role, content, completion_id: completion, index, vote, edit }) {
  if (role === "user") addUser(content);
  if (role === "assistant") addReply({ content, completion, index, vote, edit, status: "done", values: null });
}

// ---- The conversation

function addUser(content) {
  const element = $("user-template").content.firstElementChild.cloneNode(true);
  element.querySelector(".bubble").textContent = content;
  state.messages.push({ role: "user", content, element });
  $("messages").append(element);
}

function addReply(parts) {
  const message = { role: "assistant", vote: null, edit: null, index: 0, ...parts };
  message.view = new Reply(message, { coloured: coloured() });
  message.element = message.view.element;
  state.messages.push(message);
  $("messages").append(message.element);
  return message;
}

function remove(message) {
  message.element.remove();
  state.messages = state.messages.filter((each) => each !== message);
}

function send() {
  const text = $("input").value.trim();
  if (!sendable()) return;
  const last = state.messages.at(-1);
  if (last?.role === "assistant") settle(last);
  const open = state.messages.at(-1);
  if (open?.role === "user") remove(open); // it was never answered: one message with the new one
  addUser(open?.role === "user" ? `${open.content}\n${text}` : text);
  $("input").value = "";
  $("input").focus();
  answer();
}

/** A broken reply that nobody tries again: what was read of it stays in the conversation. */
function settle(message) {
  message.view.note(message.content.trim() && message.status !== "done" ? "The reply ends here." : "");
  if (!message.content.trim() && message.status !== "done") remove(message);
}

/** Streams the reply to the conversation as it stands. */
async function answer() {
  const messages = state.messages.map(({ role, content }) => ({ role, content }));
  const reply = addReply({ content: "", status: "writing", values: coloured() ? [] : null });
  const control = (state.writing = new AbortController());
  kept.set("draft", messages.at(-1).content); // not lost if the page closes now
  follow.end();
  draw();
  announce("The bot is writing.");
  try {
    await stream(reply, messages, control.signal);
    if (reply.element.isConnected) kept.set("draft", $("input").value);
    announce(`The bot: ${reply.content}`);
  } catch (error) {
    if (control.signal.aborted) stopped(reply);
    else failed(reply, error);
  } finally {
    if (state.writing === control) state.writing = null;
    draw();
  }
}

async function stream(reply, messages, signal) {
  const body = { model: "assigned", chat_id: state.chat.id, user: userId(), messages };
  let reason = null;
  for await (const chunk of complete(reply.values ? { ...body, return_values: true } : body, signal)) {
    reply.completion ??= chunk.id;
    const choice = chunk.choices?.[0];
    if (!choice) continue;
    reply.view.add(choice.delta?.content ?? "", choice.values?.content);
    reason = choice.finish_reason ?? reason;
  }
  if (!reason) throw new ServerError("The reply ended before it was complete.");
  reply.status = "done";
  reply.view.draw();
  if (reason === "length") reply.view.note("The reply reached its length limit.");
}

/** With nothing to read yet, the message goes back to where it was written. */
function stopped(reply) {
  if (!reply.element.isConnected) return; // another chat has begun
  if (!reply.content.trim()) {
    takeBack(reply);
    return announce("Stopped. Your message is in the field again.");
  }
  reply.status = "stopped";
  reply.view.draw();
  reply.view.note("You stopped this reply.", { action: () => retry(reply), label: "Write it again" });
  announce("Stopped.");
}

function failed(reply, error) {
  if (!reply.element.isConnected) return;
  reply.status = "failed";
  reply.view.draw();
  announce("");
  const ways = { 400: [takeBack, "Change my message"], 404: [() => newChat($("log-error")), "New chat"], 413: [takeBack, "Change my message"] };
  const [action, label] = ways[error.status] ?? [retry, "Try again"];
  const button = reply.view.note(error.message, { action: () => action(reply), label, alert: true });
  if (error.wait) countDown(button, error.wait);
}

/** Removes an unfinished reply and what it answers, whose text can be written again. */
function takeBack(reply) {
  remove(reply);
  const asked = state.messages.at(-1);
  remove(asked);
  $("input").value = [asked.content, $("input").value].filter(Boolean).join("\n");
  $("input").focus();
  draw();
}

function retry(reply) {
  remove(reply);
  $("input").focus({ preventScroll: true });
  answer();
}

/** The seconds that the server asks for stand on the button; nothing is sent before. */
function countDown(button, seconds) {
  state.blocked = Date.now() + seconds * 1000;
  button.disabled = true;
  const tick = () => {
    const left = Math.ceil((state.blocked - Date.now()) / 1000);
    button.textContent = left > 0 ? `Try again in ${left} s` : "Try again";
    button.disabled = left > 0;
    if (left > 0 && button.isConnected) return;
    clearInterval(timer);
    if (state.chat) drawComposer();
  };
  const timer = setInterval(tick, 250);
  tick();
}

/** What a screen reader says when it has time: a whole reply at its end, not each token. */
function announce(text) {
  $("announcer").textContent = text;
}

// ---- What stands around it

const count = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;
const coloured = () => Boolean(state.chat?.has_values) && kept.get("values") === "on";
const excess = () => $("input").value.trim().length - (state.page?.max_message_characters ?? Infinity);

function sendable() {
  return $("input").value.trim() !== "" && !state.writing && excess() <= 0 && Date.now() >= state.blocked;
}

function draw() {
  const sent = state.messages.filter((message) => message.role === "user").length;
  const missing = Math.max(1, state.page.min_messages) - sent;
  const rated = Boolean(state.chat.ratings);
  $("empty").hidden = state.messages.length > 0;
  $("rate").hidden = rated;
  $("rate").disabled = missing > 0 || Boolean(state.writing);
  $("rate").classList.toggle("ready", missing <= 0);
  $("progress").textContent = missing > 0 ? `${count(missing, "more message")} until you can rate this chat` : "Done? You can rate this chat.";
  $("composer").hidden = rated;
  $("finished").hidden = !rated;
  if (rated) drawFinished();
  $("legend").hidden = !coloured() || !state.messages.some((message) => message.values?.length);
  $("values-hint").hidden = rated || !$("legend").hidden;
  $("values-hint").textContent = coloured() ? "from the next reply on" : "How good the bot expects each word to be";
  $("values-hint").classList.toggle("spare", !coloured());
  drawComposer();
}

function drawComposer() {
  $("send").hidden = Boolean(state.writing);
  $("stop").hidden = !state.writing;
  $("send").disabled = !sendable();
  const over = excess();
  const near = over > -100 && state.page.max_message_characters;
  $("input-note").textContent = over > 0 ? `${count(over, "character")} too many` : near ? `${count(-over, "character")} left` : "Shift + Enter for a new line";
  $("input-note").classList.toggle("keys", !near);
  $("input-note").classList.toggle("error", over > 0);
  if (CSS.supports("field-sizing", "content")) return;
  $("input").style.height = "auto";
  $("input").style.height = `${$("input").scrollHeight}px`;
}

function drawFinished() {
  listRatings($("given"), state.chat.ratings);
  $("given-comment").textContent = state.chat.comments ?? "";
  $("given-comment").hidden = !state.chat.comments;
  $("finished-error").hidden = true;
}

function rate() {
  openRatings(state.chat, (ratings, comments) => {
    Object.assign(state.chat, { ratings, comments });
    for (const message of state.messages) message.view?.note(""); // nothing is tried again now
    draw();
    $("thanks").focus();
  });
}

/** Keeps the end in view while replies grow, unless the reader has scrolled away from it. */
const follow = {
  on: true,
  last: 0,
  end() {
    follow.on = true;
    $("log").scrollTop = $("log").scrollHeight;
  },
  look() {
    const { scrollHeight, scrollTop, clientHeight } = $("log");
    const left = scrollHeight - scrollTop - clientHeight;
    if (left < 40) follow.on = true;
    else if (scrollTop < follow.last) follow.on = false; // further from the end because the reader went up, not because a reply grew
    follow.last = scrollTop;
    $("jump").hidden = follow.on;
  },
};

/** A phone's keyboard covers the page without resizing it; what is left is the visual viewport. */
function fit() {
  const { height, scale } = window.visualViewport;
  if (scale > 1.01) return; // zoomed in, not covered
  document.documentElement.style.setProperty("--height", `${height}px`);
  window.scrollTo(0, 0);
}

// ---- Dialogs

function askForKey(reason, { forget = false } = {}) {
  const dialog = $("key-dialog");
  $("key-reason").textContent = reason || "This server answers with a key only. You got one from whoever runs it.";
  $("key-input").value = "";
  $("key-error").hidden = true;
  $("key-forget").hidden = !forget;
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve, reject) => {
    dialog.onclose = () => (dialog.returnValue === "ok" ? resolve() : reject(new ServerError("This needs an API key.", { status: 401 })));
    dialog.returnValue = "";
  });
}

function takeKey(event) {
  event.preventDefault();
  const key = $("key-input").value.trim();
  const usable = /^[\x21-\x7e]+$/.test(key); // what a header can carry
  $("key-error").textContent = key ? "A key has no spaces and no accents." : "Enter the key first.";
  $("key-error").hidden = usable;
  if (!usable) return $("key-input").focus();
  kept.set("key", key);
  $("key-dialog").close("ok");
}

async function changeKey() {
  const before = kept.get("key");
  try {
    await askForKey("Enter the key that this browser should use.", { forget: Boolean(before) });
  } catch {
    if (before && !kept.get("key")) begin(); // forgotten
    return;
  }
  if (kept.get("key") !== before) begin(); // another key sees other chats
}

async function deleteData(event) {
  event.preventDefault();
  const button = $("delete-dialog").querySelector("[type=submit]");
  button.disabled = true;
  $("delete-error").hidden = true;
  try {
    state.writing?.abort();
    const { deleted } = await call("DELETE", `v1/users/${encodeURIComponent(userId())}`);
    for (const name of ["user", "chat", "agreed", "draft"]) kept.drop(name);
    $("delete-dialog").close();
    welcome(`Deleted: ${count(deleted, "chat")}.`);
  } catch (error) {
    $("delete-error").textContent = `Nothing was deleted: ${error.message}`;
    $("delete-error").hidden = false;
  } finally {
    button.disabled = false;
  }
}

function openDelete() {
  $("delete-error").hidden = true;
  $("delete-dialog").showModal();
}

// ---- Wiring

function onMenu(id, action) {
  $(id).addEventListener("click", () => {
    $("menu").hidePopover();
    action();
  });
}

$("start").addEventListener("click", async () => {
  $("start").disabled = true;
  $("welcome-error").hidden = true;
  try {
    await startChat();
  } catch (error) {
    $("welcome-error").textContent = error.message;
    $("welcome-error").hidden = false;
  } finally {
    $("start").disabled = false;
  }
});
$("trouble-retry").addEventListener("click", begin);
$("welcome-delete").addEventListener("click", openDelete);
onMenu("menu-new", () => newChat($("log-error")));
onMenu("menu-consent", () => $("consent-dialog").showModal());
onMenu("menu-key", changeKey);
onMenu("menu-delete", openDelete);
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("input").addEventListener("input", () => {
  if (!state.writing) kept.set("draft", $("input").value);
  drawComposer();
});
$("input").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return; // 229: an input method is at work
  event.preventDefault();
  send();
});
$("stop").addEventListener("click", () => {
  state.writing?.abort();
  $("input").focus();
});
$("values").addEventListener("change", () => {
  kept.set("values", $("values").checked ? "on" : "off");
  for (const { view } of state.messages) view?.colour(coloured());
  draw();
});
$("rate").addEventListener("click", rate);
$("rerate").addEventListener("click", rate);
$("again").addEventListener("click", () => newChat($("finished-error")));
$("key-dialog").querySelector("form").addEventListener("submit", takeKey);
$("key-forget").addEventListener("click", () => {
  kept.drop("key");
  $("key-dialog").close();
});
$("delete-dialog").querySelector("form").addEventListener("submit", deleteData);
for (const button of document.querySelectorAll("[data-close]")) button.addEventListener("click", () => button.closest("dialog").close());
$("log").addEventListener("scroll", follow.look, { passive: true });
$("jump").addEventListener("click", () => {
  follow.end();
  $("input").focus({ preventScroll: true });
});
new ResizeObserver(() => follow.on && follow.end()).observe($("messages"));
new ResizeObserver(() => follow.on && follow.end()).observe($("log"));
window.visualViewport?.addEventListener("resize", fit);
window.addEventListener("hashchange", () => takeKeyFromAddress() && begin());

begin();
