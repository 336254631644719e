// The live page: ask for what changed, once a second, and show it.
"use strict";

(() => {
  const list = document.getElementById("runs"), now = document.getElementById("now"), body = document.getElementById("run");
  const planner = document.getElementById("planner"), connection = document.getElementById("connection");
  const filter = document.getElementById("filter"), sort = document.getElementById("sort");
  let chosen = address().name, stamp = null, planning = false, known = "";

  // A duration in hours, minutes and seconds.
  function duration(seconds) {
    const [hours, minutes, rest] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, Math.round(seconds % 60) % 60];
    return hours ? `${hours} h ${minutes} min` : minutes ? `${minutes} min ${rest} s` : `${rest} s`;
  }

  // Times are the reader's: their date, if it is not today's, and the time of day.
  function times(root) {
    for (const element of root.querySelectorAll("[data-time]")) {
      const time = new Date(1000 * Number(element.dataset.time));
      const today = time.toDateString() === new Date().toDateString();
      element.textContent = today ? time.toLocaleTimeString() : time.toLocaleString();
    }
  }

  function ages(root) {
    for (const span of root.querySelectorAll("[data-since]")) {
      const seconds = Math.max(0, Date.now() / 1000 - Number(span.dataset.since));
      const plain = "plain" in span.dataset; // in a column of seconds
      span.textContent = plain ? Math.round(seconds) : duration(Math.round(seconds));
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

  // A run has an address of its own: #run/NAME; the planner is #planner/NAME.
  function address() {
    const [kind, name] = location.hash.slice(1).split("/");
    return { planning: kind === "planner", name: name ? decodeURIComponent(name) : null };
  }

  function go(kind, name) {
    location.hash = name === null ? kind : `${kind}/${encodeURIComponent(name)}`;
  }

  function follow() {
    const there = address();
    if (there.planning) { chosen = there.name ?? chosen; plan(); } else if (there.name !== null) choose(there.name);
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

  const orders = {
    changed: (a, b) => b.changed - a.changed,
    name: (a, b) => a.name.localeCompare(b.name, undefined, { numeric: true }),
    state: (a, b) => a.state.localeCompare(b.state),
    loss: (a, b) => (a.loss ?? Infinity) - (b.loss ?? Infinity) || 0,
  };

  function listed(runs) {
    const part = filter.value.trim().toLowerCase();
    return runs.filter((run) => `${run.name} ${run.state}`.toLowerCase().includes(part)).sort(orders[sort.value]);
  }

  function menu(all) {
    const runs = listed(all);
    const wanted = JSON.stringify([runs.map((run) => [run.name, run.state]), chosen, planning]);
    if (wanted === known) return;
    known = wanted;
    list.replaceChildren(
      ...runs.map((run) => button(`${run.name} (${run.state})`, !planning && run.name === chosen, () => go("run", run.name))),
      button("planner", planning, () => go("planner", chosen)),
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
    times(now);
    if (body.dataset.html !== run.body) { // who has answered changes often, figures only with a round
      const said = (details) => details.querySelector("summary").textContent; // a round may bring new ones
      const open = new Set([...body.querySelectorAll("details[open]")].map(said));
      body.innerHTML = run.body;
      body.dataset.html = run.body;
      for (const details of body.querySelectorAll("details")) details.open = open.has(said(details));
      fpldCharts.drawAll(body);
      fpldTables.attach(body);
    }
  }

  async function loop() {
    await tick();
    setTimeout(loop, 1000);
  }
  window.addEventListener("hashchange", follow);
  for (const control of [filter, sort]) control.addEventListener("input", tick);
  if (address().planning) plan();
  loop();
})();
