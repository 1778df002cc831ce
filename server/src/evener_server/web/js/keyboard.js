// Keyboard shortcuts; dialogs.js lists them for people.

/** Calls `actions` (`stop, focus, create, menu, settings, help`). A dialog that is open has the keyboard to itself. */
export function listenToKeys(actions) {
  document.addEventListener("keydown", (event) => {
    if (event.isComposing || document.querySelector("dialog[open]")) return;
    const action = actionOf(event);
    if (!action) return;
    // Esc also belongs to the browser and to what is focused.
    if (action !== "stop") event.preventDefault();
    actions[action]();
  });
}

function actionOf(event) {
  if (event.key === "Escape") return "stop";
  if (event.altKey && !event.ctrlKey && !event.metaKey) {
    // Where Alt types other signs, as on a Mac, the key's place counts.
    return { KeyN: "create", KeyB: "menu", Comma: "settings" }[event.code];
  }
  const typing = event.target.closest("input, textarea, select");
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return undefined;
  return { "/": "focus", "?": "help" }[event.key];
}
