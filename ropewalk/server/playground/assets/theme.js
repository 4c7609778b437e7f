/** The button that turns the page dark. Until it is pressed, the page follows the system. */

import { byId } from "./dom.js";

const system = matchMedia("(prefers-color-scheme: dark)");

function isDark() {
  const { classList } = document.documentElement;
  return classList.contains("dark") || (!classList.contains("light") && system.matches);
}

function show() {
  byId("theme").setAttribute("aria-pressed", isDark());
}

function toggle() {
  const wasDark = isDark();
  document.documentElement.classList.toggle("dark", !wasDark);
  document.documentElement.classList.toggle("light", wasDark);
  show();
}

/** Wires the button. */
export function followScheme() {
  byId("theme").addEventListener("click", toggle);
  system.addEventListener("change", show);
  show();
}
