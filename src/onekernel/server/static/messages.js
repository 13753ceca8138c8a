// How a message looks: the question as it was typed, the answer as Markdown with its folded reasoning and its state.

import { button, copyButton, element } from "./elements.js";
import { renderMarkdown } from "./markdown.js";

export function questionNode(message) {
  return element("article", { className: "question", ariaLabel: "You" }, message.content);
}

// An answer's node and the function that draws its message again, as it stands.
export function answerNode(message, onAgain) {
  const thought = element("div", { className: "markdown" });
  const summary = element("summary");
  const reasoning = element("details", { className: "reasoning" }, summary, thought);
  const body = element("div", { className: "markdown" });
  const note = element("p", { className: "note" });
  const error = element("p", { className: "error", role: "alert" });
  const tools = element(
    "div",
    { className: "tools" },
    copyButton("answer", () => message.content),
    button("Try again", onAgain, "quiet again"),
  );
  const node = element("article", { className: "answer", ariaLabel: "Answer" }, reasoning, body, note, error, tools);

  function draw() {
    const running = message.state === "running";
    node.ariaBusy = String(running); // a screen reader waits for the whole answer
    node.classList.toggle("running", running);
    reasoning.hidden = !message.reasoning;
    summary.textContent = running && !message.content ? "Thinking …" : "Thoughts";
    renderMarkdown(thought, message.reasoning);
    renderMarkdown(body, message.content);
    setText(note, NOTES[message.state] ?? "");
    setText(error, message.error ?? "");
    tools.hidden = running;
  }

  draw();
  return { node, draw };
}

const NOTES = { stopped: "Stopped.", cancelled: "Stopped.", length: "Cut at the most tokens." };

function setText(node, text) {
  node.hidden = !text;
  if (node.textContent !== text) node.textContent = text; // an alert speaks when it changes
}
