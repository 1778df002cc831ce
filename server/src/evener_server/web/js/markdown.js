// Markdown that is shown while it streams in. Blocks that no longer change are left alone, so that what people select
// or scroll stays as it is.
import { Marked } from "../libraries/marked/marked.js";
import { cleanMarkdown } from "./clean.js";
import { colourCode, frameCode } from "./code.js";
import { element } from "./dom.js";
import { drawFormulas, extensions } from "./math.js";

/** A longer text is shown as it is. */
const MAX_MARKDOWN = 100000;
/** Code that is coloured again with each new piece of it. */
const MAX_GROWING = 6000;
/** Tags that models write because Markdown has no sign for them; all others are shown as text. */
const HARMLESS = /^<\/?(?:br|sub|sup|kbd|mark|u|b|i|s)\s*\/?>$/i;

const escaped = (text) => text.replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);
const marked = new Marked({
  gfm: true, breaks: true, extensions,
  renderer: {
    html: ({ text }) => (HARMLESS.test(text.trim()) ? text : escaped(text)),
    // No image is loaded: its address could tell somebody what was asked.
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

export class MarkdownView {
  #parts = [];
  #text = null;

  /** @param {HTMLElement} root what is filled; @param {(name: string) => string} t translates */
  constructor(root, t) {
    this.root = root;
    this.t = t;
  }

  /** Shows `text`; `done`: no more comes. */
  show(text, done) {
    if (text !== this.#text) {
      this.#text = text;
      this.#update(this.#blocks(text));
    }
    if (done) colourCode(this.root);
  }

  #blocks(text) {
    if (text.length > MAX_MARKDOWN) return [{ raw: text, make: () => plain(text) }];
    try {
      const tokens = marked.lexer(text).filter(({ type }) => type !== "space" && type !== "def");
      return tokens.map((token) => ({ raw: `${token.type} ${token.raw}`, make: () => cleanMarkdown(marked.parser([token])) }));
    } catch (error) {
      // Thousands of nested quotes, and the like.
      console.warn("shown as plain text:", error);
      return [{ raw: text, make: () => plain(text) }];
    }
  }

  #update(blocks) {
    let same = 0;
    while (same < blocks.length && this.#parts[same]?.raw === blocks[same].raw) same += 1;
    for (const { node } of this.#parts.splice(same)) node.remove();
    for (const { raw, make } of blocks.slice(same)) {
      const node = element("div", { class: "block" });
      node.append(make());
      frameCode(node, this.t);
      frameTables(node, this.t);
      drawFormulas(node);
      // Long code that still grows gets its colours at its end.
      if (raw.length < MAX_GROWING) colourCode(node);
      this.root.append(node);
      this.#parts.push({ raw, node });
    }
    // All but the last block are complete.
    for (const { node } of this.#parts.slice(Math.max(0, same - 1), -1)) colourCode(node);
  }
}

/** Wide tables scroll by themselves. */
function frameTables(root, t) {
  for (const table of root.querySelectorAll("table")) {
    const frame = element("div", { class: "table", tabindex: "0", role: "region", "aria-label": t("table") });
    table.replaceWith(frame);
    frame.append(table);
  }
}

function plain(text) {
  return element("div", { class: "plain" }, text);
}
