// Memory of each device by service and tag over time, against the plan.

import { drawChart } from "./chart.js";
import { bytes, clock, facts, h, prose, put, words } from "./dom.js";

const WINDOWS = [[4, "last 4 changeovers"], [20, "last 20"], [200, "last 200"], [2000, "last 2,000"]];
const FAR = 3;

export function makeMemory(host, api, fail) {
  const choice = h("select", { id: "memory-window", on: { change: () => view.refresh().catch(fail) } }, WINDOWS.map(([count, text]) => h("option", { value: count }, text)));
  const figures = h("div", { class: "charts" });
  const head = h("div", {});
  const note = h("p", { class: "note" });
  host.append(head, h("div", { class: "tools" }, h("label", {}, "Window", choice)), figures, note);
  const view = {
    parts: ["memory"],
    leastMs: 5000,
    async refresh() {
      const memory = await api(`/api/memory?changeovers=${choice.value}`);
      const charts = memory.devices.map((device) => chartOf(device, memory));
      put(head, headline(memory));
      while (figures.children.length > charts.length) figures.lastChild.remove();
      charts.forEach((spec, place) => drawChart(figures.children[place] ?? figures.appendChild(h("figure")), spec));
      put(note, prose(told(memory)));
    },
  };
  return view;
}

function headline(memory) {
  return facts(memory.devices.flatMap((device) => {
    const totals = sums(device);
    const plan = memory.plan?.[device.device];
    const most = Math.max(0, ...totals);
    return [
      [`${device.device}, tags now`, bytes(totals.at(-1)), device.total_bytes ? `of ${bytes(device.total_bytes)}` : ""],
      [`${device.device}, most in the window`, bytes(most), plan ? `plan ${bytes(Math.max(0, ...plan.tags))}` : ""],
      ...(device.process_bytes ? [[`${device.device}, all of the processes`, bytes(device.process_bytes), "at the last report"]] : []),
      ...(plan ? [[`${device.device}, plan with working memory`, bytes(Math.max(0, ...plan.total)), "at its peak"]] : []),
    ];
  }).slice(0, 9));
}

function sums(device) {
  return (device.series[0]?.bytes ?? []).map((_, index) => device.series.reduce((sum, one) => sum + one.bytes[index], 0));
}

function chartOf(device, memory) {
  const order = ["trainer", "rollout"];
  const series = [...device.series].sort((one, other) => order.indexOf(one.service) - order.indexOf(other.service));
  const plan = memory.plan?.[device.device];
  const most = Math.max(1, ...sums(device));
  const limits = [];
  if (plan) limits.push({ name: "plan for these tags", mean: plan.tags, color: "var(--ink)", isLimit: true });
  if (plan && Math.max(...plan.total) < FAR * most) limits.push({ name: "plan in all", mean: plan.total, color: "var(--ink)", isLimit: true });
  return {
    title: `Memory of ${device.device}`, unit: "mapped bytes by tag", x: memory.times, xName: "", formatX: (time) => clock(time), height: 300,
    series: series.map((one) => ({ name: `${one.service} ${one.tag}`, mean: one.bytes, color: `var(--${one.service}-${one.tag}, var(--c7))` })),
    limits, isStacked: true, isStepped: true, isWide: memory.devices.length === 1, isBinary: true, format: bytes, note: (index) => `after: ${words(memory.stages[index])}`,
  };
}

function told(memory) {
  if (!memory.devices.length) return "No data yet: the node writes memory.jsonl at its first changeover, and a supervised run makes none.";
  const bucket = memory.bucket > 1 ? ` Every ${memory.bucket}th stage is drawn.` : "";
  const plan = memory.plan_problem ? ` There is no plan to compare with: ${memory.plan_problem}.` : " The dashed line is the prediction of `tasuki plan`, with phases at their peak.";
  return `Sizes of tags are reported by the services; in between, they follow the stages in the journal.${plan}${bucket}`;
}
