// Blocks of code: a head with the language and a button that copies, and colours.
import { element, icon } from "./dom.js";
import { cleanCode } from "./clean.js";

/** Longer code stays without colours. */
const MAX_COLOURED = 50000;
let library = null;

async function load() {
  return (await import("../libraries/highlight/highlight.min.js")).default;
}

/** Gives every block in `root` its head; `t` translates. */
export function frameCode(root, t) {
  for (const pre of root.querySelectorAll("pre")) {
    const code = pre.firstElementChild;
    const language = languageOf(code);
    const button = element("button", { type: "button", class: "copy-code" }, icon("copy"), element("span", {}, t("copy")));
    button.addEventListener("click", () => copyText(code.textContent, button.lastChild, t));
    const head = element("div", { class: "code-head" }, element("span", {}, language || t("code")), button);
    const frame = element("div", { class: "code" }, head);
    // It scrolls sideways, so it must be reachable with the keyboard.
    pre.tabIndex = 0;
    pre.setAttribute("role", "region");
    pre.setAttribute("aria-label", language ? `${t("code")}: ${language}` : t("code"));
    pre.replaceWith(frame);
    frame.append(pre);
  }
}

/** Colours the code in `root` whose language is known. */
export async function colourCode(root) {
  for (const code of root.querySelectorAll("pre > code:not(.coloured)")) {
    const language = languageOf(code), text = code.textContent;
    code.classList.add("coloured");
    if (!language || text.length > MAX_COLOURED) continue;
    const highlight = await (library ??= load());
    if (!highlight.getLanguage(language)) continue;
    code.replaceChildren(cleanCode(highlight.highlight(text, { language, ignoreIllegals: true }).value));
  }
}

/** Copies a text and says so in `label` for a moment. */
export async function copyText(text, label, t) {
  const before = label.textContent;
  try {
    await navigator.clipboard.writeText(text);
    label.textContent = t("copied");
  } catch {
    // Browsers allow it on https and localhost only.
    label.textContent = copyBySelection(text) ? t("copied") : t("notCopied");
  }
  setTimeout(() => (label.textContent = before), 1500);
}

function copyBySelection(text) {
  const area = element("textarea", { class: "off-screen", "aria-hidden": "true" });
  const focused = document.activeElement;
  area.value = text;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return copied;
}

function languageOf(code) {
  return /(?:^| )language-(\S+)/.exec(code?.className ?? "")?.[1] ?? "";
}
