// What people choose, kept in this browser. The API key is kept for this tab only.

const PLACE = "evener.settings", KEY_PLACE = "evener.key";
/** Sampling fields of the API, with their ranges; empty: the model's own default. */
export const NUMBERS = {
  temperature: { min: 0, max: 5, step: 0.05 },
  top_p: { min: 0.01, max: 1, step: 0.01 },
  top_k: { min: -1, max: 100000, step: 1 },
  min_p: { min: 0, max: 1, step: 0.01 },
  max_tokens: { min: 1, max: 10000000, step: 1 },
  repetition_penalty: { min: 0.5, max: 2, step: 0.01 },
  presence_penalty: { min: -2, max: 2, step: 0.1 },
  frequency_penalty: { min: -2, max: 2, step: 0.1 },
  seed: { min: 0, max: 9007199254740991, step: 1 },
};
const DEFAULTS = { language: "", theme: "", model: "", system: "", thinking: "", tools: "", sidebar: true };

/** A storage of the browser; where it gives none, what is kept lasts as long as the page. */
function storage(kind) {
  try {
    return window[kind];
  } catch (error) {
    console.warn("settings are not kept in this browser:", error);
    const kept = new Map();
    return { getItem: (name) => kept.get(name) ?? null, setItem: (name, value) => kept.set(name, value), removeItem: (name) => kept.delete(name) };
  }
}

export class Settings {
  #lasting = storage("localStorage");
  #ofTab = storage("sessionStorage");

  constructor() {
    this.values = { ...DEFAULTS, ...Object.fromEntries(Object.keys(NUMBERS).map((name) => [name, ""])) };
    let kept = {};
    try {
      kept = JSON.parse(this.#lasting.getItem(PLACE) ?? "{}");
    } catch (error) {
      console.warn("settings were not read:", error);
    }
    for (const name of Object.keys(this.values)) {
      if (typeof kept[name] === typeof this.values[name]) this.values[name] = kept[name];
    }
  }

  set(name, value) {
    this.values[name] = value;
    this.#lasting.setItem(PLACE, JSON.stringify(this.values));
  }

  get key() {
    return this.#ofTab.getItem(KEY_PLACE) ?? "";
  }

  set key(value) {
    if (value) this.#ofTab.setItem(KEY_PLACE, value);
    else this.#ofTab.removeItem(KEY_PLACE);
  }
}

/** Why a setting cannot be used: "" if it can. */
export function problem(name, value) {
  if (value === "") return "";
  if (name === "tools") {
    try {
      const tools = JSON.parse(value);
      return Array.isArray(tools) && tools.every((tool) => tool?.type === "function" && tool.function?.name) ? "" : "tools";
    } catch {
      return "tools";
    }
  }
  const range = NUMBERS[name];
  if (!range) return "";
  const number = Number(value);
  const whole = range.step < 1 || Number.isInteger(number);
  return Number.isFinite(number) && whole && number >= range.min && number <= range.max ? "" : "number";
}

/** The fields of a request; settings that cannot be used are left out, as their dialog says. */
export function requestFields(values) {
  const fields = {};
  for (const name of Object.keys(NUMBERS)) {
    if (values[name] !== "" && !problem(name, values[name])) fields[name] = Number(values[name]);
  }
  if (values.thinking) fields.enable_thinking = values.thinking === "on";
  if (values.tools.trim() && !problem("tools", values.tools)) fields.tools = JSON.parse(values.tools);
  return fields;
}
