// The end of a chat: five questions, 1 to 7, and a comment.

import { call } from "./api.js";

const QUESTIONS = [
  { name: "quality", title: "Quality", question: "How good was the chat overall?", ends: ["very bad", "very good"] },
  { name: "fluency", title: "Fluency", question: "How good was the bot's language?", ends: ["broken", "flawless"] },
  { name: "diversity", title: "Diversity", question: "How varied were its replies?", ends: ["always the same", "very varied"] },
  { name: "contingency", title: "Relevance", question: "Did its replies fit what you said?", ends: ["never", "always"] },
  { name: "empathy", title: "Empathy", question: "Did it seem to understand how you feel?", ends: ["not at all", "very much"] },
];

const dialog = document.getElementById("rate-dialog");
const form = dialog.querySelector("form");
const comments = document.getElementById("comments");
const error = document.getElementById("rate-error");
let finished = null; // {chat, done} of the chat being rated

for (const each of QUESTIONS) document.getElementById("questions").append(question(each));

function question({ name, question, ends }) {
  const made = document.getElementById("question-template").content.cloneNode(true);
  made.querySelector("legend").textContent = question;
  const [low, high] = made.querySelectorAll(".ends span");
  low.textContent = ends[0];
  high.textContent = ends[1];
  for (let value = 1; value <= 7; value++) made.querySelector(".steps").append(step(name, value, ends));
  return made;
}

function step(name, value, ends) {
  const label = document.createElement("label");
  const input = document.createElement("input");
  const face = document.createElement("span");
  Object.assign(input, { type: "radio", name, value, required: true });
  const meaning = { 1: `, ${ends[0]}`, 7: `, ${ends[1]}` }[value] ?? "";
  input.setAttribute("aria-label", `${value}${meaning}`);
  face.textContent = value;
  label.append(input, face);
  return label;
}

/** Opens the questions about a chat {id, ratings, comments}; calls done(ratings, comments) once the server has the answers. */
export function openRatings(chat, done) {
  if (finished?.chat.id !== chat.id) form.reset(); // half-given answers to this chat stay
  for (const [name, value] of Object.entries(chat.ratings ?? {})) {
    const input = form.querySelector(`input[name="${CSS.escape(name)}"][value="${CSS.escape(value)}"]`);
    if (input) input.checked = true;
  }
  if (chat.ratings) comments.value = chat.comments ?? "";
  finished = { chat, done };
  error.hidden = true;
  dialog.showModal();
  dialog.scrollTop = 0;
  document.getElementById("rate-heading").focus();
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const missing = QUESTIONS.find(({ name }) => !form.elements[name].value);
  if (missing) {
    error.textContent = `One answer is missing: ${missing.question}`;
    error.hidden = false;
    form.elements[missing.name][0].focus();
    return;
  }
  const ratings = Object.fromEntries(QUESTIONS.map(({ name }) => [name, Number(form.elements[name].value)]));
  const button = form.querySelector("[type=submit]");
  button.disabled = true;
  error.hidden = true;
  try {
    const place = `v1/chats/${encodeURIComponent(finished.chat.id)}/ratings`;
    const stored = await call("POST", place, { ...ratings, comments: comments.value.trim() });
    dialog.close();
    finished.done(stored.ratings ?? ratings, stored.comments ?? "");
  } catch (problem) {
    error.textContent = `Not saved: ${problem.message}`;
    error.hidden = false;
  } finally {
    button.disabled = false;
  }
});

/** Writes given ratings into a <dl>. */
export function listRatings(list, ratings) {
  const given = QUESTIONS.filter(({ name }) => ratings[name]);
  list.replaceChildren(
    ...given.map(({ name, title }) => {
      const pair = document.createElement("div");
      const term = document.createElement("dt");
      const value = document.createElement("dd");
      term.textContent = title;
      value.textContent = `${ratings[name]} of 7`;
      pair.append(term, value);
      return pair;
    }),
  );
}
