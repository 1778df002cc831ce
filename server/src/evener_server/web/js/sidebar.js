// The list of conversations.
import { element, iconButton } from "./dom.js";

const DAY = 24 * 60 * 60 * 1000;
/** With more conversations than this there is a field to search their titles. */
const SEARCH_FROM = 8;

export class Sidebar {
  #summaries = [];

  /**
   * @param {HTMLElement} root of index.html
   * @param {object} actions `open(id)`, `remove(summary)`, `rename(summary)`
   */
  constructor(root, actions) {
    this.actions = actions;
    this.list = root.querySelector(".chats");
    this.search = root.querySelector("input[type=search]");
    this.search.addEventListener("input", () => this.#fill());
  }

  show(summaries, current, t) {
    this.#summaries = summaries;
    this.current = current;
    this.t = t;
    this.search.hidden = summaries.length <= SEARCH_FROM && !this.search.value;
    this.#fill();
  }

  #fill() {
    const { t } = this;
    const wanted = this.search.value.trim().toLowerCase();
    const groups = new Map();
    for (const each of this.#summaries) {
      if (wanted && !each.title.toLowerCase().includes(wanted)) continue;
      const day = dayOf(each.updated);
      groups.set(day, [...(groups.get(day) ?? []), this.#entry(each)]);
    }
    const shown = [...groups].flatMap(([day, entries]) => [
      element("h2", { class: "day" }, t(day)), element("ul", {}, entries),
    ]);
    this.list.replaceChildren(...(shown.length ? shown : [element("p", { class: "none" }, t("noChats"))]));
  }

  #entry(summary) {
    const { t, actions } = this;
    const title = summary.title || t("untitled");
    const current = summary.id === this.current;
    return element("li", { class: current ? "current" : null },
      element("button", { type: "button", class: "chat", "aria-current": current ? "true" : null, onclick: () => actions.open(summary.id) }, title),
      iconButton("edit", `${t("rename")}: ${title}`, () => actions.rename(summary)),
      iconButton("delete", `${t("delete")}: ${title}`, () => actions.remove(summary)),
    );
  }
}

function dayOf(time) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (time >= midnight) return "today";
  return time >= midnight - DAY ? "yesterday" : "earlier";
}
