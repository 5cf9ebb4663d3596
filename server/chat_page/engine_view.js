// A live picture of the engine, from GET /stats twice a second while the page is visible. The KV cache is drawn as a
// cloth: all cells stand for the same number of blocks, first those in use, then those cached.

import { readStats } from "./api.js";
import { byId } from "./dom.js";

const PAUSE_MS = 500;
const MAX_PAUSE_MS = 5000; // while the server is away: the browser's console gets a line for every failed request
const NUM_READINGS = 60;
const CELL = 7;

export class EngineView {
  /**
   * @param {() => string} model whose engine is shown; "": the first one's
   * @param {(stats: object, model: string) => void} onStats with every reading
   * @param {(error: import("./api.js").ApiError) => Promise<void>} onRefused waits until a key is entered
   */
  constructor(model, onStats, onRefused) {
    Object.assign(this, { model, onStats, onRefused, last: null, rate: 0, steps: [] });
    document.addEventListener("theme", () => this.draw());
    addEventListener("resize", () => this.draw());
    document.addEventListener("visibilitychange", () => this.wake?.());
  }

  /** Read at once, since another model is shown. */
  hurry() {}

  /** Read and draw until the page is closed. */
  async run() {
    for (let pause = PAUSE_MS; ; ) {
      if (document.hidden) await new Promise((resolve) => (this.wake = resolve));
      const model = this.model();
      try {
        this.take(await readStats(model), performance.now());
        this.onStats(this.last, model);
        pause = PAUSE_MS;
      } catch (error) {
        this.showState(nameOf(error), "bad");
        this.last = null;
        pause = Math.min(2 * pause, MAX_PAUSE_MS);
        if (error.status === 401) await this.onRefused(error);
      }
      await new Promise((resolve) => {
        this.hurry = resolve;
        setTimeout(resolve, pause);
      });
    }
  }

  take(stats, now) {
    const { engine } = stats;
    const before = this.last?.engine;
    // Counters start at 0 in every engine process.
    const since = (name) => (before && engine[name] >= before[name] ? engine[name] - before[name] : 0);
    const numSteps = since("num_steps");
    if (before) this.rate = (since("generation_tokens") / (now - this.time)) * 1000;
    const perStep = (name) => (numSteps ? since(name) / numSteps : 0);
    this.steps.push([perStep("prefill_tokens"), perStep("decode_tokens")]);
    this.steps.splice(0, this.steps.length - NUM_READINGS);
    this.last = stats;
    this.time = now;
    this.show();
  }

  show() {
    const { engine, is_ready: isReady } = this.last;
    this.wasReady ||= isReady;
    const [prefill, decode] = this.steps.at(-1);
    const { num_requests_running: running, num_requests_waiting: waiting } = engine;
    const hits = engine.prefix_cache_queries ? engine.prefix_cache_hits / engine.prefix_cache_queries : 0;
    const numbers = {
      "num-running": running,
      "num-waiting": waiting,
      rate: Math.round(this.rate),
      hits: `${Math.round(hits * 100)} %`,
      "num-used": engine.num_used_blocks,
      "num-cached": engine.num_cached_blocks,
      "num-blocks": engine.num_blocks.toLocaleString("en"),
      prefill: brief(prefill),
      decode: brief(decode),
    };
    for (const [id, value] of Object.entries(numbers)) byId(id).textContent = value;
    if (!isReady) this.showState(this.wasReady ? "engine is restarting" : "loading", "");
    else if (running || waiting) this.showState(`${running} running${waiting ? `, ${waiting} waiting` : ""}`, "busy");
    else this.showState("idle", "good");
    const blocks = `${engine.num_used_blocks} of ${engine.num_blocks} KV blocks in use, ${engine.num_cached_blocks} cached`;
    byId("cloth").setAttribute("aria-label", blocks);
    byId("steps").setAttribute("aria-label", `Tokens per step: ${brief(prefill)} prefill, ${brief(decode)} decode`);
    this.draw();
  }

  showState(text, kind) {
    byId("pill-text").textContent = text;
    byId("engine-pill").setAttribute("aria-label", `Engine: ${text}`);
    byId("dot").className = `dot ${kind}`;
  }

  draw() {
    if (!this.last || !byId("cloth").clientWidth) return;
    this.drawCloth();
    this.drawSteps();
  }

  drawCloth() {
    const { context, width, height } = surface("cloth");
    const colours = ["used", "cached", "free"].map(colour);
    const { num_blocks: total, num_used_blocks: used, num_cached_blocks: cached } = this.last.engine;
    const numColumns = Math.floor(width / CELL);
    const numCells = Math.min(numColumns * Math.floor(height / CELL), Math.max(total, 1));
    const perCell = Math.max(total, 1) / numCells;
    const kept = Math.max(cached, used); // full blocks in use are cached, too
    const cell = (blocks) => (blocks ? Math.max(1, Math.round(blocks / perCell)) : 0);
    const [usedEnd, keptEnd] = [cell(used), cell(kept)];
    for (let at = 0; at < numCells; at++) {
      context.fillStyle = colours[at < usedEnd ? 0 : at < keptEnd ? 1 : 2];
      const [x, y] = [(at % numColumns) * CELL, Math.floor(at / numColumns) * CELL];
      const isOver = (at + Math.floor(at / numColumns)) % 2; // over and under, as threads in a cloth
      context.beginPath();
      if (isOver) context.roundRect(x + 0.5, y + 1.5, CELL - 1, CELL - 3, 2);
      else context.roundRect(x + 1.5, y + 0.5, CELL - 3, CELL - 1, 2);
      context.fill();
    }
  }

  drawSteps() {
    const { context, width, height } = surface("steps");
    const [above, below, line] = ["prefill", "decode", "free"].map(colour);
    const most = Math.max(8, ...this.steps.map(([prefill, decode]) => prefill + decode));
    // Square roots: a decode is one token, a prefill may be a thousand.
    const scaled = (tokens) => Math.sqrt(tokens / most) * (height - 2);
    const step = width / NUM_READINGS;
    const offset = NUM_READINGS - this.steps.length;
    context.fillStyle = line;
    context.fillRect(0, height - 1, width, 1);
    this.steps.forEach(([prefill, decode], index) => {
      const x = (index + offset) * step;
      const [all, lower] = [scaled(prefill + decode), scaled(decode)];
      context.fillStyle = above;
      context.fillRect(x, height - 1 - all, Math.max(1, step - 1), all - lower);
      context.fillStyle = below;
      context.fillRect(x, height - 1 - lower, Math.max(1, step - 1), lower);
    });
  }
}

/** What keeps the engine out of sight, in a few words. */
const nameOf = ({ status, code }) => ({ invalid_api_key: "no key", shutting_down: "shutting down" })[code] ?? (status ? `error ${status}` : "server is away");

const brief = (number) => (number >= 10 || Number.isInteger(number) ? Math.round(number) : number.toFixed(1));

/** The colour of a name in the legend. */
const colour = (name) => getComputedStyle(document.querySelector(`.legend .${name}`), "::before").backgroundColor;

/** A cleared canvas with CSS pixels as units, sharp on any screen. */
function surface(id) {
  const canvas = byId(id);
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  const ratio = devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return { context, width, height };
}
