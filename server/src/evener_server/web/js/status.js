// The page of /status: what runs and how busy it is, asked again every few seconds while somebody looks.
import { Api, ApiError } from "./api.js";
import { askKey } from "./dialogs.js";
import { element } from "./dom.js";
import { Settings } from "./settings.js";
import { languageOf, translate, translator } from "./texts.js";

/** Milliseconds from one answer to the next question. */
const EVERY = 2000;
const $ = (selector) => document.querySelector(selector);
const settings = new Settings();
const language = languageOf(settings.values.language, navigator.languages);
const t = translator(language);
const api = new Api(() => settings.key);

/** Groups of `[name, value]`; null values are left out. */
function groups(report) {
  const { model, backend, requests, kv_cache: kv, tokens, versions } = report;
  const count = (number) => number === null || number === undefined ? null : number.toLocaleString(language);
  const of = (number, all) => number === null || !all ? count(number) : t("statusOf", { n: count(number), all: count(all) });
  const since = new Date(report.started * 1000).toLocaleString(language, { dateStyle: "medium", timeStyle: "short" });
  return [
    [t("model"), [
      [t("model"), model?.name], [t("statusArchitecture"), model?.architecture], [t("statusDtype"), model?.dtype],
      [t("statusContext"), model && t("tokens", { n: count(model.max_model_len) })], [t("statusWeights"), model?.weights_version],
      [t("statusAdapters"), model?.adapter_count ? model.adapters.join(", ") + (model.adapter_count > model.adapters.length ? ", …" : "") : null],
      [t("statusUptime"), since],
    ]],
    [t("statusBackend"), [
      [t("statusBackend"), backend && `${backend.name} ${backend.version}`], [t("statusDevice"), backend?.device],
      [t("statusRanks"), count(backend?.ranks)], [t("statusWhy"), backend?.reason],
    ]],
    [t("statusRequests"), [
      [t("statusRunning"), of(requests.running, requests.max_running)], [t("statusWaiting"), of(requests.waiting, requests.max_waiting)],
      [t("statusPreemptions"), count(requests.preemptions)],
      ...Object.entries(requests.ended).map(([reason, number]) => [`${t("statusEnded")}: ${reason}`, count(number)]),
    ]],
    [t("statusKv"), [[t("statusUsed"), kv && of(kv.blocks_used, kv.blocks)], [t("statusHits"), kv && of(kv.prefix_hits, kv.prefix_queries)]], kv?.usage],
    [t("statusTokens"), [[t("statusPrompt"), count(tokens.prompt)], [t("statusGenerated"), count(tokens.generated)]]],
    [t("statusVersions"), Object.entries(versions)],
  ];
}

function draw(report) {
  const asleep = report.model?.asleep;
  say(report.ready ? t("statusReady") : asleep ? t("statusAsleep") : t("statusNotReady", { why: report.reason }), !report.ready);
  $("#groups").replaceChildren(...groups(report).map(([title, rows, usage]) => element("section", {},
    element("h2", {}, title),
    usage !== undefined && element("meter", { min: "0", max: "1", high: "0.9", value: String(usage), "aria-label": title }),
    element("dl", {}, rows.filter(([, value]) => value !== null && value !== undefined && value !== "")
      .map(([name, value]) => [element("dt", {}, name), element("dd", {}, String(value))]).flat()))));
}

/** Shows the state, as screen readers hear it, only when it changes. */
function say(text, wrong) {
  const place = $("#state");
  if (place.textContent !== text) place.textContent = text;
  place.classList.toggle("wrong", wrong);
}

async function ask() {
  try {
    draw(await api.status());
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status !== 401) return say(error.message || t("network"), true);
    const key = await askKey(t, Boolean(settings.key));
    if (!key) return true;
    settings.key = key;
    return ask();
  }
  return false;
}

async function run() {
  const gaveUp = document.visibilityState === "visible" && await ask();
  if (!gaveUp) setTimeout(run, EVERY);
}

document.documentElement.lang = language;
translate(document, t);
run();
