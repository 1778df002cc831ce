// The only place where text becomes HTML. What a model writes is hostile: DOMPurify keeps the few elements of Markdown.
import "../libraries/dompurify/purify.min.js";

const purify = globalThis.DOMPurify;
const TAGS = [
  "a", "b", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "i", "kbd", "li", "mark", "ol",
  "p", "pre", "s", "span", "strong", "sub", "sup", "table", "tbody", "td", "th", "thead", "tr", "u", "ul",
];
const CLASS = /^(?:math|math display|language-[\w+#.-]{1,40})$/;
const COMMON = { RETURN_DOM_FRAGMENT: true, ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false, ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i };
const MARKDOWN = { ...COMMON, ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ["href", "title", "class", "start", "align"], ADD_URI_SAFE_ATTR: ["start", "align"] };
const CODE = { ...COMMON, ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"] };

/** A fragment with what is harmless in `html`, which was made from Markdown. */
export function cleanMarkdown(html) {
  const fragment = purify.sanitize(html, MARKDOWN);
  for (const each of fragment.querySelectorAll("[class]")) if (!CLASS.test(each.className)) each.removeAttribute("class");
  for (const link of fragment.querySelectorAll("a")) {
    if (!link.hasAttribute("href")) continue;
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
    // Where it leads: a model may call any address by any name.
    link.title = link.href;
  }
  return fragment;
}

/** A fragment of code in colours. */
export function cleanCode(html) {
  return purify.sanitize(html, CODE);
}
