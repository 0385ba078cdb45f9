// Pictures of a message: small, and as large as the window when they are pressed.

import { byId, el } from "./dom.js";
import { nameAndSize } from "./files.js";
import { pictureOf } from "./picture_store.js";

/** The element of an attachment with a picture, which is read from the disk. */
export function thumbnail(file) {
  const { name, picture, width, height } = file;
  const image = el("img", { alt: name, title: nameAndSize(file), width, height });
  const button = el("button", { type: "button", className: "thumbnail", ariaLabel: `Enlarge ${name}`, onclick: enlarge }, image);
  pictureOf(picture).then((url) => {
    if (url === null) button.replaceWith(el("p", { className: "hint" }, `${name} is no longer kept.`));
    else image.src = url;
  });
  return button;

  function enlarge() {
    const dialog = byId("picture");
    const close = el("button", { type: "button", ariaLabel: "Close", onclick: () => dialog.close() }, "✕");
    dialog.replaceChildren(el("img", { src: image.src, alt: name }), close);
    dialog.ariaLabel = name;
    dialog.onclick = (event) => event.target === dialog && dialog.close(); // beside the picture
    dialog.onclose = () => dialog.replaceChildren();
    dialog.showModal();
  }
}
