// Elements and numbers. Data of a run is only ever inserted as text.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes, `on` listeners and `style` properties. Children: elements, or texts; null is left out. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** As `h`, for SVG. */
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (name === "style") for (const [property, one] of Object.entries(value)) element.style.setProperty(property, one);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Replaces what is inside. The focus stays on the element that has the same `data-key`, as it is scrolled, else on what is around. */
export function put(host, ...children) {
  const focused = document.activeElement;
  const isInside = host !== focused && host.contains(focused);
  const { scrollTop } = focused;
  host.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
  if (!isInside) return;
  const same = [...host.querySelectorAll("[data-key]")].find((one) => one.dataset.key === focused.dataset.key);
  (same ?? host.closest("[tabindex]"))?.focus({ preventScroll: true });
  if (same) same.scrollTop = scrollTop;
}

/** Text with commands between backticks, as elements for `put`. */
export function prose(text) {
  const parts = text.split("`");
  return parts.length % 2 ? parts.map((part, place) => (place % 2 ? h("code", {}, part) : part)) : [text];
}

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e7) return value.toExponential(Math.min(2, digits - 1)).replace(/\.?0*e\+?/, "e");
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 6 });
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const place = value < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log2(value) / 10));
  return `${number(Number((value / 1024 ** place).toPrecision(4)))} ${units[place]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.9995) return `${number(value * 1000, 3)} ms`;
  if (value < 120) return `${number(value, 3)} s`;
  return value < 7200 ? `${number(value / 60, 3)} min` : `${number(value / 3600, 3)} h`;
}

/** Local time of seconds since 1970. */
export function clock(time, { withDate = false } = {}) {
  const moment = new Date(time * 1000);
  const two = (part) => String(part).padStart(2, "0");
  const text = `${two(moment.getHours())}:${two(moment.getMinutes())}:${two(moment.getSeconds())}`;
  return withDate ? `${moment.getFullYear()}-${two(moment.getMonth() + 1)}-${two(moment.getDate())} ${text}` : text;
}

export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.map(([name, value, small]) =>
    h("div", { class: "fact" }, h("dt", {}, name), h("dd", {}, value, small ? h("small", {}, ` ${small}`) : null))));
}

const MARKS = { DONE: "✓", FAILED: "✕", UNDONE: "↶", STARTED: "…", HELD: "=" };

export function status(name) {
  return h("span", { class: `status ${String(name).toLowerCase()}` }, h("span", { "aria-hidden": "true" }, MARKS[name] ?? "?"), String(name).toLowerCase());
}
