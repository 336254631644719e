// Draw every chart of the page from the data beside it. The data is text: nothing of it becomes markup.
"use strict";

const fpldCharts = (() => {
  const plain = d3.format("~g");

  // How the numbers of an axis are written: bytes in one unit, that of the largest, unless they span a million or more.
  function write(unit, values) {
    if (unit !== "B") return plain;
    const [low, high] = d3.extent(values.filter((value) => value > 0));
    const si = high > 1e6 * low ? d3.format("~s") : d3.formatPrefix(".6~", high ?? 1);
    return (value) => `${si(value).replace(/([a-zA-Z]?)$/, " $1")}B`;
  }

  const exact = d3.format(".4~g");

  function rowsOf(series) {
    return series.x.map((x, i) => ({ x, y: series.y[i], low: series.low[i], limit: series.limit[i], series: series.name }));
  }

  // Ticks of a logarithmic axis: powers of ten over three decades or more, all digits over fewer, even steps within one.
  function logTicks(values, count) {
    const [low, high] = d3.extent(values.filter((value) => value > 0));
    if (low === undefined) return undefined;
    const all = d3.scaleLog([low, high], [0, 1]).ticks();
    const powers = all.filter((value) => Number.isInteger(Math.round(Math.log10(value) * 1e9) / 1e9));
    return powers.length > 2 ? powers : all.length > 2 && high > 3 * low ? all : d3.ticks(low, high, count);
  }

  // A name that is wider than its place is cut; the whole of it is in the tip and in the table.
  function fit(name, room) {
    const most = Math.max(Math.floor((room - 12) / 7), 2);
    return name.length <= most || /^\d+$/.test(name) ? name : `${name.slice(0, most - 1)}…`;
  }

  // How round the number of a label is: 1, 10, 0.1 before 2 and 5, these before others; names are all alike.
  function roundness(label) {
    const digits = label.textContent.replace(/[^0-9]/g, "").replace(/^0+|0+$/g, "");
    return digits === "1" ? 0 : digits === "2" || digits === "5" ? 1 : 2;
  }

  // Hide tick labels that would touch one that is rounder, or stands before.
  function thin(labels) {
    const kept = [];
    for (const label of labels.sort((a, b) => roundness(a) - roundness(b))) {
      const box = label.getBoundingClientRect();
      const touches = (other) => box.left < other.right + 4 && other.left < box.right + 4 && box.top < other.bottom && other.top < box.bottom;
      if (box.width && kept.some(touches)) label.style.display = "none";
      else kept.push(box);
    }
  }

  function draw(figure) {
    const spec = JSON.parse(figure.querySelector("script[type='application/json']").textContent);
    const box = figure.querySelector(".plot");
    const width = Math.max(box.clientWidth, 280);
    const names = spec.series.map((series) => series.name);
    const band = spec.x.scale === "band";
    const places = [...new Set(spec.series.flatMap((series) => series.x))];
    const grouped = spec.series.some((series) => series.kind === "bars");
    const title = (d) => `${d.series}\n${spec.x.label}: ${band ? d.x : exact(d.x)}\n${spec.y.label}: ${exact(d.y)}`;
    const colour = (name) => spec.colours[names.indexOf(name) % spec.colours.length];
    const marks = [];
    for (const series of spec.series) {
      const rows = rowsOf(series), stroke = colour(series.name);
      if (series.kind === "band") {
        for (const y of ["y", "low"]) marks.push(Plot.lineY(rows, { x: "x", y, stroke }), Plot.dot(rows, { x: "x", y, fill: stroke, r: 2 }));
        marks.push(rows.length > 1 ? Plot.areaY(rows, { x: "x", y1: "low", y2: "y", fill: stroke, fillOpacity: 0.25 })
          : Plot.ruleX(rows, { x: "x", y1: "low", y2: "y", stroke, strokeOpacity: 0.25, strokeWidth: 24 }));
      }
      if (series.kind === "line") {
        marks.push(Plot.lineY(rows, { x: "x", y: "y", stroke, strokeWidth: 2 }));
        marks.push(Plot.dot(rows, { x: "x", y: "y", fill: stroke, r: rows.length > 12 ? 2 : 3.5, title, tip: true }));
      }
      if (series.kind === "dots") marks.push(Plot.dot(rows, { x: "x", y: "y", fill: stroke, r: 5, title, tip: true }));
      if (series.kind === "rule") marks.push(Plot.ruleY(rows.slice(0, 1), { y: "y", stroke, strokeDasharray: "5 4", title: (d) => `${d.series}: ${exact(d.y)}`, tip: true }));
    }
    const bars = spec.series.filter((series) => series.kind === "bars").flatMap(rowsOf);
    const stack = spec.series.filter((series) => series.kind === "stack").flatMap(rowsOf);
    if (bars.length) marks.push(Plot.barY(bars, { fx: "x", x: "series", y: "y", fill: (d) => colour(d.series), title, tip: true }));
    const limits = bars.filter((row) => row.limit !== undefined);
    if (limits.length) marks.push(Plot.tickY(limits, { fx: "x", x: "series", y: "limit", stroke: "currentColor", strokeWidth: 2 }));
    if (stack.length) marks.push(Plot.barY(stack, { x: "x", y: "y", fill: (d) => colour(d.series), title, tip: true }));
    if (bars.length || stack.length) marks.push(Plot.ruleY([0]));
    const values = (axis) => spec.series.filter((series) => axis !== "x" || series.kind !== "rule").flatMap((series) => series[axis]);
    const across = { label: spec.x.label, tickFormat: band ? undefined : write(spec.x.unit, values("x")) };
    if (band) Object.assign(across, { domain: places, tickFormat: (place) => fit(String(place), (width - 80) / places.length) });
    const plot = Plot.plot({
      width, height: 300, marginLeft: 56, marginTop: 34, marginBottom: 38, style: { background: "transparent", fontSize: "12px" },
      ...(grouped ? { fx: { ...across, padding: 0.15 }, x: { axis: null, domain: names } }
        : { x: band ? { ...across, type: stack.length ? "band" : "point" } : { ...across, type: spec.x.scale, ticks: spec.x.scale === "log" ? logTicks(values("x"), 4) : 5 } }),
      y: { label: spec.y.label, type: spec.y.scale, grid: true, nice: spec.y.scale !== "log", zero: new Set(values("y")).size === 1 && spec.y.scale !== "log", tickFormat: write(spec.y.unit, values("y")), ...(spec.y.scale === "log" ? { ticks: logTicks([...values("y"), ...values("low")], 4) } : {}) },
      inset: bars.length || stack.length ? 0 : 8, // points at a corner are whole, and beside the axes
      color: { legend: false },
      marks,
    });
    const legend = Plot.legend({ color: { type: "categorical", domain: names, range: names.map(colour) }, style: { fontSize: "12px" } });
    box.replaceChildren(legend, plot);
    for (const part of plot.querySelectorAll("g[aria-label]")) part.setAttribute("role", "group"); // a label needs a role
    for (const labels of plot.querySelectorAll("[aria-label$='tick label']")) thin([...labels.querySelectorAll("text")]);
  }

  function drawAll(root = document) {
    for (const figure of root.querySelectorAll("figure.chart")) {
      try { draw(figure); } catch (error) { console.error(error); }
    }
  }

  let wait;
  window.addEventListener("resize", () => { clearTimeout(wait); wait = setTimeout(() => drawAll(), 120); });
  window.addEventListener("beforeprint", () => drawAll());
  return { drawAll };
})();
