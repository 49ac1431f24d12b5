// Text of replies as elements: Markdown, calls of tools, and the examples of a guideline. Everything is set as text, so that no markup of a
// reply ever becomes an element of the page; a link is one only to http and https.

// Of each line every part can begin at one place only: where one can give way to the next, a long line takes the square of its length.
const FENCE = /^\s*(`{3,}(?!`)|~{3,}(?!~))([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s(.*)$/s;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/s;
const QUOTE = /^ {0,3}> ?(.*)$/;
const DIVIDER = /^\s*(\|\s*)?:?-+:?\s*(\|\s*:?-+:?\s*)*(\|\s*)?$/;
const INLINE = [
  [/^(`+)([^`](?:.*?[^`])?)\1(?!`)/s, (match) => element("code", match[2])],
  [/^\*\*(?=\S)(.+?)(?<=\S)\*\*/s, (match) => element("strong", ...inline(match[1]))],
  [/^__(?=\S)(.+?)(?<=\S)__(?![\p{L}\p{N}])/su, (match) => element("strong", ...inline(match[1]))],
  [/^\*(?=[^\s*])(.+?)(?<=[^\s*])\*(?!\*)/s, (match) => element("em", ...inline(match[1]))],
  [/^_(?=[^\s_])(.+?)(?<=[^\s_])_(?![\p{L}\p{N}_])/su, (match) => element("em", ...inline(match[1]))],
  [/^~~(?=\S)(.+?)(?<=\S)~~/s, (match) => element("del", ...inline(match[1]))],
  [/^!\[([^\]]*)\]\(([^()\s]+)\)/, (match) => element("span", `[picture: ${match[1] || match[2]}]`)],
  [/^\[([^\]]+)\]\(([^()\s]+)\)/, (match) => link(match[2], ...inline(match[1]))],
  [/^https?:\/\/[^\s<>"')\]]+[^\s<>"')\].,;:!?]/, (match) => link(match[0], match[0])],
  [/^\\([\\`*_{}[\]()#+\-.!~|>])/, (match) => document.createTextNode(match[1])],
];
const SPECIAL = /[\\`*_~![h]/;
const DEEPEST = 12; // quotes and lists within each other
const REACH = 2000; // characters from the beginning of an emphasis or a link to its end: a long text full of stars would stop the page

export function element(tag, ...children) {
  const made = document.createElement(tag);
  made.append(...children);
  return made;
}

function link(address, ...children) {
  if (!/^https?:\/\//i.test(address)) return element("span", ...children, ` (${address})`);
  return Object.assign(element("a", ...children), { href: address, target: "_blank", rel: "noopener noreferrer" });
}

/** The elements of a message: Markdown, with the tools that it calls behind it; or what a tool gave. */
export function messageOf(text, role = "assistant") {
  try {
    const told = /^\s*[[{]/.test(text) ? parsed(text) : undefined;
    const calls = callsOf(told);
    if (calls) return calls.map(callCard);
    if (told !== undefined && typeof told === "object" && role === "tool") return [valueOf(told)];
    const { before, called } = callsBehind(text);
    return [...markdown(before), ...called.map(callCard)];
  } catch {} // values within values so deep that there is no room to follow them
  return markdown(text);
}

/** A text and the calls that stand behind it, as a list. */
function callsBehind(text) {
  const at = text.search(/\[\s*\{\s*"/);
  const called = at > 0 && text.trimEnd().endsWith("]") ? callsOf(parsed(text.slice(at))) : null;
  return called ? { before: text.slice(0, at), called } : { before: text, called: [] };
}

/** Markdown as elements. `example`: how a block ```example is shown; without it, as code. */
export function markdown(text, { example } = {}, depth = 0) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const blocks = [];
  let paragraph = [];
  const end = () => {
    if (paragraph.length) blocks.push(element("p", ...inline(paragraph.join("\n"))));
    paragraph = [];
  };
  for (let at = 0; at < lines.length; ) {
    const found = block(lines, at, paragraph.length > 0, { example }, depth);
    if (found) {
      end();
      blocks.push(...found.made);
      at = found.next;
    } else {
      if (lines[at].trim()) paragraph.push(lines[at]);
      else end();
      at++;
    }
  }
  end();
  return blocks;
}

/** The block that begins at a line and where the next one does; null where it is a paragraph's line. */
function block(lines, at, inParagraph, options, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return code(lines, at, fence, options);
  const heading = HEADING.exec(line);
  if (heading) return { made: [element(`h${Math.min(6, heading[1].length + 3)}`, ...inline(title(heading[2])))], next: at + 1 };
  if (RULE.test(line)) return { made: [element("hr")], next: at + 1 };
  if (depth < DEEPEST && QUOTE.test(line)) return quote(lines, at, options, depth);
  const item = ITEM.exec(line);
  if (depth < DEEPEST && item && (!inParagraph || /[-*+]|^1[.)]/.test(item[2]))) return list(lines, at, options, depth);
  if (line.includes("|") && DIVIDER.test(lines[at + 1] ?? "") && (lines[at + 1] ?? "").includes("-")) return table(lines, at);
  return null;
}

/** The words of a heading, without the marks that may close it. */
function title(text) {
  let end = text.length;
  while (text[end - 1] === "#") end--;
  return text.slice(0, end).trim();
}

function code(lines, at, fence, { example }) {
  const close = new RegExp(`^\\s*${fence[1][0] === "`" ? "`" : "~"}{${fence[1].length},}\\s*$`);
  let next = at + 1;
  while (next < lines.length && !close.test(lines[next])) next++;
  const text = lines.slice(at + 1, next).join("\n");
  const made = example && fence[2].trim() === "example" ? example(text) : element("pre", element("code", text));
  return { made: [made], next: next + 1 };
}

function quote(lines, at, options, depth) {
  let next = at;
  const inside = [];
  while (next < lines.length && QUOTE.test(lines[next])) inside.push(QUOTE.exec(lines[next++])[1]);
  return { made: [element("blockquote", ...markdown(inside.join("\n"), options, depth + 1))], next };
}

function list(lines, at, options, depth) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(mark);
  const items = [];
  let next = at;
  while (next < lines.length) {
    const item = ITEM.exec(lines[next]);
    const blank = !lines[next].trim();
    const deeper = /^\s*/.exec(lines[next])[0].length > indent.length;
    if (item && item[1].length <= indent.length && /\d/.test(item[2]) === ordered) items.push([item[3]]);
    else if (blank && !/^\s+\S/.test(lines[next + 1] ?? "") && !ITEM.test(lines[next + 1] ?? "")) break;
    else if (blank || deeper) items.at(-1).push(lines[next]);
    else break;
    next++;
  }
  const made = element(ordered ? "ol" : "ul", ...items.map((inside) => element("li", ...loose(inside, options, depth))));
  if (ordered) made.start = parseInt(mark, 10);
  return { made: [made], next };
}

/** An item's blocks; a single paragraph is its text alone. */
function loose(inside, options, depth) {
  const rest = inside.slice(1);
  const room = Math.min(...rest.filter((line) => line.trim()).map((line) => /^\s*/.exec(line)[0].length), 99);
  const blocks = markdown([inside[0], ...rest.map((line) => line.slice(room))].join("\n"), options, depth + 1);
  return blocks[0]?.tagName === "P" ? [...blocks[0].childNodes, ...blocks.slice(1)] : blocks;
}

function table(lines, at) {
  const cells = (line) => line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
  const row = (tag, line) => element("tr", ...cells(line).map((cell) => element(tag, ...inline(cell))));
  let next = at + 2;
  const body = [];
  while (next < lines.length && lines[next].includes("|")) body.push(row("td", lines[next++]));
  const made = element("table", element("thead", row("th", lines[at])), element("tbody", ...body));
  return { made: [Object.assign(element("div", made), { className: "scroll" })], next };
}

/** Words with their emphasis, code and links. */
function inline(text) {
  const made = [];
  let plain = "";
  for (let at = 0; at < text.length; ) {
    const rest = SPECIAL.test(text[at]) && !(text[at] === "_" && /[\p{L}\p{N}]/u.test(text[at - 1] ?? "")) ? text.slice(at, at + REACH) : "";
    const found = rest && INLINE.map(([pattern, make]) => [pattern.exec(rest), make]).find(([match]) => match);
    if (!found) {
      plain += text[at++];
      continue;
    }
    if (plain) made.push(plain);
    plain = "";
    made.push(found[1](found[0]));
    at += found[0][0].length;
  }
  return plain ? [...made, plain] : made;
}

// ---- Tools

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

/** [{name, values}, ...] of what is a call or a list of calls, as OpenAI and others write them; null of anything else. */
function callsOf(told) {
  const calls = Array.isArray(told) ? told : [told];
  if (!calls.length || !calls.every((call) => typeof (call?.function?.name ?? call?.name) === "string")) return null;
  const given = calls.map((call) => (call.function ?? call).arguments ?? (call.function ?? call).parameters);
  if (given.some((values) => values === undefined)) return null;
  return calls.map((call, n) => ({ name: (call.function ?? call).name, values: typeof given[n] === "string" ? parsed(given[n]) ?? given[n] : given[n] }));
}

function callCard({ name, values }) {
  const head = element("p", element("span", "calls "), element("code", name));
  const card = element("div", head, valueOf(values));
  card.className = "call";
  return card;
}

/** A value for people: names and values of an object, a table of objects, anything else as JSON. */
function valueOf(value) {
  if (Array.isArray(value) && value.length && value.every(isFlat)) return tableOf(value);
  const entries = value && typeof value === "object" && !Array.isArray(value) ? Object.entries(value) : null;
  if (entries && !entries.length) return element("p", "(nothing)");
  if (!entries) return element("pre", element("code", typeof value === "string" ? value : JSON.stringify(value, null, 2)));
  const list = element("dl", ...entries.flatMap(([name, one]) => [element("dt", name), element("dd", isScalar(one) ? plain(one) : valueOf(one))]));
  list.className = "values";
  return list;
}

const isScalar = (value) => value === null || typeof value !== "object";
const isFlat = (value) => !isScalar(value) && !Array.isArray(value) && Object.values(value).every(isScalar);
const plain = (value) => (typeof value === "string" ? value : JSON.stringify(value) ?? "");

/** A row for each object, a column for each name that one of them has. */
function tableOf(objects) {
  const columns = [...new Set(objects.flatMap(Object.keys))];
  const row = (tag, cells) => element("tr", ...cells.map((cell) => element(tag, cell)));
  const rows = objects.map((one) => row("td", columns.map((column) => plain(one[column]))));
  const made = element("div", element("table", element("thead", row("th", columns)), element("tbody", ...rows)));
  return Object.assign(made, { className: "scroll" });
}

// ---- The examples of a guideline

const PARTS = /^(prompt|left|right|answer|why):\s?/;
const ANSWERS = { left: "Left is better", right: "Right is better", tie: "Equal", equal: "Equal", skip: "Can’t tell" };

/** A block of lines prompt:, left:, right:, answer: and why:, as a pair with its answer. */
export function exampleOf(text) {
  const parts = {};
  let name = "prompt";
  for (const line of text.split("\n")) {
    const begins = PARTS.exec(line);
    if (begins) name = begins[1];
    parts[name] = [...(parts[name] ?? []), begins ? line.slice(begins[0].length) : line];
  }
  const told = (part) => (parts[part] ?? []).join("\n").trim();
  const side = (which) => {
    const made = element("div", element("h5", which === "left" ? "Left" : "Right"), ...messageOf(told(which)));
    made.className = told("answer") === which ? "better" : "";
    return made;
  };
  const both = element("div", side("left"), side("right"));
  both.className = "both";
  const verdict = element("p", element("strong", ANSWERS[told("answer")] ?? told("answer")), told("why") ? ` – ${told("why")}` : "");
  const made = element("figure", ...(told("prompt") ? [Object.assign(element("div", ...messageOf(told("prompt"))), { className: "prompt" })] : []), both, verdict);
  made.className = "example";
  return made;
}
