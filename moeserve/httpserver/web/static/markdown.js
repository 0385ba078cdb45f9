// Markdown as elements. markdown-it reads the text; its tokens become elements one by one, each of a kind listed here,
// so no text of a model is ever read as HTML.

import { previewButton } from "./artifacts.js";
import { copyButton, el } from "./dom.js";
import { highlighted } from "./highlighting.js";
import { mathElement, mathSyntax } from "./maths.js";

const MAX_NESTING = 40; // of quotes, lists and emphasis in one another: what is deeper is shown as it is written
const parser = globalThis
  .markdownit({ html: false, linkify: true, breaks: true, maxNesting: MAX_NESTING })
  .use(mathSyntax);
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false }); // "main.py" is no address
parser.validateLink = () => true; // `link` decides, and keeps the text of what it refuses

const MAX_CHARACTERS = 300_000; // of a text that is formatted; the rest is shown as it is
const TASK = /^\[([ xX])\] /;

/** Shows `text` in `container`. What has not changed since the last call keeps its elements, so a streamed answer
 *  redraws its last block only, and a selection in the others stays. */
export function showMarkdown(container, text) {
  const found = blocksOf(text);
  found.forEach(({ source, make }, i) => {
    const old = container.children[i];
    if (old?.markdownSource === source) return;
    const node = make();
    node.markdownSource = source;
    if (old) old.replaceWith(node);
    else container.append(node);
  });
  while (container.children.length > found.length) container.lastElementChild.remove();
}

/** The blocks of a text: the source of each, which says whether it has changed, and a function that makes it. */
function blocksOf(whole) {
  const head = whole.slice(0, MAX_CHARACTERS);
  const env = {};
  const tokens = parser.parse(head, env);
  const lines = head.split("\n");
  const references = Object.keys(env.references ?? {}).length; // a definition changes the links before it
  const found = [];
  for (let start = 0, end; start < tokens.length; start = end) {
    end = endOf(tokens, start);
    const block = tokens.slice(start, end);
    const [from, to] = block[0].map;
    const text = lines.slice(from, to).join("\n");
    const isTooDeep = block.some(({ level }) => level >= MAX_NESTING - 1); // markdown-it leaves out the rest
    const make = () => (isTooDeep ? plain(text) : build(block)[0]);
    found.push({ source: `${references} ${block[0].type} ${text}`, make });
  }
  if (whole.length > head.length) {
    const rest = whole.slice(head.length);
    found.push({ source: rest, make: () => plain(rest) });
  }
  return found;
}

function plain(text) {
  return el("pre", { tabIndex: 0 }, text);
}

function endOf(tokens, start) {
  let depth = 0;
  let at = start;
  do depth += tokens[at++].nesting;
  while (depth > 0);
  return at;
}

/** The nodes of a list of tokens, in which every opening one has its closing one. */
function build(tokens) {
  const top = [];
  const open = [{ append: (...nodes) => top.push(...nodes) }];
  tokens.forEach((token, i) => {
    if (token.nesting < 0) open.pop();
    else if (token.nesting === 0) open.at(-1).append(...leaf(token));
    else if (token.hidden) open.push(open.at(-1)); // the paragraph of a tight list
    else {
      const { outer, inner = outer } = (CONTAINERS[token.type] ?? unknown)(token, tokens.slice(i + 1, i + 3));
      open.at(-1).append(outer);
      open.push(inner);
    }
  });
  return top;
}

const container = (tag, properties) => ({ outer: el(tag, properties) });
const unknown = () => container("span");

const CONTAINERS = {
  paragraph_open: () => container("p"),
  heading_open: ({ tag }) => container(`h${Math.min(Number(tag[1]) + 2, 6)}`), // the page has the first two
  blockquote_open: () => container("blockquote"),
  bullet_list_open: () => container("ul"),
  ordered_list_open: (token) => container("ol", { start: Number(token.attrGet("start") ?? 1) }),
  list_item_open: (_, next) => container("li", { className: takeTask(next) }),
  table_open: () => {
    const inner = el("table");
    return { outer: el("div", { className: "table", tabIndex: 0 }, inner), inner };
  },
  thead_open: () => container("thead"),
  tbody_open: () => container("tbody"),
  tr_open: () => container("tr"),
  th_open: (token) => container("th", { className: alignment(token) }),
  td_open: (token) => container("td", { className: alignment(token) }),
  strong_open: () => container("strong"),
  em_open: () => container("em"),
  s_open: () => container("del"),
  link_open: (token) => ({ outer: link(token.attrGet("href")) }),
};

const LEAVES = {
  inline: ({ children }) => build(children),
  text: ({ content }) => [content],
  task: ({ meta }) => [
    el("input", { type: "checkbox", disabled: true, checked: meta, ariaLabel: meta ? "done" : "to do" }),
  ],
  softbreak: () => [el("br")],
  hardbreak: () => [el("br")],
  hr: () => [el("hr")],
  code_inline: ({ content }) => [el("code", {}, content)],
  code_block: ({ content }) => [figure(content, "")],
  fence: ({ content, info }) => [figure(content, info.trim().split(/\s+/)[0])],
  image: (token) => [linkTo(token.attrGet("src"), token.content)],
  math: ({ content, meta }) => [mathElement(content, meta)],
};

function leaf(token) {
  return LEAVES[token.type]?.(token) ?? [token.content];
}

/** Makes "[x] " at the beginning of an item a checkbox. Returns the item's class. */
function takeTask([paragraph, inline]) {
  const first = paragraph?.type === "paragraph_open" ? inline.children[0] : undefined;
  const mark = first?.type === "text" ? TASK.exec(first.content) : null;
  if (mark === null) return "";
  inline.children.unshift({ type: "task", nesting: 0, meta: mark[1] !== " " });
  first.content = first.content.slice(mark[0].length - 1);
  return "task";
}

function alignment(token) {
  return /text-align:(center|right)/.exec(token.attrGet("style") ?? "")?.[1] ?? "";
}

function figure(content, language) {
  const code = content.replace(/\n$/, "");
  const actions = el("span", {}, previewButton(language, code), copyButton(() => code));
  const caption = el("figcaption", {}, el("span", {}, language || "text"), actions);
  const shown = el("code", {}, ...highlighted(code, language));
  return el("figure", { className: "code" }, caption, el("pre", { tabIndex: 0 }, shown));
}

function linkTo(target, text) {
  const node = link(target);
  node.append(text || target);
  return node;
}

/** An empty link where the target is an ordinary address, else a span. */
function link(target) {
  const url = URL.canParse(target) ? new URL(target) : null;
  if (url === null || !["http:", "https:", "mailto:"].includes(url.protocol)) return el("span");
  return el("a", { href: url.href, target: "_blank", rel: "noopener noreferrer", title: url.href });
}
