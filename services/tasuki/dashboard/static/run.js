// The curves of a run by step, beside those of other runs.

import { color, drawChart } from "./chart.js";
import { facts, h, help, number, put, seconds, words } from "./dom.js";

const POINTS = 200;
const SMOOTHINGS = [[0, "none"], [0.6, "0.6"], [0.9, "0.9"], [0.97, "0.97"]];
const STALLED_STEPS = 3;
const DASHES = [null, "6 4", "2 3", "9 3 2 3"]; // of the metrics of a chart, when runs have the colours

export function makeRun(host, api, fail) {
  let range = null;
  const again = () => view.refresh().catch(fail);
  const input = (label) => h("input", { type: "number", min: 0, "aria-label": label, on: { change: () => set() } });
  const [first, last] = [input("First step"), input("Last step")];
  const all = h("button", { type: "button", on: { click: () => zoom(null) } }, "All steps");
  const smoothing = h("select", { on: { change: again } }, SMOOTHINGS.map(([value, text]) => h("option", { value }, text)));
  const log = h("input", { type: "checkbox", on: { change: again } });
  const head = h("div", {});
  const charts = h("div", { class: "charts" });
  const others = h("div", { class: "charts" });
  const fold = h("details", { hidden: true }, h("summary", {}, "Other figures"), others);
  const constants = h("p", { class: "note" });
  const note = h("p", { class: "note" });
  host.append(head, h("div", { class: "tools" }, h("label", {}, "Steps", first, "to", last), all, h("label", { title: "Exponential moving average over the points" }, "Smoothing", smoothing), h("label", {}, log, "log axis")), note, charts, fold, constants);

  function zoom(wanted) {
    range = wanted;
    again();
  }
  function set() {
    const [low, high] = [Number(first.value), Number(last.value)];
    if (Number.isInteger(low) && Number.isInteger(high) && low >= 0 && low <= high) zoom([low, high]);
  }
  const view = {
    parts: ["steps", "run"],
    leastMs: 5000,
    async refresh() {
      const wanted = range ? `&first=${range[0]}&last=${range[1]}` : "";
      const [run, curves] = await Promise.all([api("/api/run"), api(`/api/curves?points=${POINTS}${wanted}`)]);
      put(head, headline(run), warning(run));
      if (document.activeElement !== first) first.value = range?.[0] ?? curves.bounds?.[0] ?? "";
      if (document.activeElement !== last) last.value = range?.[1] ?? curves.bounds?.[1] ?? "";
      all.disabled = range === null;
      note.textContent = described(curves);
      const settings = { names: namesOf([run.output_dir ?? "", ...run.others]), smoothing: Number(smoothing.value), isLog: log.checked, zoom };
      draw(charts, curves.charts.filter((chart) => !chart.section), curves, settings);
      const rest = curves.charts.filter((chart) => chart.section);
      fold.hidden = !rest.length;
      draw(others, rest, curves, settings);
      const same = Object.entries(curves.constants).map(([name, value]) => `${plain(name)} ${value === null ? "0 but for rounding" : number(value)}`);
      constants.textContent = same.length ? `Constant over the run: ${same.join(", ")}.` : "";
    },
  };
  fold.addEventListener("toggle", () => fold.open && again());
  return view;
}

function described(curves) {
  if (!curves.bounds) return "No step has ended yet.";
  return curves.bucket > 1 ? `Each point is the mean of ${curves.bucket} steps, its band their extremes. Drag over a chart to look closer.` : "Drag over a chart to look closer.";
}

/** Folders by their last part, or by the whole path where two share it. */
function namesOf(folders) {
  const short = folders.map((folder) => folder.split("/").at(-1));
  return folders.map((folder, place) => (short.indexOf(short[place]) === short.lastIndexOf(short[place]) ? short[place] : folder));
}

function plain(name) {
  return name === name.toUpperCase() ? name : name.replaceAll("_", " ");
}

/** Exponential moving average of the known values, corrected for its begin. */
function smoothed(values, weight) {
  let [sum, total] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    [sum, total] = [weight * sum + (1 - weight) * value, weight * total + 1 - weight];
    return sum / total;
  });
}

function draw(host, charts, curves, { names, smoothing, isLog, zoom }) {
  while (host.children.length > charts.length) host.lastChild.remove();
  charts.forEach((chart, place) => {
    const isCompared = names.length > 1 && !chart.is_stacked;
    const label = chart.unit === "s" ? words : plain;
    const metrics = [...new Set(chart.series.map((one) => one.name))];
    const series = chart.series.map((one) => ({
      ...one, name: isCompared ? `${label(one.name)} · ${names[one.run]}` : label(one.name), color: color(isCompared ? one.run : metrics.indexOf(one.name)), dash: isCompared ? DASHES[metrics.indexOf(one.name) % DASHES.length] : null,
      ...(smoothing && !chart.is_stacked ? { mean: smoothed(one.mean, smoothing), faint: one.mean, low: undefined, high: undefined } : {}),
    }));
    const isSeconds = chart.unit === "s";
    const isMarked = chart.title.startsWith("Reward, ") || chart.title === "Signal";
    drawChart(host.children[place] ?? host.appendChild(h("figure")), {
      title: plain(chart.title), unit: isSeconds ? "seconds" : chart.unit, x: curves.steps, xName: "step", series,
      isStacked: chart.is_stacked, isBars: chart.is_stacked, isLog: (chart.is_log || isLog) && !chart.is_stacked, format: isSeconds ? seconds : number, onZoom: (low, high) => zoom([low, high]),
      marks: isMarked ? { counts: curves.without_update, name: "steps without update" } : undefined,
    });
  });
}

function headline(run) {
  const { last, summary, steps } = run;
  const from = (value) => (typeof value === "number" ? `from ${number(value, 3)}` : "");
  const total = run.progress?.steps || run.num_steps || summary?.steps;
  const shown = [["Step", steps ? number(Math.min(steps[1] + 1, run.progress?.step || Infinity, summary?.steps || Infinity, total || Infinity)) : "–", total ? `of ${number(total)} ended` : ""]];
  if ("mean_reward" in last || !("loss" in last)) shown.push(["Reward, weighted sum", number(last.mean_reward, 3), "mean of the latest step"], ["Held-out reward, weighted sum", number(last.eval_score, 3), from(summary?.eval_score_before)]);
  if ("signal_fraction" in last) shown.push(["Signal", `${number(100 * last.signal_fraction, 3)} %`, "of groups have differing rewards"]);
  if (run.without_update.count) shown.push(["Steps without update", number(run.without_update.count), run.without_update.newest ? `the newest ${number(run.without_update.newest)} in a row` : ""]);
  if (!("mean_reward" in last) && "loss" in last) shown.push(["Loss", number(last.loss, 3), "nat per token"], ["Held-out loss", number(last["eval/loss"], 3), from(summary?.eval_loss_before)]);
  if ("log_prob_gap" in last) shown.push(["Log-prob gap, mean", number(last.log_prob_gap, 3), "nat"]);
  if ("entropy" in last) shown.push(["Entropy", number(last.entropy, 3), "nat"]);
  shown.push(["Policy version", number(last.policy_version)]);
  if (summary) shown.push(["Time", seconds(summary.seconds), "in all"]);
  return facts(shown);
}

function warning(run) {
  const { newest } = run.without_update;
  if (newest < STALLED_STEPS) return null;
  return h("p", { class: "problem warned", role: "status" }, `The newest ${number(newest)} steps changed no weights: `, run.without_update.failed_groups ? `rewards failed in ${number(run.without_update.failed_groups)} groups of the last one. Samples say why.` : run.last.signal_fraction === 0 ? "all groups of the last one have equal rewards. Read some samples, give partial credit, or use other prompts, larger groups or a higher temperature." : "see the samples and the log.", help("without update"));
}
