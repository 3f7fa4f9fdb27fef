"""/docs: one page without outside assets that shows /openapi.json."""

from __future__ import annotations

import base64
import hashlib

from starlette.responses import Response

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 60rem; padding: 1rem }
h2 { border-bottom: 1px solid #8886; margin-top: 2.5rem }
details { border: 1px solid #8886; border-radius: 4px; margin: .5rem 0; padding: .3rem .7rem }
summary { cursor: pointer }
code, pre { font: 13px/1.4 ui-monospace, monospace }
.method { display: inline-block; font-weight: bold; min-width: 3.5rem; text-transform: uppercase }
table { border-collapse: collapse; width: 100% }
td { border-top: 1px solid #8884; padding: .25rem .6rem .25rem 0; vertical-align: top }
.note { color: #777 }
@media (prefers-color-scheme: dark) { body { background: #181a1b; color: #ddd } a { color: #8bf } }
"""

# Texts of the document become text nodes only, so nothing in it can be markup.
_SCRIPT = """
"use strict";
const make = (tag, name, ...parts) => {
  const element = document.createElement(tag);
  if (name) element.className = name;
  element.append(...parts.filter((part) => part !== "" && part != null));
  return element;
};
const code = (text) => make("code", "", text);
const refName = (ref) => ref.split("/").pop();
let root = null;

const resolve = (value) => {
  if (!value || !value.$ref) return value;
  return value.$ref.slice(2).split("/").reduce((part, key) => part[key], root);
};

const link = (name) => {
  const anchor = make("a", "", name);
  anchor.href = "#schema-" + name;
  return anchor;
};

// The type of a schema as a row of nodes.
const typeOf = (schema) => {
  if (schema.$ref) return [link(refName(schema.$ref))];
  const options = schema.anyOf || schema.oneOf || schema.allOf;
  if (options) {
    return options.flatMap((option, index) => [...(index ? [" | "] : []), ...typeOf(option)]);
  }
  if (schema.const !== undefined) return [code(JSON.stringify(schema.const))];
  if (schema.enum) return [code(schema.enum.map((value) => JSON.stringify(value)).join(" | "))];
  if (schema.type === "array") return ["list of (", ...typeOf(schema.items || {}), ")"];
  if (schema.type === "object" && typeof schema.additionalProperties === "object") {
    return ["object of (", ...typeOf(schema.additionalProperties), ")"];
  }
  return [schema.type || "anything", bounds(schema)];
};

const BOUNDS = {
  minimum: "≥", maximum: "≤", exclusiveMinimum: ">", exclusiveMaximum: "<",
  minLength: "length ≥", maxLength: "length ≤", minItems: "entries ≥", maxItems: "entries ≤",
};

const bounds = (schema) => {
  const told = Object.keys(BOUNDS)
    .filter((name) => schema[name] !== undefined)
    .map((name) => BOUNDS[name] + " " + schema[name]);
  return told.length ? " (" + told.join(", ") + ")" : "";
};

const properties = (schema) => {
  const table = make("table", "");
  const required = new Set(schema.required || []);
  for (const [name, field] of Object.entries(schema.properties || {})) {
    const notes = [];
    if (required.has(name)) notes.push("required");
    if (field.default !== undefined && field.default !== null) {
      notes.push("default " + JSON.stringify(field.default));
    }
    table.append(make("tr", "",
      make("td", "", code(name)),
      make("td", "", ...typeOf(field)),
      make("td", "note", [...notes, field.description].filter(Boolean).join("; "))));
  }
  return table;
};

const contents = (content) => Object.entries(content || {}).flatMap(([type, media]) => [
  make("div", "", code(type), ": ", ...typeOf(media.schema),
    ...(media["x-event-schema"] ? [" of ", ...typeOf(media["x-event-schema"])] : []),
    media.schema.description ? make("div", "note", media.schema.description) : ""),
]);

const operation = (path, method, described) => {
  const details = make("details", "", make("summary", "",
    make("span", "method", method), code(path), " ", make("span", "note", described.summary)));
  for (const parameter of described.parameters || []) {
    details.append(make("p", "", code(parameter.name), " (" + parameter.in + ", ",
      ...typeOf(parameter.schema), "): ", parameter.description));
  }
  if (described.requestBody) {
    details.append(make("h4", "", "Body"), ...contents(described.requestBody.content));
  }
  details.append(make("h4", "", "Answers"));
  const table = make("table", "");
  for (const [status, reference] of Object.entries(described.responses)) {
    const response = resolve(reference);
    table.append(make("tr", "",
      make("td", "", code(status)),
      make("td", "", response.description, ...contents(response.content)),
      make("td", "note", Object.keys(response.headers || {}).join(", "))));
  }
  details.append(table);
  return details;
};

const show = (document_) => {
  root = document_;
  const page = document.getElementById("page");
  page.replaceChildren(
    make("h1", "", document_.info.title, " ", make("span", "note", document_.info.version)),
    make("p", "", document_.info.description));
  for (const tag of document_.tags) {
    page.append(make("h2", "", tag.name));
    for (const [path, methods] of Object.entries(document_.paths)) {
      for (const [method, described] of Object.entries(methods)) {
        if (described.tags.includes(tag.name)) page.append(operation(path, method, described));
      }
    }
  }
  page.append(make("h2", "", "Objects"));
  const schemas = document_.components.schemas;
  for (const name of Object.keys(schemas).sort()) {
    const details = make("details", "", make("summary", "", code(name)),
      make("p", "note", schemas[name].description || ""), properties(schemas[name]));
    details.id = "schema-" + name;
    page.append(details);
  }
  openTarget();
};

const openTarget = () => {
  const target = document.getElementById(location.hash.slice(1));
  if (target && target.tagName === "DETAILS") {
    target.open = true;
    target.scrollIntoView();
  }
};

window.addEventListener("hashchange", openTarget);
const here = location.pathname.replace(/\\/+$/, "");
fetch(here.slice(0, here.lastIndexOf("/")) + "/openapi.json")
  .then((response) => response.json())
  .then(show)
  .catch((error) => { document.getElementById("page").textContent = String(error); });
"""

_PAGE = f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Medley API</title><style>{_STYLE}</style></head>
<body><main id="page">Loading openapi.json ...</main><script>{_SCRIPT}</script></body>
</html>
"""


def _digest(text: str) -> str:
    """Return how a content security policy names an inline text that it lets through."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# Nothing but this script and this style runs, and nothing is fetched from elsewhere.
_POLICY = (
    f"default-src 'none'; script-src {_digest(_SCRIPT)}; style-src {_digest(_STYLE)}; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def make_docs_response() -> Response:
    """Return the page."""
    return Response(
        _PAGE,
        media_type="text/html",
        headers={"content-security-policy": _POLICY, "x-content-type-options": "nosniff"},
    )
