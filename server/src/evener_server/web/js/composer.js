// The field for a message, with its images.
import { MAX_IMAGES, readImage } from "./images.js";
import { element, iconButton } from "./dom.js";

export class Composer {
  #images = [];

  /**
   * @param {HTMLFormElement} form of index.html
   * @param {object} actions `send(text, images)`, `stop()`, `editLast()`, `complain(text)`
   */
  constructor(form, actions) {
    this.form = form;
    this.actions = actions;
    this.field = form.querySelector("textarea");
    this.pictures = form.querySelector(".pictures");
    this.attach = form.querySelector(".attach");
    this.file = form.querySelector("input[type=file]");
    this.send = form.querySelector(".send");
    this.stop = form.querySelector(".stop");
    this.takesImages = false;
    this.running = false;
    this.#listen();
  }

  #listen() {
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    this.field.addEventListener("keydown", (event) => this.#onKey(event));
    this.field.addEventListener("input", () => this.#fit());
    this.stop.addEventListener("click", () => this.actions.stop());
    this.attach.addEventListener("click", () => this.file.click());
    this.file.addEventListener("change", () => {
      this.#add([...this.file.files]);
      this.file.value = "";
    });
    this.field.addEventListener("paste", (event) => {
      const files = [...event.clipboardData.files].filter(({ type }) => type.startsWith("image/"));
      if (files.length && this.takesImages) {
        event.preventDefault();
        this.#add(files);
      }
    });
    this.form.addEventListener("dragover", (event) => this.takesImages && event.preventDefault());
    this.form.addEventListener("drop", (event) => {
      if (!this.takesImages) return;
      event.preventDefault();
      this.#add([...event.dataTransfer.files]);
    });
  }

  #onKey(event) {
    // While a word is composed, as Chinese is typed, Enter belongs to the input method.
    if (event.isComposing || event.keyCode === 229) return;
    if (event.key === "Enter" && !event.shiftKey && !matchMedia("(pointer: coarse)").matches) {
      event.preventDefault();
      this.#submit();
    } else if (event.key === "ArrowUp" && !this.field.value) {
      event.preventDefault();
      this.actions.editLast();
    }
  }

  #submit() {
    if (this.running || (!this.field.value.trim() && !this.#images.length)) return;
    if (!this.actions.send(this.field.value, this.#images)) return;
    this.field.value = "";
    this.#images = [];
    this.#show();
    this.#fit();
  }

  /** Shows what can be done now. */
  update({ running, takesImages, t }) {
    this.t = t;
    this.running = running;
    this.takesImages = takesImages;
    const focused = document.activeElement === this.send || document.activeElement === this.stop;
    this.attach.hidden = !takesImages;
    this.send.hidden = running;
    this.stop.hidden = !running;
    if (focused) (running ? this.stop : this.field).focus();
    if (!takesImages) this.#images = [];
    this.#show();
  }

  focus() {
    this.field.focus();
  }

  async #add(files) {
    for (const file of files) {
      if (this.#images.length >= MAX_IMAGES) {
        this.actions.complain(this.t("imageTooMany", { n: MAX_IMAGES }));
        break;
      }
      try {
        this.#images.push(await readImage(file));
      } catch (error) {
        console.warn(error);
        this.actions.complain(this.t("imageWrong", { name: file.name }));
      }
    }
    this.#show();
  }

  #show() {
    this.pictures.hidden = !this.#images.length;
    this.pictures.replaceChildren(...this.#images.map((src, i) => {
      const remove = iconButton("close", this.t("removeImage"), () => {
        this.#images.splice(i, 1);
        this.#show();
      });
      return element("div", { class: "picture-frame" }, element("img", { src, alt: "", class: "picture" }), remove);
    }));
  }

  #fit() {
    this.field.style.height = "auto";
    this.field.style.height = `${Math.min(this.field.scrollHeight, innerHeight * 0.4)}px`;
  }
}
