// The choice of a model where the server has several, and what is known of the chosen one.

import { RequestFailed, servedModels } from "./api.js";
import { byId, el, number, say } from "./dom.js";

const CHOICE = "moeserve.model";
const POLL_MS = 2000; // while a model loads

let models = []; // the cards that can be chosen
let timer = 0;

/** `changed(card)` is called with the model that requests go to, when there is one and when it changes. */
export function setUpModels(changed) {
  const select = byId("model-choice");
  select.onchange = () => {
    localStorage.setItem(CHOICE, select.value);
    changed(chosenModel());
  };
  window.addEventListener("focus", () => models.length && refreshAgain()); // others may have added or deleted some
  return { refresh };

  /** Reads the list again, and once more every other second while a model loads. */
  async function refresh() {
    clearTimeout(timer);
    models = selectable(await servedModels());
    const chosen = chosenModel();
    select.replaceChildren(...models.map(option));
    select.value = chosen.id;
    select.hidden = models.length < 2;
    byId("model").hidden = models.length > 1;
    say(byId("model"), chosen.id);
    changed(chosen);
    if (models.some((model) => model.state === "loading")) timer = setTimeout(refreshAgain, POLL_MS);
  }

  async function refreshAgain() {
    try {
      await refresh();
    } catch (error) {
      if (!(error instanceof RequestFailed)) throw error; // a server that is gone is the next question's business
    }
  }
}

/** The card of the model that requests go to; null before the list has been read. */
export function chosenModel() {
  return models.find(({ id }) => id === localStorage.getItem(CHOICE)) ?? models[0] ?? null;
}

/** The field of a request that chooses the model; none where there is no choice. */
export function modelField() {
  return models.length > 1 ? { model: chosenModel().id } : {};
}

/** Models and adapters by their first names: a second name of the same weights is no choice. */
function selectable(cards) {
  const found = cards.filter(({ id, root, parent }) => id === root || parent !== null);
  return found.length ? found : cards;
}

function option(model) {
  return el("option", { value: model.id }, `${model.id}${stateOf(model)}`);
}

function stateOf({ state, stage, fraction, status }) {
  if (state === "loading") {
    const stageNow = stage ?? status?.stage;
    const share = number.format((fraction ?? status?.fraction ?? 0) * 100);
    return ` — loading${stageNow ? ` ${stageNow}` : ""}, ${share}%`;
  }
  if (status?.failed) return " — failed to load";
  return state === "unloaded" ? " — not loaded" : "";
}
