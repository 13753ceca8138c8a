// What the browser keeps: the conversation and the settings for good, the API key until the tab is closed.

function read(storage, name, otherwise) {
  try {
    return JSON.parse(storage.getItem(`onekernel.${name}`)) ?? otherwise;
  } catch {
    return otherwise; // no storage, or not ours
  }
}

function write(storage, name, value) {
  try {
    storage.setItem(`onekernel.${name}`, JSON.stringify(value));
  } catch {
    // Full or forbidden: the page works on, a reload forgets.
  }
}

export const loadMessages = () => read(localStorage, "messages", []);
export const saveMessages = (messages) => write(localStorage, "messages", messages);
export const loadSettings = () => read(localStorage, "settings", {});
export const saveSettings = (settings) => write(localStorage, "settings", settings);
export const loadKey = () => read(sessionStorage, "key", "");
export const saveKey = (key) => write(sessionStorage, "key", key);
