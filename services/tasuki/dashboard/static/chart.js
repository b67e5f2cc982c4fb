// Charts in SVG: lines with bands, stacked areas, steps. A pointer or the arrow keys move a cursor, whose values the legend shows.

import { h, help, number, s } from "./dom.js";

const HEIGHT = 190;
const TOP = 8;
const BOTTOM = 22;
const MARKERS = 45;
const CHAR = 6.4;
const LEAST_ZOOM = 6;
const FAR = 4;
const MANY_BARS = 12;
const LARGEST = 1e300; // a difference of two such values is finite
const observers = new WeakMap();

/**
 * Draws into `host`, again whenever its width changes.
 *
 * spec: title, unit, x (numbers, ascending), xName, series: [{name, mean, low?, high?, color, dash?}], limits: dashed lines as series;
 * isStacked, isLog, isStepped, isBars (of one width each), isWhole (no value leaves the chart), isBinary (ticks in powers of two), format(value), formatX(x), height,
 * onZoom(first, last), marks: {counts, name} to point at below the curves. A series with `faint` has these values behind its own. A few values far above all others leave the chart at its top.
 */
export function drawChart(host, spec) {
  observers.get(host)?.disconnect();
  const parts = frame(host, spec);
  const observer = new ResizeObserver(() => paint(parts, spec));
  observers.set(host, observer);
  observer.observe(parts.svg.parentNode);
  paint(parts, spec);
}

function frame(host, spec) {
  const svg = s("svg", {
    height: spec.height ?? HEIGHT, tabindex: 0, role: "slider", "aria-label": `${spec.title}, chart`, "aria-orientation": "horizontal",
    "aria-valuemin": 0, "aria-valuemax": Math.max(0, spec.x.length - 1), "data-key": `chart ${spec.title}`,
  });
  const keys = [...spec.series, ...(spec.limits ?? [])].map((one) => ({ one, value: h("b", {}, "") }));
  const marked = spec.marks?.counts.reduce((sum, one) => sum + one, 0);
  const legend = h("ul", { class: "legend" }, keys.map(({ one, value }) => h("li", {}, key(one, spec), one.name, value)), marked ? h("li", { class: "marked" }, `▲ ${spec.marks.name}: ${number(marked)}`) : null);
  const focused = host.contains(document.activeElement);
  host.className = `card chart ${spec.isWide ? "wide" : ""}`;
  host.replaceChildren(h("header", {}, h("h2", {}, spec.title, help(spec.title)), h("span", { class: "unit" }, spec.unit)), h("div", {}, svg), legend);
  const parts = { svg, keys, at: null, drawing: null };
  listen(parts, spec);
  if (focused) svg.focus({ preventScroll: true });
  return parts;
}

function key(one, spec) {
  const isLine = one.isLimit || !spec.isStacked;
  const style = isLine ? { "border-color": one.color } : { background: one.color };
  return h("span", { class: `key ${isLine ? "line" : ""} ${one.dash || one.isLimit ? "dashed" : ""}`, style, "aria-hidden": "true" });
}

function paint(parts, spec) {
  const width = Math.max(200, parts.svg.parentNode.clientWidth);
  const height = spec.height ?? HEIGHT;
  parts.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  if (!spec.x.length) {
    parts.svg.replaceChildren(s("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "nothing yet"));
    return;
  }
  const layers = spec.isStacked ? stacked(spec) : spec.series;
  const { low, high, isCut } = range(layers, spec);
  const ticks = spec.isLog ? logTicks(low, high) : niceTicks(low, high, spec.isBinary);
  const labels = distinct(ticks, spec.format);
  const left = 10 + CHAR * Math.max(...labels.map((label) => label.length));
  const right = width - 10;
  const drawing = {
    left, right, top: TOP, bottom: height - BOTTOM,
    x: (index) => position(spec, index, left, right),
    y: (value) => {
      const share = spec.isLog ? (Math.log10(Math.max(value, low)) - Math.log10(low)) / (Math.log10(high) - Math.log10(low)) : (value - low) / (high - low);
      return height - BOTTOM - Math.max(-0.03, Math.min(share, 1.03)) * (height - BOTTOM - TOP);
    },
  };
  parts.drawing = drawing;
  parts.svg.replaceChildren(
    ...axes(spec, drawing, ticks, labels),
    ...layers.flatMap((layer) => (spec.isStacked ? [area(layer, spec, drawing)] : curve(layer, spec, drawing))),
    ...(spec.limits ?? []).map((limit) => s("path", { class: "limit", d: path(limit.mean, spec, drawing) })),
  );
  const marks = (spec.marks?.counts ?? []).map((count, index) => (count ? [drawing.x(index).toFixed(1), height - BOTTOM] : null)).filter(Boolean);
  if (marks.length) parts.svg.append(s("path", { class: "marks", d: marks.map(([x, y]) => `M${x},${y - 7}l4,7h-8Z`).join("") }));
  if (isCut) parts.svg.append(...summits(layers.at(-1), spec, drawing, high));
  parts.cursor = s("line", { class: "cursor", y1: TOP, y2: height - BOTTOM, visibility: "hidden" });
  parts.zoom = s("rect", { class: "zoom", y: TOP, height: height - BOTTOM - TOP, visibility: "hidden" });
  parts.svg.append(parts.cursor, parts.zoom);
  point(parts, spec, parts.at);
}

/** Series on top of each other: the first lies at the bottom. */
function stacked(spec) {
  let below = spec.x.map(() => 0);
  return spec.series.map((one) => {
    const base = below;
    below = base.map((value, index) => value + (one.mean[index] ?? 0));
    return { ...one, base, top: below };
  });
}

/** Low and high end of the axis; isCut: whether values are above it. */
function range(layers, spec) {
  const values = layers.flatMap((one) => (one.top ? one.top : [...one.mean, ...(one.low ?? []), ...(one.high ?? []), ...(one.faint ?? [])]));
  for (const limit of spec.limits ?? []) values.push(...limit.mean);
  const known = values.filter((value) => value !== null && Number.isFinite(value) && (!spec.isLog || value > 0)).sort((one, other) => one - other);
  if (!known.length) return spec.isLog ? { low: 0.1, high: 1 } : { low: 0, high: 1 };
  let [low, high] = [known[0], known.at(-1)].map((value) => Math.max(-LARGEST, Math.min(LARGEST, value)));
  if (spec.isLog) return { low: 10 ** Math.floor(Math.log10(low)), high: 10 ** Math.max(Math.ceil(Math.log10(high)), Math.floor(Math.log10(low)) + 1) };
  const usual = [...(layers.at(-1).top ?? [])].sort((one, other) => one - other)[Math.floor(0.94 * (spec.x.length - 1))] ?? 0;
  const isCut = Boolean(spec.isStacked && !spec.isWhole && !spec.limits?.length && usual > 0 && high > FAR * usual);
  if (isCut) high = 1.5 * usual;
  if (spec.isStacked || (low >= 0 && low < 0.6 * high)) low = 0;
  if (low === high) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
  const room = (high - low) * 0.05;
  return { low: low === 0 ? 0 : low - room, high: high + room, isCut };
}

/** Labels for values above the axis, placed where the line leaves it. */
function summits(layer, spec, drawing, high) {
  const above = layer.top.map((value, index) => [index, value]).filter(([, value]) => value > high);
  let before = -Infinity;
  return above.map(([index, value]) => {
    const x = Math.max(drawing.left + 18, Math.min(drawing.right - 18, drawing.x(index)));
    if (x - before < 60) return s("g");
    before = x;
    return s("g", {}, s("rect", { class: "summit", x: x - 26, y: drawing.top + 2, width: 52, height: 16, rx: 4 }), s("text", { x, y: drawing.top + 14, "text-anchor": "middle" }, `▲ ${spec.format(value)}`));
  });
}

/** Labels with as many digits as tell the ticks apart. */
function distinct(ticks, format) {
  for (let digits = 3; ; digits += 1) {
    const labels = ticks.map((tick) => format(tick, digits));
    if (digits > 9 || new Set(labels).size === labels.length) return labels;
  }
}

function niceTicks(low, high, isBinary) {
  const rough = (high - low) / 4;
  const power = isBinary ? 2 ** Math.floor(Math.log2(rough)) : 10 ** Math.floor(Math.log10(rough));
  const step = (isBinary ? [1, 2] : [1, 2, 2.5, 5, 10]).map((one) => one * power).find((one) => one >= rough);
  if (!(step > 0 && step < Infinity)) return [low, high]; // near the least or the largest float
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.max(0, Math.floor(high / step) - first + 1) }, (_, index) => Number(((first + index) * step).toPrecision(12)));
}

function logTicks(low, high) {
  const [first, last] = [Math.round(Math.log10(low)), Math.round(Math.log10(high))];
  const every = Math.max(1, Math.ceil((last - first) / 4));
  return Array.from({ length: Math.floor((last - first) / every) + 1 }, (_, index) => 10 ** (first + index * every));
}

function position(spec, index, left, right) {
  if (spec.isBars) return left + ((index + 0.5) / spec.x.length) * (right - left);
  const [first, last] = [spec.x[0], spec.x.at(-1)];
  return last === first ? (left + right) / 2 : left + ((spec.x[index] - first) / (last - first)) * (right - left);
}

function axes(spec, drawing, ticks, labels) {
  const rows = ticks.flatMap((tick, index) => [
    s("line", { class: "grid", x1: drawing.left, x2: drawing.right, y1: drawing.y(tick), y2: drawing.y(tick) }),
    s("text", { x: drawing.left - 6, y: drawing.y(tick) + 4, "text-anchor": "end" }, labels[index]),
  ]);
  const y = drawing.bottom + 16;
  if (!spec.formatX && (!spec.isBars || spec.x.length <= MANY_BARS)) return [...rows, ...stepLabels(spec, drawing, y)];
  const format = spec.formatX ?? ((value) => number(value));
  const first = `${spec.xName} ${format(spec.x[0])}`.trim();
  const row = [s("text", { x: drawing.left, y }, first)];
  if (spec.x.length === 1) return [...rows, ...row];
  const last = format(spec.x.at(-1));
  row.push(s("text", { x: drawing.right, y, "text-anchor": "end" }, last));
  const room = drawing.right - drawing.left - CHAR * (first.length + last.length) - 60;
  const middle = spec.x[0] + (spec.x.at(-1) - spec.x[0]) / 2;
  if (room > 60) row.push(s("text", { x: (drawing.left + drawing.right) / 2, y, "text-anchor": "middle" }, format(spec.formatX ? middle : Math.round(middle))));
  return [...rows, ...row];
}

/** Whole numbers where they are, or the value of each bar. */
function stepLabels(spec, drawing, y) {
  const [first, last] = [spec.x[0], spec.x.at(-1)];
  const ticks = spec.isBars ? spec.x : [...new Set([first, ...niceTicks(first, last).filter(Number.isInteger), last])].sort((one, other) => one - other);
  const place = (tick, index) => (spec.isBars ? drawing.x(index) : last === first ? drawing.left : drawing.left + ((tick - first) / (last - first)) * (drawing.right - drawing.left));
  let end = -Infinity;
  return ticks.map((tick, index) => {
    const text = index || spec.isBars ? number(tick, 3) : `${spec.xName} ${number(tick)}`.trim();
    const [x, half] = [place(tick, index), (CHAR * text.length) / 2];
    const at = Math.max(drawing.left + half, Math.min(drawing.right - half, x));
    const next = index < ticks.length - 1 && !spec.isBars ? drawing.right - CHAR * number(last).length : Infinity;
    if (at - half < end + CHAR || at + half + CHAR > next) return null;
    end = at + half;
    return s("text", { x: at, y, "text-anchor": "middle" }, text);
  }).filter(Boolean);
}

function curve(one, spec, drawing) {
  const shown = [];
  if (one.low) shown.push(s("path", { class: "band", style: { fill: one.color }, d: band(one.low, one.high, drawing) }));
  if (one.faint) shown.push(s("path", { class: "curve faint", style: { stroke: one.color }, d: path(one.faint, spec, drawing) }));
  shown.push(s("path", { class: "curve", style: { stroke: one.color }, "stroke-dasharray": one.dash, d: path(one.mean, spec, drawing) }));
  const known = one.mean.map((value, index) => [index, value]).filter(([, value]) => value !== null);
  if (known.length <= MARKERS && known.length < spec.x.length * 0.8 || known.length === 1)
    shown.push(...known.map(([index, value]) => s("circle", { cx: drawing.x(index), cy: drawing.y(value), r: 3, style: { fill: one.color } })));
  return shown;
}

function path(values, spec, drawing) {
  let text = "";
  let before = null;
  values.forEach((value, index) => {
    if (value === null || (spec.isLog && value <= 0)) return;
    const [x, y] = [drawing.x(index).toFixed(1), drawing.y(value).toFixed(1)];
    text += before === null ? `M${x},${y}` : spec.isStepped ? `H${x}V${y}` : `L${x},${y}`;
    before = y;
  });
  return text;
}

function band(low, high, drawing) {
  const known = low.map((value, index) => index).filter((index) => low[index] !== null && high[index] !== null);
  if (!known.length) return "";
  const at = (index, values) => `${drawing.x(index).toFixed(1)},${drawing.y(values[index]).toFixed(1)}`;
  return `M${known.map((index) => at(index, high)).join("L")}L${known.reverse().map((index) => at(index, low)).join("L")}Z`;
}

function bars(layer, spec, drawing) {
  const width = (drawing.right - drawing.left) / spec.x.length;
  const [gap, shown] = [width > 6 ? 1 : 0, spec.x.map((_, index) => index).filter((index) => layer.top[index] > layer.base[index])];
  const d = shown.map((index) => {
    const [x, y] = [drawing.x(index) - width / 2 + gap, drawing.y(layer.top[index])];
    return `M${x.toFixed(1)},${y.toFixed(1)}h${(width - 2 * gap).toFixed(1)}V${drawing.y(layer.base[index]).toFixed(1)}H${x.toFixed(1)}Z`;
  });
  return s("path", { class: "area", style: { fill: layer.color }, d: d.join("") });
}

function area(layer, spec, drawing) {
  if (spec.isBars) return bars(layer, spec, drawing);
  const edge = (values, index) => `${drawing.x(index).toFixed(1)},${drawing.y(values[index]).toFixed(1)}`;
  const indices = spec.x.map((_, index) => index);
  let forth = "";
  let back = "";
  for (const index of indices) {
    if (spec.isStepped && index) forth += `L${drawing.x(index).toFixed(1)},${drawing.y(layer.top[index - 1]).toFixed(1)}`;
    forth += `${index ? "L" : "M"}${edge(layer.top, index)}`;
  }
  for (const index of indices.reverse()) {
    back += `L${edge(layer.base, index)}`;
    if (spec.isStepped && index) back += `L${drawing.x(index).toFixed(1)},${drawing.y(layer.base[index - 1]).toFixed(1)}`;
  }
  return s("path", { class: "area", style: { fill: layer.color }, d: `${forth}${back}Z` });
}

/** Shows the values at an index, or the last ones when there is none. */
function point(parts, spec, index) {
  parts.at = index;
  const shown = index ?? spec.x.length - 1;
  for (const { one, value } of parts.keys) value.textContent = spec.format(at(one.mean, shown, index === null));
  if (!parts.cursor) return;
  parts.cursor.setAttribute("visibility", index === null ? "hidden" : "visible");
  if (index !== null) for (const end of ["x1", "x2"]) parts.cursor.setAttribute(end, parts.drawing.x(index));
  const place = `${spec.xName} ${(spec.formatX ?? number)(spec.x[shown])}${spec.note ? `, ${spec.note(shown)}` : ""}`.trim();
  const text = `${place}: ${parts.keys.map(({ one, value }) => `${one.name} ${value.textContent}`).join(", ")}`;
  parts.svg.setAttribute("aria-valuenow", shown);
  parts.svg.setAttribute("aria-valuetext", text);
  parts.svg.closest(".chart").querySelector(".unit").textContent = index === null ? spec.unit : place;
}

/** At the end of a chart the last known value is used. */
function at(values, index, isLast) {
  while (isLast && index > 0 && values[index] === null) index -= 1;
  return values[index];
}

function listen(parts, spec) {
  let from = null;
  const nearest = (event) => {
    const box = parts.svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * parts.svg.viewBox.baseVal.width;
    const { left, right } = parts.drawing;
    if (spec.isBars) return Math.max(0, Math.min(spec.x.length - 1, Math.floor(((x - left) / (right - left)) * spec.x.length)));
    const wanted = spec.x[0] + ((x - left) / (right - left)) * (spec.x.at(-1) - spec.x[0]);
    let [low, high] = [0, spec.x.length - 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (spec.x[middle] < wanted) low = middle + 1;
      else high = middle;
    }
    return low > 0 && wanted - spec.x[low - 1] < spec.x[low] - wanted ? low - 1 : low;
  };
  parts.svg.addEventListener("pointermove", (event) => {
    if (!parts.drawing || !spec.x.length) return;
    point(parts, spec, nearest(event));
    if (from !== null) mark(parts, from, parts.at);
  });
  parts.svg.addEventListener("pointerleave", () => spec.x.length && point(parts, spec, null));
  parts.svg.addEventListener("pointerdown", (event) => {
    if (spec.onZoom && event.pointerType === "mouse" && parts.drawing) from = nearest(event);
  });
  parts.svg.addEventListener("pointerup", () => {
    const [start, end] = [Math.min(from, parts.at), Math.max(from, parts.at)];
    const isZoom = from !== null && parts.drawing.x(end) - parts.drawing.x(start) > LEAST_ZOOM;
    from = null;
    parts.zoom?.setAttribute("visibility", "hidden");
    if (isZoom) spec.onZoom(spec.x[start], spec.x[end]);
  });
  parts.svg.addEventListener("keydown", (event) => {
    const last = spec.x.length - 1;
    const now = parts.at ?? last;
    const page = Math.max(1, Math.round(last / 10));
    const moved = {
      ArrowLeft: now - 1, ArrowDown: now - 1, ArrowRight: now + 1, ArrowUp: now + 1, PageDown: now - page, PageUp: now + page, Home: 0, End: last,
    }[event.key];
    if (moved === undefined || last < 0) return;
    event.preventDefault();
    point(parts, spec, Math.max(0, Math.min(last, moved)));
  });
  parts.svg.addEventListener("blur", () => spec.x.length && point(parts, spec, null));
}

function mark(parts, from, to) {
  const [left, right] = [from, to].map(parts.drawing.x).sort((one, other) => one - other);
  parts.zoom.setAttribute("x", left);
  parts.zoom.setAttribute("width", right - left);
  parts.zoom.setAttribute("visibility", "visible");
}

/** A colour for each place; colours repeat after the tenth. */
export function color(place) {
  return `var(--c${place % 10})`;
}
