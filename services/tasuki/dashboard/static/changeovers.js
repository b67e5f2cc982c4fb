// Changeovers with the seconds of their stages, failures and causes; restarts of services.

import { color } from "./chart.js";
import { bytes, clock, facts, h, number, prose, put, seconds, status, words } from "./dom.js";
import { restarts, sinceLast, TO_ROLLOUT, TO_TRAIN } from "./node.js";

const STAGES = [...TO_ROLLOUT, ...TO_TRAIN];
const PAGE = 50;
const FAILED = ["FAILED", "UNDONE"];

export function makeChangeovers(host, api, fail) {
  let [older, hasMore] = [[], null];
  const open = new Set();
  const failed = h("input", { type: "checkbox", on: { change: () => reload() } });
  const head = h("div", {});
  const body = h("tbody", {});
  const restarted = h("div", { class: "card" });
  const more = h("button", { type: "button", class: "more", on: { click: () => load().catch(fail) } }, "Show older ones");
  const columns = ["changeover", "begun", "leads to", "status", "seconds", "stages", "cause"];
  host.append(head, h("div", { class: "card" },
    h("div", { class: "tools" }, h("h2", {}, "Changeovers"), h("label", {}, failed, "only with failures")),
    h("ul", { class: "legend", "aria-label": "Colours of the stages" }, STAGES.map((stage, place) => h("li", {}, h("span", { class: "key", style: { background: color(place) } }), words(stage)))),
    h("div", { class: "scroll" }, h("table", {}, h("caption", { class: "hidden" }, "Changeovers, newest first"),
      h("thead", {}, h("tr", {}, columns.map((name) => h("th", { scope: "col", class: name === "seconds" ? "number" : name === "stages" || name === "begun" ? "optional" : null }, name)))), body)),
    more), restarted);

  const path = (before) => `/api/changeovers?limit=${PAGE}${failed.checked ? "&failed=1" : ""}${before === null ? "" : `&before=${before}`}`;
  function reload() {
    [older, hasMore] = [[], null];
    view.refresh().catch(fail);
  }
  async function load() {
    const page = await api(path(hasMore));
    older.push(...page.changeovers);
    hasMore = page.next;
    await view.refresh();
  }
  const view = {
    parts: ["changeovers"],
    leastMs: 5000,
    async refresh() {
      const [page, { restarts: logged }] = await Promise.all([api(path(null)), api("/api/node")]);
      if (!older.length) hasMore = page.next;
      const known = new Map([...older, ...page.changeovers].map((one) => [one.number, one]));
      const all = [...known.values()].sort((one, other) => other.number - one.number);
      put(head, headline(page, logged), h("p", { class: "note spaced" }, covered(page, logged)));
      put(body, all.length ? all.flatMap((one) => rows(one, open, () => view.refresh().catch(fail))) : h("tr", {}, h("td", { colspan: 7 }, failed.checked ? "No failure." : "None yet.")));
      more.hidden = hasMore === null;
      put(restarted, restartTable(logged));
    },
  };
  return view;
}

function headline(page, logged) {
  const ended = page.changeovers.filter((one) => one.status === "DONE" && one.seconds);
  const median = (target) => {
    const sorted = ended.filter((one) => one.target === target).map((one) => one.seconds).sort((one, other) => one - other);
    return sorted.length ? [[`To ${words(target)}, median`, seconds(sorted[sorted.length >> 1]), `of ${sorted.length} shown`]] : [];
  };
  const count = (status) => [number(page.counts[status] ?? 0), page.counts_now && page.counts[status] ? sinceLast(page.counts_now[status] ?? 0) : ""];
  return facts([["Done", ...count("DONE")], ["Failed", ...count("FAILED")], ...median("ROLLOUT"), ...median("TRAIN"), restarts(logged)]);
}

/** The time that the counts are of. */
function covered(page, logged) {
  if (page.since === null) return "";
  const isFirst = page.counts_now === null && logged.num_starts === 1;
  const logs = logged.num_starts > 1 ? ` Restarts are those of its last ${logged.num_starts} starts, from the supervisor's logs.` : "";
  return `Changeovers since the node's ${isFirst ? "start" : "first start"}, ${clock(page.since, { withDate: true })}, whichever run they were for.${logs}`;
}

function rows(one, open, redraw) {
  const isOpen = open.has(one.number);
  const toggle = () => {
    if (isOpen) open.delete(one.number);
    else open.add(one.number);
    redraw();
  };
  const first = one.stages.find((stage) => stage.status === "FAILED");
  const cause = one.error_reason ? [one.error_reason, one.error_message] : first ? [`${first.stage}: ${first.error_reason}`, first.error_message] : ["", ""];
  const row = h("tr", {},
    h("td", {}, h("button", { type: "button", class: "open", "aria-expanded": String(isOpen), "data-key": one.id, on: { click: toggle } }, one.id)),
    h("td", { class: "optional" }, clock(one.start_time, { withDate: true })), h("td", {}, words(one.target)), h("td", {}, status(one.status)),
    h("td", { class: "number" }, one.seconds ? seconds(one.seconds) : "–"), h("td", { class: "optional" }, bar(one)),
    h("td", { class: "cause" }, prose(isOpen ? cause.filter(Boolean).join(": ") : short(cause))));
  return isOpen ? [row, h("tr", { class: "detail" }, h("td", { colspan: 7 }, details(one)))] : [row];
}

function short([reason, message]) {
  return reason ? `${reason}${message ? `: ${message.slice(0, 90)}${message.length > 90 ? "…" : ""}` : ""}` : "";
}

function bar(one) {
  const total = one.stages.reduce((sum, stage) => sum + stage.seconds, 0) || 1;
  const label = one.stages.map((stage) => `${words(stage.stage)} ${seconds(stage.seconds)}`).join(", ");
  return h("div", { class: "stack", role: "img", "aria-label": label, title: label }, one.stages.map((stage) =>
    h("i", { style: { width: `${(100 * stage.seconds) / total}%`, background: FAILED.includes(stage.status) ? "var(--bad)" : color(Math.max(0, STAGES.indexOf(stage.stage))) } })));
}

function details(one) {
  const cells = one.stages.map((stage) => h("tr", {},
    h("td", {}, `${stage.is_undo ? "undo of " : ""}${words(stage.stage)} (${stage.stage})`), h("td", {}, clock(stage.time)), h("td", {}, status(stage.status)),
    h("td", { class: "number" }, seconds(stage.seconds)), h("td", { class: "number" }, stage.bytes ? bytes(stage.bytes) : "–"),
    h("td", { class: "cause" }, prose([stage.error_reason, stage.error_message].filter(Boolean).join(": ")))));
  return h("table", {}, h("caption", {}, `from: ${words(one.origin)}, epoch ${one.epoch}, request ${one.request_id}${one.policy_version === null ? "" : `, version ${one.policy_version}`}`),
    h("thead", {}, h("tr", {}, ["stage", "begun", "status", "seconds", "bytes", "cause"].map((name) => h("th", { scope: "col", class: ["seconds", "bytes"].includes(name) ? "number" : null }, name)))), h("tbody", {}, cells));
}

function restartTable(logged) {
  const list = logged.restarts;
  if (!list.length) return [h("h2", {}, "Restarts"), h("p", { class: "note" }, "None in the supervisor's logs.")];
  return [h("h2", {}, "Restarts"), h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["time", "service", "number", "cause"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, list.map((one) => h("tr", {}, h("td", {}, clock(one.time, { withDate: true })), h("td", {}, one.service), h("td", {}, one.number), h("td", { class: "cause" }, one.cause))))))];
}
