/** Small functions over the document. Text is always set as text, never as HTML. */

export const byId = (id) => document.getElementById(id);

/** Creates an element with properties and children; strings become text. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) {
      element[name] = value;
    } else {
      element.setAttribute(name, value);
    }
  }
  element.append(...children);
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

/** Creates an SVG element with attributes and children. */
export function drawn(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export const grouped = (number) => Math.round(number).toLocaleString("en-US");

/** Formats seconds for a reader: 14 ms, 0.41 s, 12 s. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) {
    return "";
  }
  if (seconds < 0.1) {
    return `${Number((seconds * 1000).toPrecision(2))} ms`;
  }
  return `${seconds < 10 ? seconds.toFixed(2) : seconds.toFixed(0)} s`;
}

/** Calls `work` when there was no further call for `wait` milliseconds. */
export function settled(work, wait) {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(work, wait);
  };
}
