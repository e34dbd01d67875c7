// What the page shows: the few numbers, the charts, the tables.

const runs = JSON.parse(document.getElementById("data").textContent);
const single = runs.length === 1;
const percent = (value) => number(100 * value) + "%";
const color = (index) => `var(--run${index % 8})`;
const STOPS = ["var(--run3)", "var(--run0)", "var(--run2)", "var(--run1)"];
const EVENT_ROWS = ["restart", "scaling", "trouble", "checkpoint", "other"];
const EVENT_NAMES = { restart: "restarts", scaling: "scaling", trouble: "spikes, warnings", checkpoint: "checkpoints", other: "other" };

function shade(index, count) {
  const place = (index / Math.max(1, count - 1)) * (STOPS.length - 1), stop = Math.min(Math.floor(place), STOPS.length - 2);
  return `color-mix(in oklab, ${STOPS[stop]} ${Math.round(100 * (1 - place + stop))}%, ${STOPS[stop + 1]})`;
}

function lineOf(run, index, name, options = {}) {
  const values = run.series[name];
  if (!values) return null;
  return { name: options.name || (single ? name : run.name), color: options.color || color(index), x: run.series, y: options.smooth ? smoothed(values) : values, ...options };
}

function collect(make) {
  return runs.flatMap((run, index) => make(run, index)).filter(Boolean);
}

function marksOf() {
  return single ? runs[0].events.filter((event) => event.kind === "restart" || event.kind === "scaling") : [];
}

function dotsOf(name) {
  return collect((run, index) => run.validation.length && {
    color: single ? "var(--ink)" : color(index),
    x: { step: run.validation.map((v) => v.step), tokens: run.validation.map((v) => v.tokens), hours: run.validation.map((v) => v.hours) },
    y: run.validation.map((v) => v[name]),
  });
}

function dashed(style, position) {
  return style || (!single && position > 0 ? "dash" : "");
}

function plain(parent, title, about, columns, options = {}) {
  // columns: [series, name, colour of a single run, style]
  const lines = collect((run, index) => columns.map(([series, name, tint, style], i) =>
    lineOf(run, index, series, { name: single ? name : `${run.name}${columns.length > 1 ? " " + name : ""}`, color: single ? tint : color(index), style: dashed(style, i), smooth: options.smooth })));
  lines.sort((a, b) => (b.style === "dash") - (a.style === "dash")); // drawn first, so that a full line lies over a dashed one
  if (!lines.length) return;
  const present = columns.filter(([series]) => runs.some((run) => run.series[series]));
  const key = single || present.length > 1 ? present.map(([, name, tint, style], i) => [name, single ? tint : "var(--soft)", dashed(style, i)]) : [];
  addChart(parent, { title, about, lines, key, marks: marksOf(), ...options });
}

function quality(parent, title, about, series, rest = {}) {
  const lines = collect((run, index) => [
    lineOf(run, index, series, { style: "raw" }),
    lineOf(run, index, rest.smoothSeries || series, { name: single ? "training" : run.name, smooth: !rest.smoothSeries }),
  ]);
  if (rest.band) lines.forEach((line) => { if (line.style === "raw") line.band = rest.band(line.x); });
  const dots = dotsOf(series);
  const key = single ? [["training, smoothed", color(0)]] : [];
  if (dots.length) key.push([single ? "held out" : "dots: held out", single ? "var(--ink)" : "var(--soft)", "dot"]);
  addChart(parent, { title, about, lines, dots, key, marks: marksOf(), ...rest });
}

function buildCharts(parent) {
  quality(parent, "Loss", "by step, smoothed by supervised tokens", "loss", {
    smoothSeries: "loss_smooth", log: true, height: 250, band: (series) => [series.loss_least, series.loss_most],
  });
  quality(parent, "Tau", "tokens per target pass, whole blocks", "tau", { height: 250 });
  lengthChart(parent);
  slotCharts(parent);
  plain(parent, "Throughput", "tokens per second over a sliding window", [
    ["real_tokens_per_second", "real", "var(--run0)"], ["padded_tokens_per_second", "allocated, padding included", "var(--run1)", "dash"],
  ], { zero: true });
  plain(parent, "Who waits", "share of time", [["drafter_wait", "drafter, for features", "var(--run1)"], ["target_wait", "targets, for room in the window", "var(--run0)"]],
    { zero: true, format: percent, most: 0.1 });
  plain(parent, "Queues", "batches", [["q_pre", "handed to targets (q_pre)", "var(--run0)"], ["q_hs", "features ready (q_hs)", "var(--run1)"]], { zero: true, smooth: true });
  plain(parent, "Window", "MB of features in flight", [["window_mb", "in flight", "var(--run2)"]], { zero: true, smooth: true });
  plain(parent, "Power", "watts, all devices", [["watts", "watts", "var(--run4)"]], { zero: true });
  plain(parent, "Energy", "real tokens per joule", [["tokens_per_joule", "tokens per joule", "var(--run2)"]], { zero: true });
  targetsChart(parent);
  plain(parent, "Learning rate", "", [["lr", "lr", "var(--run3)"]], { zero: true, height: 150 });
  plain(parent, "Gradient norm", "before clipping", [["grad_norm", "norm", "var(--run5)"]], { log: true, height: 150 });
  fillRows(parent);
}

function fillRows(parent) {
  // a row with one narrow chart only is given to it whole
  let alone = null;
  for (const one of [...parent.children, null]) {
    if (one === null || one.classList.contains("wide")) { if (alone) alone.classList.add("wide"); alone = null; }
    else alone = alone ? null : one;
  }
}

function lengthChart(parent) {
  const lines = collect((run, index) => run.lengths.map((group, i) => ({
    name: single ? group.name : `${run.name}, ${group.name}`, x: group, y: smoothed(group.loss),
    color: single ? shade(i, run.lengths.length) : color(index), style: single || i === 0 ? "" : "dash",
  })));
  const bucketed = runs[0].lengths[0].name.startsWith("bucket");
  const about = single && !bucketed ? "steps by mean document length, in quarters" : "steps by bucket or mean document length";
  addChart(parent, { title: "Loss by length", about, lines, log: true, marks: marksOf(), key: single ? lines.map((line) => [line.name, line.color]) : [] });
}

function slotCharts(parent) {
  const having = runs.filter((run) => run.slots.lines);
  if (!having.length) return;
  if (single) {
    const count = having[0].slots.lines.length;
    const lines = having[0].slots.lines.map((values, i) => ({ name: `slot ${i + 1}`, x: having[0].slots, y: smoothed(values), color: shade(i, count) }));
    const key = [["slot 1", shade(0, count)], [`slot ${count}`, shade(count - 1, count)]];
    addChart(parent, { title: "Accuracy per slot", about: "slot k predicts the k-th token after the anchor", lines, key, format: percent, zero: true, marks: marksOf() });
  } else {
    quality(parent, "Accuracy", "mean of all slots", "accuracy", { format: percent, zero: true });
  }
  const profile = collect((run, index) => run.slots.late && {
    name: single ? "training" : run.name, color: color(index), own: "slot", x: { slot: run.slots.late.map((_, i) => i + 1) }, y: run.slots.late,
  });
  const dots = collect((run, index) => {
    const last = run.validation[run.validation.length - 1];
    return last && last.slot_accuracy && { color: single ? "var(--ink)" : color(index), own: "slot", x: { slot: last.slot_accuracy.map((_, i) => i + 1) }, y: last.slot_accuracy };
  });
  const longest = Math.max(...profile.map((line) => line.y.length));
  const key = single ? [["training, last tenth", color(0)]] : [];
  if (dots.length) key.push(["last validation", single ? "var(--ink)" : "var(--soft)", "dot"]);
  addChart(parent, { title: "Accuracy over the block", about: "by slot, at the end of the run", lines: profile, dots, key, own: true, unit: "slot",
    places: Array.from({ length: longest }, (_, i) => i + 1), format: percent, zero: true });
}

function targetsChart(parent) {
  const kinds = EVENT_ROWS.filter((kind) => runs.some((run) => run.events.some((event) => event.kind === kind)));
  const lines = collect((run, index) => lineOf(run, index, "targets", { name: single ? "targets" : run.name, style: "steps" }));
  const most = Math.max(1, ...lines.flatMap((line) => line.y));
  const chart = {
    title: "Targets and events", about: single ? "" : "a row of dots per kind of event, coloured by run", wide: true, lines, zero: true, most, height: 130 + 22 * kinds.length,
    key: [["targets at work", single ? color(0) : "var(--soft)"], ...kinds.map((kind) => [EVENT_NAMES[kind], single ? `var(--${kind})` : "var(--soft)", "dot"])],
    events: runs.flatMap((run) => run.events), marks: marksOf(), format: (value) => Number.isInteger(value) ? number(value) : "",
  };
  chart.head = 22 * kinds.length;
  chart.after = (svg, x) => kinds.forEach((kind, row) => {
    const at = 10 + 22 * row;
    node("line", { x1: chart.place.left, x2: chart.place.width - chart.place.right, y1: at, y2: at, class: "gridline" }, svg);
    runs.forEach((run, index) => run.events.filter((event) => event.kind === kind).forEach((event) => {
      node("circle", { cx: x(event[axis]), cy: at, r: 4.5, fill: single ? `var(--${kind})` : color(index), stroke: "var(--card)", "stroke-width": 1.5 }, svg);
    }));
  });
  addChart(parent, chart);
}

function buildHeadline(parent) {
  for (const [index, run] of runs.entries()) {
    const row = element("div", { class: "headline" });
    if (!single) {
      const name = element("div", { class: "number" }, element("em", {}, "run"), element("b", {}, run.name), element("small", {}, ""));
      name.style.borderLeft = `4px solid ${color(index)}`;
      row.append(name);
    }
    for (const one of run.headline) row.append(element("div", { class: "number" }, element("em", {}, one.name), element("b", {}, one.value), element("small", {}, one.note)));
    parent.append(row);
  }
}

function table(head, rows) {
  const numeric = head.map((_, i) => i > 0 && rows.length > 0 && rows.every((row) => typeof row[i] === "string" && /^[–\-\d]/.test(row[i])));
  const top = element("tr", {}, ...head.map((name, i) => element("th", { class: numeric[i] ? "n" : "" }, name)));
  const body = rows.map((row) => element("tr", {}, ...row.map((cell, i) => element("td", { class: numeric[i] ? "n" : "" }, cell))));
  return element("div", { class: "scroll" }, element("table", {}, element("thead", {}, top), element("tbody", {}, ...body)));
}

function card(parent, title, about, content, wide = false) {
  const head = element("div", { class: "head" }, element("h2", {}, title), element("p", { class: "about" }, about));
  parent.append(element("div", { class: "card" + (wide ? " wide" : "") }, head, content));
}

function named(run, index, text) {
  return element("span", {}, element("i", { class: "dot", color: color(index) }), text);
}

function buildTables(parent) {
  const grid = element("div", { class: "tables" });
  parent.append(grid);
  const groups = runs.flatMap((run, index) => run.buckets.map((bucket) => [
    single ? bucket.name : named(run, index, `${run.name}, ${bucket.name}`), number(bucket.steps), number(bucket.tokens), number(bucket.mean_length),
    bucket.padding_efficiency === null ? "–" : percent(bucket.padding_efficiency), number(bucket.loss), number(bucket.tau), bucket.accuracy === null ? "–" : percent(bucket.accuracy),
  ]));
  card(grid, "By length", "loss, tau and accuracy: last fifth of the steps of each", table(["", "steps", "real tokens", "mean length", "padding eff.", "loss", "tau", "accuracy"], groups));
  const made = runs.flatMap((run, index) => run.targets.map((one) => [single ? one.name : named(run, index, `${run.name}, ${one.name}`), number(one.batches, 6)]));
  card(grid, "Batches by target", "whose gradient is in the weights", table(["target", "batches"], made));
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.environment)))];
  const rows = keys.map((key) => [key, ...runs.map((run) => String(run.environment[key] ?? "–"))]);
  card(grid, "Environment", "where the run lived", rows.length ? table(["", ...runs.map((run) => run.name)], rows) : element("p", { class: "about" }, "not recorded"));
  const events = runs.flatMap((run, index) => run.events.map((event) => [event, index]));
  const listed = events.slice(-200).map(([event, index]) => [
    element("span", {}, element("i", { class: "dot", color: single ? `var(--${event.kind})` : color(index) }), event.event),
    number(event.step, 7), event.time || "–", event.reason,
  ]);
  card(grid, "Events", events.length > 200 ? "the last 200" : "UTC", table(["event", "step", "time", "what happened"], listed));
  if (!single) card(grid, "Settings that differ", "", differences(), true);
  for (const run of runs) card(grid, single ? "Config" : `Config of ${run.name}`, "starts the same run again", element("pre", {}, run.config), single);
}

function flat(text) {
  // dotted keys of the YAML that the run wrote: two levels, lists and maps below them as they stand
  const out = new Map();
  let section = "", key = "";
  for (const line of text.split("\n")) {
    const top = line.match(/^(\w+):(.*)$/), inner = line.match(/^  (\w+):(.*)$/);
    if (top) { section = key = top[1]; if (top[2].trim()) out.set(key, top[2].trim()); }
    else if (inner) { key = `${section}.${inner[1]}`; out.set(key, inner[2].trim()); }
    else if (line.trim()) out.set(key, `${out.get(key) || ""} ${line.trim()}`.trim());
  }
  return out;
}

function differences() {
  const maps = runs.map((run) => flat(run.config));
  const keys = [...new Set(maps.flatMap((map) => [...map.keys()]))];
  const rows = keys.filter((key) => new Set(maps.map((map) => map.get(key))).size > 1).map((key) => [key, ...maps.map((map) => map.get(key) ?? "–")]);
  return rows.length ? table(["", ...runs.map((run) => run.name)], rows) : element("p", { class: "about" }, "none");
}

function buildHeader() {
  document.getElementById("title").textContent = single ? runs[0].name : runs.map((run) => run.name).join(", ");
  const subtitle = single ? "DFlash drafter, one training run" : `${runs.length} training runs of a DFlash drafter, overlaid`;
  document.getElementById("subtitle").textContent = subtitle;
  const legend = document.getElementById("legend");
  if (!single) runs.forEach((run, index) => legend.append(element("span", {}, element("i", { color: color(index) }), run.name)));
  else if (marksOf().length) for (const kind of ["restart", "scaling"]) {
    if (marksOf().some((event) => event.kind === kind)) legend.append(element("span", {}, element("i", { color: `var(--${kind})` }), EVENT_NAMES[kind]));
  }
  const choice = document.getElementById("axis");
  for (const [name, words] of Object.entries(AXES)) {
    const button = element("button", { type: "button", "data-axis": name, "aria-pressed": String(name === axis) }, words);
    button.addEventListener("click", () => {
      axis = name;
      for (const other of choice.children) other.setAttribute("aria-pressed", String(other.dataset.axis === axis));
      drawAll();
    });
    choice.append(button);
  }
}

axis = single ? "hours" : "tokens";
buildHeader();
buildHeadline(document.getElementById("headline"));
buildCharts(document.getElementById("charts"));
buildTables(document.getElementById("tables"));
drawAll();
new ResizeObserver(drawAll).observe(document.getElementById("charts"));
document.body.dataset.drawn = String(charts.length);
