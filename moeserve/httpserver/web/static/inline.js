// Markdown within a line: code, emphasis, links. Returns nodes.

import { el } from "./dom.js";

const MAX_DEPTH = 6;
// Where something may begin; what lies before is text.
const START = /[\\`*_~[]|!\[|https?:\/\//g;

// Each is tried at its place. The lengths are bounded so that no text, however odd, costs more than a little.
const ESCAPE = /\\([\\`*_{}[\]()#+\-.!|>~<])/y;
const CODE = /(`{1,8})(?!`)([^]{1,4000}?)(?<!`)\1(?!`)/y;
const LINK = /!?\[([^\]\n]{1,1000})\]\(([^()\s]{1,2000}(?:\([^()\s]{0,500}\)[^()\s]{0,500})?)(?:\s"[^"\n]{0,500}")?\)/y;
const BARE_LINK = /https?:\/\/[^\s<>"'`\])}]{1,2000}/y;
const STRONG = /(\*\*|__)(?=\S)([^]{1,2000}?)(?<=\S)\1/y;
const EMPHASIS = /(\*)(?=[^\s*])([^*]{1,2000}?)(?<=\S)\*(?!\*)|(?<!\w)_(?=\S)([^_]{1,2000}?)(?<=\S)_(?!\w)/y;
const STRUCK = /~~(?=\S)([^]{1,2000}?)(?<=\S)~~/y;

const RULES = [
  [ESCAPE, ([, char]) => char],
  [CODE, ([, , code]) => el("code", {}, code.replace(/^ (.*\S.*) $/, "$1"))],
  [LINK, ([, text, target], depth) => link(target, ...inline(text, depth))],
  [BARE_LINK, ([url]) => bareLink(url)],
  [STRONG, ([, , text], depth) => el("strong", {}, ...inline(text, depth))],
  [EMPHASIS, ([, , star, line], depth) => el("em", {}, ...inline(star ?? line, depth))],
  [STRUCK, ([, text], depth) => el("del", {}, ...inline(text, depth))],
];

/** Nodes and strings. Line breaks stay line breaks, as people expect of a chat. */
export function inline(text, depth = 0) {
  if (depth > MAX_DEPTH) return [text];
  const nodes = [];
  let plain = "";
  let at = 0;
  while (at < text.length) {
    START.lastIndex = at;
    const next = START.exec(text)?.index ?? text.length;
    plain += text.slice(at, next);
    at = next;
    if (at === text.length) break;
    const found = matchAt(text, at, depth + 1);
    if (found === null) {
      plain += text[at];
      at += 1;
      continue;
    }
    nodes.push(...lines(plain), ...found.nodes);
    plain = "";
    at = found.end;
  }
  return [...nodes, ...lines(plain)];
}

function matchAt(text, at, depth) {
  for (const [pattern, make] of RULES) {
    pattern.lastIndex = at;
    const match = pattern.exec(text);
    if (match !== null) {
      const end = pattern.lastIndex; // before `make`, which may use the pattern again
      return { nodes: [make(match, depth)].flat(), end };
    }
  }
  return null;
}

function lines(text) {
  return text.split("\n").flatMap((line, i) => (i ? [el("br"), line] : [line])).filter((node) => node !== "");
}

function bareLink(url) {
  const end = url.search(/[.,;:!?]+$/); // the sentence's, not the address's
  const address = end < 0 ? url : url.slice(0, end);
  return [link(address, address), url.slice(address.length)].filter((node) => node !== "");
}

/** A link where the target is an ordinary address, else its text alone. */
function link(target, ...children) {
  const url = URL.canParse(target) ? new URL(target) : null;
  if (url === null || !["http:", "https:", "mailto:"].includes(url.protocol)) return el("span", {}, ...children);
  return el("a", { href: url.href, target: "_blank", rel: "noopener noreferrer", title: url.href }, ...children);
}
