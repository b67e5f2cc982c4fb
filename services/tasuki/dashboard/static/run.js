// The curves of a run by step.

import { color, drawChart } from "./chart.js";
import { facts, h, number, put, seconds } from "./dom.js";

const POINTS = 200;

export function makeRun(host, api, fail) {
  let range = null;
  const input = (label) => h("input", { type: "number", min: 0, "aria-label": label, on: { change: () => set() } });
  const [first, last] = [input("First step"), input("Last step")];
  const all = h("button", { type: "button", on: { click: () => zoom(null) } }, "All steps");
  const head = h("div", {});
  const charts = h("div", { class: "charts" });
  const others = h("div", { class: "charts" });
  const fold = h("details", { hidden: true }, h("summary", {}, "Other figures"), others);
  const note = h("p", { class: "note" });
  host.append(head, h("div", { class: "tools" }, h("label", {}, "Steps", first, "to", last), all, note), charts, fold);

  function zoom(wanted) {
    range = wanted;
    view.refresh().catch(fail);
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
      put(head, headline(run));
      if (document.activeElement !== first) first.value = range?.[0] ?? curves.bounds?.[0] ?? "";
      if (document.activeElement !== last) last.value = range?.[1] ?? curves.bounds?.[1] ?? "";
      all.disabled = range === null;
      note.textContent = described(curves);
      draw(charts, curves.charts.filter((chart) => !chart.section), curves, zoom);
      const rest = curves.charts.filter((chart) => chart.section);
      fold.hidden = !rest.length;
      draw(others, rest, curves, zoom);
    },
  };
  fold.addEventListener("toggle", () => fold.open && view.refresh().catch(fail));
  return view;
}

function described(curves) {
  if (!curves.bounds) return "No step has ended yet.";
  return curves.bucket > 1 ? `Each point is the mean of ${curves.bucket} steps, its band their extremes. Drag over a chart to look closer.` : "Drag over a chart to look closer.";
}

function draw(host, charts, curves, zoom) {
  while (host.children.length > charts.length) host.lastChild.remove();
  charts.forEach((chart, place) => {
    const series = chart.series.map((one, index) => ({ ...one, name: one.name === one.name.toUpperCase() ? one.name : one.name.replaceAll("_", " "), color: color(index) }));
    const isSeconds = chart.unit === "s";
    drawChart(host.children[place] ?? host.appendChild(h("figure")), {
      title: chart.title.replaceAll("_", " "), unit: isSeconds ? "seconds" : chart.unit, x: curves.steps, xName: "step", series,
      isStacked: chart.is_stacked, isBars: chart.is_stacked, isLog: chart.is_log, format: isSeconds ? seconds : number, onZoom: (low, high) => zoom([low, high]),
    });
  });
}

function headline(run) {
  const { last, summary, steps } = run;
  const before = summary?.eval_score_before;
  return facts([
    ["Step", steps ? number(steps[1]) : "–"],
    ["Reward", number(last.mean_reward, 3)],
    ["Held-out score", number(last.eval_score, 3), typeof before === "number" ? `from ${number(before, 3)}` : ""],
    ["Log-prob gap, mean", number(last.log_prob_gap, 3), "nat"],
    ["Entropy", number(last.entropy, 3), "nat"],
    ["Policy version", number(last.policy_version)],
    ...(summary ? [["Time", seconds(summary.seconds)]] : []),
  ]);
}
