// The dialogs: settings, keys, the API key, and questions.
import { element } from "./dom.js";
import { NUMBERS, problem } from "./settings.js";

const SHORTCUTS = [
  ["keyNewline", "Enter"], ["keyLine", "Shift Enter"], ["keyStop", "Esc"], ["keyEdit", "↑"], ["keyFocus", "/"],
  ["keyNew", "Alt N"], ["keyMenu", "Alt B"], ["keySettings", "Alt ,"], ["keyHelp", "?"],
];

/** The settings. `changed(name)` is called after each change; `actions`: `exportAll, importFile, clearAll`. */
export function showSettings(settings, models, t, changed, actions) {
  const { values } = settings;
  const set = (name) => (event) => {
    const value = event.target.value.trim();
    const wrong = problem(name, value);
    const note = event.target.parentElement.querySelector(".wrong");
    if (note) note.textContent = wrong && t(wrong === "tools" ? "toolsWrong" : "number", NUMBERS[name]);
    event.target.setAttribute("aria-invalid", String(Boolean(wrong)));
    if (wrong) return;
    settings.set(name, name === "system" ? event.target.value : value);
    changed(name);
  };
  const choice = (name, label, options) => field(t(label), element("select", { onchange: set(name) },
    options.map(([value, text]) => element("option", { value, selected: values[name] === value }, text))));
  const area = (name, label, help, rows) => {
    const input = element("textarea", { rows, spellcheck: "false", oninput: set(name) });
    input.value = values[name];
    return field(t(label), input, t(help));
  };
  const numbers = Object.entries(NUMBERS).map(([name, range]) => field(t(name), element("input", {
    type: "number", inputmode: "decimal", value: values[name], placeholder: t("default"), ...range, step: "any", oninput: set(name),
  })));
  const key = element("input", { type: "password", autocomplete: "off", value: settings.key, onchange: (event) => {
    settings.key = event.target.value.trim();
    changed("key");
  } });
  const file = element("input", { type: "file", accept: ".json,application/json", class: "off-screen", tabindex: "-1", "aria-label": t("import"), onchange: (event) => actions.importFile(event.target.files[0]) });
  const button = (label, onclick, extra = "") => element("button", { type: "button", class: `button ${extra}`, onclick }, t(label));
  const reset = button("reset", () => {
    for (const name of [...Object.keys(NUMBERS), "thinking"]) settings.set(name, "");
    changed("reset");
    dialog.close();
  });
  const dialog = open(t("settings"), t, [
    element("div", { class: "pair" },
      choice("language", "language", [["", t("auto")], ["en", "English"], ["zh", "中文"]]),
      choice("theme", "theme", [["", t("auto")], ["light", t("light")], ["dark", t("dark")]])),
    models.length > 1 && choice("model", "model", models.map(({ id }) => [id, id])),
    area("system", "system", "systemHelp", 3),
    element("h3", {}, t("sampling")),
    element("div", { class: "numbers" }, numbers),
    element("div", { class: "pair" },
      choice("thinking", "thinking", [["", t("default")], ["on", t("on")], ["off", t("off")]]), element("div", { class: "aside" }, reset)),
    element("p", { class: "help" }, t("thinkingHelp")),
    area("tools", "tools", "toolsHelp", 3),
    field(t("apiKey"), key, t("apiKeyHelp")),
    element("h3", {}, t("data")),
    element("p", { class: "help" }, t("local")),
    element("div", { class: "buttons" }, button("export", actions.exportAll), button("import", () => file.click()), file, button("clear", actions.clearAll, "danger")),
  ]);
}

export function showShortcuts(t) {
  const rows = SHORTCUTS.map(([name, keys]) => element("tr", {},
    element("th", { scope: "row" }, t(name)), element("td", {}, keys.split(" ").map((each) => element("kbd", {}, each)))));
  open(t("shortcuts"), t, [element("table", { class: "shortcuts" }, element("tbody", {}, rows))]);
}

/** Asks for the API key; the answer is "" if there is none. */
export async function askKey(t, wrong) {
  const input = element("input", { type: "password", autocomplete: "off", required: true });
  return ask(t("keyNeeded"), t, [wrong && element("p", { class: "note wrong" }, t("keyWrong")), field(t("apiKey"), input, t("apiKeyHelp"))],
    t("keySave"), () => input.value.trim());
}

/** Asks for a line of text; null if there is no answer. */
export async function askText(question, given, t) {
  const input = element("input", { type: "text", maxlength: "80", value: given });
  return (await ask(t("rename"), t, [field(question, input)], t("save"), () => input.value.trim())) || null;
}

/** Whether the answer to `question` is yes. */
export async function confirmed(question, t) {
  return Boolean(await ask(t("delete"), t, [element("p", {}, question)], t("delete"), () => "yes", "danger"));
}

function ask(title, t, parts, yes, answer, kind = "primary") {
  return new Promise((resolve) => {
    let given = "";
    const form = element("form", {}, parts, element("div", { class: "buttons end" },
      element("button", { type: "button", class: "button", onclick: () => dialog.close() }, t("cancel")),
      element("button", { type: "submit", class: `button ${kind}` }, yes)));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      given = answer();
      dialog.close();
    });
    const dialog = open(title, t, [form], "small");
    dialog.addEventListener("close", () => resolve(given));
  });
}

function open(title, t, parts, kind = "") {
  const close = element("button", { type: "button", class: "icon-button", "aria-label": t("close"), title: t("close"), onclick: () => dialog.close() }, "✕");
  const head = element("div", { class: "dialog-head" }, element("h2", { id: "dialog-title" }, title), close);
  const dialog = element("dialog", { class: kind, "aria-labelledby": "dialog-title" }, head, element("div", { class: "dialog-body" }, parts));
  document.body.append(dialog);
  dialog.addEventListener("close", () => dialog.remove());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  dialog.showModal();
  dialog.querySelector(".dialog-body :is(input, select, button)")?.focus();
  return dialog;
}

let fields = 0;

function field(label, input, help) {
  const id = `field-${(fields += 1)}`;
  input.id = id;
  const parts = [element("label", { for: id }, label), input, element("p", { class: "wrong", id: `${id}-wrong`, role: "alert" })];
  input.setAttribute("aria-describedby", help ? `${id}-wrong ${id}-help` : `${id}-wrong`);
  if (help) parts.push(element("p", { class: "help", id: `${id}-help` }, help));
  return element("div", { class: "field" }, parts);
}
