// Formulas: found in Markdown, and drawn by KaTeX, which is loaded with the first of them.

/** Characters of a formula. */
const MAX_FORMULA = 4000;
/** What opens a formula, what closes it, and whether it stands on its own. Longer openings come first. */
const DELIMITERS = [
  { open: "$$", close: "$$", display: true },
  { open: "\\[", close: "\\]", display: true },
  { open: "\\(", close: "\\)", display: false },
  { open: "$", close: "$", display: false },
];

/** The formula at the beginning of `source`: `{raw, text, display}`, or null. */
export function formulaAt(source) {
  const kind = DELIMITERS.find(({ open }) => source.startsWith(open));
  if (!kind) return null;
  const { open, close, display } = kind;
  const rest = source.slice(open.length, open.length + MAX_FORMULA);
  for (let end = rest.indexOf(close); end >= 0; end = rest.indexOf(close, end + 1)) {
    const text = rest.slice(0, end);
    if (rest[end - 1] === "\\" && open.startsWith("$")) continue; // \$ is a dollar sign
    if (!text.trim() || (!display && text.includes("\n\n"))) return null;
    // "$5 and $6" is money: as pandoc does, a formula has no space inside its signs and no digit after them.
    if (open === "$" && (/^\s|\s$|\n/.test(text) || /\d/.test(rest[end + 1] ?? ""))) return null;
    return { raw: source.slice(0, open.length + end + close.length), text: text.trim(), display };
  }
  return null;
}

const escaped = (text) => text.replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);
const renderer = ({ text, display }) => `<span class="math${display ? " display" : ""}">${escaped(text)}</span>`;

/** Extensions for marked. */
export const extensions = [
  {
    name: "formulaBlock", level: "block", renderer: (token) => `<p>${renderer(token)}</p>\n`,
    start: (source) => source.match(/(?<=\n) {0,3}(?:\$\$|\\\[)/)?.index,
    tokenizer(source) {
      const indent = /^ {0,3}(?=\$\$|\\\[)/.exec(source);
      const found = indent && formulaAt(source.slice(indent[0].length));
      const after = found && /^[ \t]*(?:\n|$)/.exec(source.slice(indent[0].length + found.raw.length));
      if (after) return { type: "formulaBlock", ...found, raw: indent[0] + found.raw + after[0] };
    },
  },
  {
    name: "formula", level: "inline", renderer,
    start: (source) => source.match(/\$|\\\(|\\\[/)?.index,
    tokenizer(source) {
      const found = formulaAt(source);
      if (found) return { type: "formula", ...found };
    },
  },
];

let library = null;

async function load() {
  const style = document.createElement("link");
  style.rel = "stylesheet";
  style.href = "page/libraries/katex/katex.min.css";
  document.head.append(style);
  await import("../libraries/katex/katex.min.js");
  return globalThis.katex;
}

/** Draws all formulas in `root`. What is no formula stays as it was written. */
export async function drawFormulas(root) {
  const found = root.querySelectorAll("span.math:not(.drawn)");
  if (!found.length) return;
  const katex = await (library ??= load());
  for (const place of found) {
    const source = place.textContent, displayMode = place.classList.contains("display");
    place.classList.add("drawn");
    try {
      // It makes elements, no HTML, and follows no links: trust is off.
      katex.render(source, place, { displayMode, maxSize: 20, maxExpand: 500, strict: "ignore", trust: false });
    } catch (error) {
      place.textContent = source;
      place.classList.add("wrong");
      place.title = error.message;
    }
  }
}
