// The console: polls the API every two seconds and renders the answers. Event data is untrusted: it reaches the page
// as text only, and every link is a fragment built here.
import { eventPanel, runPanel } from "./panels.js";
import { $, Refused, code, duration, el, firstLine, get, link, pill, preview, time, token, tone, visible } from "./parts.js";

const POLL_MS = 2000;
const SIZES = [10, 50, 200, 500]; // rows shown, increased by each click on "Show …"; the API returns at most 500
const COMMAND = `tidegate publish order.created --source shop.api --data '{"id": 7, "amount": 120}'`;

// The two lists

const cell = (name, ...children) => el("td", { class: name }, ...children);
const runs = prepare("runs", (run) => [
  cell("c-time", link("run", run.id, time(run.created_at))),
  cell("c-name", visible(run.workflow)),
  cell("c-status", pill(run.status)),
  cell("c-text", code(preview(run.parameters))),
  run.error ? cell("c-text error", firstLine(run.error)) : cell("c-text", code(preview(run.output))),
  cell("c-end", duration(run)),
]);
const events = prepare("events", (event) => [
  cell("c-time", link("event", event.id, time(event.received_at))),
  cell("c-name", visible(event.type)),
  cell("c-source", visible(event.source)),
  cell("c-ext", visible(event.external_id ?? "")),
  cell("c-text", code(preview(event.payload))),
]);

function prepare(name, cells) {
  const section = $(`#${name}`);
  const inputs = [...section.querySelectorAll("select, input")];
  const list = { name, cells, section, inputs, body: $("tbody", section), rows: new Map(), size: SIZES[0], items: null };
  for (const input of inputs) {
    const value = new URLSearchParams(location.search).get(input.name) ?? "";
    if (value && input.name === "workflow") input.append(el("option", { value }, value));
    input.value = value;
    input.addEventListener("input", () => schedule(input.localName === "input" ? 300 : 0));
  }
  const on = (button, act) => $(button, section).addEventListener("click", () => (act(), schedule(0)));
  on(".clear", () => inputs.forEach((input) => (input.value = "")));
  on(".more", () => (list.size = SIZES.find((size) => size > list.size)));
  followRows(list.section);
  return list;
}

// A click anywhere in a row follows its link.
function followRows(section) {
  section.addEventListener("click", (click) => {
    const target = click.target.closest("tbody tr")?.querySelector("a");
    if (target && !click.target.closest("a") && getSelection().isCollapsed) target.focus(), target.click();
  });
}

const filters = (list) => list.inputs.map((input) => [input.name, input.value.trim()]).filter(([, value]) => value);
const isFiltered = (...lists) => lists.some((list) => filters(list).length > 0);
const limit = (list) => Math.max(50, list.size);
const load = (list) => get(`/v1/${list.name}?${new URLSearchParams([...filters(list), ["limit", limit(list)]])}`);

// Unchanged rows are not redrawn, so that focus and selection survive.
function drawList(list, page) {
  list.items = page[list.name];
  list.hasMore = page.next_cursor !== null;
  const [shown, before] = [list.items.slice(0, list.size), list.rows];
  list.rows = new Map();
  shown.forEach((item, index) => {
    const { row, drawn } = before.get(item.id) ?? { row: el("tr", {}) };
    const current = JSON.stringify(item) + new Date().toDateString();
    if (drawn !== current) {
      const isFocused = row.contains(document.activeElement);
      row.replaceChildren(...list.cells(item));
      if (isFocused) $("a", row).focus();
    }
    list.rows.set(item.id, { row, drawn: current });
    if (list.body.children[index] !== row) list.body.insertBefore(row, list.body.children[index] ?? null);
  });
  while (list.body.children.length > shown.length) list.body.lastChild.remove();

  const next = SIZES.find((size) => size > list.size);
  const [table, none, clear, more] = ["table", ".none", ".clear", ".more"].map((selector) => $(selector, list.section));
  table.hidden = !shown.length;
  none.hidden = shown.length > 0;
  none.textContent = `No ${list.name} ${isFiltered(list) ? "match the filter." : "yet."}`;
  clear.hidden = !isFiltered(list);
  more.hidden = !next || (list.items.length <= list.size && !list.hasMore);
  more.textContent = list.hasMore || list.items.length > next ? `Show ${next}` : `Show all ${list.items.length}`;
}

// Totals from health; with a filter (or where the token may not read all of health), counts of the page that is shown:
// 50+ means that there are more. Counts by status are left out for an incomplete page, where they would mislead.
function drawCounts(health) {
  if (!runs.items || !events.items) return;
  const count = (number, word, name) => el("span", { class: name }, el("b", {}, String(number)), ` ${word}`);
  const isOfAll = !isFiltered(runs, events) && Boolean(health?.totals && health.queues?.runs);
  const parts = [events, runs].map(({ name, items, hasMore }, index) => {
    const number = isOfAll ? [health.totals.received, health.totals.launched][index] : items.length;
    return count(number + (hasMore && !isOfAll ? "+" : ""), number === 1 ? name.slice(0, -1) : name);
  });
  const inPage = (status) => (runs.hasMore ? 0 : runs.items.filter((run) => run.status === status).length);
  const waiting = isOfAll ? health.queues.runs : null;
  const statuses = waiting
    ? { pending: waiting.ready + waiting.delayed, running: waiting.active }
    : Object.fromEntries(["pending", "running", "failed"].map((status) => [status, inPage(status)]));
  for (const [status, number] of Object.entries(statuses)) if (number) parts.push(count(number, status, tone(status)));
  if (isFiltered(runs, events)) parts.push(el("i", {}, "as filtered"));
  $("#counts").replaceChildren(...parts);
  $("#counts").title = isOfAll
    ? "Events received and runs launched in total; runs that are waiting and running now"
    : `In the newest ${limit(runs)} runs and ${limit(events)} events`;
  const isEmpty = !isFiltered(runs, events) && !runs.items.length && !events.items.length;
  runs.section.hidden = events.section.hidden = isEmpty;
  $("#welcome").hidden = !isEmpty;
}

// Problems: what, since when, what to do, and the runbook; hidden while there are none

function drawCauses({ causes, warnings = [], dead_letters: letters = { total: 0 } }) { // a token bound to sources gets fewer fields
  const section = $("#causes");
  section.hidden = !causes.length && !warnings.length && !letters.total;
  const page = (where) => (/^https?:/.test(where) ? el("a", { href: where, rel: "noreferrer" }, "runbook") : code(visible(where)));
  const lines = causes.map((cause) => el("li", {},
    pill(cause.severity), el("b", {}, visible(`${cause.code.replaceAll("_", " ")}${cause.code.startsWith("trigger_") ? "" : `: ${cause.subject}`}`)),
    el("span", {}, visible(cause.message)), cause.since && el("span", {}, "since ", time(cause.since)),
    el("span", { class: "do" }, visible(`do: ${cause.do}`)), page(cause.runbook)));
  lines.push(...warnings.map((warning) => el("li", {}, el("b", {}, visible(warning.code.replaceAll("_", " "))), el("span", {}, visible(warning.message)))));
  const fresh = el("ul", {}, ...lines);
  if (!$("ul", section).isEqualNode(fresh) && !section.contains(document.activeElement)) $("ul", section).replaceWith(fresh);
  $("#letters").textContent = letters.total
    ? `dead letters: ${letters.total} (${letters.last_24h} in the last 24 h); list them with tidegate dlq list`
    : "";
}

// Held work, and paused sources and triggers; hidden while there is none

function eta(seconds) {
  if (seconds === null) return "when resumed";
  if (seconds < 120) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 120 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

// The time is unknown: it depends on an operator, the end of a run, or the probe of a breaker.
const OPEN_ENDED = { concurrency: "next slot", breaker_open: "after probe" };

const MAX_GATES = 10; // pauses and breakers listed by name; the rest is counted

function drawHeld(retries, health) {
  const until = (gate, otherwise) => (gate.until ? `until ${time(gate.until).textContent}` : otherwise);
  const line = (gate, how) => `${gate.source ?? `${gate.workflow}/${gate.name}`}: ${how}${gate.reason ? ` (${gate.reason})` : ""}`;
  const gates = [
    ...[...health.paused_sources, ...health.paused_triggers].map((gate) => line(gate, `paused ${until(gate, "until resumed")}`)),
    ...[...health.source_breakers, ...health.trigger_breakers].map((gate) =>
      line(gate, gate.state === "half_open" ? "breaker half open" : `breaker open ${until(gate, "")}`)),
  ];
  const named = gates.slice(0, MAX_GATES);
  const others = ["paused_sources", "paused_triggers", "source_breakers", "trigger_breakers"]
    .reduce((sum, name) => sum + health[`${name}_total`], 0) - named.length;
  if (others > 0) named.push(`and ${others} more`);
  const waiting = health.retries.events.total + health.retries.deliveries.total;
  const nextAttempt = (retry) => retry.eta_seconds !== null ? time(retry.next_attempt_at) : OPEN_ENDED[retry.reason] ?? "when resumed";
  const rows = retries.map((retry) => el("tr", {},
    cell("c-time", link("event", retry.event_id, nextAttempt(retry))),
    cell("c-name", visible(retry.workflow ? `${retry.type} → ${retry.workflow}/${retry.trigger}` : retry.type)),
    cell("c-source", visible(retry.source)),
    cell("c-status", pill(visible(retry.reason ?? "unknown"))),
    cell("c-text", visible(retry.last_error ?? "")),
    cell("c-end", retry.eta_seconds === null ? "" : eta(retry.eta_seconds))));
  const section = $("#held");
  section.hidden = !rows.length && !named.length;
  $("#held-title").textContent = waiting > rows.length ? `Held: ${waiting}, the next ${rows.length}` : "Held";
  $("#paused").textContent = visible(named.join(" · "));
  $("table", section).hidden = !rows.length;
  const fresh = el("tbody", {}, ...rows);
  if (!$("tbody", section).isEqualNode(fresh) && !section.contains(document.activeElement)) $("tbody", section).replaceWith(fresh);
}

function suggest(into, values) {
  const known = new Set([...into.children].map((option) => option.value));
  const fresh = [...new Set(values)].filter((value) => !known.has(value)).slice(0, 200 - known.size);
  into.append(...fresh.map((value) => el("option", { value }, value)));
}

// The panel shows what the URL's fragment names: #event=<id> or #run=<id>

const panel = $("#panel");
let opener = null; // the element that had the focus before the panel opened

async function drawPanel() {
  const asked = location.hash;
  const [, kind, given] = /^#(event|run)=(.+)$/.exec(asked) ?? [];
  const isShown = panel.dataset.shows === asked;
  let current = asked; // the fragment of its row: with Tidegate's id, where the URL may have the producer's
  if (kind) {
    const draw = async () => (kind === "run" ? runPanel : eventPanel)(decodeURIComponent(given));
    const sorry = (error) => [given, [el("p", { class: "error" }, visible(error.message))]];
    const [title, content, id] = await draw().catch((error) => (isShown && !(error instanceof Refused) ? [] : sorry(error)));
    if (asked !== location.hash || !content) return; // another panel was opened meanwhile, or the last answer stays on show
    const fresh = el("div", { id: "panel-body" }, ...content);
    if (!$("#panel-body").isEqualNode(fresh)) $("#panel-body").replaceWith(fresh);
    $("#panel-title").textContent = visible(title);
    $("#panel-kind").textContent = kind;
    current = `#${kind}=${id}`;
  }
  if (panel.hidden) opener = document.activeElement;
  panel.dataset.shows = kind ? asked : "";
  panel.hidden = !kind;
  $("#main").inert = !panel.hidden && matchMedia("(max-width: 700px)").matches;
  for (const a of document.querySelectorAll("tbody a")) a.closest("tr").setAttribute("aria-current", a.hash === current);
  if (kind && !isShown) panel.focus(), panel.scrollTo(0, 0);
}

function close() {
  history.pushState(null, "", location.pathname + location.search);
  drawPanel();
  opener?.focus();
}

// Polling

let [timer, generation, lostAt] = [0, 0, null]; // answers to requests of an older generation are discarded

function schedule(ms) {
  generation++;
  clearTimeout(timer);
  timer = setTimeout(tick, ms);
}

async function tick() {
  const mine = generation;
  const query = `?${new URLSearchParams([...filters(runs), ...filters(events)])}`.replace(/^\?$/, "");
  if (query !== location.search) history.replaceState(null, "", location.pathname + query + location.hash);
  const asked = [get("/readyz"), get("/admin/event-health"), load(runs), load(events), get("/v1/workflows?limit=200"), ...["/admin/retries?limit=10", "/admin/retries?kind=deliveries&limit=10"].map((path) => get(path))];
  const [ready, health, runPage, eventPage, workflows, ...waits] = await Promise.allSettled(asked);
  if (mine !== generation) return;
  try {
    drawHealth(ready.reason, health.value, runPage.reason ?? eventPage.reason);
    if (health.value) drawCauses(health.value);
    if (runPage.value) drawList(runs, runPage.value);
    if (eventPage.value) drawList(events, eventPage.value);
    const [held, deliveries] = waits.map((answer) => answer.value);
    if (held && deliveries && health.value?.retries) drawHeld([...held.retries, ...deliveries.retries], health.value);
    drawCounts(health.value);
    drawPanel();
    suggest($("[name=workflow]"), workflows.value?.workflows.map((workflow) => workflow.slug));
    for (const field of ["type", "source"]) suggest($(`#${field}s`), events.items?.map((event) => event[field]));
  } finally {
    if (!document.hidden) schedule(POLL_MS);
  }
}

// Without a valid token only the sign-in form is shown.
function drawLogin(isLocked, why) {
  $("#main").hidden = isLocked;
  $("#login-why").textContent = isLocked && token() ? visible(why) : "";
  if ($("#login").hidden === !isLocked) return;
  $("#login").hidden = !isLocked;
  if (isLocked) $("#token").focus();
}

function drawHealth(unready, health, failure) {
  drawLogin(Boolean(failure?.isLocked), failure?.message);
  const isLost = Boolean(failure) && !(failure instanceof Refused);
  lostAt = isLost ? (lostAt ?? new Date().toISOString()) : null;
  const lost = () => `No answer from ${location.origin} since ${time(lostAt).textContent}; retrying every two seconds.`;
  const text = isLost ? `${lost()} The page shows its last answer.` : failure?.isLocked ? "" : visible(failure?.message ?? "");
  if ($("#banner").textContent !== text) $("#banner").textContent = text; // set only when it changes, so that a screen reader announces it once
  $("#banner").hidden = !text;
  document.body.classList.toggle("stale", Boolean(text));
  $("#dot").className = `dot ${unready ? "bad" : health ? tone(health.status) : "good"}`;
  $("#health").textContent = !unready ? (health?.status ?? "ready") : unready instanceof Refused ? visible(unready.message) : "no answer";
}

const isDefault = ["http://127.0.0.1:8700", "http://localhost:8700"].includes(location.origin);
$("#command").textContent = (isDefault ? "" : `TIDEGATE_URL=${location.origin} `) + COMMAND;
$("#zone").textContent = `Times are local (${Intl.DateTimeFormat().resolvedOptions().timeZone}); hover for UTC.`;
$("#close").addEventListener("click", close);
followRows($("#held"));
addEventListener("keydown", (key) => key.key === "Escape" && !panel.hidden && close());
addEventListener("hashchange", drawPanel);
$("#login").addEventListener("submit", (submit) => {
  submit.preventDefault();
  sessionStorage.setItem("tidegate-token", $("#token").value.trim());
  $("#token").value = "";
  schedule(0);
});
document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : schedule(0)));
schedule(0);
