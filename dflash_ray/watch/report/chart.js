"use strict";
// Charts as SVG: lines over a shared horizontal axis, with a crosshair that all of them follow.
// Drawn here and not by matplotlib, whose SVG stands still: no crosshair across charts, no change between steps, tokens and time. A
// charting package that has both (plotly: 4.8 MB) would make a page of 0.1 MB forty times as large.

const SVG = "http://www.w3.org/2000/svg";
const AXES = { hours: "training time", tokens: "tokens", step: "steps" };
const charts = [];
let axis = "tokens";

function node(name, attributes = {}, parent = null) {
  const one = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) one.setAttribute(key, value);
  if (parent) parent.append(one);
  return one;
}

function element(name, attributes = {}, ...children) {
  const one = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "color") one.style.setProperty("--c", value);
    else one.setAttribute(key, value);
  }
  one.append(...children);
  return one;
}

function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return trim(value / 1e9, digits) + "G";
  if (size >= 1e6) return trim(value / 1e6, digits) + "M";
  if (size >= 1e4) return trim(value / 1e3, digits) + "K";
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  return trim(value, digits);
}

function trim(value, digits) {
  return String(Number(value.toPrecision(digits)));
}

function hours(value) {
  const seconds = Math.round(value * 3600);
  if (seconds >= 172800) return trim(value / 24, 3) + " d";
  if (seconds >= 3600) return Math.floor(seconds / 3600) + ":" + String(Math.floor(seconds / 60) % 60).padStart(2, "0") + " h";
  if (seconds % 60 === 0) return seconds / 60 + " min";
  return Math.floor(seconds / 60) + ":" + String(seconds % 60).padStart(2, "0") + " min";
}

function position(value) {
  return axis === "hours" ? hours(value) : number(value);
}

function ticks(low, high, wanted) {
  const raw = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(raw));
  const size = [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => one >= raw);
  const out = [];
  for (let at = Math.ceil(low / size - 1e-9) * size; at <= high + size * 1e-9; at += size) out.push(Math.abs(at) < size * 1e-9 ? 0 : at);
  return out;
}

function timeTicks(low, high, wanted) {
  const sizes = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 432000, 864000];
  const size = (sizes.find((one) => one >= ((high - low) * 3600) / wanted) || 1728000) / 3600;
  const out = [];
  for (let at = Math.ceil(low / size) * size; at <= high + 1e-9; at += size) out.push(at);
  return out;
}

function logTicks(low, high) {
  const out = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const one of [1, 2, 5]) {
      const value = one * 10 ** power;
      if (value >= low * 0.999 && value <= high * 1.001) out.push(value);
    }
  }
  return out;
}

function smoothed(values) {
  // a running mean that forgets over a fortieth of the line
  const keep = 1 - 1 / Math.max(1, values.length / 40);
  let sum = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = keep * sum + value;
    weight = keep * weight + 1;
    return sum / weight;
  });
}

// chart: {title, about, wide, lines: [{run, name, color, x: {step, tokens, hours}, y, style, band}], dots, marks, format, log, zero, most}
function addChart(parent, chart) {
  const card = element("div", { class: "card" + (chart.wide ? " wide" : "") });
  const key = element("div", { class: "key" });
  for (const [name, color, style] of chart.key || []) {
    key.append(element("span", {}, element("i", { class: style || "", color }), name));
  }
  const about = element("p", { class: "about" }, chart.about || "");
  card.append(element("div", { class: "head" }, element("h2", {}, chart.title), about), key);
  const svg = node("svg", { role: "img", "aria-label": chart.title });
  card.append(svg);
  parent.append(card);
  chart.svg = svg;
  charts.push(chart);
  svg.addEventListener("pointermove", (event) => point(chart, event));
  svg.addEventListener("pointerleave", leave);
}

function xs(line) {
  return line.x[line.own || axis];
}

function extent(chart) {
  let low = Infinity, high = -Infinity, least = Infinity, most = -Infinity;
  const all = [...chart.lines, ...(chart.dots || [])];
  for (const line of all) {
    for (const value of xs(line)) { low = Math.min(low, value); high = Math.max(high, value); }
    for (const value of line.y) if (value !== null) { least = Math.min(least, value); most = Math.max(most, value); }
  }
  if (!chart.own) { low = 0; high = range(); }
  if (low === high) { low -= 0.5; high += 0.5; }
  if (!isFinite(least)) { least = 0; most = 1; }
  const log = chart.log && least > 0 && most / least > 6;
  if (chart.zero && !log) least = Math.min(0, least);
  if (chart.most !== undefined) most = Math.max(most, chart.most);
  if (least === most) { least -= Math.abs(least) * 0.1 || 0.5; most += Math.abs(most) * 0.1 || 0.5; }
  const room = log ? (most / least) ** 0.04 : (most - least) * 0.05;
  if (log) { least /= room; most *= room; }
  else { if (!(chart.zero && least === 0)) least -= room; most += room; }
  return { low, high, least, most, log };
}

function range() {
  return Math.max(...runs.map((run) => run.series[axis][run.series[axis].length - 1])) || 1;
}

function draw(chart) {
  const svg = chart.svg, width = Math.max(svg.clientWidth, 240), height = chart.height || 210;
  const left = 50, right = 10, top = 8 + (chart.head || 0), bottom = 24;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  svg.replaceChildren();
  const { low, high, least, most, log } = extent(chart);
  const x = (value) => left + ((value - low) / (high - low)) * (width - left - right);
  const portion = (value) => log ? Math.log(value / least) / Math.log(most / least) : (value - least) / (most - least);
  const y = (value) => top + (1 - portion(value)) * (height - top - bottom);
  chart.place = { x, y, left, right, width, height, top, bottom, low, high };
  for (const value of log ? logTicks(least, most) : ticks(least, most, 5)) {
    node("line", { x1: left, x2: width - right, y1: y(value), y2: y(value), class: "gridline" }, svg);
    const text = node("text", { x: left - 7, y: y(value) + 3.5, "text-anchor": "end" }, svg);
    text.textContent = (chart.format || number)(value);
  }
  node("line", { x1: left, x2: width - right, y1: height - bottom, y2: height - bottom, class: "baseline" }, svg);
  const wanted = Math.max(2, Math.floor(width / 110));
  const places = chart.own ? chart.places : axis === "hours" ? timeTicks(low, high, wanted) : ticks(low, high, wanted);
  for (const value of places) {
    const text = node("text", { x: x(value), y: height - 8, "text-anchor": value === high && !chart.own ? "end" : "middle" }, svg);
    text.textContent = chart.own ? number(value) : position(value);
  }
  for (const mark of chart.marks || []) {
    if (chart.own) break;
    const at = x(mark[axis]);
    node("line", { x1: at, x2: at, y1: top, y2: height - bottom, class: "mark", stroke: `var(--${mark.kind})` }, svg);
  }
  for (const line of chart.lines) drawLine(svg, line, x, y);
  for (const dots of chart.dots || []) {
    dots.y.forEach((value, i) => {
      if (value !== null) node("circle", { cx: x(xs(dots)[i]), cy: y(value), r: 3.2, fill: dots.color, stroke: "var(--card)", "stroke-width": 1.2 }, svg);
    });
  }
  if (chart.after) chart.after(svg, x);
  chart.cross = node("line", { y1: top, y2: height - bottom, class: "cross", visibility: "hidden" }, svg);
}

function drawLine(svg, line, x, y) {
  const at = xs(line);
  if (line.band) {
    const up = at.map((value, i) => line.band[1][i] === null ? null : `${x(value).toFixed(1)},${y(line.band[1][i]).toFixed(1)}`).filter(Boolean);
    const down = at.map((value, i) => line.band[0][i] === null ? null : `${x(value).toFixed(1)},${y(line.band[0][i]).toFixed(1)}`).filter(Boolean);
    node("path", { d: "M" + [...up, ...down.reverse()].join("L") + "Z", class: "band", fill: line.color }, svg);
  }
  let path = "", pen = false, last = null;
  at.forEach((value, i) => {
    if (line.y[i] === null) { pen = false; return; }
    const px = x(value).toFixed(1), py = y(line.y[i]).toFixed(1);
    if (line.style === "steps" && pen) path += `H${px}`;
    path += `${pen ? "L" : "M"}${px},${py}`;
    pen = true;
    last = i;
  });
  if (at.length === 1 && last !== null) node("circle", { cx: x(at[0]), cy: y(line.y[0]), r: 3, fill: line.color }, svg);
  node("path", { d: path || "M0,0", class: `curve ${line.style || ""}`, stroke: line.color }, svg);
}

function nearest(values, wanted) {
  let low = 0, high = values.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle; else high = middle;
  }
  return Math.abs(values[low] - wanted) <= Math.abs(values[high] - wanted) ? low : high;
}

function point(chart, event) {
  const box = chart.svg.getBoundingClientRect(), place = chart.place;
  const px = ((event.clientX - box.left) / box.width) * place.width;
  if (px < place.left || px > place.width - place.right) return leave();
  const value = place.low + ((px - place.left) / (place.width - place.left - place.right)) * (place.high - place.low);
  for (const other of charts) {
    if (Boolean(other.own) !== Boolean(chart.own) || (chart.own && other !== chart)) { if (other.cross) other.cross.setAttribute("visibility", "hidden"); continue; }
    const at = other.place.x(value);
    other.cross.setAttribute("x1", at);
    other.cross.setAttribute("x2", at);
    other.cross.setAttribute("visibility", "visible");
  }
  const rows = [];
  for (const line of chart.lines) {
    if (line.style === "raw" || !line.y.length) continue;
    const at = xs(line);
    if (value > at[at.length - 1] + (place.high - place.low) * 0.02) continue;
    const i = nearest(at, value);
    if (line.y[i] !== null) rows.push([line.name, (chart.format || number)(line.y[i]), line.color]);
  }
  const near = (chart.events || []).filter((one) => Math.abs(place.x(one[axis]) - px) < 7).slice(0, 5);
  tell(event, chart.own ? `${chart.unit} ${Math.round(value)}` : `${AXES[axis]}: ${position(value)}`, rows, near);
}

function tell(event, title, rows, near) {
  const tip = document.getElementById("tip");
  tip.replaceChildren(element("b", {}, title));
  for (const [name, value, color] of rows) {
    const label = element("span", {}, name);
    label.style.color = color;
    tip.append(element("div", {}, label, element("span", {}, value)));
  }
  for (const one of near) {
    const text = element("p", {}, `${one.event} after step ${one.step}: ${one.reason}`);
    text.style.color = `var(--${one.kind})`;
    tip.append(text);
  }
  tip.hidden = false;
  const wide = tip.offsetWidth, tall = tip.offsetHeight;
  tip.style.left = Math.max(4, event.clientX + 16 + wide > innerWidth ? event.clientX - wide - 12 : event.clientX + 16) + "px";
  tip.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - tall - 6)) + "px";
}

function leave() {
  document.getElementById("tip").hidden = true;
  for (const chart of charts) if (chart.cross) chart.cross.setAttribute("visibility", "hidden");
}

function drawAll() {
  for (const chart of charts) draw(chart);
}
