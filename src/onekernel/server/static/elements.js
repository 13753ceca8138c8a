// Small makers of DOM nodes. Strings become text nodes, never HTML.

export function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  Object.assign(node, properties);
  node.append(...children);
  return node;
}

export function button(label, onClick, className = "") {
  const node = element("button", { type: "button", className }, label);
  node.addEventListener("click", onClick);
  return node;
}

export function copyButton(what, text) {
  const node = button("Copy", async () => {
    const copied = await copy(text());
    node.textContent = copied ? "Copied" : "Not allowed";
    setTimeout(() => (node.textContent = "Copy"), 1500);
  }, "quiet");
  node.ariaLabel = `Copy ${what}`;
  return node;
}

export function codeBlock(code, language) {
  const name = language ? `${language} code` : "code";
  const bar = element("div", { className: "bar" }, element("span", {}, language), copyButton(name, () => code));
  // A block that scrolls must be reachable by keyboard.
  const scroller = element("pre", { tabIndex: 0, role: "group", ariaLabel: name }, element("code", {}, code));
  return element("div", { className: "code" }, bar, scroller);
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text); // the clipboard needs https or localhost
  }
}

function copyBySelection(text) {
  const area = element("textarea", { value: text, className: "unseen" });
  const focused = document.activeElement;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return copied;
}
