// Markdown to DOM nodes. The text comes from a model and may hold anything, so nothing here parses HTML: every piece of
// text becomes a text node, every element is created by name, and a link must be http or https.

import { codeBlock, element } from "./elements.js";

const FENCE = /^ {0,3}(`{3,}|~{3,}) *([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)/;
const TABLE_RULE = /^ *\|? *:?-+:? *(?:\| *:?-+:? *)*\|? *$/;

const DEEPEST = 8; // of quotes, lists and emphasis inside each other; what is deeper stays plain text

const sources = new WeakMap(); // a block's element -> the text that it shows

// Show `text` in `target`. Blocks whose text is as before keep their elements, so a growing answer redraws its end only.
export function renderMarkdown(target, text, depth = 0) {
  const blocks = splitBlocks(text.replaceAll("\r\n", "\n").replaceAll("\t", "    ").split("\n"));
  blocks.forEach((lines, index) => {
    const source = lines.join("\n");
    const old = target.children[index];
    if (old && sources.get(old) === source) return;
    const block = renderBlock(lines, depth);
    sources.set(block, source);
    if (old) old.replaceWith(block);
    else target.append(block);
  });
  while (target.children.length > blocks.length) target.lastElementChild.remove();
}

function kindOf(lines, index) {
  const line = lines[index];
  if (FENCE.test(line)) return "fence";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (QUOTE.test(line)) return "quote";
  if (ITEM.test(line)) return "list";
  if (line.includes("|") && TABLE_RULE.test(lines[index + 1] ?? "") && lines[index + 1].includes("|")) return "table";
  return "paragraph";
}

// The index after the last line of the block that begins at `start`.
function endOf(kind, lines, start) {
  const isBlank = (index) => !lines[index].trim();
  let end = start + 1;
  if (kind === "fence") {
    const fence = FENCE.exec(lines[start])[1];
    const closes = (line) => line.trim().startsWith(fence) && /^(`+|~+)$/.test(line.trim());
    while (end < lines.length && !closes(lines[end])) end += 1;
    return Math.min(end + 1, lines.length);
  }
  if (kind === "list") {
    const ordered = isOrdered(lines[start]);
    const belongs = (index) => /^ {2}/.test(lines[index]) || (ITEM.test(lines[index]) && isOrdered(lines[index]) === ordered);
    while (end < lines.length) {
      let next = end;
      while (next < lines.length && isBlank(next)) next += 1;
      if (next === lines.length) break;
      const lazy = next === end && kindOf(lines, next) === "paragraph";
      if (RULE.test(lines[next]) || !(belongs(next) || lazy)) break;
      end = next + 1;
    }
    return end;
  }
  if (kind === "table") {
    while (end < lines.length && lines[end].includes("|")) end += 1;
  } else if (kind === "quote" || kind === "paragraph") {
    const goesOn = (index) => ["paragraph", kind].includes(kindOf(lines, index));
    while (end < lines.length && !isBlank(end) && goesOn(end)) end += 1;
  }
  return end;
}

function splitBlocks(lines) {
  const blocks = [];
  for (let index = 0; index < lines.length; ) {
    if (!lines[index].trim()) {
      index += 1;
      continue;
    }
    const end = endOf(kindOf(lines, index), lines, index);
    blocks.push(lines.slice(index, end));
    index = end;
  }
  return blocks;
}

function renderBlock(lines, depth) {
  const kind = depth < DEEPEST ? kindOf(lines, 0) : "paragraph";
  if (kind === "fence") return renderFence(lines);
  if (kind === "rule") return element("hr");
  if (kind === "quote") return renderQuote(lines, depth);
  if (kind === "list") return renderList(lines, depth);
  if (kind === "table") return renderTable(lines);
  if (kind === "heading") {
    const [, marks, title] = HEADING.exec(lines[0]);
    // The page's own headings are of level 1 and 2.
    return element(`h${Math.min(marks.length + 2, 6)}`, {}, ...inline(title));
  }
  return element("p", {}, ...inline(lines.map((line) => line.trim()).join("\n")));
}

function renderFence(lines) {
  const [, fence, language] = FENCE.exec(lines[0]);
  const closed = lines.length > 1 && lines.at(-1).trim().startsWith(fence);
  return codeBlock(lines.slice(1, closed ? -1 : undefined).join("\n"), language);
}

function renderQuote(lines, depth) {
  const quote = element("blockquote");
  renderMarkdown(quote, lines.map((line) => line.replace(QUOTE, "")).join("\n"), depth + 1);
  return quote;
}

const isOrdered = (line) => /^\s*\d/.test(line);

function renderList(lines, depth) {
  const list = element(isOrdered(lines[0]) ? "ol" : "ul");
  const first = Number.parseInt(lines[0], 10);
  if (first > 1) list.start = first;
  const isLoose = lines.some((line) => !line.trim());
  for (const item of splitItems(lines)) {
    const entry = element("li");
    renderMarkdown(entry, item.join("\n"), depth + 1);
    if (!isLoose) {
      for (const paragraph of entry.querySelectorAll(":scope > p")) paragraph.replaceWith(...paragraph.childNodes);
    }
    list.append(entry);
  }
  return list;
}

// The lines of each item, without its marker and indentation.
function splitItems(lines) {
  const items = [];
  let width = 0;
  for (const line of lines) {
    const indent = line.length - line.trimStart().length;
    const marker = ITEM.exec(line);
    if (marker && (!items.length || indent < Math.min(width, 2) || indent === 0)) {
      width = marker[0].length;
      items.push([line.slice(width)]);
    } else {
      items.at(-1).push(line.slice(Math.min(indent, width)));
    }
  }
  return items;
}

function renderTable(lines) {
  const rows = lines.filter((_, index) => index !== 1).map((line) => splitCells(line));
  const alignments = splitCells(lines[1]).map((rule) => (rule.endsWith(":") ? (rule.startsWith(":") ? "center" : "right") : ""));
  const row = (cells, tag) =>
    element("tr", {}, ...rows[0].map((_, index) => element(tag, { className: alignments[index] ?? "" }, ...inline(cells[index] ?? ""))));
  const table = element(
    "table",
    {},
    element("thead", {}, row(rows[0], "th")),
    element("tbody", {}, ...rows.slice(1).map((cells) => row(cells, "td"))),
  );
  return element("div", { className: "table", tabIndex: 0, role: "group", ariaLabel: "Table" }, table);
}

function splitCells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

const INLINE = new RegExp(
  [
    String.raw`\\(?<escaped>[!-/:-@[-\x60{-~])`,
    String.raw`(?<ticks>\x60+)(?<code>[^]*?[^\x60])\k<ticks>(?!\x60)`,
    String.raw`!?\[(?<label>(?:[^\[\]\\]|\\.)*)\]\(\s*<?(?<href>[^\s()<>]+(?:\([^\s()<>]*\)[^\s()<>]*)?)>?(?:\s+"[^"]*")?\s*\)`,
    String.raw`\*\*(?=\S)(?<bold>[^]*?\S\*?)\*\*(?!\*)`,
    String.raw`(?<!\w)__(?=\S)(?<bold2>[^]*?\S)__(?!\w)`,
    String.raw`\*(?=[^\s*])(?<italic>[^]*?[^\s*])\*(?!\*)`,
    String.raw`(?<!\w)_(?=[^\s_])(?<italic2>[^]*?[^\s_])_(?!\w)`,
    String.raw`~~(?=\S)(?<struck>[^]*?\S)~~`,
    String.raw`(?<url>https?:\/\/[^\s<>"'\x60]*[^\s<>"'\x60.,;:!?)\]*_])`,
    String.raw`(?<newline>\n)`,
  ].join("|"),
  "g",
);

// The nodes of a line of text: text nodes, and elements for what is marked.
function inline(text, depth = 0) {
  if (depth >= DEEPEST) return [text];
  const nodes = [];
  let done = 0;
  for (const match of text.matchAll(INLINE)) {
    nodes.push(text.slice(done, match.index), inlineNode(match[0], match.groups, depth + 1));
    done = match.index + match[0].length;
  }
  nodes.push(text.slice(done));
  return nodes.filter((node) => node !== "");
}

function inlineNode(source, found, depth) {
  const { escaped, code, label, href, struck, url, newline } = found;
  const bold = found.bold ?? found.bold2;
  const italic = found.italic ?? found.italic2;
  if (escaped !== undefined) return escaped;
  if (code !== undefined) return element("code", {}, code.replace(/^ (.*\S.*) $/s, "$1"));
  if (bold !== undefined) return element("strong", {}, ...inline(bold, depth));
  if (italic !== undefined) return element("em", {}, ...inline(italic, depth));
  if (struck !== undefined) return element("s", {}, ...inline(struck, depth));
  if (newline !== undefined) return element("br");
  if (url !== undefined) return link(url, [url]) ?? source;
  return link(href, label ? inline(label, depth) : [href]) ?? source;
}

function link(address, nodes) {
  if (!/^https?:\/\//i.test(address) || !URL.canParse(address)) return null;
  const href = new URL(address).href;
  return element("a", { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...nodes);
}
