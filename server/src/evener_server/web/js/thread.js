// The messages of a conversation, and how they scroll.
import { path } from "./conversation.js";
import { MessageView } from "./message.js";

/** So close to the end, people are reading what comes. */
const NEAR = 80;

export class Thread {
  #views = new Map();
  #follow = true;
  #frame = 0;
  #cost = 0;

  /**
   * @param {object} places elements: `scroller`, `list`, `down` (the button that goes to the end)
   * @param {object} actions of MessageView
   */
  constructor({ scroller, list, down }, actions) {
    Object.assign(this, { scroller, list, down, actions });
    scroller.addEventListener("scroll", () => this.#scrolled(), { passive: true });
    down.addEventListener("click", () => this.toEnd());
    new ResizeObserver(() => this.#follow && this.#jump()).observe(list);
  }

  /** Shows a conversation; `running` is the message that grows, or null. */
  show(conversation, running, t, { again = false } = {}) {
    if (again) this.#views.clear();
    const messages = path(conversation), views = new Map();
    for (const message of messages) {
      const view = this.#views.get(message.id) ?? new MessageView(message, this.actions, t);
      view.update(conversation, message === running, message === messages.at(-1));
      views.set(message.id, view);
    }
    this.#views = views;
    const shown = [...views.values()].map(({ root }) => root);
    if (shown.length !== this.list.childElementCount || shown.some((each, i) => each !== this.list.children[i])) {
      this.list.replaceChildren(...shown);
    }
    if (this.#follow) this.#jump();
  }

  /** Shows what a growing message has become, a few times a second at most. */
  grow(conversation, message) {
    if (this.#frame) return;
    // Drawing takes at most a quarter of the time.
    this.#frame = setTimeout(() => requestAnimationFrame(() => {
      this.#frame = 0;
      const began = performance.now();
      this.#views.get(message.id)?.update(conversation, this.isRunning(message), true);
      this.#cost = performance.now() - began;
    }), Math.min(5000, 3 * this.#cost));
  }

  /** Set by the owner: whether more of `message` will come. */
  isRunning = () => false;

  view(id) {
    return this.#views.get(id);
  }

  toEnd() {
    this.#follow = true;
    this.#jump();
  }

  #jump() {
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  #scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    this.#follow = scrollHeight - scrollTop - clientHeight < NEAR;
    this.down.hidden = this.#follow;
  }
}
