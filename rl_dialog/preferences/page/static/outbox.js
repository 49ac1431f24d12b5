// Answers and undos on their way to the log: in their order, one at a time, kept in the window's store until the server has them on its disk.
// What fails on the way is sent again with the same key, which the server knows: nothing is lost and nothing counts twice.

import { kept, pause, post, randomId } from "./api.js";

const WAITS = [0.5, 1, 2, 4, 8]; // seconds between attempts
const PASSING = [408, 425, 429]; // refusals that say nothing of the answer: it came too slowly, too soon, or too often

export class Outbox {
  /** changed(outbox): something was added, sent or not; done(operation, result): the server has it; refused(operation, error): it will not take it. */
  constructor({ changed, done, refused }) {
    Object.assign(this, { changed, done, refused });
    this.operations = kept.get("outbox") ?? [];
    this.failures = 0;
    this.problem = ""; // why the last attempt failed
    this.sending = false;
    this.wake = () => {};
    addEventListener("online", () => this.wake());
  }

  get size() {
    return this.operations.length;
  }

  add(operation) {
    this.operations.push({ key: randomId(), ...operation });
    this.keep();
    this.send();
  }

  async send() {
    if (this.sending) return;
    this.sending = true;
    while (this.size) {
      const operation = this.operations[0];
      try {
        const { key, kind, query, choice, remarks } = operation;
        const result = kind === "undo" ? await post("v1/undo", query ? { query } : {}, { key }) : await post("v1/answers", { query, choice, ...remarks }, { key });
        this.failures = 0;
        this.problem = "";
        this.next();
        this.done(operation, result);
      } catch (error) {
        if (error.status && error.status < 500 && !PASSING.includes(error.status)) {
          this.next();
          this.refused(operation, error);
        } else {
          this.problem = error.message;
          this.keep();
          await Promise.race([pause(WAITS[Math.min(this.failures++, WAITS.length - 1)]), new Promise((resolve) => (this.wake = resolve))]);
        }
      }
    }
    this.sending = false;
  }

  next() {
    this.operations.shift();
    this.keep();
  }

  keep() {
    kept.set("outbox", this.operations);
    this.changed(this);
  }
}
