// What the panel shows of an event and of a run.
import { code, duration, el, firstLine, get, json, link, pill, post, time, tone, visible } from "./parts.js";

const MAX_CHILDREN = 50; // listed; the others are counted

const part = (title, ...children) => el("section", {}, el("h3", {}, title), ...children);
const block = (text, name) => el("pre", { class: name, tabindex: "0" }, code(text));
const id = (text) => text && code(visible(text));
const moment = (iso) => iso && time(iso, 3);
const facts = (pairs) => el("dl", {}, ...pairs.filter(([, value]) => value).map(([name, value]) =>
  el("div", {}, el("dt", {}, name), el("dd", {}, value))));

export async function eventPanel(given) {
  const path = `/v1/events/${encodeURIComponent(given)}`;
  const [event, story] = await Promise.all([get(path), get(`${path}/explain`)]);
  const lines = story.decisions.map((line) => el("li", { class: tone(line.decision) },
    el("div", {}, el("span", { class: "stage" }, line.stage), pill(line.decision), el("b", {}, visible([line.workflow, line.trigger].filter(Boolean).join("/"))),
      line.stage === "run" && link("run", line.run_id, "show run"), moment(line.at)),
    line.reason && el("p", {}, visible(line.reason))));
  return [event.type, [
    el("p", { class: "summary" }, visible(story.summary.replace(/^no_trigger: /, ""))),
    part("Decisions", el("ol", { class: "story" }, ...lines)),
    part("Payload", block(json(event.payload, 2))),
    Object.keys(event.metadata).length > 0 && part("Metadata", block(json(event.metadata, 2))),
    part("Details", facts([
      ["Source", visible(event.source)], ["External id", id(event.external_id)], ["Event id", id(event.id)],
      ["Correlation id", event.correlation_id !== event.id && id(event.correlation_id)],
      ["Occurred", moment(event.occurred_at)], ["Received", moment(event.received_at)],
      ["Time to live", event.ttl_ms && `${event.ttl_ms} ms`],
      ["Published by run", story.caused_by_run_id && link("run", story.caused_by_run_id, id(story.caused_by_run_id))],
    ])),
  ], event.id];
}

// What an unfinished run waits for, in the words of `tidegate explain`; null where the token may not ask.
async function waitOf(run) {
  if (run.finished_at) return null;
  const story = await get(`/v1/explain/${encodeURIComponent(run.id)}`).catch(() => null);
  return story?.waits_for ? el("p", { class: "waits" }, `Waits for ${visible(story.waits_for)}`, story.until && el("span", {}, ", until ", moment(story.until))) : null;
}

const isApproval = (step) => step.kind === "wait" && step.status === "pending" && step.retry_metadata.reason === "approval";

// What was decided, in the words of `tidegate runs show`; "" for another step, or while nobody has.
function decision(step) {
  if (step.retry_metadata.reason !== "approval") return "";
  if (step.is_timed_out) return "nobody decided";
  const given = step.result?.payload;
  if (!given) return "";
  return visible(`${given.approved ? "approved" : "rejected"} by ${given.by} (${given.via})${given.comment ? `: ${firstLine(given.comment)}` : ""}`);
}

const refusals = new Map(); // by approval, why the last click changed nothing: what is drawn anew says it, too

// Approve or reject, as `tidegate approvals` does; the token needs the scope `operate`.
function decide(step) {
  const comment = el("input", { "aria-label": "Comment", placeholder: "Comment", maxlength: "1000" });
  const said = el("span", { role: "status" }, refusals.get(step.id));
  const button = (verb, title) => {
    const made = el("button", { type: "button" }, title);
    made.addEventListener("click", async () => {
      const refused = await post(`/admin/approvals/${step.id}/${verb}`, comment.value ? { comment: comment.value } : {}).then(() => "", (error) => visible(error.message));
      refusals.set(step.id, refused);
      said.textContent = refused;
      dispatchEvent(new Event("hashchange")); // draw the panel
    });
    return made;
  };
  return el("p", { class: "decide" }, comment, button("approve", "Approve"), button("reject", "Reject"), said);
}

function childList(children, total) {
  const lines = children.slice(0, MAX_CHILDREN).map((child) => el("li", { class: tone(child.status) },
    el("div", {}, pill(child.status === "started" && !child.is_launched ? "not launched" : child.status), el("b", {}, visible(child.workflow)), el("span", { class: "stage" }, visible(child.step)),
      child.run_id && link("run", child.run_id, "show run")),
    child.error && el("p", {}, firstLine(child.error))));
  const counts = new Map();
  for (const { status } of children) counts.set(status, (counts.get(status) ?? 0) + 1);
  const counted = [...counts].map(([status, number]) => `${number} ${status}`).join(", ");
  const of = children.length < total ? `${total}. Of the first ${children.length}` : total;
  const more = children.length > MAX_CHILDREN && el("p", { class: "muted" }, `The first ${MAX_CHILDREN} of ${of}: ${counted}.`);
  return part("Children", el("ol", { class: "story" }, ...lines), more);
}

// A start that has not launched its run: why, in the words of `tidegate explain`, where the token may ask.
async function startPanel(start) {
  const story = await get(`/v1/explain/${encodeURIComponent(start.event_id)}`).catch(() => null);
  const state = start.status === "not_launched" ? "This run was not launched" : "This run is not launched yet";
  return [story?.outcomes[0]?.workflow ?? "Run", [
    el("p", { class: "summary" }, pill("not launched")),
    el("p", { class: "waits" }, [state, story?.summary ?? start.error].filter(Boolean).map(visible).join(": "), story?.until && el("span", {}, ", until ", moment(story.until))),
    part("Details", facts([["Event", link("event", start.event_id, id(start.event_id))], ["Run id", id(start.run_id)]])),
  ], start.run_id];
}

export async function runPanel(given) {
  const answer = await get(`/v1/runs/${encodeURIComponent(given)}`);
  if (!answer.run) return startPanel(answer);
  const { run, parent_run_id: parent, children = [] } = answer;
  const steps = answer.steps.filter((step) => !step.name.startsWith("tidegate.")); // those are the engine's own
  const wait = await waitOf(run);
  const lines = steps.map((step) => el("li", { class: tone(step.status) },
    el("div", {}, pill(step.is_timed_out ? "timed out" : step.status), el("b", {}, visible(step.name)), step.retry_attempts && `retries: ${step.retry_attempts}`),
    step.next_attempt_at && el("p", {}, step.kind === "step" ? "next attempt " : "until ", moment(step.next_attempt_at)),
    isApproval(step) && decide(step),
    step.error ? block(visible(step.error), "error") : decision(step) ? el("p", {}, decision(step)) : step.result !== null && block(json(step.result, 2))));
  return [run.workflow, [
    el("p", { class: "summary" }, pill(run.status), " ", duration(run), run.attempts > 1 && `, attempt ${run.attempts}`),
    wait,
    run.error && part("Error", block(visible(run.error), "error")),
    part("Steps", steps.length ? el("ol", { class: "story" }, ...lines) : el("p", { class: "muted" }, "This run has no steps.")),
    children.length > 0 && childList(children, answer.children_total),
    part("Parameters", block(json(run.parameters, 2))),
    run.output !== null && part("Output", block(json(run.output, 2))),
    part("Details", facts([
      ["Event", run.event_id && link("event", run.event_id, id(run.event_id))], ["Run id", id(run.id)],
      ["Parent run", parent && link("run", parent, id(parent))],
      ["Created", moment(run.created_at)], ["Started", moment(run.started_at)], ["Finished", moment(run.finished_at)],
    ])),
  ], run.id];
}
