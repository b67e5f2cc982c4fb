// The sample dump by step and group, and one completion by token.

import { drawChart } from "./chart.js";
import { h, number, put } from "./dom.js";

const FIRST_TOKENS = 1500;
const DECADES = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1];

export function makeSamples(host, api, fail) {
  let [steps, step, index, follows, shown] = [[], null, 0, true, ""];
  const field = h("input", { type: "number", min: 0, "aria-label": "Step", on: { change: () => choose(Number(field.value)) } });
  const back = h("button", { type: "button", "aria-label": "Step before", on: { click: () => move(-1) } }, "◀");
  const forth = h("button", { type: "button", "aria-label": "Step after", on: { click: () => move(1) } }, "▶");
  const told = h("span", { class: "note" });
  const groups = h("div", { class: "groups" });
  const one = h("div", { class: "card sample" });
  host.append(h("div", { class: "tools" }, h("label", {}, "Step", field), back, forth, told, h("span", { class: "note optional" }, h("kbd", {}, "["), " ", h("kbd", {}, "]"), " other step, ", h("kbd", {}, "↑"), " ", h("kbd", {}, "↓"), " other completion, ", h("kbd", {}, "←"), " ", h("kbd", {}, "→"), " tokens")), h("h2", { class: "hidden" }, "Groups"), h("div", { class: "samples" }, groups, one));

  function choose(wanted) {
    if (!steps.length) return;
    step = steps.reduce((best, other) => (Math.abs(other - wanted) < Math.abs(best - wanted) ? other : best));
    [index, follows] = [0, step === steps.at(-1)];
    load().catch(fail);
  }
  function move(by) {
    const place = steps.indexOf(step) + by;
    if (steps[place] !== undefined) choose(steps[place]);
  }
  async function load() {
    field.value = step;
    back.disabled = step === steps[0];
    forth.disabled = step === steps.at(-1);
    const wanted = step;
    const read = await api(`/api/samples/step?step=${step}`);
    if (wanted !== step) return;
    told.textContent = described(read, steps);
    put(groups, byGroup(read.samples).map(([group, samples]) => groupOf(group, samples, index, (wanted) => select(wanted).catch(fail))));
    if (read.samples.length) await select(read.samples.some((sample) => sample.index === index) ? index : read.samples[0].index, { focus: false });
    else clear(h("p", { class: "note" }, "This step has no samples that can be read."));
  }
  async function select(wanted, { focus = true } = {}) {
    index = wanted;
    for (const button of groups.querySelectorAll("button")) {
      const isChosen = Number(button.dataset.index) === wanted;
      button.setAttribute("aria-current", String(isChosen));
      button.tabIndex = isChosen ? 0 : -1;
      if (isChosen && focus) button.focus();
    }
    const sample = await api(`/api/samples/one?step=${step}&index=${wanted}`);
    const read = JSON.stringify(sample);
    // Shown again, it would lose the token that somebody has chosen.
    if (index !== wanted || read === shown) return;
    shown = read;
    show(one, sample);
  }
  function clear(...notes) {
    shown = "";
    put(one, ...notes);
  }
  groups.addEventListener("keydown", (event) => {
    const buttons = [...groups.querySelectorAll("button")];
    const place = buttons.findIndex((button) => Number(button.dataset.index) === index);
    const moved = { ArrowDown: place + 1, ArrowUp: place - 1, Home: 0, End: buttons.length - 1 }[event.key];
    if (moved === undefined || !buttons[moved]) return;
    event.preventDefault();
    select(Number(buttons[moved].dataset.index)).catch(fail);
  });
  // On the whole page: after a change of tabs the focus is still on the tab.
  document.addEventListener("keydown", (event) => {
    const by = { "[": -1, "]": 1 }[event.key];
    if (by && !host.hidden && !event.metaKey && !event.target.matches("input")) move(by);
  });
  return {
    parts: ["samples"],
    async refresh() {
      const before = step;
      steps = (await api("/api/samples")).steps;
      if (!steps.length) {
        told.textContent = "No samples: [train.samples] groups_per_step is 0, or no step has ended yet.";
        put(groups);
        clear();
        return;
      }
      if (step === null || follows || !steps.includes(step)) step = steps.at(-1);
      if (step !== before) index = 0;
      await load();
    },
  };
}

function described(read, steps) {
  const bad = read.num_bad_lines ? `, ${read.num_bad_lines} lines that are no sample` : "";
  return `${number(steps.length)} steps, ${number(steps[0])} to ${number(steps.at(-1))}; ${read.samples.length} completions${bad}${read.is_cut ? ", cut" : ""}`;
}

function byGroup(samples) {
  const found = new Map();
  for (const sample of samples) found.set(sample.group, [...(found.get(sample.group) ?? []), sample]);
  return [...found];
}

function groupOf(group, samples, chosen, select) {
  const rewards = samples.map((sample) => sample.reward).filter((reward) => reward !== null);
  const mean = rewards.length ? rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length : null;
  return h("section", { class: "group card", "aria-label": `Group ${group}` }, h("h3", {}, `Group ${group ?? "–"}`, h("span", { class: "note" }, ` · ${samples.length} completions, mean reward ${number(mean, 3)}`)),
    h("p", { class: "prompt" }, samples[0].prompt),
    h("ul", {}, samples.map((sample) => h("li", {}, h("button", { type: "button", "data-index": sample.index, "data-key": `sample ${sample.index}`, tabindex: sample.index === chosen ? 0 : -1, "aria-current": String(sample.index === chosen), on: { click: () => select(sample.index) } },
      h("span", { class: "text" }, sample.completion || "(empty)"), h("span", { class: "score" }, number(sample.reward, 3)), h("span", { class: "gap" }, sample.log_prob_gap_max === null ? "" : `gap ${number(sample.log_prob_gap_max, 2)}`))))));
}

function show(host, sample) {
  const pairs = [
    ["reward", number(sample.reward)], ...Object.entries(sample.rewards).map(([name, value]) => [`reward ${name}`, number(value)]), ["advantage", number(sample.advantage)],
    ["log-prob gap", sample.log_prob_gap === null ? "not measured" : `mean ${number(sample.log_prob_gap, 3)}, max ${number(sample.log_prob_gap_max, 3)}`],
    ["finish", sample.finish_reason], ["version", number(sample.policy_version)], ["temperature", number(sample.temperature)], ["tokens", number(sample.num_tokens)],
    ...Object.entries(sample.fields).map(([name, value]) => [`row: ${name}`, value]),
  ];
  const detail = h("dl", { class: "pairs", "aria-live": "polite" });
  const figure = h("figure", {});
  host.replaceChildren(h("h2", {}, `Group ${sample.group ?? "–"}, completion ${sample.sample ?? "–"}`),
    h("dl", { class: "pairs two" }, pairs.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, String(value))])),
    block("Prompt", sample.prompt), block("Completion", sample.completion),
    h("div", {}, h("h3", { id: "tokens-title" }, "Tokens by log-prob gap, |trainer - rollout|"), scale()), tokensOf(sample, detail), detail, figure);
  if (sample.token_ids.length > 1 && sample.rollout_log_probs) drawChart(figure, probsChart(sample));
}

function block(title, text) {
  return h("div", {}, h("h3", {}, title), h("div", { class: "text-block", tabindex: 0, role: "region", "aria-label": title }, text || "(empty)"));
}

function gapOf(sample, place) {
  const [ours, theirs] = [sample.trainer_log_probs?.[place], sample.rollout_log_probs?.[place]];
  return ours === null || ours === undefined || theirs === null || theirs === undefined ? null : ours - theirs;
}

function levelOf(gap) {
  return gap === null ? 0 : DECADES.filter((decade) => Math.abs(gap) >= decade * (1 - 1e-9)).length;
}

function scale() {
  return h("p", { class: "scale" }, "nat, at least:", DECADES.map((decade, place) => h("span", { class: `g${place + 1}` }, decade >= 1e-3 ? String(decade) : decade.toExponential(0))));
}

function tokensOf(sample, detail) {
  const spans = [];
  const host = h("div", { class: "tokens", role: "listbox", "aria-labelledby": "tokens-title", "aria-orientation": "horizontal", tabindex: 0 });
  let chosen = 0;
  const choose = (place) => {
    spans[chosen]?.setAttribute("aria-selected", "false");
    chosen = place;
    spans[place].setAttribute("aria-selected", "true");
    spans[place].scrollIntoView({ block: "nearest" });
    host.setAttribute("aria-activedescendant", spans[place].id);
    put(detail, numbersOf(sample, place).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
  };
  const add = (upTo) => {
    while (spans.length < Math.min(upTo, sample.token_ids.length)) {
      const place = spans.length;
      const span = h("span", { class: `g${levelOf(gapOf(sample, place))}`, role: "option", id: `token-${place}`, "aria-selected": "false", on: { click: () => choose(place) } }, visible(sample, place));
      spans.push(span);
      host.append(span);
    }
  };
  add(FIRST_TOKENS);
  host.addEventListener("keydown", (event) => {
    const moved = { ArrowRight: chosen + 1, ArrowLeft: chosen - 1, Home: 0, End: sample.token_ids.length - 1, PageDown: chosen + 50, PageUp: chosen - 50 }[event.key];
    if (moved === undefined || !sample.token_ids.length) return;
    event.preventDefault();
    const place = Math.max(0, Math.min(sample.token_ids.length - 1, moved));
    add(place + FIRST_TOKENS);
    choose(place);
  });
  if (sample.token_ids.length) choose(mostGap(sample));
  const rest = sample.token_ids.length - spans.length;
  const more = rest > 0 ? h("button", { type: "button", class: "more", on: { click: () => { add(Infinity); more.remove(); } } }, `Show ${number(rest)} more tokens`) : null;
  return h("div", {}, host, more);
}

/** The token to begin with: that of the largest gap among those drawn first. */
function mostGap(sample) {
  let most = 0;
  for (let place = 1; place < Math.min(sample.token_ids.length, FIRST_TOKENS); place += 1)
    if (Math.abs(gapOf(sample, place) ?? 0) > Math.abs(gapOf(sample, most) ?? 0)) most = place;
  return most;
}

function visible(sample, place) {
  const text = sample.tokens[place];
  return text === null ? `⟨${sample.token_ids[place]}⟩` : text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥") || "∅";
}

function numbersOf(sample, place) {
  const gap = gapOf(sample, place);
  const prob = (value) => (value === null || value === undefined ? "–" : `${number(value, 6)}, probability ${number(Math.exp(value), 3)}`);
  return [
    [`token ${place + 1} of ${sample.token_ids.length}`, `${JSON.stringify(sample.tokens[place] ?? "")}, id ${sample.token_ids[place]}`],
    ["rollout log-prob", prob(sample.rollout_log_probs?.[place])], ["trainer log-prob", prob(sample.trainer_log_probs?.[place])],
    ["trainer - rollout", gap === null ? "–" : `${number(gap, 3)} nat`], ["advantage", number(sample.advantages?.[place] ?? sample.advantage)],
  ];
}

function probsChart(sample) {
  const series = [{ name: "rollout", mean: sample.rollout_log_probs, color: "var(--c1)" }];
  if (sample.trainer_log_probs) series.push({ name: "trainer", mean: sample.trainer_log_probs, color: "var(--c0)", dashed: true });
  return { title: "Log-probs by token", unit: "nat", x: sample.token_ids.map((_, place) => place + 1), xName: "token", series, format: number, height: 150 };
}
