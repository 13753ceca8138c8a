// What an accessibility checker would find: names, references, targets, contrasts (WCAG 2.2 AA), headings, landmarks.

() => {
  const problems = [];
  const luminance = (color) => {
    const channels = color.match(/[\d.]+/g).map((value) => value / 255);
    const [r, g, b] = channels.map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const backdrop = (node) => {
    for (; node; node = node.parentElement) {
      const color = getComputedStyle(node).backgroundColor;
      if (!/, 0\)$|transparent/.test(color)) return color;
    }
    return "rgb(255, 255, 255)";
  };
  const say = (node, what) => problems.push(`${node.tagName}#${node.id}.${node.className}: ${what}`);
  const ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
  for (const id of ids) if (ids.indexOf(id) !== ids.lastIndexOf(id)) problems.push(`two #${id}`);
  for (const node of document.querySelectorAll("[aria-labelledby], [aria-describedby], label[for]")) {
    const names = node.getAttribute("aria-labelledby") ?? node.getAttribute("aria-describedby") ?? node.htmlFor;
    for (const id of names.split(" ")) if (!document.getElementById(id)) say(node, `no #${id}`);
  }
  for (const node of document.querySelectorAll("button, input, textarea, select, a, summary")) {
    const name = node.ariaLabel || [...(node.labels ?? [])].map((l) => l.textContent).join("") || node.textContent;
    if (!name.trim()) say(node, "has no name");
    if (node.tabIndex > 0) say(node, "leaves the order of the page");
    const box = node.getBoundingClientRect();
    const inline = node.tagName === "A" || node.tagName === "SUMMARY";
    if (box.width && !inline && (box.width < 24 || box.height < 24)) say(node, `is ${box.width} x ${box.height}`);
  }
  for (const node of document.querySelectorAll("img")) if (!node.hasAttribute("alt")) say(node, "has no alt");
  for (const node of document.querySelectorAll("pre, .table")) {
    if (node.scrollWidth > node.clientWidth && node.tabIndex !== 0) say(node, "scrolls by mouse only");
  }
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !node.checkVisibility()) continue;
    const [a, b] = [luminance(getComputedStyle(node).color), luminance(backdrop(node))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) say(node, `contrast ${contrast.toFixed(2)}: ${walker.currentNode.textContent.trim()}`);
  }
  const levels = [...document.querySelectorAll("h1, h2, h3, h4, h5, h6")].map((h) => Number(h.tagName[1]));
  if (levels.filter((level) => level === 1).length !== 1) problems.push("not one h1");
  if (!document.documentElement.lang || !document.title) problems.push("no language or title");
  for (const tag of ["header", "main", "footer"]) if (!document.querySelector(tag)) problems.push(`no ${tag}`);
  return problems;
}
