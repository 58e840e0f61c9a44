// What the pages are made of: calling the API, and values as text. Event data is untrusted: it reaches the page as text
// only, and every link is a fragment built here.
const TIMEOUT_MS = 10_000;
const TONES = {
  good: ["succeeded", "launched", "ok"],
  bad: ["failed", "exhausted", "dead_letter", "critical"],
  busy: ["running", "matched", "started"],
  wait: ["pending", "waiting", "throttled", "paused", "held", "not launched", "scheduled", "rate_limit", "breaker_open", "rescheduled", "degraded"],
};

export const $ = (selector, inside = document) => inside.querySelector(selector);

export function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value) node.setAttribute(name, value);
  node.append(...children.filter(Boolean));
  return node;
}

// Calling the API

export class Refused extends Error {} // the server answered with an error

// Numbers that a double cannot represent keep their digits as sent, where the browser supports it.
const exactly = (_, value, context) =>
  typeof value === "number" && JSON.rawJSON && String(value) !== context.source ? JSON.rawJSON(context.source) : value;

// The token is kept for the lifetime of the tab; not in a cookie, so that pages of other sites cannot use it.
export const token = () => sessionStorage.getItem("tidegate-token");

export const get = (path) => ask(path, {});
export const post = (path, body) =>
  ask(path, { method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json" } });

async function ask(path, options) {
  const headers = { ...options.headers, ...(token() && { authorization: `Bearer ${token()}` }) };
  const response = await fetch(path, { ...options, signal: AbortSignal.timeout(TIMEOUT_MS), cache: "no-store", headers });
  const isJson = /json/.test(response.headers.get("content-type"));
  const body = isJson ? JSON.parse(await response.text(), exactly) : {};
  if (response.ok && isJson) return body;
  const failing = Object.values(body.checks ?? {}).filter((state) => state !== "ok").join("; ");
  const fields = (body.errors ?? []).map((error) => `${error.field}: ${error.message}`);
  const refused = new Refused([body.detail ?? (failing || `HTTP ${response.status}`), ...fields].join("; "));
  throw Object.assign(refused, { isLocked: response.status === 401 });
}

// Values as text

// Control and bidirectional characters are escaped, so that text cannot disguise itself.
export const visible = (text) =>
  text.replace(/[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g, (character) =>
    "\\u" + character.charCodeAt(0).toString(16).padStart(4, "0"));
export const json = (value, indent) => visible(JSON.stringify(value, null, indent));
const oneLine = (text) => text.replace(/(?<=[[{])\n\s*|\n\s*(?=[\]}])/g, "").replace(/\n\s*/g, " ");
export const preview = (value) => (value === null ? "" : oneLine(json(value, 1)).slice(0, 240));
export const firstLine = (text) => visible(text.trimStart().split("\n")[0]).slice(0, 240);
export const tone = (word) => Object.keys(TONES).find((name) => TONES[name].includes(word)) ?? "muted";
export const pill = (word) => el("span", { class: `pill ${tone(word)}` }, word.replaceAll("_", " "));
export const code = (text) => el("code", {}, text);
export const link = (kind, id, child) => el("a", { href: `#${kind}=${encodeURIComponent(id)}` }, child);

export function time(iso, digits) {
  const at = new Date(iso);
  const day = at.toDateString() === new Date().toDateString() ? {} : { day: "numeric", month: "short" };
  const clock = { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23", fractionalSecondDigits: digits };
  return el("time", { datetime: iso, title: iso }, at.toLocaleString("en-GB", { ...day, ...clock }));
}

export function duration(run) {
  if (!run.started_at) return "";
  if (!run.finished_at) return el("span", {}, "since ", time(run.started_at));
  const ms = new Date(run.finished_at) - new Date(run.started_at);
  if (ms < 1000) return `${ms} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(1)} s`;
  const [hours, minutes] = [Math.floor(ms / 3_600_000), Math.floor(ms / 60_000) % 60];
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${Math.floor(ms / 1000) % 60} s`;
}
