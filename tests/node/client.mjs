// What OpenAI's Node client makes of a gateway's answers: prints one JSON object per scenario.
// `client.mjs URL KEY answers` asks for answers of all kinds, `batches` for files and batches;
// `killed MODEL TOKENS` reads long streams under which something is killed once it has said "begun".
import OpenAI from "openai";

const [baseURL, apiKey, scenario, ...rest] = process.argv.slice(2);
const ask = { model: "demo", messages: [{ role: "user", content: "say it" }] };
const tell = (name, facts) => console.log(JSON.stringify({ name, ...facts }));
const fault = (error) => ({ kind: error.constructor.name, status: error.status ?? null, code: error.code ?? null });

async function attempt(name, work, options = {}) {
  const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: 20_000, ...options });
  try {
    tell(name, await work(client));
  } catch (error) {
    tell(name, fault(error));
  }
}

async function readStream(stream) {
  let text = "";
  let finish = null;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? "";
    finish = chunk.choices[0]?.finish_reason ?? finish;
  }
  return { text, finish };
}

async function answers() {
  await attempt("whole", async (client) => {
    const { data, response } = await client.chat.completions.create({ ...ask, service_tier: "flex" }).withResponse();
    return {
      text: data.choices[0].message.content,
      finish: data.choices[0].finish_reason,
      tier: data.service_tier,
      id: response.headers.get("x-request-id"),
    };
  });
  await attempt("stream", async (client) => readStream(await client.chat.completions.create({ ...ask, stream: true })));
  await attempt("response", async (client) => {
    const answer = await client.responses.create({ model: "demo", input: "say it", service_tier: "flex" });
    return { text: answer.output_text, status: answer.status, tier: answer.service_tier };
  });
  await attempt("response stream", async (client) => {
    let text = "";
    const types = new Set();
    for await (const event of await client.responses.create({ model: "demo", input: "say it", stream: true })) {
      types.add(event.type);
      text += event.type === "response.output_text.delta" ? event.delta : "";
    }
    const has = (type) => types.has(`response.${type}`);
    return { text, begun: has("created"), ended: has("completed") || has("incomplete") };
  });
  await attempt("stored response", async (client) => client.responses.create({ model: "demo", input: "x", previous_response_id: "resp_1" }));
  await attempt("model", async (client) => ({ id: (await client.models.retrieve("demo")).id }));
  await attempt("wrong model", async (client) => client.chat.completions.create({ ...ask, model: "other" }));
  await attempt("wrong key", async (client) => client.models.list(), { apiKey: "sk-wrong" });
  await attempt("bad value", async (client) => client.chat.completions.create({ ...ask, temperature: -1 }));
  await attempt("overload", async (client) => client.chat.completions.create({ ...ask, user: "overload", seed: 1 }));
  // A refusal holds for a tenth of a second, for whatever else its tenant asks in that tier.
  await new Promise((done) => setTimeout(done, 400));
  await attempt("broken stream", async (client) => readStream(await client.chat.completions.create({ ...ask, stream: true, seed: 2 })));
  await attempt("retried", async (client) => ({ finish: (await client.chat.completions.create({ ...ask, seed: 3 })).choices[0].finish_reason }), { maxRetries: 2 });
}

// Files and batches, where the prompt says what becomes of a line: `slow` takes an hour.
const lines = (...prompts) =>
  prompts
    .map((prompt, n) => ({ custom_id: `c${n}`, method: "POST", url: "/v1/completions", body: { model: "m", prompt } }))
    .map((line) => JSON.stringify(line) + "\n")
    .join("");

async function begin(client, text) {
  const file = await client.files.create({ file: await OpenAI.toFile(Buffer.from(text), "in.jsonl"), purpose: "batch" });
  return client.batches.create({ input_file_id: file.id, endpoint: "/v1/completions", completion_window: "24h" });
}

async function until(client, id, holds) {
  for (;;) {
    const now = await client.batches.retrieve(id);
    if (holds(now)) return now;
    await new Promise((done) => setTimeout(done, 50));
  }
}

const idsOf = async (client, file) => (await (await client.files.content(file)).text()).trim().split("\n").map((line) => JSON.parse(line).custom_id).sort();

async function batches() {
  await attempt("batch", async (client) => {
    const { id } = await begin(client, lines("one", "two", "bad"));
    const end = await until(client, id, ({ status }) => status === "completed");
    const listed = [];
    for await (const each of client.batches.list({ limit: 1 })) listed.push(each.id);
    const deleted = (await client.files.delete(end.output_file_id)).deleted;
    const gone = await client.files.retrieve(end.output_file_id).catch((error) => error.status);
    return { counts: end.request_counts, errors: await idsOf(client, end.error_file_id), listed: listed.includes(id), deleted, gone };
  });
  await attempt("cancelled batch", async (client) => {
    const { id } = await begin(client, lines("one", "slow"));
    await until(client, id, ({ request_counts }) => request_counts.completed === 1);
    const asked = (await client.batches.cancel(id)).status;
    const end = await until(client, id, ({ status }) => status === "cancelled");
    return { asked, output: await idsOf(client, end.output_file_id), errors: await idsOf(client, end.error_file_id) };
  });
}

// Reads a stream to its end and tells how far it came: an error is told by the client's exception.
async function readLong(name, open, begun) {
  const facts = { finish: {}, tokens: null, ended: false };
  let events = 0;
  try {
    for await (const event of await open()) {
      events += 1;
      if (events === 5) begun();
      for (const choice of event.choices ?? []) {
        if (choice.finish_reason) facts.finish[choice.index] = choice.finish_reason;
      }
      facts.tokens = event.usage?.completion_tokens ?? event.response?.usage?.output_tokens ?? facts.tokens;
    }
    tell(name, { ...facts, ended: true });
  } catch (error) {
    tell(name, { ...facts, ...fault(error) });
  }
}

async function killed(model, tokens) {
  const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: 90_000 });
  const long = { model, stream: true, ignore_eos: true };
  const most = Number(tokens);
  const counted = { ...long, max_tokens: most, stream_options: { include_usage: true } };
  const streams = {
    completion: () => client.completions.create({ ...counted, prompt: "def f(" }),
    chat: () => client.chat.completions.create({ ...counted, messages: ask.messages, n: 2 }),
    response: () => client.responses.create({ ...long, input: "say it", max_output_tokens: most }),
  };
  let waiting = Object.keys(streams).length;
  const begun = () => {
    waiting -= 1;
    if (waiting === 0) tell("begun", {});
  };
  await Promise.all(Object.entries(streams).map(([name, open]) => readLong(name, open, begun)));
}

await { answers, batches, killed }[scenario](...rest);
