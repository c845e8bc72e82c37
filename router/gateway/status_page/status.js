// The status page: reads /status.json once a second while it is visible, and talks to /v1/chat/completions.
// Text from the model and from workers only ever becomes a text node.
"use strict";

const POLL_MS = 1000;
const byId = (id) => document.getElementById(id);

function element(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

// -- figures ---------------------------------------------------------------------------------------------------------

const count = (value) => Math.round(value).toLocaleString("en");
const milliseconds = (seconds) => (seconds === null || seconds === undefined ? "–" : seconds < 10 ? `${(seconds * 1e3).toFixed(seconds < 0.1 ? 1 : 0)} ms` : `${seconds.toFixed(1)} s`);
const percent = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(1)} %` : "–");

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${value.toFixed(unit ? 1 : 0)} ${units[unit]}`;
}

function showFigures(list, figures) {
  list.replaceChildren(...figures.map(([name, value]) => {
    const pair = element("div");
    pair.append(element("dt", "", name), element("dd", "", value));
    return pair;
  }));
}

function showReady(text, kind) {
  const badge = byId("ready");
  if (badge.textContent !== text) badge.textContent = text;  // a live region: say it once
  badge.className = `badge ${kind}`;
}

function showWorker(worker) {
  const node = element("div", "worker");
  const line = element("div", "line");
  const isGood = worker.is_linked && worker.state === "serving";
  line.append(
    element("strong", "", worker.id),
    element("span", `badge ${isGood ? "good" : "bad"}`, worker.is_linked ? worker.state : `${worker.state}, not connected`),
    element("span", "muted small", `pid ${worker.rank_pids.join(", ") || worker.pid}`),
    element("span", "muted small", `start ${worker.incarnation.slice(0, 8)}`),
  );
  if (worker.rank_pids.length > 1) line.append(element("span", "muted small", worker.parallel));
  if (worker.role === "decode") line.append(element("span", "muted small", `pulls from ${worker.pairs_up.join(", ") || "nobody"}`));
  const bar = element("div", "bar");
  const parts = ["held", "cached", "quarantined", "free"].map((name) => [name, worker[`blocks_${name}`]]);
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", `Cache blocks: ${parts.map(([name, value]) => `${value} ${name}`).join(", ")}`);
  for (const [name, value] of parts) {
    const part = element("span", name);
    part.style.width = `${worker.blocks_total ? (100 * value) / worker.blocks_total : 0}%`;
    bar.append(part);
  }
  const load = worker.load;
  const words = `${parts.map(([name, value]) => `${count(value)} ${name}`).join(" · ")} of ${count(worker.blocks_total)} blocks`;
  const work = `${load.num_running} running, ${load.num_waiting} waiting` + (worker.role === "prefill" ? `, ${count(load.queued_prefill_tokens)} tokens queued` : "");
  node.append(line, bar, element("div", "small", work), element("div", "muted small", words));
  return node;
}

function showPools(workers) {
  const nodes = [];
  for (const role of ["prefill", "decode"]) {
    const pool = workers.filter((worker) => worker.role === role);
    if (pool.length) nodes.push(element("h3", "", `${role} · ${pool.length} ${pool.length === 1 ? "worker" : "workers"}`), ...pool.map(showWorker));
  }
  byId("pools").replaceChildren(...(nodes.length ? nodes : [element("p", "muted", "No worker has announced itself yet.")]));
}

function showRecent(requests) {
  const rows = requests.map((request) => {
    const row = element("tr");
    row.append(element("td", "", request.reason === "done" ? "done" : request.reason.replaceAll("_", " ")), element("td", "", `${request.prefill} → ${request.decode}`));
    for (const value of [count(request.num_prompt_tokens), count(request.num_cached_tokens), count(request.num_output_tokens), milliseconds(request.ttft_s), milliseconds(request.itl_s), count(request.retries)]) {
      row.append(element("td", "number", value));
    }
    return row;
  });
  if (rows.length) byId("recent").replaceChildren(...rows);
}

function showStatus(status) {
  byId("model").textContent = status.model;
  byId("version").textContent = `glm-cluster ${status.version}`;
  showReady(status.is_draining ? "shutting down" : status.is_ready ? "ready" : "waiting for a usable pair of workers", status.is_ready ? "good" : "bad");
  showFigures(byId("phases"), Object.entries(status.requests.phases).map(([name, value]) => [name, count(value)]));
  const recent = status.recent;
  byId("recent-count").textContent = recent.num_requests;
  showFigures(byId("latency"), [
    ["TTFT p50", milliseconds(recent.ttft_s?.p50)], ["TTFT p99", milliseconds(recent.ttft_s?.p99)],
    ["ITL p50", milliseconds(recent.itl_s?.p50)], ["ITL p99", milliseconds(recent.itl_s?.p99)],
    ["retries", count(recent.num_retries)], ["failed", count(recent.num_failed)],
  ]);
  showRecent(recent.requests);
  showPools(status.workers);
  const total = (name) => status.workers.reduce((sum, worker) => sum + worker.load[name], 0);
  const totalDrafts = (name) => status.workers.reduce((sum, worker) => sum + worker.load[name].reduce((all, one) => all + one, 0), 0);
  const readSeconds = total("read_s");
  showFigures(byId("transfers"), [
    ["hand-offs open", count(total("num_transfers"))], ["pulled", bytes(total("bytes_read"))],
    ["pull rate", readSeconds > 0 ? `${bytes(total("bytes_read") / readSeconds)}/s` : "–"],
    ["prefix hits", percent(total("prefix_hit_tokens"), total("prefix_query_tokens"))],
    ["stale reads", count(total("stale_validations"))], ["preemptions", count(total("preemptions"))],
    ["drafts held", percent(totalDrafts("accepted"), totalDrafts("drafted"))],
  ]);
}

async function poll() {
  if (!document.hidden) {
    try {
      const reply = await fetch("/status.json", { cache: "no-store" });
      showStatus(await reply.json());
    } catch {
      showReady("the gateway does not answer", "bad");
    }
  }
  setTimeout(poll, POLL_MS);
}

// -- chat ------------------------------------------------------------------------------------------------------------

const conversation = [];
let answering = null;  // the AbortController of the answer that is being streamed

function addMessage(who) {
  byId("hint")?.remove();
  const node = element("div", "message");
  node.append(element("div", "who", who));
  byId("messages").append(node);
  return node;
}

function follow(change) {
  const box = byId("messages");
  const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  change();
  if (isAtEnd) box.scrollTop = box.scrollHeight;
}

async function* readEvents(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const events = held.split("\n\n");
    held = events.pop();
    for (const event of events) {
      if (event.startsWith("data: ") && event !== "data: [DONE]") yield JSON.parse(event.slice(6));
    }
  }
}

class AnswerView {
  constructor() {
    this.node = addMessage("model");
    this.details = element("details");
    this.details.open = true;
    this.details.hidden = true;
    this.summary = element("summary", "", "Thinking …");
    this.thinking = element("div", "text");
    this.details.append(this.summary, this.thinking);
    this.content = element("div", "text");
    this.note = element("div", "muted small");
    this.node.append(this.details, this.content, this.note);
    this.reasoningText = "";
    this.contentText = "";
    this.startedMs = performance.now();
    this.firstMs = null;
  }

  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    const delta = chunk.choices?.[0]?.delta;
    if (delta?.reasoning_content || delta?.content) this.firstMs ??= performance.now();
    if (delta?.reasoning_content) {
      this.reasoningText += delta.reasoning_content;
      this.details.hidden = false;
      this.thinking.append(delta.reasoning_content);
    }
    if (delta?.content) {
      if (!this.contentText) this.endThinking();
      this.contentText += delta.content;
      this.content.append(delta.content);
    }
    if (chunk.choices?.[0]?.finish_reason) this.reason = chunk.choices[0].finish_reason;
    if (chunk.usage) this.usage = chunk.usage;
  }

  endThinking() {
    this.summary.textContent = "Thinking";
    this.details.open = false;
  }

  finish() {
    if (this.contentText || !this.reasoningText) this.endThinking();
    else this.summary.textContent = "Thinking (no answer followed)";
    const words = [];
    if (this.usage) words.push(`${this.usage.completion_tokens} tokens, ${this.usage.prompt_tokens_details.cached_tokens} of ${this.usage.prompt_tokens} prompt tokens cached`);
    if (this.firstMs !== null) words.push(`first token after ${milliseconds((this.firstMs - this.startedMs) / 1e3)}`);
    if (this.reason === "length") words.push("cut at the token limit");
    this.note.textContent = words.join(" · ");
  }
}

async function ask(text) {
  addMessage("you").append(element("div", "text", text));
  conversation.push({ role: "user", content: text });
  const view = new AnswerView();
  answering = new AbortController();
  byId("messages").scrollTop = byId("messages").scrollHeight;
  try {
    const body = {
      model: byId("model").textContent, messages: conversation, stream: true, stream_options: { include_usage: true },
      reasoning_effort: byId("effort").value, temperature: Number(byId("temperature").value), max_tokens: Number(byId("max-tokens").value),
    };
    const reply = await fetch("/v1/chat/completions", {
      method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal: answering.signal,
    });
    if (!reply.ok) throw new Error((await reply.json()).error.message);
    for await (const chunk of readEvents(reply)) follow(() => view.take(chunk));
  } catch (error) {
    follow(() => view.node.append(element("div", error.name === "AbortError" ? "muted small" : "error", error.name === "AbortError" ? "stopped" : error.message)));
  }
  answering = null;
  follow(() => view.finish());
  if (view.contentText || view.reasoningText) conversation.push({ role: "assistant", content: view.contentText, reasoning_content: view.reasoningText });
  else conversation.pop();
}

function showAnswering(isAnswering) {
  byId("send").disabled = isAnswering;
  byId("stop").hidden = !isAnswering;
}

async function submit() {
  const prompt = byId("prompt");
  const text = prompt.value.trim();
  if (!text || answering) return;
  prompt.value = "";
  showAnswering(true);
  await ask(text);
  showAnswering(false);
  prompt.focus();
}

byId("ask").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(); }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") answering?.abort(); });
byId("stop").addEventListener("click", () => answering?.abort());
byId("clear").addEventListener("click", () => {
  answering?.abort();
  conversation.length = 0;
  byId("messages").replaceChildren(element("p", "muted", "A new conversation."));
  byId("prompt").focus();
});
poll();
