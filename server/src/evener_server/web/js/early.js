// Runs before the page is drawn, so that it does not flash in the other colours.
try {
  document.documentElement.dataset.theme = JSON.parse(localStorage.getItem("evener.settings") ?? "{}").theme ?? "";
} catch (error) {
  console.warn("settings were not read:", error);
}
