// One message as it is shown, with what can be done to it.
import { copyText } from "./code.js";
import { siblings } from "./conversation.js";
import { element, icon, iconButton } from "./dom.js";
import { MarkdownView } from "./markdown.js";

/** Seconds of an answer below which its speed says nothing. */
const SHORTEST = 0.2;

/** Characters of a message that certainly fit the screen. */
const LONG = 600;

/** The view of one message; made again when the language or the message's place changes. */
export class MessageView {
  #markdown = null;
  #reasoning = null;
  #body = element("div", { class: "body" });
  #foot = element("div", { class: "foot" });

  /**
   * @param {object} message of conversation.js
   * @param {object} actions `edit(message, text)`, `regenerate(message)`, `branch(message)`, `results(message, texts)`
   * @param {(name: string, values?: object) => string} t translates
   */
  constructor(message, actions, t) {
    this.message = message;
    this.actions = actions;
    this.t = t;
    const label = element("h2", { class: "off-screen" }, this.#name());
    this.root = element("article", { class: `message ${message.role}`, "data-id": message.id }, label, this.#body, this.#foot);
    if (message.role === "user") this.#fillUser();
    if (message.role === "tool") this.#fillTool();
  }

  #name() {
    return this.t({ user: "you", assistant: "assistant", tool: "tool" }[this.message.role]);
  }

  /**
   * Shows the message as it is now.
   * @param {object} conversation where it is
   * @param {boolean} running more of it will come
   * @param {boolean} last it is the last one shown
   */
  update(conversation, running, last) {
    if (this.message.role === "assistant") this.#fillAnswer(running, last);
    // Buttons that somebody has focused are not replaced while the text grows.
    if (!running || !this.#foot.hasChildNodes()) this.#fillFoot(conversation, running);
    this.root.classList.toggle("running", running);
  }

  #fillUser() {
    const { images, content } = this.message;
    const shown = (images ?? []).map((src) => element("img", { src, alt: "", class: "picture" }));
    if (shown.length) this.#body.append(element("div", { class: "pictures" }, shown));
    // A long paste scrolls by itself, so it must be reachable with the keyboard.
    this.#body.append(element("div", { class: "said", tabindex: content.length > LONG ? "0" : null }, content));
  }

  #fillTool() {
    const { name, content } = this.message;
    const head = element("div", { class: "tool-head" }, icon("tool"), this.t("result", { name: name ?? "" }));
    this.#body.append(element("div", { class: "tool-card" }, head, element("pre", { tabindex: "0" }, content)));
  }

  #fillAnswer(running, last) {
    const { message, t } = this;
    if (message.reasoning) this.#showReasoning(running && !message.content);
    if (message.content) {
      if (!this.#markdown) {
        this.#markdown = new MarkdownView(element("div", { class: "markdown" }), t);
        this.#body.append(this.#markdown.root);
      }
      this.#markdown.show(message.content, !running);
    }
    for (const each of this.#body.querySelectorAll(":scope > .tool-card, :scope > .wait, :scope > .note, :scope > .results")) each.remove();
    for (const call of message.calls ?? []) this.#body.append(this.#callCard(call));
    const empty = !message.content && !message.reasoning && !message.calls?.length;
    if (running && empty) this.#body.append(element("div", { class: "wait" }, element("i"), element("i"), element("i")));
    if (running) return;
    if (message.error) this.#body.append(element("div", { class: "note wrong" }, icon("warning"), element("span", {}, message.error)));
    // Without a reason for its end, the page was closed while it came.
    else if (message.stopped || !message.finish) this.#body.append(element("div", { class: "note" }, t("stopped")));
    else if (message.finish === "length") this.#body.append(element("div", { class: "note" }, t("lengthReached")));
    else if (empty) this.#body.append(element("div", { class: "note" }, t("answerEmpty")));
    if (last && message.calls?.length && !message.error && !message.stopped) this.#body.append(this.#resultForm());
  }

  #showReasoning(open) {
    const { message, t } = this;
    if (!this.#reasoning) {
      this.#reasoning = new MarkdownView(element("div", { class: "markdown" }), t);
      const title = element("span", { class: "title" });
      const summary = element("summary", {}, icon("right"), title);
      this.#body.prepend(element("details", { class: "reasoning" }, summary, this.#reasoning.root));
    }
    this.#body.querySelector(".reasoning .title").textContent = t(open ? "reasoningNow" : "reasoning");
    this.#body.querySelector(".reasoning").classList.toggle("open-ended", open);
    this.#reasoning.show(message.reasoning, !open);
  }

  #callCard({ name, arguments: given }) {
    const head = element("div", { class: "tool-head" }, icon("tool"), this.t("toolCall", { name }));
    return element("div", { class: "tool-card" }, head, element("pre", { tabindex: "0", "aria-label": this.t("arguments") }, indented(given)));
  }

  #resultForm() {
    const fields = this.message.calls.map(({ name }) => element("textarea", { rows: "2", "aria-label": this.t("result", { name }), placeholder: this.t("result", { name }) }));
    const send = element("button", { type: "submit", class: "button primary" }, this.t("sendResults"));
    const form = element("form", { class: "results" }, fields, send);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.actions.results(this.message, fields.map((field) => field.value));
    });
    return form;
  }

  #fillFoot(conversation, running) {
    const { message, t, actions } = this;
    const all = siblings(conversation, message);
    const place = all.indexOf(message);
    const parts = [];
    if (all.length > 1) {
      const step = (by) => () => actions.branch(all[place + by]);
      parts.push(
        iconButton("left", t("older"), step(-1), { disabled: place === 0 || running }),
        element("span", { class: "count", "aria-label": t("branch", { n: place + 1, all: all.length }) }, `${place + 1}/${all.length}`),
        iconButton("right", t("newer"), step(1), { disabled: place === all.length - 1 || running }),
      );
    }
    if (!running && message.role !== "tool") {
      if (message.content) {
        const button = iconButton("copy", t("copy"), () => copyText(message.content, note, t));
        const note = element("span", { class: "copied", role: "status" });
        parts.push(button, note);
      }
      if (message.role === "user") parts.push(iconButton("edit", t("edit"), () => this.edit()));
      if (message.role === "assistant") parts.push(iconButton("again", t("regenerate"), () => actions.regenerate(message)));
    }
    if (!running && message.tokens) parts.push(element("span", { class: "stats" }, this.#stats()));
    this.#foot.replaceChildren(...parts);
  }

  #stats() {
    const { tokens, seconds } = this.message;
    const count = this.t("tokens", { n: tokens });
    return seconds >= SHORTEST ? `${count} · ${this.t("speed", { n: (tokens / seconds).toFixed(1) })}` : count;
  }

  /** Lets people change a message of theirs. */
  edit() {
    const { message, t } = this;
    const field = element("textarea", { "aria-label": t("edit") });
    field.value = message.content;
    const send = element("button", { type: "submit", class: "button primary" }, t("send"));
    const cancel = element("button", { type: "button", class: "button" }, t("cancel"));
    const form = element("form", { class: "editor" }, field, element("p", { class: "help" }, t("editHelp")), element("div", { class: "buttons" }, cancel, send));
    const close = () => {
      form.replaceWith(this.#body);
      this.#foot.hidden = false;
      this.#foot.querySelector("button:last-of-type")?.focus();
    };
    cancel.addEventListener("click", close);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (field.value.trim()) this.actions.edit(message, field.value);
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.target === field) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    this.#body.replaceWith(form);
    this.#foot.hidden = true;
    field.style.height = `${Math.min(field.scrollHeight + 4, 400)}px`;
    field.focus();
  }
}

function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // still incomplete, or the model wrote something else
  }
}
