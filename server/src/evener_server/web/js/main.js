// The page: what people do, and what follows from it.
import { Api, ApiError } from "./api.js";
import { addChunk } from "./answer.js";
import { Composer } from "./composer.js";
import { MAX_MESSAGES, MAX_SIZE, append, newConversation, path, show, sizeOf, titleOf, toRequest } from "./conversation.js";
import { askKey, askText, confirmed, showSettings, showShortcuts } from "./dialogs.js";
import { listenToKeys } from "./keyboard.js";
import { Settings, requestFields } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { openStore } from "./store.js";
import { languageOf, translate, translator } from "./texts.js";
import { Thread } from "./thread.js";
import { MAX_FILE, fromFile, toFile } from "./transfer.js";

const $ = (selector) => document.querySelector(selector);
/** Milliseconds between the times at which a growing answer is kept. */
const KEEP_EVERY = 2000;

class Page {
  models = [];
  conversation = newConversation();
  /** The answer that grows: `{conversation, message, abort}`, or null. */
  answering = null;
  /** Ids of conversations that were removed, perhaps while their answer grew. */
  #removed = new Set();

  constructor() {
    this.settings = new Settings();
    this.api = new Api(() => this.settings.key);
    this.thread = new Thread({ scroller: $("#scroller"), list: $("#thread"), down: $("#down") }, {
      edit: (message, text) => this.#edit(message, text),
      regenerate: (message) => this.#answer(this.conversation, message.parent),
      branch: (message) => this.#branch(message),
      results: (message, texts) => this.#results(message, texts),
    });
    this.thread.isRunning = (message) => this.answering?.message === message;
    this.composer = new Composer($("#composer"), {
      send: (text, images) => this.#send(text, images),
      stop: () => this.#stop(),
      editLast: () => this.#editLast(),
      complain: (text) => this.#say(text, true),
    });
    this.sidebar = new Sidebar($("#sidebar"), {
      open: (id) => this.#open(id),
      remove: (summary) => this.#remove(summary),
      rename: (summary) => this.#rename(summary),
    });
  }

  async start() {
    this.#setLanguage();
    this.#listen();
    this.store = await openStore();
    if (!this.store.lasting) this.#say(this.t("notKept"), true);
    const kept = location.hash.slice(1) && (await this.store.get(location.hash.slice(1)));
    if (kept) this.conversation = kept;
    await this.#list();
    this.#draw();
    this.thread.toEnd();
    this.composer.focus();
    await this.#connect();
  }

  // What people see.

  #setLanguage() {
    const language = languageOf(this.settings.values.language, navigator.languages);
    document.documentElement.lang = language;
    this.t = translator(language);
    translate(document, this.t);
  }

  #draw(options) {
    const { conversation, t, settings } = this;
    const model = this.#model();
    document.documentElement.dataset.theme = settings.values.theme;
    document.documentElement.dataset.sidebar = settings.values.sidebar ? "open" : "closed";
    document.title = conversation.title ? `${conversation.title} · ${model?.id ?? "evener"}` : (model?.id ?? "evener");
    $("#title").textContent = conversation.title || t("newChat");
    $("#model").textContent = model?.id ?? t("connecting");
    $("#context").textContent = model ? t("contextLength", { n: model.max_model_len.toLocaleString(document.documentElement.lang) }) : "";
    $("#welcome").hidden = conversation.messages.length > 0;
    const running = this.answering?.conversation === conversation ? this.answering.message : null;
    this.thread.show(conversation, running, t, options);
    this.composer.update({ running: Boolean(this.answering), takesImages: Boolean(model?.input_modalities?.includes("image")), t });
  }

  /** Says something to everybody: in a line at the foot, and to screen readers. */
  #say(text, wrong = false) {
    clearTimeout(this.saying);
    $("#status").textContent = wrong ? "" : text;
    $("#alert").textContent = wrong ? text : "";
    if (wrong) this.saying = setTimeout(() => ($("#alert").textContent = ""), 8000);
  }

  #model() {
    return this.models.find(({ id }) => id === this.settings.values.model) ?? this.models[0];
  }

  async #list() {
    this.sidebar.show(await this.store.list(), this.conversation.id, this.t);
  }

  // The server.

  async #connect() {
    for (let wrong = false; ; wrong = true) {
      try {
        this.models = await this.api.models();
        return this.#draw();
      } catch (error) {
        if (!(error instanceof ApiError)) throw error;
        if (error.status !== 401) {
          $("#model").textContent = this.#textOf(error);
          setTimeout(() => this.#connect(), 3000);
          return undefined;
        }
        const key = await askKey(this.t, wrong && this.settings.key);
        if (!key) return undefined;
        this.settings.key = key;
      }
    }
  }

  #textOf(error) {
    return error.message || (error.status ? `HTTP ${error.status}` : this.t("network"));
  }

  /** Answers the message `parent` of `conversation`; a message without a parent cannot be an answer. */
  async #answer(conversation, parent) {
    if (this.answering) return;
    const { values } = this.settings, model = this.#model();
    const messages = toRequest(path(conversation, parent), values.system);
    const message = append(conversation, parent, { role: "assistant", model: model?.id });
    const abort = new AbortController();
    this.answering = { conversation, message, abort };
    this.#draw();
    this.thread.toEnd();
    this.#say(this.t("answering"));
    await this.#keep(conversation);
    const body = { ...(model && { model: model.id }), messages, ...requestFields(values) };
    let first = 0, kept = performance.now();
    try {
      for await (const chunk of this.api.chat(body, abort.signal)) {
        const now = performance.now(), begun = Boolean(message.content || message.reasoning);
        addChunk(message, chunk);
        if (!first && (begun || message.content || message.reasoning)) first = now;
        if (first && chunk.choices?.length) message.seconds = (now - first) / 1000;
        if (conversation === this.conversation) this.thread.grow(conversation, message);
        if (now - kept > KEEP_EVERY) {
          kept = now;
          await this.#keep(conversation);
        }
      }
    } catch (error) {
      if (abort.signal.aborted) message.stopped = true;
      else message.error = error instanceof ApiError ? this.#textOf(error) : String(error);
      if (error.status === 401) setTimeout(() => this.#connect());
    }
    this.answering = null;
    this.#draw();
    this.#say(message.error ? `${this.t("error")}: ${message.error}` : this.t(message.stopped ? "stopped" : "finished"));
    conversation.updated = Date.now();
    await this.#keep(conversation);
  }

  async #keep(conversation) {
    if (this.#removed.has(conversation.id)) return;
    try {
      await this.store.put(conversation);
    } catch (error) {
      this.#say(`${this.t("error")}: ${error.message}`, true);
    }
    await this.#list();
  }

  // What people do.

  #send(text, images) {
    const { conversation } = this;
    if (conversation.messages.length >= MAX_MESSAGES - 2 || sizeOf(conversation) + sizeOf(images) > MAX_SIZE) {
      this.#say(this.t("fullConversation"), true);
      return false;
    }
    const message = append(conversation, conversation.head, { role: "user", content: text, ...(images.length && { images }) });
    history.replaceState(null, "", `#${conversation.id}`);
    this.#answer(conversation, message.id);
    return true;
  }

  #stop() {
    this.answering?.abort.abort();
  }

  #edit(message, text) {
    if (this.answering) return;
    const { role, parent, images } = message;
    const made = append(this.conversation, parent, { role, content: text, ...(images && { images }) });
    this.#answer(this.conversation, made.id);
  }

  #editLast() {
    const last = path(this.conversation).findLast(({ role }) => role === "user");
    if (last && !this.answering) this.thread.view(last.id).edit();
  }

  #branch(message) {
    show(this.conversation, message.id);
    this.#draw();
    this.#keep(this.conversation);
  }

  #results(message, texts) {
    if (this.answering) return;
    let parent = message.id;
    for (const [i, call] of message.calls.entries()) {
      parent = append(this.conversation, parent, { role: "tool", content: texts[i], call: call.id, name: call.name }).id;
    }
    this.#answer(this.conversation, parent);
  }

  #create() {
    this.#become(newConversation());
    history.replaceState(null, "", location.pathname);
  }

  async #open(id) {
    const running = this.answering?.conversation;
    const found = running?.id === id ? running : await this.store.get(id);
    if (!found) return this.#list(); // removed in another tab
    this.#become(found);
    history.replaceState(null, "", `#${id}`);
    return undefined;
  }

  #become(conversation) {
    this.conversation = conversation;
    if (matchMedia("(max-width: 760px)").matches) this.#toggleSidebar(false);
    this.#draw({ again: true });
    this.thread.toEnd();
    this.#list();
    this.composer.focus();
  }

  async #remove({ id, title }) {
    if (!(await confirmed(this.t("deleteAsk", { title: title || this.t("untitled") }), this.t))) return;
    this.#removed.add(id);
    if (this.answering?.conversation.id === id) this.#stop();
    await this.store.remove(id);
    if (this.conversation.id === id) this.#create();
    await this.#list();
  }

  async #rename({ id, title }) {
    const given = await askText(this.t("renameAsk"), title, this.t);
    const found = id === this.conversation.id ? this.conversation : await this.store.get(id);
    if (!given || !found) return;
    found.title = titleOf(given);
    await this.#keep(found);
    this.#draw();
  }

  #openSettings() {
    showSettings(this.settings, this.models, this.t, (name) => {
      if (name === "language") this.#setLanguage();
      if (name === "key" && !this.models.length) this.#connect();
      if (!["language", "theme", "model"].includes(name)) return;
      this.#draw({ again: name === "language" });
      this.#list();
    }, {
      exportAll: () => this.#export(),
      importFile: (file) => this.#import(file),
      clearAll: () => this.#clear(),
    });
  }

  async #export() {
    const url = URL.createObjectURL(new Blob([toFile(await this.store.all())], { type: "application/json" }));
    const link = document.createElement("a");
    link.href = url;
    link.download = `evener-${new Date().toISOString().slice(0, 10)}.json`;
    link.click();
    URL.revokeObjectURL(url);
    this.#say(this.t("exported"));
  }

  async #import(file) {
    try {
      if (file.size > MAX_FILE) throw new Error(`${file.size} > ${MAX_FILE}`);
      const found = fromFile(await file.text());
      for (const each of found) await this.store.put(each);
      this.#say(this.t("imported", { n: found.length }));
    } catch (error) {
      this.#say(this.t("importWrong", { why: error.message }), true);
    }
    await this.#list();
  }

  async #clear() {
    if (!(await confirmed(this.t("clearAsk"), this.t))) return;
    for (const { id } of [...(await this.store.list()), this.conversation]) this.#removed.add(id);
    this.#stop();
    await this.store.clear();
    this.#create();
  }

  #toggleSidebar(open = !this.settings.values.sidebar) {
    this.settings.set("sidebar", open);
    this.#draw();
    if (open && matchMedia("(max-width: 760px)").matches) $("#new").focus();
  }

  #listen() {
    if (matchMedia("(max-width: 760px)").matches) this.settings.values.sidebar = false;
    $("#new").addEventListener("click", () => this.#create());
    $("#new-narrow").addEventListener("click", () => this.#create());
    for (const each of document.querySelectorAll(".menu")) each.addEventListener("click", () => this.#toggleSidebar());
    $("#shade").addEventListener("click", () => this.#toggleSidebar(false));
    $("#open-settings").addEventListener("click", () => this.#openSettings());
    $("#open-shortcuts").addEventListener("click", () => showShortcuts(this.t));
    $("#switch-theme").addEventListener("click", () => {
      const dark = getComputedStyle(document.documentElement).colorScheme === "dark" ||
        (!this.settings.values.theme && matchMedia("(prefers-color-scheme: dark)").matches);
      this.settings.set("theme", dark ? "light" : "dark");
      this.#draw();
    });
    $("#switch-language").addEventListener("click", () => {
      this.settings.set("language", document.documentElement.lang === "zh" ? "en" : "zh");
      this.#setLanguage();
      this.#draw({ again: true });
      this.#list();
    });
    listenToKeys({
      stop: () => (this.answering ? this.#stop() : $("#shade").checkVisibility() && this.#toggleSidebar(false)),
      focus: () => this.composer.focus(),
      create: () => this.#create(),
      menu: () => this.#toggleSidebar(),
      settings: () => this.#openSettings(),
      help: () => showShortcuts(this.t),
    });
    addEventListener("hashchange", () => location.hash.length > 1 && this.#open(location.hash.slice(1)));
  }
}

new Page().start();
