// The usual calls with the official JavaScript client: a line of JSON, call -> what came of it.
import { createRequire } from "node:module";

const OpenAI = createRequire(`${process.env.RL_DIALOG_CLIENTS}/npm/`)("openai");
const talk = [{ role: "user", content: "hello" }];
const long = [{ role: "user", content: "long ".repeat(2000) }];
const tool = { type: "function", function: { name: "clock", parameters: { type: "object", properties: {} } } };
const client = new OpenAI({ maxRetries: 0 });
const stranger = new OpenAI({ apiKey: "sk-rl-nobody", maxRetries: 0 });

async function ask(fields = {}, by = client) {
  const answer = await by.chat.completions.create({ model: "bc", messages: talk, ...fields });
  return answer.choices.map((choice) => choice.message.content);
}

async function stream() {
  let text = "";
  for await (const chunk of await client.chat.completions.create({ model: "bc", messages: talk, seed: 1, stream: true }))
    for (const choice of chunk.choices) text += choice.delta.content ?? "";
  return text;
}

async function models() {
  const found = [];
  for await (const model of client.models.list()) found.push(model.id);
  return found.includes("bc");
}

async function attempt(call) {
  try {
    return (await call()) ? "yes" : "no";
  } catch (error) {
    return `${error.constructor.name}: ${error.message}`;
  }
}

const [said] = await ask({ seed: 1 });
const calls = {
  models,
  chat: async () => said.length > 0,
  stream: async () => (await stream()) === said,
  n: async () => (await ask({ n: 3 })).length === 3,
  stop: async () => !(await ask({ seed: 1, stop: [said[2]] }))[0].includes(said[2]),
  seed: async () => (await ask({ seed: 1 }))[0] === said && (await ask({ seed: 2 }))[0] !== said,
  tools: () => ask({ tools: [tool] }),
  "wrong key": () => ask({}, stranger),
  "too long": () => ask({ messages: long }),
};
const outcomes = {};
for (const [name, call] of Object.entries(calls)) outcomes[name] = await attempt(call);
console.log(JSON.stringify(outcomes));
