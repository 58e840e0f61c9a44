// Draws /openapi.json: operations grouped by path, then the named schemas they refer to.
const $ = (id) => document.getElementById(id);
const TONES = { get: "busy", post: "good", put: "wait", patch: "wait", delete: "bad" };

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) if (value) node.setAttribute(name, value);
  node.append(...children.filter(Boolean));
  return node;
}

const anchor = (text) => text.replace(/[^\w]+/g, "-");
const joined = (nodes, separator) => el("span", {}, ...nodes.flatMap((node, index) => (index ? [separator, node] : [node])));

// A schema's type in a few words; a named schema is a link.
function type(schema) {
  if (schema.$ref) {
    const name = schema.$ref.split("/").at(-1);
    return el("a", { href: `#schema-${anchor(name)}` }, name);
  }
  const options = schema.anyOf ?? schema.oneOf;
  if (options) return joined(options.map(type), " or ");
  if (schema.enum) return joined(schema.enum.map((value) => el("code", {}, JSON.stringify(value))), " · ");
  if (schema.type === "array") return el("span", {}, "array of ", schema.items ? type(schema.items) : "anything");
  const values = schema.additionalProperties;
  if (schema.type === "object" && values?.type) return el("span", {}, "object of ", type(values));
  return el("span", {}, [schema.type ?? "anything", schema.format && `(${schema.format})`].filter(Boolean).join(" "));
}

function remarks(schema, isRequired) {
  const bounds = [["maxLength", "at most $ characters"], ["minimum", "at least $"], ["maximum", "at most $"]];
  const said = bounds.filter(([key]) => key in schema).map(([key, text]) => text.replace("$", schema[key]));
  if (schema.default !== undefined && schema.default !== null) said.push(`default ${JSON.stringify(schema.default)}`);
  return [isRequired && "required", schema.description, ...said].filter(Boolean).join("; ");
}

function table(heading, rows) {
  const body = rows.map((cells) => el("tr", {}, ...cells.map((cell) => el("td", {}, cell))));
  return el("div", {}, el("h3", {}, heading), el("table", {}, el("tbody", {}, ...body)));
}

const fields = (heading, schema) =>
  table(heading, Object.entries(schema.properties).map(([name, field]) =>
    [el("code", {}, name), type(field), remarks(field, schema.required?.includes(name))]));

// The body's media types; an inline object schema is shown field by field.
function requestBody(content) {
  const forms = Object.entries(content).map(([media, { schema }]) => [el("code", {}, media), type(schema)]);
  const shapes = Object.values(content).flatMap(({ schema }) => schema.oneOf ?? [schema]).filter((shape) => shape.properties);
  return [table("Request body", forms), ...shapes.map((shape) => fields("Fields", shape))];
}

function operation(method, given) {
  const answers = Object.entries(given.responses).map(([status, answer]) => {
    const schema = Object.values(answer.content ?? {})[0]?.schema;
    return [el("code", {}, status), schema && type(schema), answer.description];
  });
  const parameters = (given.parameters ?? []).map((parameter) =>
    [el("code", {}, parameter.name), type(parameter.schema), [`in ${parameter.in}`, remarks(parameter, parameter.required)].filter(Boolean).join("; ")]);
  const scopes = (given.security ?? []).flatMap((entry) => Object.values(entry).flat());
  return el("div", { class: "operation" },
    el("p", {}, el("span", { class: `pill ${TONES[method] ?? "muted"}` }, method.toUpperCase()), el("b", {}, given.summary)),
    el("p", {}, scopes.length ? `Requires a token with the scope ${scopes.join(", ")}.` : "No token required."),
    parameters.length && table("Parameters", parameters),
    ...(given.requestBody ? requestBody(given.requestBody.content) : []),
    table("Responses", answers));
}

function entry(id, title, ...children) {
  $("contents").append(el("a", { href: `#${id}` }, title));
  $("paths").append(el("article", { id }, el("h2", {}, title), ...children));
}

try {
  const response = await fetch("/openapi.json");
  if (!response.ok) throw new Error(`HTTP ${response.status}`);
  const { info, paths, components } = await response.json();
  $("title").textContent = `${info.title} API`;
  $("about").textContent = `version ${info.version}`;
  for (const [path, methods] of Object.entries(paths)) {
    entry(`path-${anchor(path)}`, path, ...Object.entries(methods).map(([method, given]) => operation(method, given)));
  }
  $("contents").append(el("h3", {}, "Schemas"));
  const named = Object.entries(components?.schemas ?? {});
  const all = named.flatMap(([name, schema]) => [[name, schema], ...Object.entries(schema.$defs ?? {})]);
  for (const [name, schema] of all) {
    const about = schema.description && el("p", {}, schema.description);
    entry(`schema-${anchor(name)}`, name, about, schema.properties ? fields("Fields", schema) : el("p", {}, type(schema)));
  }
  if (location.hash) $(location.hash.slice(1))?.scrollIntoView();
} catch (error) {
  $("banner").textContent = `The API description could not be loaded: ${error.message}`;
  $("banner").hidden = false;
}
