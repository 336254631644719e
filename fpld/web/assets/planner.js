// The planner: sliders for links, deadline and total. The server plans; this page asks and shows.
"use strict";

const fpldPlanner = (() => {
  const controls = document.getElementById("controls"), plan = document.getElementById("plan");
  let source = null, deadline = 1, busy = false, again = false;

  const rate = (value) => (value >= 1e6 ? `${d3.format(".3~g")(value / 1e6)} Mbit/s` : `${d3.format(".3~g")(value / 1e3)} kbit/s`);

  const limit = { "bit/s": rate, B: (value) => `${d3.format(".3~s")(value).replace(/[a-zA-Z]?$/, " $&")}B a round` };

  // Sliders of rates and times are logarithmic: their value is the exponent of ten.
  function slider(name, label, low, high, value, show) {
    const box = document.createElement("label"), text = document.createElement("span");
    const output = document.createElement("span"), input = document.createElement("input");
    text.textContent = label;
    Object.assign(input, { type: "range", min: low, max: high, step: "any", name });
    input.value = value;
    output.className = "value";
    const tell = () => { output.textContent = show(Number(input.value)); input.setAttribute("aria-valuetext", output.textContent); };
    input.addEventListener("input", () => { tell(); ask(); });
    tell();
    box.append(text, output, input);
    return box;
  }

  async function open(run) {
    source = run;
    const answer = await fetch(run === null ? "/api/planner" : `/api/planner?run=${encodeURIComponent(run)}`);
    const start = await answer.json();
    document.getElementById("planner-source").textContent =
      start.error ?? (run === null ? "An example: open a run first to plan from what it measured." : `From what ${run} measured.`);
    if (start.error) { controls.replaceChildren(); plan.replaceChildren(); return; }
    const linked = start.sites.some((site) => site.unit === "bit/s"); // without a link a deadline holds no one
    deadline = start.deadline;
    controls.replaceChildren(
      ...start.sites.map((site) => slider("link", site.name, 3, 8, Math.log10(site.limit), (v) => limit[site.unit](10 ** v))),
      ...(linked ? [slider("deadline", "deadline of a round", 0, 5, Math.log10(start.deadline), (v) => `${d3.format(".3~g")(10 ** v)} s`)] : []),
      slider("total", "total, of what all can send", 0, 1, start.share, d3.format(".0%")),
    );
    await ask();
  }

  // One question at a time: while one is under way, the next remembers only that there is more to ask.
  async function ask() {
    if (busy) { again = true; return; }
    busy = true;
    do {
      again = false;
      const values = (name) => [...controls.querySelectorAll(`input[name=${name}]`)].map((input) => Number(input.value));
      const query = new URLSearchParams({
        links: values("link").map((v) => 10 ** v).join(","), deadline: values("deadline").length ? 10 ** values("deadline")[0] : deadline, total: values("total")[0],
      });
      if (source !== null) query.set("run", source);
      try {
        const answer = await (await fetch(`/api/plan?${query}`)).json();
        plan.innerHTML = answer.body ?? ""; // made by the server's templates, which escape
        fpldCharts.drawAll(plan);
        fpldTables.attach(plan);
      } catch { /* the connection line says so */ }
    } while (again);
    busy = false;
  }

  return { open };
})();
