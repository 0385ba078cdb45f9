// Picture files, made fit for a server: it reads few formats, and a conversation sends all its pictures with each turn.
// Videos go as they are.

import { number } from "./dom.js";

const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif"]; // that the server reads
const OTHERS = /\.(avif|bmp|heic|heif|ico|jxl|tiff?)$/i; // of which browsers name no type, or not everywhere
const VIDEOS = /\.(m4v|mkv|mov|mp4|webm)$/i;
const MAX_VIDEO_BYTES = 14_000_000; // a body has 32 MiB, and base64 takes a third more
const MAX_FILE_BYTES = 100_000_000;
const MAX_SENT_BYTES = 2_000_000; // of a file that is sent as it is
const MAX_PIXELS = 2048 * 2048; // of one that is drawn again
const QUALITY = 0.92; // of JPEG

/** By its type or its name. A drawing in SVG is a text. */
export function isPicture({ type, name }) {
  return (type.startsWith("image/") && type !== "image/svg+xml") || OTHERS.test(name);
}

export function isVideo({ type, name }) {
  return type.startsWith("video/") || (type === "" && VIDEOS.test(name));
}

/** {picture: {url, size}}, size in bytes, or {cause}: why it cannot be sent. */
export async function readVideo(file) {
  const { name, size, type } = file;
  if (size > MAX_VIDEO_BYTES) return { cause: `${name} is larger than ${number.format(MAX_VIDEO_BYTES)} bytes.` };
  return { picture: { url: await dataUrl(new Blob([file], { type: type || "video/mp4" })), size } };
}

/** {picture: {url, width, height}}, or {cause}: why it cannot be sent. */
export async function readPicture(file) {
  if (file.size > MAX_FILE_BYTES) return { cause: `${file.name} is larger than ${number.format(MAX_FILE_BYTES)} bytes.` };
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch (error) {
    if (!(error instanceof DOMException)) throw error;
    return { cause: `${file.name} is no picture that this browser can read. Save it as PNG or JPEG.` };
  }
  const { width, height } = bitmap;
  const sent = KINDS.includes(file.type) && file.size <= MAX_SENT_BYTES ? file : await drawn(bitmap, file.type);
  bitmap.close();
  return { picture: { url: await dataUrl(sent), width, height } };
}

/** As PNG if that is small enough and the file was no JPEG, else as JPEG, on white. */
async function drawn(bitmap, type) {
  const scale = Math.min(1, Math.sqrt(MAX_PIXELS / (bitmap.width * bitmap.height)));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  const draw = () => context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  const saved = (kind) => new Promise((resolve) => canvas.toBlob(resolve, kind, QUALITY));
  context.imageSmoothingQuality = "high";
  draw();
  const exact = type === "image/jpeg" ? null : await saved("image/png");
  if (exact !== null && exact.size <= MAX_SENT_BYTES) return exact;
  context.fillStyle = "white";
  context.fillRect(0, 0, canvas.width, canvas.height);
  draw();
  return saved("image/jpeg");
}

function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error); // a DOMException
    reader.readAsDataURL(blob);
  });
}
