// The sample dump by step and group, and one completion by token.

import { drawChart } from "./chart.js";
import { block, h, number, put } from "./dom.js";

const FIRST_TOKENS = 1500;
const FEW_VALUES = 12;
const BINS = 20;
const DECADES = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1];

export function makeSamples(host, api, fail) {
  let [steps, step, index, follows, shown] = [[], null, 0, true, ""];
  const field = h("input", { type: "number", min: 0, "aria-label": "Step", on: { change: () => choose(Number(field.value)) } });
  const back = h("button", { type: "button", "aria-label": "Step before", on: { click: () => move(-1) } }, "◀");
  const forth = h("button", { type: "button", "aria-label": "Step after", on: { click: () => move(1) } }, "▶");
  const told = h("span", { class: "note" });
  const reload = () => step !== null && load().catch(fail);
  const search = h("input", { type: "search", on: { change: reload } });
  const bound = (label) => h("input", { type: "number", step: "any", "aria-label": label, on: { change: reload } });
  const [least, most] = [bound("Least reward"), bound("Largest reward")];
  const charts = h("div", { class: "charts small" });
  const rewards = h("details", { open: true }, h("summary", {}, "Rewards of the step"), charts);
  const groups = h("div", { class: "groups" });
  const one = h("div", { class: "card sample" });
  host.append(h("div", { class: "tools" }, h("label", {}, "Step", field), back, forth, h("label", {}, "Search", search), h("label", {}, "Reward", least, "to", most), told, h("span", { class: "note optional" }, h("kbd", {}, "["), " ", h("kbd", {}, "]"), " other step, ", h("kbd", {}, "↑"), " ", h("kbd", {}, "↓"), " other completion, ", h("kbd", {}, "←"), " ", h("kbd", {}, "→"), " tokens")), rewards, h("h2", { class: "hidden" }, "Groups"), h("div", { class: "samples" }, groups, one));

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
    const read = await api(`/api/samples/step?step=${step}&contains=${encodeURIComponent(search.value)}`);
    if (wanted !== step) return;
    read.samples = read.samples.filter((sample) => isWithin(sample.reward, least.value, most.value));
    told.textContent = described(read, steps);
    drawRewards(charts, read.rewards);
    put(groups, byGroup(read.samples).map(([group, samples]) => groupOf(group, samples, index, (wanted) => select(wanted).catch(fail))));
    if (read.samples.length) await select(read.samples.some((sample) => sample.index === index) ? index : read.samples[0].index, { focus: false });
    else clear(h("p", { class: "note" }, "No completion of this step matches, or none can be read."));
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
    const pictures = h("div", { class: "pictures" });
    show(one, sample, pictures);
    for (let place = 0; place < sample.num_images; place += 1) await addPicture(pictures, `/api/samples/image?step=${step}&index=${wanted}&place=${place}`, place);
  }
  async function addPicture(pictures, path, place) {
    try {
      const url = URL.createObjectURL(await api(path, (answer) => answer.blob()));
      pictures.append(h("img", { src: url, alt: `Image ${place + 1} of the prompt`, on: { load: () => URL.revokeObjectURL(url) } }));
    } catch (error) {
      pictures.append(h("p", { class: "note" }, error.message));
    }
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
        rewards.hidden = true;
        told.textContent = "No samples: [train.samples] groups_per_step is 0, or no step has ended yet.";
        put(groups);
        clear();
        return;
      }
      rewards.hidden = false;
      if (step === null || follows || !steps.includes(step)) step = steps.at(-1);
      if (step !== before) index = 0;
      await load();
    },
  };
}

function described(read, steps) {
  const bad = read.num_bad_lines ? `, ${read.num_bad_lines} lines that are no sample` : "";
  return `${number(steps.length)} steps, ${number(steps[0])} to ${number(steps.at(-1))}; ${number(read.samples.length)} of ${number(read.rewards.length)} completions${bad}${read.is_cut ? ", cut" : ""}`;
}

function isWithin(reward, least, most) {
  return (least === "" || (reward !== null && reward >= Number(least))) && (most === "" || (reward !== null && reward <= Number(most)));
}

/** A histogram of the weighted sum and, of several reward functions, of each. */
function drawRewards(host, rewards) {
  const names = [...new Set(rewards.flatMap(Object.keys))];
  const shown = names.length > 2 ? names : names.slice(0, 1);
  while (host.children.length > shown.length) host.lastChild.remove();
  shown.forEach((name, place) => {
    const values = rewards.map((one) => one[name]).filter((value) => value !== null && value !== undefined).sort((one, other) => one - other);
    const distinct = [...new Set(values)];
    const [low, width] = [values[0], (values.at(-1) - values[0]) / BINS];
    const x = distinct.length <= FEW_VALUES ? distinct : Array.from({ length: BINS }, (_, bin) => low + (bin + 0.5) * width);
    const counts = x.map(() => 0);
    for (const value of values) counts[distinct.length <= FEW_VALUES ? distinct.indexOf(value) : Math.min(BINS - 1, Math.floor((value - low) / width))] += 1;
    drawChart(host.children[place] ?? host.appendChild(h("figure")), {
      title: name ? `Reward ${name}, unweighted` : "Reward, weighted sum", unit: `${number(values.length)} completions`, x, xName: "reward", series: [{ name: "completions", mean: counts, color: "var(--c0)" }],
      isStacked: true, isBars: true, isWhole: true, format: number, height: 130,
    });
  });
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

function show(host, sample, pictures) {
  const pairs = [
    ["reward", number(sample.reward)], ...Object.entries(sample.rewards).map(([name, value]) => [`reward ${name}`, number(value)]), ["advantage", number(sample.advantage)],
    ["log-prob gap", sample.log_prob_gap === null ? "not measured" : `mean ${number(sample.log_prob_gap, 3)}, max ${number(sample.log_prob_gap_max, 3)}`],
    ["finish", sample.finish_reason], ["version", sample.version_spans.map(([tokens, version]) => `${number(version)}: ${number(tokens)} tokens`).join(", ") || number(sample.policy_version)], ["temperature", number(sample.temperature)], ["tokens", number(sample.num_tokens)],
    ...(sample.failure ? [["failure", sample.failure]] : []), ...Object.entries(sample.fields).map(([name, value]) => [`row: ${name}`, value]),
  ];
  const detail = h("dl", { class: "pairs", "aria-live": "polite" });
  const figure = h("figure", {});
  put(host, h("h2", {}, `Group ${sample.group ?? "–"}, completion ${sample.sample ?? "–"}`),
    h("dl", { class: "pairs two" }, pairs.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, String(value))])), pictures,
    sample.is_masked.includes(true) ? episode(sample) : sample.messages ? chat(sample) : h("div", {}, block("Prompt", sample.prompt), block(titleOf(sample), sample.completion)),
    sample.templated && !sample.is_masked.includes(true) ? h("details", {}, h("summary", {}, "Prompt as the model got it"), block("Tokens of the prompt, as text", sample.templated)) : null);
  if (!sample.token_ids.length) {
    host.append(h("p", { class: "note" }, "Tokens and log-probs are kept for train.samples.groups_per_step groups of a step, which are listed first."));
    return;
  }
  host.append(h("div", {}, h("h3", { id: "tokens-title" }, "Tokens by log-prob gap, |trainer - rollout|"), scale(sample)), tokensOf(sample, detail), detail, figure);
  if (sample.token_ids.length > 1 && sample.rollout_log_probs) drawChart(figure, probsChart(sample));
}

function titleOf(sample) {
  return sample.messages ? "assistant, this completion" : "Completion";
}

/** The messages of a chat and the completion, by role. */
function chat(sample) {
  const turns = [...sample.messages, { role: "assistant", content: sample.completion, others: "", isCompletion: true }];
  return h("div", { class: "chat" }, turns.map((one) => h("div", { class: `turn ${one.isCompletion ? "is-completion" : ""}` }, block(one.isCompletion ? titleOf(sample) : one.role, [one.content, one.others].filter(Boolean).join("\n")))));
}

/** An episode's turns: what the policy drew, and what the template, tools and users wrote between. */
function episode(sample) {
  const turns = [{ title: "Prompt as the model got it", text: sample.templated ?? sample.prompt }];
  let count = 0;
  sample.is_masked.forEach((isMasked, place) => {
    const title = () => (isMasked ? "tools, users, template" : `policy, turn ${(count += 1)}, advantage ${number(sample.advantages?.[place] ?? sample.advantage, 3)}`);
    if (isMasked !== sample.is_masked[place - 1]) turns.push({ title: title(), text: "", isDrawn: !isMasked });
    turns.at(-1).text += sample.tokens[place] ?? `⟨${sample.token_ids[place]}⟩`;
  });
  return h("div", { class: "chat" }, turns.map((one) => h("div", { class: `turn ${one.isDrawn ? "is-completion" : ""}` }, block(one.title, one.text))));
}

function gapOf(sample, place) {
  const [ours, theirs] = [sample.trainer_log_probs?.[place], sample.rollout_log_probs?.[place]];
  return ours === null || ours === undefined || theirs === null || theirs === undefined ? null : ours - theirs;
}

function levelOf(gap) {
  return gap === null ? 0 : DECADES.filter((decade) => Math.abs(gap) >= decade * (1 - 1e-9)).length;
}

function scale(sample) {
  return h("p", { class: "scale" }, "nat, at least:", DECADES.map((decade, place) => h("span", { class: `g${place + 1}` }, decade >= 1e-3 ? String(decade) : decade.toExponential(0))), sample.is_masked.includes(true) ? h("span", { class: "masked" }, "not drawn") : null);
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
      const span = h("span", { class: sample.is_masked[place] ? "masked" : `g${levelOf(gapOf(sample, place))}`, role: "option", id: `token-${place}`, "aria-selected": "false", on: { click: () => choose(place) } }, visible(sample, place));
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
    ["trainer - rollout", sample.is_masked[place] ? "not drawn by the policy" : gap === null ? "–" : `${number(gap, 3)} nat`], ["advantage", sample.is_masked[place] ? "–" : number(sample.advantages?.[place] ?? sample.advantage)],
  ];
}

function probsChart(sample) {
  const series = [{ name: "rollout", mean: sample.rollout_log_probs, color: "var(--c1)" }];
  if (sample.trainer_log_probs) series.push({ name: "trainer", mean: sample.trainer_log_probs, color: "var(--c0)", dash: "6 4" });
  return { title: "Log-probs by token", unit: "nat", x: sample.token_ids.map((_, place) => place + 1), xName: "token", series, format: number, height: 150 };
}
