/** The request as text to paste and run: curl, Python, JSON. The key is never in it. */

// Arguments of openai's Python client; other fields go to extra_body.
const KNOWN = new Set([
  ...["model", "prompt", "messages", "max_tokens", "temperature", "top_p", "seed", "stop"],
  ...["logprobs", "top_logprobs", "n", "echo"],
]);

/** Returns a JSON value as a Python literal. */
export function pythonLiteral(value, indent = "") {
  if (value === null) {
    return "None";
  }
  if (value === true || value === false) {
    return value ? "True" : "False";
  }
  const deeper = `${indent}    `;
  if (Array.isArray(value)) {
    const items = value.map((each) => `${deeper}${pythonLiteral(each, deeper)},\n`);
    return items.length ? `[\n${items.join("")}${indent}]` : "[]";
  }
  if (typeof value === "object") {
    const items = Object.entries(value).map(
      ([name, each]) => `${deeper}${JSON.stringify(name)}: ${pythonLiteral(each, deeper)},\n`,
    );
    return items.length ? `{\n${items.join("")}${indent}}` : "{}";
  }
  // A JSON string is a Python string, but for characters that JSON writes as surrogate pairs.
  return JSON.stringify(value);
}

const shellQuoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

export function asJson(body) {
  return JSON.stringify(body, null, 2);
}

export function asCurl(root, path, body, hasKey) {
  const lines = [`curl ${shellQuoted(`${root}/${path}`)}`, "  -H 'Content-Type: application/json'"];
  if (hasKey) {
    lines.push('  -H "Authorization: Bearer $ROPEWALK_API_KEY"');
  }
  lines.push(`  -d ${shellQuoted(JSON.stringify(body))}`);
  return `${lines.join(" \\\n")}\n`;
}

export function asPython(root, path, body, hasKey) {
  const call = path.includes("chat") ? "chat.completions" : "completions";
  const extra = {};
  const lines = [];
  for (const [name, value] of Object.entries(body)) {
    if (KNOWN.has(name)) {
      lines.push(`    ${name}=${pythonLiteral(value, "    ")},\n`);
    } else {
      extra[name] = value;
    }
  }
  if (Object.keys(extra).length) {
    lines.push(`    extra_body=${pythonLiteral(extra, "    ")},\n`);
  }
  const key = hasKey ? 'os.environ["ROPEWALK_API_KEY"]' : '"none"';
  const text = path.includes("chat") ? "message.content" : "text";
  return (
    `${hasKey ? "import os\n\n" : ""}import openai\n\n` +
    `client = openai.OpenAI(base_url=${JSON.stringify(`${root}/v1`)}, api_key=${key})\n` +
    `answer = client.${call}.create(\n${lines.join("")})\n` +
    `print(answer.choices[0].${text})\n`
  );
}
