// Tabs, the token, and questions for changes. Each view loads its data when it becomes visible.

import { makeChangeovers } from "./changeovers.js";
import { doing, h, number, prose, put, seconds, words } from "./dom.js";
import { makeEvaluations } from "./evaluations.js";
import { makeMemory } from "./memory.js";
import { makeNode } from "./node.js";
import { makeRun } from "./run.js";
import { makeSamples } from "./samples.js";
import { makeLog, makeSettings } from "./settings.js";

const LEAST_MS = 2000; // between refreshes of a view, unless it has its own leastMs
const CHANGES_MS = 1000; // between questions for changes
const RETRY_MS = 2000;
const TABS = ["run", "samples", "evaluations", "settings", "log", "node", "memory", "changeovers"];
const OF_REWARDS = ["samples", "evaluations"]; // which a supervised run has not
const STALE_S = 15; // of a record that is renewed every second
const KEY = "tasuki-token";

const byId = (id) => document.getElementById(id);
const views = {};
const stale = new Set(TABS);
const loaded = new Set();
const lastRefresh = {};
let token = "";
let shown = "";
let known = {};
let [headTimer, viewTimer] = [0, 0];
let lastHead = -LEAST_MS;

class Refused extends Error {}

async function api(path, read = (answer) => answer.json()) {
  const answer = await fetch(path, { headers: token ? { Authorization: `Bearer ${token}` } : {}, cache: "no-store" });
  if (answer.status === 401 || answer.status === 403) throw new Refused((await answer.json()).error);
  if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).error ?? `the server answered ${answer.status}`);
  return read(answer);
}

function readPlace() {
  const given = new URLSearchParams(location.hash.slice(1));
  if (given.has("token")) sessionStorage.setItem(KEY, given.get("token"));
  token = sessionStorage.getItem(KEY) ?? "";
  const tab = given.get("tab") ?? location.hash.slice(1);
  // The token must not remain visible in screenshots or the history.
  history.replaceState(null, "", TABS.includes(tab) ? `#${tab}` : location.pathname);
  return TABS.includes(tab) ? tab : "";
}

function show(tab, { focus = false } = {}) {
  shown = tab;
  delete lastRefresh[tab];
  clearTimeout(viewTimer);
  viewTimer = 0;
  for (const one of TABS) {
    const isShown = one === tab;
    const button = byId(`tab-${one}`);
    button.setAttribute("aria-selected", String(isShown));
    button.tabIndex = isShown ? 0 : -1;
    byId(`view-${one}`).hidden = !isShown;
    if (isShown && focus) button.focus();
  }
  keepInView(tab);
  history.replaceState(null, "", `#${tab}`);
  void refresh();
}

/** In a narrow window the tabs scroll sideways. */
function keepInView(tab) {
  byId(`tab-${tab}`).scrollIntoView({ block: "nearest", inline: "nearest" });
}

/** The shown view, so often that a run of short steps is not slowed; a failure is told and tried again with the next change. */
async function refresh() {
  const tab = shown;
  byId("loading").hidden = loaded.has(tab) || !stale.has(tab);
  if (!stale.has(tab)) return;
  const wait = lastRefresh[tab] === undefined ? 0 : lastRefresh[tab] + (views[tab].leastMs ?? LEAST_MS) - performance.now();
  if (wait > 0) {
    viewTimer ||= setTimeout(() => {
      viewTimer = 0;
      void refresh();
    }, wait);
    return;
  }
  stale.delete(tab);
  lastRefresh[tab] = performance.now();
  try {
    await views[tab].refresh();
    loaded.add(tab);
    tell("");
  } catch (error) {
    fail(error);
  }
  if (tab === shown) byId("loading").hidden = true;
}

function fail(error) {
  if (error instanceof Refused) ask(error.message);
  else tell(error.message);
}

function tell(text) {
  put(byId("problem"), prose(text));
  byId("problem").hidden = !text;
}

function ask(why) {
  put(byId("ask-why"), prose(why));
  byId("ask").hidden = false;
  for (const tab of TABS) byId(`view-${tab}`).hidden = true;
  byId("token").focus();
}

function badge(text, kind) {
  byId("live").textContent = text;
  byId("live").className = `badge ${kind}`;
}

function refreshHead() {
  if (headTimer) return;
  headTimer = setTimeout(() => {
    [headTimer, lastHead] = [0, performance.now()];
    showHead().catch(fail);
  }, Math.max(0, lastHead + LEAST_MS - performance.now()));
}

async function showHead() {
  const asked = api("/api/node"); // a busy node takes seconds: the run does not wait for it
  asked.catch(() => {});
  const run = await api("/api/run");
  byId("where").textContent = run.output_dir ?? run.archive;
  document.title = `${(run.output_dir ?? run.archive).split("/").pop()} · tasuki`;
  put(byId("unreadable"), run.problems.map((line) => h("p", { class: "cause" }, line)));
  put(byId("progress"), progress(run));
  for (const tab of OF_REWARDS) byId(`tab-${tab}`).hidden = run.is_supervised;
  asked.then((node) => badge(node.is_live ? ["live", isStale(run) && doing(node)].filter(Boolean).join(" · ") : node.is_silent ? "no answer" : run.summary ? "run ended" : "no node runs", node.is_live ? "is-live" : "")).catch(fail);
  return run;
}

/** Whether no command tells what the run does now. */
function isStale({ progress: told, now }) {
  return !told || now - told.updated_at > STALE_S;
}

/** What the run does now, and how long it still takes. */
function progress({ progress: now, now: time }) {
  if (!now) return [];
  if (isStale({ progress: now, now: time })) return h("p", { class: "note" }, `The run's command wrote its last line ${seconds(time - now.updated_at)} ago: it has been stopped or killed. `, h("code", {}, "tasuki train --resume"), " can continue it.");
  const part = now.total ? `${number(now.done)} of ${number(now.total)}` : `for ${seconds(now.activity_s)}`;
  const shown = [`${words(now.activity)}: ${part}`, now.tokens_per_second ? `${number(now.tokens_per_second, 3)} tokens/s` : "", now.steps ? `step ${number(now.step)} of ${number(now.steps)}` : "", `${seconds(now.elapsed_s)} elapsed`, now.eta_s ? `about ${seconds(now.eta_s)} left${now.waits_for ? " without this wait" : ""}` : "", now.waits_for];
  return [now.steps ? h("progress", { max: now.steps, value: now.step, "aria-label": "Steps of the run" }) : null, h("span", {}, shown.filter(Boolean).join(" · "))];
}

function take(parts) {
  const changed = Object.keys(parts).filter((part) => parts[part] !== known[part]);
  known = parts;
  for (const tab of TABS) if (views[tab].parts.some((part) => changed.includes(part))) stale.add(tab);
  if (["run", "node", "progress"].some((part) => changed.includes(part))) refreshHead();
  void refresh();
}

async function follow() {
  for (;;) {
    try {
      take(await api("/api/changes"));
    } catch (error) {
      if (error instanceof Refused) {
        ask(error.message);
        return;
      }
      known = {};
      badge("not connected", "is-bad");
    }
    await new Promise((resolve) => setTimeout(resolve, CHANGES_MS));
  }
}

function moveTab(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const tabs = TABS.filter((tab) => !byId(`tab-${tab}`).hidden);
  if (step) show(tabs.at((tabs.indexOf(shown) + step) % tabs.length), { focus: true });
  else if (event.key === "Home") show(TABS[0], { focus: true });
  else if (event.key === "End") show(TABS.at(-1), { focus: true });
  else return;
  event.preventDefault();
}

async function begin() {
  const wanted = readPlace();
  const makers = { evaluations: makeEvaluations, settings: makeSettings, log: makeLog, node: makeNode, memory: makeMemory, run: makeRun, samples: makeSamples, changeovers: makeChangeovers };
  for (const tab of TABS) {
    views[tab] = makers[tab](byId(`view-${tab}`), api, fail);
    byId(`tab-${tab}`).addEventListener("click", () => show(tab));
  }
  byId("tabs").addEventListener("keydown", moveTab);
  addEventListener("resize", () => shown && keepInView(shown));
  byId("token-use").addEventListener("click", () => {
    sessionStorage.setItem(KEY, byId("token").value.trim());
    location.reload();
  });
  byId("token").addEventListener("keydown", (event) => event.key === "Enter" && byId("token-use").click());
  for (;;) {
    try {
      const run = await showHead();
      show((!byId(`tab-${wanted}`)?.hidden && wanted) || (run.output_dir ? "run" : "node"));
      break;
    } catch (error) {
      fail(error);
      if (error instanceof Refused) return;
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }
  await follow();
}

void begin();
