// One reply of the bot: its text or tokens, the votes, the suggestion of something better, and what went wrong.

import { call } from "./api.js";
import { addTokens, endTokens, tokenRow } from "./values.js";

/**
 * The element of a reply. `message` is what the chat keeps of it:
 * {content, completion, index, vote, edit, values (array or null), status: "writing" | "done" | "stopped" | "failed"}.
 */
export class Reply {
  constructor(message, { coloured }) {
    this.message = message;
    this.element = document.getElementById("reply-template").content.firstElementChild.cloneNode(true);
    this.coloured = coloured;
    this.tokens = null; // made when there is something to colour
    this.saving = Promise.resolve(); // feedback is sent in the order it was given
    this.savedVote = message.vote ?? null;
    this.part = (selector) => this.element.querySelector(selector);
    this.part(".up").addEventListener("click", () => this.vote(1));
    this.part(".down").addEventListener("click", () => this.vote(-1));
    this.part(".edit").addEventListener("click", () => this.openEditor(this.part(".editor").hidden));
    this.part(".cancel").addEventListener("click", () => this.openEditor(false));
    this.part(".remove").addEventListener("click", () => this.saveEdit(null));
    this.part(".editor").addEventListener("submit", (event) => {
      event.preventDefault();
      this.suggest();
    });
    this.part(".editor").addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.openEditor(false);
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.suggest();
    });
    this.text = document.createElement("p");
    this.text.className = "text";
    this.part(".bubble").append(this.text);
    this.draw();
  }

  /** Everything that depends on the message's state. */
  draw() {
    const { content, status, vote, edit, completion } = this.message;
    this.element.setAttribute("aria-busy", String(status === "writing"));
    const shown = status === "writing" ? content.trimStart() : content.trim(); // while it is written, a last space may be between words
    this.text.textContent = shown || (status === "done" ? "(no words)" : "");
    this.text.classList.toggle("wordless", !content.trim());
    this.part(".bubble").hidden = !content.trim() && status !== "done";
    this.part(".dots").hidden = status !== "writing" || content.trim() !== "";
    this.part(".actions").hidden = status !== "done" || !completion;
    this.part(".up").setAttribute("aria-pressed", String(vote === 1));
    this.part(".down").setAttribute("aria-pressed", String(vote === -1));
    this.part(".suggestion").hidden = typeof edit !== "string";
    this.part(".suggestion p").textContent = edit ?? "";
    this.part(".edit").classList.toggle("given", typeof edit === "string");
    this.colour(this.coloured);
  }

  /** The next piece of a streamed reply; its tokens if values were asked for. */
  add(text, tokens) {
    this.message.content += text;
    if (this.message.values && tokens) {
      this.message.values.push(...tokens);
      if (this.tokens) addTokens(this.tokens, tokens);
    }
    if (this.part(".bubble").hidden || this.message.values) this.draw();
    else this.text.append(text);
  }

  /** Tokens with their colours, or the plain text. */
  colour(on) {
    this.coloured = on;
    const show = on && Boolean(this.message.values?.length);
    if (show && !this.tokens) {
      this.tokens = tokenRow();
      addTokens(this.tokens, this.message.values);
      this.part(".bubble").append(this.tokens);
    }
    if (this.tokens) this.tokens.hidden = !show;
    if (show && this.message.status !== "writing") endTokens(this.tokens, this.message.content.trim());
    this.text.hidden = show;
  }

  /** A line below the reply with one thing to do about it; no action: just the line. alert: say it at once. */
  note(text, { action = null, label = "", alert = false } = {}) {
    const [line, button] = this.part(".note").children;
    line.setAttribute("role", alert ? "alert" : "none");
    line.textContent = text;
    button.hidden = !action;
    button.textContent = label;
    button.onclick = action;
    this.part(".note").hidden = !text;
    return button;
  }

  async vote(value) {
    const { message } = this;
    message.vote = message.vote === value ? 0 : value; // the same again takes it back
    const wanted = message.vote;
    this.note("");
    this.draw();
    await this.save({ vote: wanted }, {
      done: () => (this.savedVote = wanted),
      failed: (error) => {
        if (message.vote === wanted) message.vote = this.savedVote;
        this.note(`Your vote was not saved: ${error.message}`, { alert: true });
        this.draw();
      },
    });
  }

  openEditor(open) {
    const editor = this.part(".editor");
    const input = this.part(".editor textarea");
    editor.hidden = !open;
    this.part(".edit").setAttribute("aria-expanded", String(open));
    this.part(".editor .error").hidden = true;
    this.part(".remove").hidden = typeof this.message.edit !== "string";
    if (!open) return this.part(".edit").focus();
    input.value = this.message.edit ?? this.message.content.trim();
    input.focus();
    editor.scrollIntoView({ block: "nearest" });
  }

  suggest() {
    const text = this.part(".editor textarea").value.trim();
    if (text === (this.message.edit ?? "")) return this.editorError(text ? "" : "Write what it should have said.");
    if (!text) return this.editorError("Write what it should have said, or remove the suggestion.");
    if (text === this.message.content.trim()) return this.editorError("This is what the bot said. Change it, or cancel.");
    return this.saveEdit(text);
  }

  /** An empty text means that there is nothing to do. */
  editorError(text) {
    if (!text) return this.openEditor(false);
    this.part(".editor .error").textContent = text;
    this.part(".editor .error").hidden = false;
    this.part(".editor textarea").focus();
  }

  async saveEdit(text) {
    const button = this.part(".editor [type=submit]");
    button.disabled = true;
    await this.save({ edit: text }, {
      done: () => {
        this.message.edit = text;
        this.draw();
        this.openEditor(false);
      },
      failed: (error) => this.editorError(`Not saved: ${error.message}`),
    });
    button.disabled = false;
  }

  save(feedback, { done, failed }) {
    const { completion, index = 0 } = this.message;
    this.saving = this.saving.then(() => call("POST", "v1/feedback", { completion_id: completion, index, ...feedback }).then(done, failed));
    return this.saving;
  }
}
