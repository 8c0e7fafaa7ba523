"""The page /docs: it shows /openapi.json, with nothing from elsewhere, so that it works offline."""

DOCS_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Baton API</title>
<style>
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
details { border: 1px solid #8886; border-radius: 6px; margin: .4rem 0; padding: .4rem .8rem; }
summary { cursor: pointer; font-family: ui-monospace, monospace; }
summary b { display: inline-block; min-width: 4.5rem; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: .15rem .8rem .15rem 0; border-top: 1px solid #8883; }
code, pre, textarea { font-family: ui-monospace, monospace; font-size: 13px; }
textarea { width: 100%; min-height: 8rem; box-sizing: border-box; }
pre { overflow: auto; max-height: 24rem; background: #8881; padding: .6rem; }
input { width: 20rem; }
</style>
</head>
<body>
<h1>Baton API</h1>
<p id="about"></p>
<p><label>API key, if the server has keys: <input id="key" type="password" autocomplete="off"></label></p>
<main id="paths">Reading /openapi.json.</main>
<script>
const make = (tag, text, ...children) => {
  const node = document.createElement(tag);
  if (text) node.textContent = text;
  node.append(...children);
  return node;
};
const typeOf = (schema, all) => {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map(one => typeOf(one, all)).join(" | ");
  if (schema.enum) return schema.enum.map(one => JSON.stringify(one)).join(" | ");
  if (schema.type === "array") return "list of " + (typeOf(schema.items, all) || "anything");
  return [].concat(schema.type || "anything").join(" | ");
};
const fieldsOf = (schema, all) => {
  const found = schema.$ref ? all[schema.$ref.split("/").pop()] : schema;
  const required = new Set(found.required || []);
  const rows = Object.entries(found.properties || {}).map(([name, one]) => make("tr", "",
    make("td", "", make("code", name)), make("td", typeOf(one, all)),
    make("td", required.has(name) ? "required" : "")));
  return make("table", "", ...rows);
};
const tryIt = (method, path, example) => {
  const area = make("textarea", example), button = make("button", "Send"), answer = make("pre");
  button.onclick = async () => {
    const key = document.getElementById("key").value;
    const headers = {"content-type": "application/json"};
    if (key) headers.authorization = "Bearer " + key;
    const body = method === "post" ? area.value : undefined;
    try {
      const got = await fetch(path, {method: method.toUpperCase(), headers, body});
      answer.textContent = got.status + "\\n" + await got.text();
    } catch (error) { answer.textContent = String(error); }
  };
  return method === "post" ? [area, button, answer] : [button, answer];
};
fetch("/openapi.json").then(got => got.json()).then(doc => {
  document.getElementById("about").textContent = doc.info.description;
  const main = document.getElementById("paths"), all = doc.components.schemas;
  main.textContent = "";
  for (const [path, methods] of Object.entries(doc.paths)) {
    for (const [method, one] of Object.entries(methods)) {
      const box = make("details", "", make("summary", "", make("b", method.toUpperCase()), path));
      if (one.summary) box.append(make("p", one.summary));
      const body = one.requestBody && one.requestBody.content["application/json"];
      if (body) box.append(make("h4", "Fields"), fieldsOf(body.schema, all));
      const rows = Object.entries(one.responses).map(([status, answer]) => make("tr", "",
        make("td", "", make("code", status)), make("td", answer.description)));
      box.append(make("h4", "Answers"), make("table", "", ...rows));
      if (!path.includes("{") && (method === "get" || body))
        box.append(make("h4", "Try it"), ...tryIt(method, path, body ? '{"model": ""}' : ""));
      main.append(box);
    }
  }
}).catch(error => { document.getElementById("paths").textContent = String(error); });
</script>
</body>
</html>
"""
