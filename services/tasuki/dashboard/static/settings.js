// Where a run comes from, its settings beside the defaults, and the newest lines of the logs.

import { block, h, number, pairs, put } from "./dom.js";

export function makeSettings(host, api) {
  return {
    parts: ["run"],
    leastMs: 10_000,
    async refresh() {
      const [found, run] = await Promise.all([api("/api/settings"), api("/api/run")]);
      const summary = Object.entries(run.summary ?? {}).filter(([name]) => !run.is_supervised || name !== "num_failed_rewards").map(([name, value]) => [name.replaceAll("_", " "), typeof value === "number" ? number(value) : String(value ?? "–")]);
      const isOpen = host.querySelector("details")?.open;
      put(host, h("div", { class: "columns" },
        h("div", { class: "card" }, h("h2", {}, "Provenance"), Object.keys(found.provenance).length ? pairs(Object.entries(found.provenance)) : h("p", { class: "note" }, "There is no run.json yet.")),
        summary.length ? h("div", { class: "card" }, h("h2", {}, "Summary"), pairs(summary)) : null),
      h("div", { class: "card" }, h("h2", {}, "Settings that differ from the defaults"), found.changed.length ? changes(found.changed) : h("p", { class: "note" }, "There is no configuration here that can be read.")),
      found.toml ? h("details", { class: "card", open: isOpen }, h("summary", { "data-key": "toml" }, "Every setting, as TOML"), block("Configuration", found.toml)) : null);
    },
  };
}

function changes(list) {
  return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["key", "value", "default"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, list.map((one) => h("tr", {}, h("th", { scope: "row" }, h("code", {}, one.key)), h("td", {}, one.value), h("td", { class: "note" }, one.default ?? "–"))))));
}

export function makeLog(host, api, fail) {
  let found = { lines: [], problems: [] };
  const warnings = h("input", { type: "checkbox", checked: true, on: { change: () => view.refresh().catch(fail) } });
  const process = h("select", { on: { change: () => draw() } }, ["all", "supervisor", "coordinator", "trainer", "rollout"].map((name) => h("option", { value: name }, name)));
  const search = h("input", { type: "search", on: { input: () => draw() } });
  const told = h("p", { class: "note" });
  const list = h("ol", { class: "events log", tabindex: 0, "aria-label": "Log, newest line first", "data-key": "log" });
  host.append(h("div", { class: "tools" }, h("label", {}, warnings, "only warnings and errors"), h("label", {}, "Process", process), h("label", {}, "Search", search)), told, h("div", { class: "card" }, list));
  function draw() {
    const text = search.value.toLowerCase();
    const lines = found.lines.filter((line) => (process.value === "all" || line.process === process.value) && line.text.toLowerCase().includes(text));
    told.textContent = [...found.problems, lines.length ? `The newest ${number(lines.length)} lines, newest first.` : warnings.checked ? "No warning and no error." : "No line."].join(" ");
    put(list, lines.toReversed().map((line) => h("li", { class: `of-${line.level.toLowerCase()}` }, `${line.time} ${line.level} ${line.process} ${line.text}`)));
  }
  const view = {
    parts: ["log"],
    leastMs: 3000,
    async refresh() {
      found = await api(`/api/log${warnings.checked ? "?warnings=1" : ""}`);
      draw();
    },
  };
  return view;
}
