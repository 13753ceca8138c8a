// The settings dialog. A field that is empty is not sent, so that the model's own default holds.

import { loadSettings, saveSettings } from "./store.js";

const dialog = document.getElementById("settings");
const form = dialog.querySelector("form");
const fields = [...form.querySelectorAll("[name]")];

function show(settings) {
  for (const field of fields) field.value = settings[field.name] ?? "";
}

function keep() {
  const filled = fields.filter((field) => field.value.trim() && field.validity.valid);
  saveSettings(Object.fromEntries(filled.map((field) => [field.name, field.value.trim()])));
}

// The settings as members of a request, and the system prompt on its own.
export function currentSettings() {
  const { system = "", ...sampling } = loadSettings();
  const numbers = Object.entries(sampling).map(([name, value]) => [name, Number(value)]);
  return { system, sampling: Object.fromEntries(numbers.filter(([, value]) => Number.isFinite(value))) };
}

export function setUpSettings() {
  show(loadSettings());
  form.addEventListener("input", keep);
  document.getElementById("open-settings").addEventListener("click", () => dialog.showModal());
  document.getElementById("reset-settings").addEventListener("click", () => {
    form.reset();
    keep();
  });
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close(); // the backdrop
  });
}
