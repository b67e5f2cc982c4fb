// The ring with the current phase and stage, the services, and recent events.

import { doing, facts, h, help, number, pairs, put, seconds, words } from "./dom.js";

export const TO_ROLLOUT = ["LOAD_WEIGHTS", "RESUME_WEIGHTS", "SYNC", "OFFLOAD", "RESUME_KV"];
export const TO_TRAIN = ["DRAIN", "PAUSE_KV", "PAUSE_WEIGHTS", "LOAD_TRAINER"];
const TRAINERS = ["LOAD_WEIGHTS", "OFFLOAD", "LOAD_TRAINER"];

export function makeNode(host, api) {
  return {
    parts: ["node", "run", "changeovers"],
    async refresh() {
      const [node, run] = await Promise.all([api("/api/node"), api("/api/run")]);
      put(host, headline(node, run), ring(node), node.is_live ? services(node) : offline(node));
    },
  };
}

function headline(node, run) {
  const last = run.last;
  const shown = [];
  if (node.is_live) {
    const state = node.node;
    const stage = plain(state.changeover_id ? state.next_stage : state.stage, "STAGE_");
    shown.push(["Now", doing(node), stage && (state.changeover_id ? `${words(stage)} runs` : `last: ${words(stage)}`)]);
    shown.push(["Version trained", node.absent.trainer ? "unknown" : version(node.trainer.policy_version)], ["Version served", state.policy_version === undefined && !stage ? "unknown" : version(state.policy_version)]);
    shown.push(["Changeovers", number(Number(state.num_changeovers))]);
  } else {
    shown.push(["Node", node.is_silent ? "no answer" : "not running"], ["Version", version(last.policy_version)]);
  }
  shown.push(restarts(node.restarts));
  return facts(shown);
}

/** The fact of how often services were restarted. */
export function restarts({ counts, counts_now: now }) {
  const sum = (by) => Object.values(by).reduce((total, one) => total + one, 0);
  const services = Object.entries(counts).map(([name, count]) => `${name} ${count}`).join(", ");
  return ["Restarts", number(sum(counts)), [services, now && services && sinceLast(sum(now))].filter(Boolean).join("; ")];
}

/** Of a count, how much of it is from the node's last start. */
export function sinceLast(count) {
  return `${number(count)} since the last start`;
}

function version(value) {
  return value === undefined || value === null ? "none yet" : number(Number(value));
}

function plain(name, prefix) {
  const text = String(name ?? "").replace(prefix, "");
  return text === "UNSPECIFIED" ? "" : text;
}

function ring(node) {
  const state = node.is_live ? node.node : {};
  const running = state.changeover_id ? plain(state.next_stage, "STAGE_") : "";
  const now = { at: plain(state.stage, "STAGE_"), running, phase: plain(state.phase, "PHASE_"), seconds: node.last_seconds };
  const total = (stages) => stages.reduce((sum, stage) => (stage in node.last_seconds ? (sum ?? 0) + node.last_seconds[stage] : sum), null);
  const items = [
    phase("TRAIN", "the trainer has the memory", "train", now, 0),
    ...TO_ROLLOUT.map((stage, place) => card(stage, { row: 1, column: 2 + 4 * place, span: 4, order: 1 + place }, now)),
    phase("ROLLOUT", "the engine has the memory", "rollout", now, 6),
    ...TO_TRAIN.map((stage, place) => card(stage, { row: 2, column: 17 - 5 * place, span: 5, order: 7 + place }, now)),
  ];
  return h("div", { class: "card" }, h("h2", {}, "Ring", help("Ring")), h("ol", { class: "ring", "aria-label": "Phases and stages, in their order" }, items),
    h("p", { class: "arrows" }, h("span", {}, `→ top row, training to generating: last ${seconds(total(TO_ROLLOUT))}`), h("span", {}, `← bottom row, generating to training: last ${seconds(total(TO_TRAIN))}`)));
}

function phase(name, text, kind, now, order) {
  const isNow = now.phase === name && !now.running;
  return h("li", { class: `phase ${kind} ${isNow ? "is-now" : ""}`, style: { "--order": order }, "aria-current": isNow ? "step" : null },
    h("strong", {}, words(name)), h("span", {}, text), isNow ? h("span", {}, "now") : null);
}

function card(stage, place, now) {
  const owner = TRAINERS.includes(stage) ? "trainer" : "rollout";
  const isRunning = now.running === stage;
  const isAt = !isRunning && now.at === stage;
  const text = isRunning ? "▶ runs now" : isAt ? "● last done" : "";
  return h("li", {
    class: `stage of-${owner} ${isAt ? "is-at" : ""} ${isRunning ? "is-running" : ""}`, "aria-current": isRunning ? "step" : null,
    style: { "grid-row": place.row, "grid-column": `${place.column} / span ${place.span}`, "--order": place.order },
  }, h("span", { class: "name", title: stage }, words(stage)), h("span", { class: "figure" }, seconds(now.seconds[stage])), h("span", { class: "owner" }, owner), h("span", { class: "mark" }, text || "\u00a0"));
}

function services(node) {
  const { trainer, rollout, absent } = node;
  const health = rollout.is_poisoned ? `poisoned: ${rollout.poison_reason}` : `${number(Number(rollout.num_running ?? 0))} requests running`;
  const coordinator = [["Epoch", node.node.epoch], ["Changeover", node.node.changeover_id || "none runs"], ["Last error", node.node.last_error || "none"]];
  return h("div", { class: "columns" },
    service("Coordinator", absent.coordinator, coordinator),
    service("Trainer", absent.trainer, [["Ranks", trainer.num_ranks], ["Parameters", number(Number(trainer.num_parameters ?? 0))], ["Version", version(trainer.policy_version)], ["Address", node.node.trainer_target]]),
    service("Rollout", absent.rollout, [["Engines", `${rollout.dp_size} × TP ${rollout.tp_size}`], ["Health", health], ["Address", node.node.rollout_target]]));
}

function service(name, absent, list) {
  return h("div", { class: "card" }, h("h2", {}, name), absent ? h("p", { class: "cause" }, absent) : pairs(list));
}

function offline(node) {
  return h("div", { class: "card" }, h("h2", {}, "Node"), h("p", { class: "note" }, `${sentence(node.note)} The ring shows the last seconds of each stage, from the journal.`));
}

function sentence(text) {
  return text ? `${text[0].toUpperCase()}${text.slice(1)}.` : "";
}

