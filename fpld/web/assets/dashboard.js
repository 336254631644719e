// The live page: ask for what changed, once a second, and show it.
"use strict";

(() => {
  const list = document.getElementById("runs"), now = document.getElementById("now"), body = document.getElementById("run");
  const planner = document.getElementById("planner"), connection = document.getElementById("connection");
  let chosen = null, stamp = null, planning = false, known = "";

  function ages(root) {
    for (const span of root.querySelectorAll("[data-since]")) {
      const seconds = Math.max(0, Date.now() / 1000 - Number(span.dataset.since));
      const plain = "plain" in span.dataset; // in a column of seconds
      span.textContent = plain ? Math.round(seconds) : seconds < 90 ? `${Math.round(seconds)} s` : `${Math.round(seconds / 60)} min`;
    }
  }

  function button(text, current, action) {
    const item = document.createElement("li"), inner = document.createElement("button");
    inner.type = "button";
    inner.textContent = text;
    inner.setAttribute("aria-current", String(current));
    inner.addEventListener("click", action);
    item.append(inner);
    return item;
  }

  function choose(name) {
    chosen = name;
    planning = false;
    stamp = null;
    now.replaceChildren();
    body.replaceChildren();
    tick();
  }

  function plan() {
    planning = true;
    fpldPlanner.open(chosen);
    tick();
  }

  function menu(runs) {
    const wanted = JSON.stringify([runs.map((run) => [run.name, run.state]), chosen, planning]);
    if (wanted === known) return;
    known = wanted;
    list.replaceChildren(
      ...runs.map((run) => button(`${run.name} (${run.state})`, !planning && run.name === chosen, () => choose(run.name))),
      button("planner", planning, plan),
    );
    planner.hidden = !planning;
    now.hidden = body.hidden = planning;
  }

  async function tick() {
    try {
      const answer = await fetch("/api/runs");
      if (answer.status === 401) { location.reload(); return; }
      const runs = await answer.json();
      if (runs.error) { connection.textContent = runs.error; return; }
      if (!runs.some((run) => run.name === chosen)) chosen = runs.length ? runs[0].name : null;
      menu(runs);
      if (chosen === null && !planning) now.textContent = "No run is here yet.";
      if (chosen !== null && !planning) await show(chosen);
      connection.textContent = "";
    } catch {
      connection.textContent = "The dashboard does not answer: is it still running?";
    }
    ages(now);
  }

  async function show(name) {
    const query = new URLSearchParams({ name, have: stamp ?? "" });
    const run = await (await fetch(`/api/run?${query}`)).json();
    if (name !== chosen || run.stamp === stamp || run.error) return;
    stamp = run.stamp;
    now.innerHTML = run.live; // made by the server's templates, which escape
    if (body.dataset.html !== run.body) { // who has answered changes often, figures only with a round
      const open = [...body.querySelectorAll("details")].map((details) => details.open);
      body.innerHTML = run.body;
      body.dataset.html = run.body;
      [...body.querySelectorAll("details")].forEach((details, i) => { details.open = open[i] ?? false; });
      fpldCharts.drawAll(body);
      fpldTables.attach(body);
    }
  }

  async function loop() {
    await tick();
    setTimeout(loop, 1000);
  }
  loop();
})();
