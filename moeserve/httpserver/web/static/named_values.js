// Values that are kept by name in this browser: a list to choose from, and buttons that keep and delete.

import { byId, el } from "./dom.js";

const MAX_NAME = 60; // characters

/** The control in the element `id`, whose values are kept under `key`. `read()` returns the value to keep under a name,
 *  `use(value)` is called with a chosen one. `what`: its name for people, as "system prompt". */
export function setUpNamedValues({ id, key, what, read, use }) {
  const box = byId(id);
  const select = el("select", {}, el("option", { value: "" }, "Choose…"));
  const name = el("input", { maxLength: MAX_NAME, ariaLabel: `Name of the ${what}`, placeholder: "Name" });
  const naming = el("div", { className: "naming", hidden: true }, name,
    button("Keep", what, keep), button("Cancel", what, () => setNaming(false)));
  const saveAs = button("Save as…", what, () => setNaming(true));
  const remove = button("Delete", what, forget);
  box.replaceChildren(el("label", {}, `Saved ${what}s `, select), saveAs, remove, naming);
  select.onchange = () => {
    remove.disabled = !select.value;
    if (select.value) use(stored(key)[select.value]);
  };
  name.onkeydown = (event) => {
    if (event.key !== "Enter" && event.key !== "Escape") return;
    event.preventDefault();
    event.stopPropagation(); // neither the dialog's Save nor its end
    if (event.key === "Enter") keep();
    else setNaming(false);
  };
  show("");

  function show(chosen) {
    const names = Object.keys(stored(key)).sort((a, b) => a.localeCompare(b));
    select.replaceChildren(el("option", { value: "" }, names.length ? "Choose…" : "None yet"),
      ...names.map((one) => el("option", { value: one }, one)));
    select.value = chosen;
    remove.disabled = !chosen;
  }

  function setNaming(isOn) {
    naming.hidden = !isOn;
    name.value = isOn ? select.value : "";
    if (isOn) name.select();
    else saveAs.focus();
  }

  function keep() {
    const chosen = name.value.trim();
    if (!chosen) {
      name.focus();
      return;
    }
    write({ ...stored(key), [chosen]: read() });
    show(chosen);
    setNaming(false);
  }

  function forget() {
    const left = { ...stored(key) };
    delete left[select.value];
    write(left);
    show("");
    saveAs.focus();
  }

  function write(values) {
    localStorage.setItem(key, JSON.stringify(values));
  }
}

function button(label, what, onclick) {
  return el("button", { type: "button", ariaLabel: `${label} (${what})`, onclick }, label);
}

/** Values by name, without a prototype: any name may be given. */
function stored(key) {
  return Object.assign(Object.create(null), JSON.parse(localStorage.getItem(key) ?? "{}"));
}
