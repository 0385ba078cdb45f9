// What all pages share: the served model's name, the state of the server, the API key, light and dark.

import { apiKey, health, servedModel } from "./api.js";
import { byId, number, say } from "./dom.js";

const THEME = "moeserve.theme";
const THEMES = ["auto", "light", "dark"];
const POLL_MS = 1000;

export function setUpTheme() {
  const button = byId("theme");
  show(localStorage.getItem(THEME) ?? "auto");
  button.onclick = () => {
    const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
    localStorage.setItem(THEME, next);
    show(next);
  };
  function show(theme) {
    document.documentElement.dataset.theme = THEMES.includes(theme) ? theme : "auto";
    button.querySelector(".choice").textContent = theme;
  }
}

/** Calls `change(isDark)` now, when the user chooses another theme, and whenever the browser's own choice changes where the
 *  user left it to that. */
export function followTheme(change) {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const show = () => {
    const chosen = localStorage.getItem(THEME);
    change(chosen === "dark" || (chosen !== "light" && dark.matches));
  };
  dark.addEventListener("change", show);
  byId("theme").addEventListener("click", show); // behind `setUpTheme`
  show();
}

/** The dialog that asks for an API key; `changed()` is called when there is a new one. */
export function setUpKeyDialog(changed) {
  const dialog = byId("key-dialog");
  const field = byId("key");
  byId("open-key").onclick = () => {
    askForKey();
    byId("key-problem").textContent = "";
  };
  byId("key-cancel").onclick = () => dialog.close();
  dialog.querySelector("form").onsubmit = (event) => {
    event.preventDefault();
    apiKey.set(field.value.trim());
    dialog.close();
    changed();
  };
}

export function askForKey() {
  byId("key").value = apiKey.get();
  byId("key-problem").textContent = apiKey.get() ? "The server does not take this key." : "This server wants a key.";
  byId("key-dialog").showModal();
}

/** Shows the model's name and returns its card; while the server is loading or away, says so and waits. Returns null,
 *  and asks, when the server wants another key. */
export async function awaitModel() {
  const banner = byId("banner");
  for (;;) {
    const state = await health();
    banner.hidden = state.status === "ok";
    if (state.status !== "ok") say(banner, wordsFor(state));
    else {
      try {
        return shown(await servedModel());
      } catch (error) {
        banner.hidden = false;
        say(banner, error.status === 401 ? "This server wants an API key." : error.message);
        if (error.status === 401) {
          askForKey();
          return null;
        }
      }
    }
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}

function shown(model) {
  byId("model").textContent = model.id;
  byId("model").title = `${number.format(model.max_model_len)} tokens of context`;
  return model;
}

function wordsFor(state) {
  switch (state.status) {
    case "loading":
      return `The model is loading: ${state.stage}, ${Math.round(state.fraction * 100)}%`;
    case "draining":
      return "The server is shutting down.";
    case "restarting":
      return `The engine is restarted: ${state.cause}`;
    case "unresponsive":
      return "The engine does not respond.";
    default:
      return "The server cannot be reached. Trying again…";
  }
}
