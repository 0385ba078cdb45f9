// A small Markdown: what models write in a chat. Text in, elements out, nothing parsed as HTML.

import { copyButton, el } from "./dom.js";
import { inline } from "./inline.js";

const MAX_DEPTH = 8; // of quotes and lists in one another
const FENCE = /^ {0,3}(`{3,}|~{3,}) *([^\s`]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const TABLE_RULE = /^ *\|?( *:?-+:? *\|)* *:?-+:? *\|? *$/;

/** Shows `text` in `container`. What has not changed since the last call keeps its elements, so a streamed answer
 *  costs its last block only, and a selection in the others stays. */
export function showMarkdown(container, text) {
  const found = [...blocks(text.split("\n"))];
  found.forEach((block, i) => {
    const source = block.lines.join("\n");
    const old = container.children[i];
    if (old?.markdownSource === source) return;
    const node = render(block, 0);
    node.markdownSource = source;
    if (old) old.replaceWith(node);
    else container.append(node);
  });
  while (container.children.length > found.length) container.lastElementChild.remove();
}

function* blocks(lines) {
  let start = 0;
  while (start < lines.length) {
    if (isBlank(lines[start])) {
      start += 1;
      continue;
    }
    const kind = kindOf(lines, start);
    const end = ENDS[kind](lines, start);
    yield { kind, lines: lines.slice(start, end) };
    start = end;
  }
}

function kindOf(lines, at) {
  const line = lines[at];
  if (FENCE.test(line)) return "code";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (QUOTE.test(line)) return "quote";
  if (ITEM.test(line)) return "list";
  if (line.includes("|") && at + 1 < lines.length && lines[at + 1].includes("-") && TABLE_RULE.test(lines[at + 1]))
    return "table";
  return "paragraph";
}

/** Where a block that begins at a line ends: the first line that is not part of it. */
const ENDS = {
  code(lines, at) {
    const [, fence] = FENCE.exec(lines[at]);
    const closing = new RegExp(`^ {0,3}${fence[0]}{${fence.length},} *$`);
    const end = lines.findIndex((line, i) => i > at && closing.test(line));
    return end < 0 ? lines.length : end + 1;
  },
  heading: (_, at) => at + 1,
  rule: (_, at) => at + 1,
  quote: (lines, at) => firstAfter(lines, at, (i) => !QUOTE.test(lines[i])),
  table: (lines, at) => firstAfter(lines, at + 1, (i) => !lines[i].includes("|")),
  paragraph: (lines, at) => firstAfter(lines, at, (i) => isBlank(lines[i]) || kindOf(lines, i) !== "paragraph"),
  list(lines, at) {
    const goesOn = (i) => ITEM.test(lines[i]) || /^ {2,}\S/.test(lines[i]);
    return firstAfter(lines, at, (i) => {
      if (goesOn(i)) return false;
      if (isBlank(lines[i])) return i + 1 >= lines.length || !goesOn(i + 1);
      return isBlank(lines[i - 1]) || kindOf(lines, i) !== "paragraph";
    });
  },
};

function firstAfter(lines, at, ends) {
  let i = at + 1;
  while (i < lines.length && !ends(i)) i += 1;
  return i;
}

function render({ kind, lines }, depth) {
  return depth > MAX_DEPTH ? el("p", {}, lines.join("\n")) : RENDERERS[kind](lines, depth + 1);
}

const RENDERERS = {
  code(lines) {
    const [, fence, language] = FENCE.exec(lines[0]);
    const isClosed = lines.length > 1 && lines.at(-1).trim().startsWith(fence);
    const code = lines.slice(1, isClosed ? -1 : undefined).join("\n");
    const caption = el("figcaption", {}, el("span", {}, language || "text"), copyButton(() => code));
    return el("figure", { className: "code" }, caption, el("pre", { tabIndex: 0 }, el("code", {}, code)));
  },
  heading(lines) {
    const [, marks, text] = HEADING.exec(lines[0]);
    return el(`h${Math.min(marks.length + 2, 6)}`, {}, ...inline(text)); // the page has the first two
  },
  rule: () => el("hr"),
  quote: (lines, depth) => el("blockquote", {}, ...inner(lines.map((line) => line.replace(QUOTE, "")), depth)),
  list(lines, depth) {
    const [, indent, mark] = ITEM.exec(lines[0]);
    const items = [];
    for (const line of lines) {
      const match = ITEM.exec(line);
      if (match !== null && match[1].length <= indent.length + 1) items.push([line.slice(match[0].length)]);
      else items.at(-1).push(line.replace(new RegExp(`^ {0,${indent.length + mark.length + 1}}`), ""));
    }
    const nodes = items.map((item) => el("li", {}, ...inner(item, depth, true)));
    return /\d/.test(mark) ? el("ol", { start: parseInt(mark, 10) }, ...nodes) : el("ul", {}, ...nodes);
  },
  table(lines) {
    const rows = lines.filter((_, i) => i !== 1).map(cells);
    const line = (tag, row) => el("tr", {}, ...row.map((cell) => el(tag, {}, ...inline(cell))));
    const head = el("thead", {}, line("th", rows[0]));
    const body = el("tbody", {}, ...rows.slice(1).map((row) => line("td", row)));
    return el("div", { className: "table", tabIndex: 0 }, el("table", {}, head, body));
  },
  paragraph: (lines) => el("p", {}, ...inline(lines.map((line) => line.trim()).join("\n"))),
};

/** The blocks within a block; in a list item without blank lines the first paragraph stands bare. */
function inner(lines, depth, isItem = false) {
  return [...blocks(lines)].flatMap((block, i) => {
    const isBare = isItem && i === 0 && block.kind === "paragraph" && !lines.some(isBlank);
    return isBare ? inline(block.lines.map((line) => line.trim()).join("\n")) : [render(block, depth)];
  });
}

function cells(line) {
  const text = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return text.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function isBlank(line) {
  return line.trim() === "";
}
