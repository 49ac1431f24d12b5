// Two clips that loop together. A clip is a sheet of frames; a canvas shows one of them at a time.

const RATE = 15; // frames per second at speed 1: what an agent that acts on every fourth frame sees at 60 Hz
const HOLD = 7; // frames that the end is held before the next round
const SMALL = 320; // pixels; frames that are no wider keep their hard edges when they are enlarged

export class Player {
  constructor(sides) {
    this.sides = sides; // the two elements with a canvas
    this.clips = null; // [{frames, columns, width, height, ended, picture}, ...]
    this.speed = 1;
    this.playing = true;
    this.at = 0; // frames since the round began, a fraction
    this.before = null;
    requestAnimationFrame((now) => this.tick(now));
  }

  show(clips) {
    this.clips = clips;
    this.at = 0;
    this.sides.forEach((side, n) => {
      const canvas = side.querySelector("canvas");
      Object.assign(canvas, { width: clips[n].width, height: clips[n].height });
      side.classList.toggle("small", clips[n].width <= SMALL);
    });
    this.draw();
  }

  clear() {
    this.clips = null;
  }

  tick(now) {
    requestAnimationFrame((later) => this.tick(later));
    const passed = Math.min(now - (this.before ?? now), 250) / 1000; // a page in the background sleeps
    this.before = now;
    if (!this.clips || !this.playing) return;
    const round = Math.max(...this.clips.map((clip) => clip.frames)) + HOLD;
    this.at = (this.at + passed * RATE * this.speed) % round;
    this.draw();
  }

  draw() {
    this.sides.forEach((side, n) => {
      const { frames, columns, width, height, ended, picture } = this.clips[n];
      const frame = Math.min(Math.floor(this.at), frames - 1);
      const x = (frame % columns) * width;
      const y = Math.floor(frame / columns) * height;
      side.querySelector("canvas").getContext("2d").drawImage(picture, x, y, width, height, 0, 0, width, height);
      side.querySelector(".played").style.setProperty("--at", frames > 1 ? frame / (frames - 1) : 1);
      side.classList.toggle("over", ended && frame === frames - 1);
    });
  }
}
