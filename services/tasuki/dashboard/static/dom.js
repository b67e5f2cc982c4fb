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
  if (size < 1e-3 || size >= 1e7) return value.toExponential(digits > 4 ? digits - 3 : Math.min(2, digits - 1)).replace(/\.?0*e\+?/, "e");
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 9 });
}

export function bytes(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const place = value < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log2(value) / 10));
  return `${number(Number((value / 1024 ** place).toPrecision(digits)), digits)} ${units[place]}`;
}

export function seconds(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (value < 0.9995) return `${number(value * 1000, digits)} ms`;
  if (value < 120) return `${number(value, digits)} s`;
  return value < 7200 ? `${number(value / 60, digits)} min` : `${number(value / 3600, digits)} h`;
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
    h("div", { class: "fact" }, h("dt", {}, name, help(name)), h("dd", {}, value, small ? h("small", {}, ` ${small}`) : null))));
}

const WORDS = {
  start: "starting the node", evaluate: "answering held-out prompts", generate: "generating", reward: "scoring rewards", ref_log_probs: "log-probs of the reference", old_log_probs: "log-probs before the step", values: "values of the critic",
  forward_backward: "computing gradients", critic: "training the critic", optim_step: "updating weights", to_train: "handing over to the trainer", to_rollout: "handing over to the engine", save: "saving a checkpoint", export: "exporting the model", stop: "stopping",
  LOAD_WEIGHTS: "publish weights", RESUME_WEIGHTS: "map weights", SYNC: "copy weights", OFFLOAD: "trainer leaves", RESUME_KV: "map KV cache", DRAIN: "finish requests", PAUSE_KV: "release KV cache", PAUSE_WEIGHTS: "release weights", LOAD_TRAINER: "trainer returns",
  TRAIN: "training", ROLLOUT: "generating",
};

/** What a part of a step, a stage or a phase does, by its name. */
export function words(name) {
  return WORDS[name] ?? String(name).replaceAll("_", " ");
}

/** What a node does now. Its phase is unspecified during a changeover, and until it is known. */
export function doing({ node, absent }) {
  const phase = String(node.phase).replace("PHASE_", "");
  if (phase !== "UNSPECIFIED") return words(phase);
  if (node.changeover_id) return "handing over";
  const away = Object.keys(absent).join(" and ");
  return away ? `waiting for ${away}` : node.stage === "STAGE_UNSPECIFIED" ? "unknown" : "between phases";
}

const TERMS = [
  ["gap", "The difference between the trainer's and rollout's log-prob of a sampled token, in nats. If it grows, the two no longer compute the same policy."],
  ["signal", "The share of a step's groups whose rewards differ. In a group of equal rewards no completion has an advantage, so it teaches nothing. The deviation is that of the rewards within a group, mean over the groups."],
  ["without update", "Steps that generated completions but changed no weights, mostly because all their groups have equal rewards."],
  ["weighted sum", "The reward that is trained on: each reward function by its weight, added up. Unweighted means are in a chart of their own."],
  ["entropy", "How evenly the policy spreads its probability over the next token, in nats. Near 0 it always says the same."],
  ["kl", "How far the policy is from another one, in nats per token: from the reference, or from the one that sampled."],
  ["version", "The number of optimizer steps that the policy has behind it. Rollout serves a version once it is synchronized."],
  ["ring", "The nine stages by which trainer and rollout hand the device's memory to each other, in their fixed order: top row to generate, bottom row to train."],
  ["tags", "A tag is one kind of a service's memory, such as weights or kv_cache. A changeover moves a tag out of the device as a whole, or it stays: then both services fit beside it."],
  ["changeover", "One way around half the ring: from training to generating, or back."],
];

/** A button that explains a term of the name, if there is one: on hover, click or key. */
export function help(name) {
  const found = TERMS.find(([term]) => name.toLowerCase().includes(term));
  return found ? h("button", { type: "button", class: "help", title: found[1], "aria-label": `What is ${name}?`, on: { click: () => explain(found[1]) } }, "?") : null;
}

function explain(text) {
  const note = document.getElementById("explained");
  note.textContent = text;
  note.showPopover();
}

/** A region of text that scrolls by keyboard, too. */
export function block(title, text, level = "h3") {
  return h("div", {}, h(level, {}, title), h("div", { class: "text-block", tabindex: 0, role: "region", "aria-label": title }, text || "(empty)"));
}

export function pairs(list) {
  return h("dl", { class: "pairs spaced" }, list.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, String(value ?? "–"))]));
}

const MARKS = { DONE: "✓", FAILED: "✕", UNDONE: "↶", STARTED: "…", HELD: "=" };

export function status(name) {
  return h("span", { class: `status ${String(name).toLowerCase()}` }, h("span", { "aria-hidden": "true" }, MARKS[name] ?? "?"), String(name).toLowerCase());
}
