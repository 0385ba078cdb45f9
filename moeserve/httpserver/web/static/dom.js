// Elements are built, never parsed: no text of a model or a server is ever read as HTML. (The page's
// Content-Security-Policy switches innerHTML and its like off altogether.)

/** An element with its properties, attributes, listeners (`onclick`) and children; null children are left out. */
export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

export function byId(id) {
  return document.getElementById(id);
}

/** Sets a text that a screen reader reads out, unless it stands there already: it would be read again. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** A button that copies what `text()` returns and says so for a moment. */
export function copyButton(text, label = "Copy") {
  const button = el("button", { type: "button", className: "quiet", onclick: copy }, label);
  async function copy() {
    button.textContent = (await copied(text())) ? "Copied" : "Not copied";
    setTimeout(() => (button.textContent = label), 1500);
  }
  return button;
}

/** Whether the text is on the clipboard now. Over plain HTTP from another machine browsers keep navigator.clipboard
 *  from a page; a selected text field still works there. */
async function copied(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch (error) {
      if (error.name !== "NotAllowedError") throw error;
    }
  }
  const field = el("textarea", { value: text, className: "off-screen" });
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
}

export const number = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
export const oneDigit = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

/** 0.21 s, 4.2 s, 1 min 12 s. */
export function seconds(milliseconds) {
  const s = milliseconds / 1000;
  if (s < 60) return `${s.toFixed(s < 1 ? 2 : 1)} s`;
  return `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`;
}
