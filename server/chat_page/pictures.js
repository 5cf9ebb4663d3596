// Pictures of a message: read from files, no larger than models need, and shown. A picture is a data: URL, which requests,
// the browser's database and exported files hold as it is.

import { el, iconButton } from "./dom.js";

export const MAX_PICTURES = 10; // of a message
const MAX_SIDE = 2048; // pixels; models look at fewer
const MAX_BYTES = 1_500_000; // of a file that is kept as it is, and of a PNG that is made: storage must last
const MAX_FILE_BYTES = 50_000_000;
const QUALITY = 0.85;
const [ALONE, ONE_OF_SEVERAL] = [[360, 260], [172, 172]]; // pixels of a picture in a message, at most
const FORMATS = /^image\/(png|jpeg|webp)$/;
const URLS = /^data:image\/(png|jpeg|webp);base64,[A-Za-z0-9+/]+={0,2}$/;
const NAMES = /\.(avif|bmp|gif|hei[cf]|ico|jxl|tiff?)$/i; // of files whose type browsers may not know

/**
 * @typedef {object} Picture
 * @property {string} name
 * @property {string} url
 * @property {number} [width] in pixels; a Markdown file does not say it
 * @property {number} [height]
 */

/** Whether what is attached to a message is a picture, not a text. */
export const isPicture = ({ url }) => url !== undefined;

/** Whether something from a file of conversations is a picture: only its own bytes may be shown and sent. */
export const isPictureUrl = (value) => typeof value === "string" && URLS.test(value);

/** Whether a file holds pixels. An SVG is text, as code is. */
export const holdsPixels = ({ name, type }) => (type.startsWith("image/") && type !== "image/svg+xml") || NAMES.test(name);

/** Whether a model is known to see pictures. */
export const sees = (model) => Boolean(model?.input_modalities?.includes("image"));

/** Whether it may see them: it does, or nothing is known of it before it was loaded. */
export const maySee = (model) => !model?.input_modalities || sees(model);

/**
 * @param {File} file
 * @returns {Promise<Picture>} upright, with at most `MAX_SIDE` pixels on a side
 * @throws {Error} that says why it cannot be attached
 */
export async function readPicture(file) {
  if (!FORMATS.test(file.type)) throw new Error(`${file.name} is not attached: pictures must be PNG, JPEG or WebP.`);
  if (file.size > MAX_FILE_BYTES) throw new Error(`${file.name} is larger than ${MAX_FILE_BYTES / 1e6} MB.`);
  const bitmap = await createImageBitmap(file).catch(() => {
    throw new Error(`${file.name} cannot be read: it is damaged, or no picture.`);
  });
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  const [width, height] = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(side * scale)));
  const isSmall = scale === 1 && file.size <= MAX_BYTES;
  const url = await urlOf(isSmall ? file : await drawn(bitmap, width, height, file.type));
  bitmap.close();
  return { name: file.name, url, width, height };
}

/** A file of this size: a JPEG of photographs, a PNG of anything else unless that takes too many bytes. */
async function drawn(bitmap, width, height, type) {
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, width, height);
  const png = type === "image/jpeg" ? null : await canvas.convertToBlob();
  if (png?.size <= MAX_BYTES) return png;
  Object.assign(context, { globalCompositeOperation: "destination-over", fillStyle: "white" }); // behind what is transparent
  context.fillRect(0, 0, width, height);
  return canvas.convertToBlob({ type: "image/jpeg", quality: QUALITY });
}

const urlOf = (blob) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("The picture cannot be read any more."));
    reader.readAsDataURL(blob);
  });

/** A picture, no larger than this; its place is kept until the browser has decoded it. */
export function imageOf({ name, url, width, height }, maxWidth = Infinity, maxHeight = Infinity) {
  const scale = Math.min(1, maxWidth / width, maxHeight / height);
  return el("img", { src: url, alt: name, ...(scale > 0 && { width: Math.round(width * scale), height: Math.round(height * scale) }) });
}

/** The pictures of a message that was sent; a click shows all of one. */
export function picturesView(pictures) {
  const most = pictures.length > 1 ? ONE_OF_SEVERAL : ALONE;
  return el("div", { class: "pictures" }, ...pictures.map((picture) =>
    el("button", { type: "button", class: "picture", title: "Show in full", onclick: () => showInFull(picture) }, imageOf(picture, ...most))));
}

function showInFull(picture) {
  const dialog = el("dialog", { class: "viewer", "aria-label": picture.name, onclick: () => dialog.close(), onclose: () => dialog.remove() },
    iconButton("close", "Close", null), imageOf(picture)); // a click on either closes it
  document.body.append(dialog);
  dialog.showModal();
}
