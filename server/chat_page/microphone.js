// Speech for the message: what the microphone records, a model that hears turns into text. It is sent once it ends, and
// at the longest after `MAX_S`; the microphone is free again then, whatever happens.

import { transcribe } from "./api.js";
import { byId, icon } from "./dom.js";

/** Seconds of a recording. */
const MAX_S = 300;

/** The icon and the name of the button in each state, and what is told above the field. */
const STATES = {
  idle: ["mic", "Speak", ""],
  asking: ["mic", "Cancel the recording", "Waiting for the microphone…"],
  recording: ["stop", "Stop and transcribe", "Recording"],
  transcribing: ["mic", "Cancel the transcription", "Transcribing…"],
};

/** What the browser's errors mean to the one who speaks. */
const FAULTS = {
  NotAllowedError: "The browser does not let this page use the microphone. Allow it in the settings of this site.",
  NotFoundError: "There is no microphone.",
  NotReadableError: "The microphone cannot be opened. Does another program use it?",
};

const clock = (seconds) => `${Math.floor(seconds / 60)}:${String(Math.floor(seconds % 60)).padStart(2, "0")}`;

/**
 * Record until the recorder is stopped, or the microphone goes away.
 * @param {(recorder: MediaRecorder) => void} onStart
 * @param {AbortSignal} signal
 * @returns {Promise<Blob>} in the format that the browser prefers
 */
async function record(onStart, signal) {
  const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
  try {
    signal.throwIfAborted(); // while the browser asked
    const recorder = new MediaRecorder(stream);
    const parts = [];
    await new Promise((resolve, reject) => {
      recorder.addEventListener("dataavailable", ({ data }) => parts.push(data));
      recorder.addEventListener("stop", resolve);
      recorder.addEventListener("error", ({ error }) => reject(error));
      signal.addEventListener("abort", () => reject(signal.reason));
      recorder.start();
      onStart(recorder);
    });
    const sound = new Blob(parts, { type: recorder.mimeType });
    if (!sound.size) throw new Error("Nothing was recorded.");
    return sound;
  } finally {
    for (const track of stream.getTracks()) track.stop();
  }
}

export class Microphone {
  /** @param {(text: string) => void} onText with what was said */
  constructor(onText) {
    Object.assign(this, { onText, model: "", recorder: null, abort: null });
    byId("microphone").addEventListener("click", () => this.press());
    byId("discard-speech").addEventListener("click", () => {
      byId("microphone").focus();
      this.cancel();
    });
  }

  get isBusy() {
    return this.abort !== null;
  }

  /** Show the button if a model hears ("" for none) and the browser can record; over plain HTTP it cannot. */
  offer(model) {
    this.model = model;
    byId("microphone").hidden = !model || !navigator.mediaDevices?.getUserMedia || !window.MediaRecorder;
  }

  press() {
    if (this.recorder) this.stop();
    else if (this.isBusy) this.cancel();
    else this.listen();
  }

  async listen() {
    const abort = (this.abort = new AbortController());
    this.show("asking");
    let fault = "";
    try {
      const sound = await record((recorder) => this.follow(recorder), abort.signal);
      abort.signal.throwIfAborted();
      this.recorder = null;
      this.show("transcribing");
      const text = (await transcribe(sound, this.model, abort.signal)).trim();
      abort.signal.throwIfAborted();
      if (text) this.onText(text);
      else fault = "No words were heard.";
    } catch (error) {
      fault = FAULTS[error.name] ?? error.message;
    }
    if (this.abort === abort) this.end(fault); // else it was cancelled
  }

  /** Show for how long it records, and stop in time. */
  follow(recorder) {
    this.recorder = recorder;
    this.show("recording");
    const [start, { signal }] = [performance.now(), this.abort];
    const tick = () => {
      const seconds = (performance.now() - start) / 1000;
      if (recorder.state === "inactive" || signal.aborted) return;
      byId("speech-time").textContent = `${clock(seconds)} of ${clock(MAX_S)}`;
      if (seconds >= MAX_S) this.stop();
      else setTimeout(tick, 250);
    };
    tick();
  }

  stop() {
    this.recorder.stop();
    this.recorder = null;
  }

  /** Drop what is recorded or transcribed. */
  cancel() {
    this.abort?.abort();
    this.end("");
  }

  end(fault) {
    Object.assign(this, { recorder: null, abort: null });
    this.show("idle");
    byId("speech-fault").textContent = fault;
  }

  show(state) {
    const [name, label, text] = STATES[state];
    const button = byId("microphone");
    button.replaceChildren(icon(name));
    button.setAttribute("aria-label", label);
    Object.assign(button, { title: label });
    button.dataset.state = state;
    byId("speech").hidden = !text;
    byId("speech-what").textContent = text;
    if (text) byId("announcer").textContent = text;
    for (const id of ["speech-time", "speech-fault"]) byId(id).textContent = "";
  }
}
