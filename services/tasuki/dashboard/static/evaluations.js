// Held-out completions: which rows changed between two evaluations.

import { block, facts, h, number, put } from "./dom.js";

const SHOWN = 50;
const SUMMARY_CHARS = 400;
const FILTERS = { changed: (row) => row.change !== 0, better: (row) => row.change > 0, worse: (row) => row.change < 0, all: () => true };

export function makeEvaluations(host, api, fail) {
  let [steps, follows, found, limit] = [[], true, null, SHOWN];
  const open = new Set();
  const choice = (label) => h("select", { "aria-label": label, on: { change: () => { follows = after.value === String(steps.at(-1)); load().catch(fail); } } });
  const [before, after] = [choice("Earlier evaluation"), choice("Later evaluation")];
  const filter = h("select", { on: { change: () => draw() } }, Object.keys(FILTERS).map((name) => h("option", { value: name }, name)));
  const search = h("input", { type: "search", on: { input: () => draw() } });
  const head = h("div", {});
  const told = h("p", { class: "note" });
  const rows = h("div", { class: "rows" });
  const more = h("button", { type: "button", class: "more", on: { click: () => { limit += SHOWN; draw(); } } }, "Show more");
  host.append(h("div", { class: "tools" }, h("label", {}, "Step", before), h("label", {}, "against step", after), h("label", {}, "Rows", filter), h("label", {}, "Search", search)), head, told, rows, more);

  async function load() {
    const [from, to] = [before.value, after.value];
    found = await api(`/api/evaluations?before=${from}&after=${to}`);
    limit = SHOWN;
    if (from === before.value && to === after.value) draw();
  }
  function draw() {
    if (!found) return;
    const { counts } = found;
    put(head, facts([["Better", number(counts.better)], ["Worse", number(counts.worse)], ["Unchanged", number(counts.same)], ["Held-out rows", number(found.num_rows)]]));
    const text = search.value.toLowerCase();
    const wanted = found.rows.filter((row) => FILTERS[filter.value](row) && `${row.was.prompt}\n${row.was.completion}\n${row.is.completion}`.toLowerCase().includes(text));
    const kept = found.rows.some((row) => row.is.completion) ? " Texts are kept of the first 256 rows." : "";
    told.textContent = `${wanted.length ? `${number(wanted.length)} rows, the largest change of reward first.` : "No such row."}${kept}${found.is_cut ? " There are more than are shown." : ""}`;
    put(rows, wanted.slice(0, limit).map((row) => rowOf(row, open, [before.value, after.value])));
    more.hidden = wanted.length <= limit;
  }
  return {
    parts: ["samples"],
    async refresh() {
      steps = (await api("/api/samples")).evaluations;
      if (!steps.length) {
        told.textContent = "No held-out completions: there is no train.eval_dataset, [train.samples] groups_per_step is 0, or nothing has been evaluated yet.";
        put(rows);
        more.hidden = true;
        return;
      }
      const [old, now] = [before.value, after.value];
      for (const one of [before, after]) put(one, steps.map((step) => h("option", { value: step }, String(step))));
      after.value = follows || !steps.includes(Number(now)) ? steps.at(-1) : now;
      before.value = old !== "" && steps.includes(Number(old)) ? old : steps[0];
      await load();
    },
  };
}

function rowOf(row, open, [before, after]) {
  const kind = row.change > 0 ? "done" : row.change < 0 ? "failed" : "held";
  const summary = h("summary", { "data-key": `row ${row.row}` }, h("span", { class: `status ${kind}` }, `${row.change > 0 ? "▲" : row.change < 0 ? "▼" : "="} ${number(row.was.reward, 3)} → ${number(row.is.reward, 3)}`), h("b", {}, ` Row ${row.row} `), h("span", { class: "text" }, row.is.completion ? `${row.is.prompt} ⟶ ${row.was.completion} ⟶ ${row.is.completion}`.slice(0, SUMMARY_CHARS) : "(no text kept)"));
  const shown = h("details", { class: "card row", open: open.has(row.row) }, summary,
    block("Prompt", row.is.prompt), h("div", { class: "columns" }, block(`Step ${before}, ${row.was.finish_reason}`, row.was.completion), block(`Step ${after}, ${row.is.finish_reason}`, row.is.completion)),
    h("p", { class: "note" }, Object.entries(row.is.rewards).map(([name, value]) => `${name} ${number(row.was.rewards[name], 3)} → ${number(value, 3)}`).join(", ")));
  shown.addEventListener("toggle", () => (shown.open ? open.add(row.row) : open.delete(row.row)));
  return shown;
}
