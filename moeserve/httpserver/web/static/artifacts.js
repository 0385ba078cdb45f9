// HTML and SVG that a model wrote, shown in a frame of its own: without this page's origin, so that its scripts reach
// neither the conversations nor the key, and without network access (the policy of artifact.html).

import { byId, el } from "./dom.js";
import { download } from "./exchange.js";

const KINDS = {
  html: { type: "text/html", whole: (code) => code },
  svg: { type: "image/svg+xml", whole: (code) => `<!doctype html><title>Drawing</title>${code}` },
};

/** A button that shows the code of a block in this language; null for those that cannot be shown. */
export function previewButton(language, code) {
  const kind = kindOf(language.toLowerCase(), code);
  if (kind === null) return null;
  return el("button", { type: "button", className: "quiet", onclick: () => preview(kind, code) }, "Preview");
}

function kindOf(language, code) {
  if (language === "xml" && /^\s*(<\?xml[^>]*\?>\s*)?<svg[\s>]/.test(code)) return "svg"; // as many models mark it
  return Object.hasOwn(KINDS, language) ? language : null;
}

function preview(kind, code) {
  const { type, whole } = KINDS[kind];
  const dialog = byId("artifact");
  const title = `Preview of the ${kind.toUpperCase()}`;
  const frame = el("iframe", { sandbox: "allow-scripts", title, src: "web/artifact.html" });
  frame.onload = () => {
    frame.onload = null; // what is shown then may load itself again
    frame.contentWindow.postMessage(whole(code), "*"); // its origin is opaque: it has no name
  };
  const save = el("button", { type: "button", onclick: () => download(`preview.${kind}`, type, code) }, "Download");
  const close = el("button", { type: "button", className: "primary", onclick: () => dialog.close() }, "Close");
  const buttons = el("div", { className: "buttons" }, save, close);
  dialog.replaceChildren(el("h2", { id: "artifact-title" }, "Preview"), frame, buttons);
  dialog.onclose = () => dialog.replaceChildren(); // and so ends its scripts
  dialog.showModal();
  close.focus();
}
