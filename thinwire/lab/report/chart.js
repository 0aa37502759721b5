"use strict";
// Charts as inline SVG. Every function here takes plain data and returns elements; report.js says what to draw.
// Colours are CSS variables: a theme or the printer changes them without a redraw.

const SVG_NAMESPACE = "http://www.w3.org/2000/svg";
const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif";
// A step is forward + backward, what it waited for the exchange, and the rest. The exchange itself runs partly beside it.
const STEP = { forward_backward: "forward + backward", wait: "wait for the exchange", other: "other" };
const EXCHANGE = { compress: "compress", communicate: "communicate" };
const PHASES = { ...STEP, ...EXCHANGE };

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG_NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== undefined) node.setAttribute(name, value);
  node.append(...children.filter((child) => child !== null));
  return node;
}

function html(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in node && name !== "style") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function text(x, y, content, attributes = {}) {
  return svg("text", { x, y, "font-size": 12, fill: "var(--quiet)", ...attributes }, content);
}

// --- numbers as people read them ------------------------------------------------------------------

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

function plain(value, digits = 3) {
  if (!known(value)) return "–";
  const magnitude = Math.abs(value);
  if (magnitude !== 0 && (magnitude < 1e-4 || magnitude >= 1e9)) return value.toExponential(digits - 1);
  const places = magnitude === 0 ? 0 : Math.max(0, digits - 1 - Math.floor(Math.log10(magnitude)));
  return value.toLocaleString("en-US", { maximumFractionDigits: Math.min(places, 8) });
}

function withUnit(value, steps, digits) {
  if (value === 0) return "0";
  const [size, unit] = steps.find(([size]) => Math.abs(value) >= size * 0.99995) || steps[steps.length - 1];
  return `${plain(value / size, digits)} ${unit}`;
}

const FORMATS = {
  count: (value) => (known(value) ? Math.round(value).toLocaleString("en-US") : "–"),
  number: plain,
  percent: (value, digits) => (known(value) ? `${plain(value, digits)} %` : "–"),
  times: (value, digits) => (known(value) ? `${plain(value, digits)}×` : "–"),
  bytes: (value, digits) =>
    known(value) ? withUnit(value, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]], digits) : "–",
  seconds: (value, digits) =>
    known(value) ? withUnit(value, [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"], [1e-3, "ms"]], digits) : "–",
  ms: (value, digits) => (known(value) ? withUnit(value, [[1000, "s"], [1, "ms"], [1e-3, "µs"]], digits) : "–"),
};

/** A ratio to dense in words: "2.6× sooner", "1.13× later" instead of 0.884 times as soon, "the same". */
function against(ratio, more, less) {
  if (!known(ratio)) return "–";
  const times = Math.max(ratio, 1 / ratio), value = plain(times, times < 2 ? 3 : 2);
  return value === "1" ? "the same" : `${value}× ${ratio > 1 ? more : less}`;
}

/** Labels of an axis: as many decimals as tell the ticks apart, the same for all. */
function tickLabels(axis, ticks) {
  if (axis.kind !== "number" || axis.log || ticks.length < 2) return ticks.map((tick) => FORMATS[axis.kind](tick));
  const whole = (places) => ticks.every((tick) => Math.abs(tick * 10 ** places - Math.round(tick * 10 ** places)) < 1e-6);
  const places = [0, 1, 2, 3, 4, 5, 6].find(whole) ?? 6;
  return ticks.map((tick) => tick.toLocaleString("en-US", { minimumFractionDigits: places, maximumFractionDigits: places }));
}

// --- scales: from data to pixels ------------------------------------------------------------------

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) if (known(value)) { low = Math.min(low, value); high = Math.max(high, value); }
  return low <= high ? [low, high] : null;
}

function linearTicks(low, high, count, factors = [1, 2, 2.5, 5, 10]) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * factors.find((factor) => factor * power >= rough * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step + 0); // -0 + 0 is 0
  return ticks;
}

function logTicks(low, high, count) {
  const decades = Math.log10(high / low);
  if (decades < 0.9) return linearTicks(low, high, count).filter((tick) => tick > 0);
  const digits = decades > count / 2 ? [1] : decades > count / 3 ? [1, 3] : [1, 2, 5];
  const every = Math.max(1, Math.ceil(decades / count));
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    for (const digit of digits) {
      const tick = digit * 10 ** power;
      if (power % every === 0 && tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
    }
  return ticks;
}

/** A function from [low, high] to pixels [from, to], with ticks; axis: {log, ticks}. */
function scaleOf([low, high], from, to, axis, count) {
  const forward = axis.log ? Math.log : (value) => value;
  const start = forward(low), length = forward(high) - start || 1;
  const scale = (value) => from + ((forward(value) - start) / length) * (to - from);
  scale.domain = [low, high];
  scale.ticks = axis.ticks ? thinned(axis.ticks.filter((t) => t >= low && t <= high), count)
    : (axis.log ? logTicks : linearTicks)(low, high, count);
  return scale;
}

const thinned = (ticks, count) => ticks.filter((_, i) => i % Math.ceil(ticks.length / Math.max(1, count)) === 0);

/** Room around the values, and a domain of some width even for one value. */
function padded([low, high], axis) {
  if (axis.log) return low === high ? [low / 2, high * 2] : [low / (high / low) ** 0.04, high * (high / low) ** 0.04];
  const room = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
  return [axis.zero || (low >= 0 && low < room) ? 0 : low - room, Math.min(high + room, Math.max(axis.most ?? Infinity, high))];
}

/** The domain out to the next ticks where these are near: a reader sees between which numbers the curves lie. */
function toTicks([low, high], axis, count) {
  if (axis.log || axis.ticks) return [low, high];
  const ticks = linearTicks(low, high, count), step = ticks[1] - ticks[0], near = 0.1 * (high - low);
  const [below, above] = [ticks[0] - step, ticks[ticks.length - 1] + step];
  return [low - below <= near ? below : low, above - high <= near && above <= (axis.most ?? Infinity) ? above : high];
}

// --- line charts ----------------------------------------------------------------------------------

const MARKERS = [
  (r) => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0`,
  (r) => `M${-r},${-r}H${r}V${r}H${-r}Z`,
  (r) => `M0,${-1.3 * r}L${1.25 * r},${r}H${-1.25 * r}Z`,
  (r) => `M0,${-1.4 * r}L${1.4 * r},0L0,${1.4 * r}L${-1.4 * r},0Z`,
  (r) => `M0,${1.3 * r}L${1.25 * r},${-r}H${-1.25 * r}Z`,
];

function marker(style, x, y, radius = 3, attributes = {}) {
  return svg("path", { d: MARKERS[style.marker](radius), transform: `translate(${x.toFixed(2)},${y.toFixed(2)})`,
    fill: style.color, ...attributes });
}

/** "M..L.." through the points that are there; a gap where a value is missing. */
function pathOf(xs, ys, x, y) {
  let path = "", pen = "M";
  for (let i = 0; i < xs.length; i++) {
    const [px, py] = [x(xs[i]), y(ys[i])];
    if (known(xs[i]) && known(ys[i]) && Number.isFinite(px) && Number.isFinite(py)) {
      path += `${pen}${px.toFixed(2)},${py.toFixed(2)}`;
      pen = "L";
    } else pen = "M";
  }
  return path;
}

function bandOf(xs, low, high, x, y) {
  const there = xs.map((_, i) => i).filter((i) => [xs[i], low[i], high[i], x(xs[i]), y(low[i]), y(high[i])].every(known));
  if (there.length < 2) return "";
  const edge = (values, order) => order.map((i) => `${x(xs[i]).toFixed(2)},${y(values[i]).toFixed(2)}`).join("L");
  return `M${edge(high, there)}L${edge(low, [...there].reverse())}Z`;
}

/**
 * chart: {title, x: axis, y: axis, curves: [curve]}, axis: {label, kind, log, zero, most, ticks}
 * curve: {method, style, x: [], y: [], low, high, raw: [], line: bool, markers: bool, whiskers: bool, note}
 * Returns {node, x, y, plot} for the pointer, or null when there is nothing to draw.
 */
function drawLines(chart, width, height, legend = false) {
  const shown = chart.curves.filter((curve) => curve.y.some(known));
  const usable = (axis) => (value) => known(value) && (!axis.log || value > 0);
  const xs = extent(shown.flatMap((curve) => curve.x).filter(usable(chart.x)));
  const ending = (curve, values) => (chart.y.zoom ? values.slice(Math.floor(values.length / 2)) : values);
  const ys = extent(shown.flatMap((curve) =>
    [...ending(curve, curve.y), ...ending(curve, curve.low || []), ...ending(curve, curve.high || [])]).filter(usable(chart.y)));
  if (!xs || !ys) return null;

  const legendRows = legend ? legendOf(shown, width) : { node: null, height: 0 };
  const top = (legend ? 54 : 24) + legendRows.height, bottom = height - 42;
  const rows = Math.max(3, (bottom - top) / 42);
  const y = scaleOf(toTicks(padded(ys, chart.y), chart.y, rows), bottom, top, chart.y, rows);
  const yLabels = tickLabels(chart.y, y.ticks);
  const labels = chart.labelled && !legend ? shown.filter((curve) => curve.line).map((curve) => ({ curve, name: shortName(curve.method, shown.map((other) => other.method), width < 500 ? 16 : 26) })) : [];
  const left = 12 + 6.6 * Math.max(...yLabels.map((label) => label.length));
  const right = width - (labels.length ? Math.min(0.4 * width, 14 + Math.max(...labels.map(widthOf))) : 14);
  const xDomain = chart.x.zero && !chart.x.log ? [0, xs[1] * 1.02 || 1] : padded(xs, chart.x);
  const x = scaleOf(xDomain, left, right, chart.x, Math.max(2, (right - left) / (chart.x.log ? 52 : 72)));

  const node = svg("svg", { viewBox: `0 0 ${width} ${height}`, xmlns: SVG_NAMESPACE, "font-family": FONT, role: "img",
    "aria-label": `${chart.title}: ${shown.map((curve) => curve.method).join(", ")}` });
  if (legend) node.append(text(left, 18, chart.title, { "font-size": 14, "font-weight": 600, fill: "var(--ink)" }), legendRows.node);
  node.append(text(0, top - 13, chart.y.label));
  for (const [i, tick] of y.ticks.entries())
    node.append(svg("line", { x1: left, x2: right, y1: y(tick), y2: y(tick), stroke: "var(--grid)" }),
      text(left - 6, y(tick) + 4, yLabels[i], { "text-anchor": "end" }));
  const xLabels = tickLabels(chart.x, x.ticks);
  for (const [i, tick] of x.ticks.entries())
    node.append(svg("line", { x1: x(tick), x2: x(tick), y1: bottom, y2: bottom + 4, stroke: "var(--quiet)" }),
      text(x(tick), bottom + 17, xLabels[i], { "text-anchor": "middle" }));
  node.append(svg("line", { x1: left, x2: right, y1: bottom, y2: bottom, stroke: "var(--quiet)" }),
    text((left + right) / 2, height - 6, chart.x.label + (chart.x.log ? " (log scale)" : ""), { "text-anchor": "middle" }));

  const clip = `clip${drawLines.count = (drawLines.count || 0) + 1}`;
  node.append(svg("clipPath", { id: clip }, svg("rect", { x: left - 5, y: top - 5, width: right - left + 10, height: bottom - top + 6 })));
  const layer = svg("g", { "clip-path": `url(#${clip})` });
  node.append(layer);
  for (const curve of shown) layer.append(drawCurve(curve, x, y));
  placeLabels(node, labels, x, y, { top, bottom, width });
  return { node, x, y, shown, plot: { left, right, top, bottom } };
}

const widthOf = ({ name }) => 6.7 * name.length + 4;

/** The name before its options where no other of the methods has it; else beginning and end of the whole. */
function shortName(method, methods, most) {
  const name = method.split(/[: ]/)[0];
  if (new Set(methods.filter((other) => other.split(/[: ]/)[0] === name)).size === 1) return name;
  const head = Math.floor(0.45 * most);
  return method.length <= most ? method : `${method.slice(0, head)}…${method.slice(head + 1 - most)}`;
}

/** A name beside the end of each line; names that would lie on each other move apart, and a thin line says whose they are. */
function placeLabels(node, labels, x, y, { top, bottom, width }) {
  const LINE = 14;
  const there = labels.flatMap((label) => {
    let i = label.curve.y.length - 1;
    while (i >= 0 && !(known(label.curve.y[i]) && Number.isFinite(x(label.curve.x[i])))) i--;
    if (i < 0) return [];
    const px = x(label.curve.x[i]), py = Math.max(top, Math.min(bottom, y(label.curve.y[i])));
    return [{ ...label, px, py, at: Math.max(0, Math.min(px + 9, width - widthOf(label))), y: py }];
  }).sort((a, b) => a.py - b.py);
  const beside = (a, b) => a.at < b.at + widthOf(b) && b.at < a.at + widthOf(a);
  there.forEach((label, i) => { for (const other of there.slice(0, i)) if (beside(label, other)) label.y = Math.max(label.y, other.y + LINE); });
  for (let i = there.length - 1; i >= 0; i--) {
    there[i].y = Math.min(there[i].y, bottom - 4);
    for (const other of there.slice(i + 1)) if (beside(there[i], other)) there[i].y = Math.min(there[i].y, other.y - LINE);
  }
  for (const { curve, name, px, py, at, y: place } of there) {
    const group = svg("g", { "data-method": curve.method, class: "label" });
    if (Math.abs(place - py) > 6) group.append(svg("line", { x1: px + 4, y1: py, x2: at - 1, y2: place, stroke: curve.style.color, "stroke-width": 0.75 }));
    group.append(text(at, place + 4, name, { fill: curve.style.color, "font-weight": 600, stroke: "var(--card)", "stroke-width": 3, "paint-order": "stroke", "stroke-linejoin": "round" }));
    node.append(group);
  }
}

function drawCurve(curve, x, y) {
  const { style } = curve;
  const group = svg("g", { "data-method": curve.method });
  if (curve.low && !curve.whiskers)
    group.append(svg("path", { d: bandOf(curve.x, curve.low, curve.high, x, y), fill: style.color, opacity: 0.16, class: "band" }));
  if (curve.raw)
    group.append(svg("path", { d: pathOf(curve.x, curve.raw, x, y), fill: "none", stroke: style.color, opacity: 0.28, class: "raw" }));
  if (curve.line)
    group.append(svg("path", { d: pathOf(curve.x, curve.y, x, y), fill: "none", stroke: style.color, "stroke-width": 2,
      "stroke-dasharray": style.dash || undefined, "stroke-linejoin": "round", class: "curve" }));
  for (let i = 0; i < curve.x.length; i++) {
    const [px, py] = [x(curve.x[i]), y(curve.y[i])];
    if (!known(curve.y[i]) || !Number.isFinite(px) || !Number.isFinite(py)) continue;
    if (curve.whiskers && known(curve.low?.[i]) && known(curve.high?.[i]))
      group.append(svg("line", { x1: px, x2: px, y1: y(curve.low[i]), y2: y(curve.high[i]), stroke: style.color, "stroke-width": 1.5 }));
    if (curve.markers) group.append(marker(style, px, py, curve.whiskers ? 4 : 3,
      { stroke: "var(--card)", "stroke-width": 1, class: "point" }));
  }
  return group;
}

/** Names with their line in front, for exported charts; wraps to the width. */
function legendOf(curves, width) {
  const group = svg("g");
  const seen = new Map(curves.map((curve) => [curve.method, curve.style]));
  let left = 12, row = 0;
  for (const [method, style] of seen) {
    const length = 48 + 7 * method.length;
    if (left > 12 && left + length > width) { left = 12; row++; }
    group.append(svg("g", { transform: `translate(${left},${30 + 18 * row})` }, sample(style), text(30, 10, method, { fill: "var(--ink)" })));
    left += length;
  }
  return { node: group, height: 18 * (row + 1) };
}

/** A short piece of a method's line with its marker. */
function sample(style) {
  return svg("svg", { width: 26, height: 12, viewBox: "0 0 26 12" },
    svg("line", { x1: 0, x2: 26, y1: 6, y2: 6, stroke: style.color, "stroke-width": 2, "stroke-dasharray": style.dash || undefined }),
    marker(style, 13, 6, 3));
}

// --- bars -----------------------------------------------------------------------------------------

const sumOf = (parts, phases) => Object.keys(phases).reduce((sum, phase) => sum + (parts[phase] || 0), 0);

/** chart: {title, label, kind, rows: [{method, parts: {phase: value}}]}: the step as a bar, the exchange thinner under it. */
function drawBars(chart, width, legend = false) {
  const rows = chart.rows.map((row) => ({ ...row, total: sumOf(row.parts, STEP), exchange: sumOf(row.parts, EXCHANGE) }));
  if (!rows.length) return null;
  const top = legend ? 58 : 4, pitch = 50, bottom = top + pitch * rows.length, height = bottom + 40;
  const right = width - 70;
  const x = scaleOf([0, Math.max(...rows.map((row) => Math.max(row.total, row.exchange))) || 1], 1, right, {}, Math.max(2, right / 90));
  const node = svg("svg", { viewBox: `0 0 ${width} ${height}`, xmlns: SVG_NAMESPACE, "font-family": FONT, role: "img", "aria-label": chart.title });
  if (legend) node.append(text(2, 18, chart.title, { "font-size": 14, "font-weight": 600, fill: "var(--ink)" }), phaseKeys());
  for (const tick of x.ticks)
    node.append(svg("line", { x1: x(tick), x2: x(tick), y1: top, y2: bottom, stroke: "var(--grid)" }),
      text(x(tick), bottom + 15, FORMATS[chart.kind](tick), { "text-anchor": tick === 0 ? "start" : "middle" }));
  node.append(text(1, height - 5, chart.label));
  rows.forEach((row, i) => {
    const y = top + i * pitch;
    const group = svg("g", { "data-method": row.method }, text(1, y + 14, row.label || row.method, { fill: "var(--ink)" }));
    stack(group, row.parts, STEP, x, y + 19, 15);
    stack(group, row.parts, EXCHANGE, x, y + 36, 6);
    group.append(text(x(row.total) + 6, y + 31, FORMATS[chart.kind](row.total), { fill: "var(--ink)" }));
    node.append(group);
  });
  return { node, rows };
}

function stack(group, parts, phases, x, y, height) {
  let done = 0;
  for (const phase of Object.keys(phases)) {
    const value = parts[phase] || 0;
    if (value > 0)
      group.append(svg("rect", { x: x(done), y, width: Math.max(0.5, x(done + value) - x(done)), height, fill: `var(--${phase})`,
        stroke: "var(--card)", "stroke-width": 0.5, "data-phase": phase, "data-value": value }));
    done += value;
  }
}

function phaseKeys() {
  const group = svg("g");
  let left = 2;
  for (const [phase, name] of Object.entries(PHASES)) {
    group.append(svg("rect", { x: left, y: 32, width: 11, height: 11, fill: `var(--${phase})` }), text(left + 16, 42, name));
    left += 34 + 6.4 * name.length;
  }
  return group;
}

/** chart: {title, label, rows: [{method, style, filled, hollow}]}: two dots a method on a log axis from 1. */
function drawDots(chart, width, legend = false) {
  const values = extent(chart.rows.flatMap((row) => [row.filled, row.hollow]).filter((value) => value > 0));
  if (!values) return null;
  const top = legend ? 58 : 4, pitch = 44, bottom = top + pitch * chart.rows.length, height = bottom + 40;
  const right = width - 70;
  const low = Math.min(1, values[0]);
  const x = scaleOf([low, Math.max(values[1], low * 10)], 8, right, { log: true }, Math.max(2, right / 70));
  const node = svg("svg", { viewBox: `0 0 ${width} ${height}`, xmlns: SVG_NAMESPACE, "font-family": FONT, role: "img", "aria-label": chart.title });
  if (legend) node.append(text(2, 18, chart.title, { "font-size": 14, "font-weight": 600, fill: "var(--ink)" }), text(2, 42, chart.keys));
  for (const tick of x.ticks)
    node.append(svg("line", { x1: x(tick), x2: x(tick), y1: top, y2: bottom, stroke: "var(--grid)" }),
      text(x(tick), bottom + 15, FORMATS.times(tick), { "text-anchor": "middle" }));
  node.append(text(1, height - 5, chart.label));
  chart.rows.forEach((row, i) => {
    const y = top + i * pitch + 27;
    const group = svg("g", { "data-method": row.method }, text(1, y - 13, row.method, { fill: "var(--ink)" }));
    if (row.filled > 0)
      group.append(svg("line", { x1: x(1), x2: x(row.filled), y1: y, y2: y, stroke: row.style.color, "stroke-width": 2 }));
    if (row.hollow > 0)
      group.append(svg("circle", { cx: x(row.hollow), cy: y, r: 6, fill: "none", stroke: row.style.color, "stroke-width": 2 }));
    if (row.filled > 0) group.append(svg("circle", { cx: x(row.filled), cy: y, r: 4, fill: row.style.color }));
    group.append(text(Math.max(x(row.filled || 1), x(row.hollow || 1)) + 12, y + 4, FORMATS.times(row.filled), { fill: "var(--ink)" }));
    node.append(group);
  });
  return { node, rows: chart.rows };
}
