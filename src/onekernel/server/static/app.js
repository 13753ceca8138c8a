// The page's one conversation: send, stream, stop, and keep.

import { ApiError, servedModel, streamAnswer } from "./api.js";
import { answerNode, questionNode } from "./messages.js";
import { currentSettings, setUpSettings } from "./settings.js";
import { hideSpeed, Speed } from "./speed.js";
import { loadKey, loadMessages, saveKey, saveMessages } from "./store.js";

const RETRY_MS = 2000; // while the server loads its model, or is gone
const SAVE_MS = 1000; // how much of an answer a crash of the browser may lose

const byId = (id) => document.getElementById(id);
const [conversation, welcome, prompt, send, stop] = ["conversation", "welcome", "prompt", "send", "stop"].map(byId);

let model = null;
let retry = 0;
let messages = loadMessages();
let running = null; // the AbortController of the answer that is being made

function say(text) {
  byId("status").textContent = text;
}

async function connect() {
  clearTimeout(retry);
  try {
    model = await servedModel(loadKey());
    const isLoading = !model.max_model_len; // which is known once the model is there
    byId("model").textContent = isLoading ? `${model.id}, loading …` : model.id;
    if (isLoading) retry = setTimeout(connect, RETRY_MS);
    document.title = `${model.id} · onekernel`;
    byId("key-form").hidden = true;
  } catch (error) {
    model = null;
    if (error.status === 401) {
      askForKey();
      return;
    }
    byId("model").textContent = "not connected";
    retry = setTimeout(connect, RETRY_MS);
  }
}

function askForKey() {
  byId("model").textContent = "needs an API key";
  byId("key-form").hidden = false;
  byId("key").focus();
}

// What the model is given. An answer that never began is left out, and so is its question.
function history() {
  const { system } = currentSettings();
  const turns = system ? [{ role: "system", content: system }] : [];
  messages.forEach(({ role, content }, index) => {
    const answer = messages[index + 1];
    const unanswered = answer && !answer.content && index + 2 < messages.length;
    if (content && !(role === "user" && unanswered)) turns.push({ role, content });
  });
  return turns;
}

function show(message) {
  welcome.hidden = true;
  const shown = message.role === "user" ? { node: questionNode(message) } : answerNode(message, () => again());
  conversation.append(shown.node);
  return shown;
}

async function ask(text) {
  messages.push({ role: "user", content: text });
  show(messages.at(-1));
  await answer();
}

async function again() {
  if (running) return;
  messages.pop();
  conversation.lastElementChild.remove();
  await answer();
}

async function answer() {
  const request = { messages: history(), ...currentSettings().sampling };
  const message = { role: "assistant", content: "", reasoning: "", state: "running" };
  messages.push(message);
  const { draw } = show(message);
  const speed = new Speed(model?.onekernel?.read_limit_us);
  running = new AbortController();
  setRunning(true);
  scrollToEnd();
  let frame = 0;
  const drawSoon = () => {
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      const follow = isAtEnd();
      draw();
      speed.show();
      if (follow) scrollToEnd();
    });
  };
  let timings;
  const saving = setInterval(() => saveMessages(messages), SAVE_MS);
  try {
    for await (const chunk of chunks(request, running.signal)) {
      timings = chunk.timings ?? timings;
      const choice = chunk.choices[0];
      const { content, reasoning_content: thought } = choice?.delta ?? {};
      if (content || thought) speed.token();
      message.content += content ?? "";
      message.reasoning += thought ?? "";
      if (choice?.finish_reason) message.state = choice.finish_reason;
      drawSoon();
    }
    say("Answer complete.");
  } catch (error) {
    fail(message, error);
  }
  clearInterval(saving);
  cancelAnimationFrame(frame);
  if (message.state === "running") message.state = "stopped";
  const follow = isAtEnd();
  draw();
  speed.show(timings);
  saveMessages(messages);
  running = null;
  setRunning(false);
  if (follow) scrollToEnd();
}

function chunks(request, signal) {
  const body = { ...(model && { model: model.id }), ...request, stream: true, stream_options: { include_usage: true } };
  return streamAnswer(body, loadKey(), signal);
}

function fail(message, error) {
  if (error.name === "AbortError") {
    message.state = "stopped";
    say("Stopped.");
    return;
  }
  message.state = "failed";
  message.error = error instanceof ApiError ? error.message : `The page failed: ${error.message}`;
  if (error instanceof ApiError) connect(); // it may want a key, serve another model by now, or be gone
}

function setRunning(isRunning) {
  const hadFocus = [send, stop].includes(document.activeElement);
  send.hidden = isRunning;
  stop.hidden = !isRunning;
  if (isRunning) say("Answering …");
  if (hadFocus) (isRunning ? stop : prompt).focus();
}

function newChat() {
  running?.abort();
  messages = [];
  saveMessages(messages);
  conversation.replaceChildren();
  welcome.hidden = false;
  hideSpeed();
  say("New chat.");
  prompt.focus();
}

const isAtEnd = () => window.innerHeight + window.scrollY >= document.documentElement.scrollHeight - 60;
const scrollToEnd = () => window.scrollTo(0, document.documentElement.scrollHeight);

function fitPrompt() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

function submit() {
  const text = prompt.value.trim();
  if (!text || running) return;
  prompt.value = "";
  fitPrompt();
  ask(text);
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
prompt.addEventListener("input", fitPrompt);
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !byId("settings").open) running?.abort();
});
stop.addEventListener("click", () => running?.abort());
byId("new-chat").addEventListener("click", newChat);
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  saveKey(byId("key").value.trim());
  byId("key").value = "";
  connect();
  prompt.focus();
});
// A browser that leaves cuts the connection, which would look like a failure; so the page stops first.
window.addEventListener("beforeunload", () => running?.abort());
window.addEventListener("pagehide", () => saveMessages(messages));

setUpSettings();
for (const message of messages) {
  if (message.state === "running") message.state = "stopped"; // the page was left in the middle of it
  show(message);
}
scrollToEnd();
connect();
