// What the page shows: reads the JSON block, builds legend, charts, tables and sources, and draws again on a click.

const data = JSON.parse(document.getElementById("data").textContent);
const hidden = new Set();
const figures = [];
const main = document.getElementById("main");

// --- how a method looks, everywhere ---------------------------------------------------------------

const DASHES = ["", "9 3", "2.5 3", "9 3 2.5 3", "16 4", "6 2 2 2 2 2"];
const styles = new Map();
for (const method of data.methods) {
  const name = method.split(/[: ]/)[0];
  const i = [...styles.values()].filter((style) => style.numbered).length;
  if (method === "dense") styles.set(method, { color: "var(--dense)", dash: "5 3", marker: 1 });
  else if (name === "noop") styles.set(method, { color: "var(--noop)", dash: "1 3", marker: 0 });
  else styles.set(method, { color: `var(--m${i % 8})`, dash: DASHES[(i + Math.floor(i / 8)) % DASHES.length],
    marker: [0, 2, 3, 4, 1][i % 5], numbered: true });
}

const legend = document.getElementById("legend");
for (const method of data.methods) {
  const toggle = () => { hidden.has(method) ? hidden.delete(method) : hidden.add(method); redraw(); };
  const alone = () => { data.methods.forEach((other) => hidden.add(other)); hidden.delete(method); redraw(); };
  legend.append(html("button", { type: "button", "data-method": method, title: "Click: hide or show. Double click: only this one.",
    onclick: toggle, ondblclick: alone }, sample(styles.get(method)), method));
}
const showAll = html("button", { type: "button", className: "all", onclick: () => { hidden.clear(); redraw(); } }, "show all");
legend.append(showAll);

function redraw() {
  hideTooltip();
  for (const button of legend.querySelectorAll("[data-method]")) button.setAttribute("aria-pressed", String(!hidden.has(button.dataset.method)));
  showAll.hidden = !hidden.size;
  for (const figure of figures) figure.draw();
  for (const row of document.querySelectorAll("tr[data-method]")) row.hidden = hidden.has(row.dataset.method);
}

addEventListener("beforeprint", () => figures.forEach((figure) => figure.wide ? figure.draw(360, 300) : figure.draw(250, 230)));
addEventListener("afterprint", redraw);

const visible = (rows) => rows.filter((row) => !hidden.has(row.method));

// --- a chart on the page --------------------------------------------------------------------------

/**
 * kind: "lines" | "bars" | "dots"; describe(options) returns the chart to draw for the options now chosen.
 * options: {name: {label, on, title}}: buttons that turn something on and off.
 */
function addFigure(parent, { id, kind, describe, options = {}, keys, height = 300 }) {
  const canvas = html("div", { className: "canvas" });
  const caption = html("figcaption");
  const buttons = html("div", { className: "buttons" });
  const heading = html("h3");
  const node = html("figure", { id, tabIndex: 0 }, html("div", { className: "head" }, heading, buttons), keys, canvas, caption);
  const figure = { id, chart: null, drawn: null, wide: parent.classList.contains("wide") };
  const render = (width, tall, legend) => kind === "lines" ? drawLines(figure.chart, width, tall, legend)
    : (kind === "bars" ? drawBars : drawDots)(figure.chart, width, legend);

  figure.draw = (width = Math.max(240, canvas.clientWidth || 400), tall = height) => {
    figure.chart = describe(Object.fromEntries(Object.entries(options).map(([name, option]) => [name, option.on])));
    heading.textContent = figure.chart.title;
    caption.textContent = figure.chart.caption || "";
    caption.hidden = !caption.textContent;
    figure.drawn = render(width, tall, false);
    canvas.replaceChildren(figure.drawn?.node || html("p", { className: "quiet" }, "Nothing to show: no method is visible, or none has these numbers."));
  };
  /** The chart alone, for papers: light colours, a legend inside, no variables. */
  figure.export = () => {
    const node = render(640, 420, true)?.node;
    if (!node) return null;
    const box = node.viewBox.baseVal;
    node.setAttribute("width", box.width);
    node.setAttribute("height", box.height);
    node.prepend(svg("rect", { width: box.width, height: box.height, fill: "#ffffff" }));
    const colours = getComputedStyle(document.documentElement);
    const text = new XMLSerializer().serializeToString(node);
    return { width: box.width, height: box.height,
      text: text.replace(/var\((--[\w-]+)\)/g, (_, name) => /#\w+/.exec(colours.getPropertyValue(name))[0]) };
  };
  for (const option of Object.values(options)) {
    const button = html("button", { type: "button", className: "option", title: option.title, "aria-pressed": String(option.on) }, option.label);
    button.onclick = () => { option.on = !option.on; button.setAttribute("aria-pressed", String(option.on)); figure.draw(); };
    buttons.append(button);
  }
  buttons.append(
    html("button", { type: "button", title: "Download as SVG", onclick: () => saveSvg(figure) }, "SVG"),
    html("button", { type: "button", title: "Download as PNG", onclick: () => savePng(figure) }, "PNG"));
  if (kind === "lines") followPointer(node, canvas, () => figure);
  else followRows(canvas, () => figure);
  new ResizeObserver(() => { if (canvas.clientWidth !== figure.width) { figure.width = canvas.clientWidth; figure.draw(); } }).observe(canvas);
  parent.append(node);
  figures.push(figure);
}

function save(name, blob) {
  const link = html("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

function saveSvg(figure) {
  const made = figure.export();
  if (made) save(`${figure.id}.svg`, new Blob([made.text], { type: "image/svg+xml" }));
}

function savePng(figure, scale = 3) {
  const made = figure.export();
  if (!made) return;
  const image = new Image();
  image.onload = () => {
    const canvas = html("canvas", { width: made.width * scale, height: made.height * scale });
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((blob) => save(`${figure.id}.png`, blob), "image/png");
  };
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(made.text)}`;
}

// --- training curves ------------------------------------------------------------------------------

/** The mean of each value and equally many on both sides, fewer near the ends: it neither lags behind nor bends there. */
function runningMean(values, reach) {
  return values.map((value, i) => {
    const side = Math.min(reach, i, values.length - 1 - i);
    const near = values.slice(i - side, i + side + 1).filter(known);
    return known(value) ? near.reduce((sum, one) => sum + one, 0) / near.length : null;
  });
}

const reachOf = (length) => (length < 20 ? 0 : Math.max(1, Math.round(length / 40)));
const lengthOf = (one) => (one.steps.step || []).length;

function timeAxis(series) {
  const longest = Math.max(...series.flatMap((one) => [...(one.epochs.seconds || []), ...(one.steps.seconds || [])]).filter(known), 0);
  const [unit, word] = longest > 7200 ? [3600, "hours"] : longest > 300 ? [60, "minutes"] : [1, "seconds"];
  return { key: "seconds", name: "time", label: `time (${word})`, kind: "number", tip: "seconds", unit, zero: true };
}

function byteAxis(series) {
  const last = extent(series.map((one) => one.row.bytes_sent).filter((value) => value > 0));
  return { key: "bytes", name: "sent", label: "bytes sent by a worker", kind: "bytes", tip: "bytes", zero: true,
    log: Boolean(last && last[1] / last[0] > 8) };
}

function curvesOf(series, xAxis, value, smooth) {
  return visible(series).flatMap((one) => {
    const fine = value === "loss" && lengthOf(one) > 1;
    const columns = fine ? one.steps : one.epochs;
    if (!columns.step) return [];
    const smoothed = fine && smooth && reachOf(lengthOf(one)) ? runningMean(columns[value], reachOf(lengthOf(one))) : null;
    return [{
      method: one.method, style: styles.get(one.method), line: true, markers: !fine && columns.step.length <= 40,
      x: columns[xAxis.key].map((x) => (known(x) ? x / (xAxis.unit || 1) : null)), y: smoothed || columns[value],
      raw: smoothed ? columns[value] : null, low: columns[`${value}_low`], high: columns[`${value}_high`],
    }];
  });
}

function addCurves(section, parent, number) {
  const { metric, series } = section;
  const percent = metric.unit === "%" ? "percent" : "number";
  const yAxes = {
    metric: { label: metric.name + (metric.unit ? ` (${metric.unit})` : ""), kind: "number", tip: percent,
      most: metric.unit === "%" ? 100 : undefined, lowerFirst: !metric.higher_is_better },
    loss: { label: "training loss", kind: "number", tip: "number", lowerFirst: true },
  };
  const long = series.some((one) => reachOf(lengthOf(one)) > 0);
  for (const value of ["metric", "loss"])
    for (const x of [{ key: "step", name: "step", label: "steps", kind: "count", tip: "count", zero: true }, timeAxis(series), byteAxis(series)]) {
      const options = { log: { label: "log x", on: Boolean(x.log), title: "Logarithmic x axis" },
        zoom: { label: "zoom y", on: false, title: "Fit the y axis to the second half of every curve" } };
      if (value === "loss" && long) options.smooth = { label: "smooth", on: true, title: "Running mean; what was logged stays faintly visible" };
      addFigure(parent, { id: `${section.id}-${value}-${x.key}`, kind: "lines", options, describe: ({ log, zoom, smooth }) => ({
        title: `${value === "metric" ? metric.name : "loss"} over ${{ step: "steps", seconds: "time", bytes: "bytes" }[x.key]}`,
        x: { ...x, log }, y: { ...yAxes[value], zoom }, curves: curvesOf(series, x, value, smooth),
        caption: smooth ? smoothingNote(series) : "" }) });
    }
}

function smoothingNote(series) {
  const widths = extent(visible(series).filter((one) => reachOf(lengthOf(one))).map((one) => 2 * reachOf(lengthOf(one)) + 1));
  if (!widths) return "";
  const thin = Math.max(...series.map((one) => one.averaged || 1));
  return `Line: mean over ${[...new Set(widths)].join(" to ")} neighbouring log lines; faint: as logged` + (thin > 1 ? `, ${thin} lines averaged to a point.` : ".");
}

// --- time and bytes -------------------------------------------------------------------------------

const phaseTip = (row) => [
  { name: "step", value: FORMATS.ms(row.total) },
  ...Object.entries(STEP).map(([phase, name]) => ({ name: `– ${name}`, value: FORMATS.ms(row.parts[phase] || 0) })),
  { name: "exchange", value: FORMATS.ms(row.exchange) },
  ...Object.entries(EXCHANGE).map(([phase, name]) => ({ name: `– ${name}`, value: FORMATS.ms(row.parts[phase] || 0) })),
];

function phaseLegend() {
  const key = ([phase, name]) => html("span", {}, html("i", { style: `background:var(--${phase})` }), name);
  return html("div", { className: "keys" }, ...Object.entries(PHASES).map(key));
}

const TWO_BARS = "Upper bar: the step. Lower bar: the exchange, a part of which runs beside the backward pass.";

function addBreakdown(parent, id, title, rows, caption) {
  addFigure(parent, { id, kind: "bars", keys: phaseLegend(), describe: () => ({
    title, caption, label: "time of a step", kind: "ms", rows: visible(rows), tip: phaseTip }) });
}

function addRatios(section, parent) {
  const rows = section.series.filter((one) => known(one.row.ratio))
    .map((one) => ({ method: one.method, style: styles.get(one.method), filled: one.row.ratio, hollow: one.row.link_ratio }));
  if (!rows.length) return;
  addFigure(parent, { id: `${section.id}-ratio`, kind: "dots", describe: () => ({
    title: "how much less is sent", label: "times fewer bytes than dense (log scale)", rows: visible(rows),
    keys: "dot: ratio of frames; ring: ratio on the link",
    caption: "Dot: dense fp32 bytes / bytes of the frames (the papers' ratio). Ring: bytes of a dense ring all-reduce / bytes over a worker's link.",
    tip: (row) => [{ name: "ratio", value: FORMATS.times(row.filled, 4) }, { name: "link ratio", value: FORMATS.times(row.hollow, 4) }] }) });
}

// --- sections -------------------------------------------------------------------------------------

function addSection(section, number) {
  section.id = `${section.recipe.toLowerCase().replace(/[^a-z0-9]+/g, "-")}${data.sections.length > 1 ? `-${number + 1}` : ""}`;
  const seeds = Math.max(...section.series.map((one) => one.seeds.length));
  main.append(html("h2", {}, section.recipe), html("p", { className: "quiet reading" },
    [section.setting, seeds > 1 ? "lines are means over seeds, bands reach from the lowest to the highest run" : ""].filter(Boolean).join("; ")));
  const curves = html("div", { className: "charts" }), bars = html("div", { className: "charts wide" });
  main.append(curves);
  addCurves(section, curves, number);
  addResults(section, main);
  addTarget(section, main);
  main.append(bars);
  const timed = section.series.filter((one) => Object.keys(one.breakdown_ms).length).map((one) => ({ method: one.method, parts: one.breakdown_ms }));
  if (timed.length) addBreakdown(bars, `${section.id}-breakdown`, "where the time of a step goes", timed, `Mean over all logged steps. ${TWO_BARS}`);
  addRatios(section, bars);
}

function addScaling(chart, number) {
  const id = `scaling-${number + 1}`;
  const { facts } = chart;
  const words = [facts.params && `${plain(facts.params / 1e6)} M parameters`, facts.compute_ms && `${FORMATS.ms(facts.compute_ms)} computing a step`,
    facts.alpha_s && `latency ${FORMATS.seconds(facts.alpha_s)}`, facts.beta_s_per_byte && `${plain(8e-6 / facts.beta_s_per_byte)} Mb/s`];
  main.append(html("h2", {}, `Scaling: ${chart.title}`), html("p", { className: "quiet reading" }, words.filter(Boolean).join(", ")));
  if (chart.recommended) main.append(html("p", { className: "reading" }, html("b", {}, `Adviser: ${chart.recommended}`), chart.reason ? ` – ${chart.reason}` : ""));
  const hosts = [...new Set([...chart.predicted.flatMap((one) => one.hosts), ...chart.measured.map((row) => row.hosts)])].filter(known).sort((a, b) => a - b);
  const grid = html("div", { className: "charts wide" });
  main.append(grid);
  addFigure(grid, { id, kind: "lines", height: 360, options: { log: { label: "log y", on: true, title: "Logarithmic y axis" } }, describe: ({ log }) => ({
    title: "step time over hosts", exact: true,
    x: { name: "hosts", label: "hosts", kind: "count", tip: "count", log: true, ticks: hosts },
    y: { label: "time of a step", kind: "ms", tip: "ms", log, zero: !log, lowerFirst: true },
    caption: [chart.predicted.length && "Lines: predicted.", chart.measured.length && "Points: measured, median with p20 to p80."].filter(Boolean).join(" "),
    curves: [
      ...visible(chart.predicted).map((one) => ({ method: one.method, note: "predicted", style: styles.get(one.method), line: true, x: one.hosts, y: one.step_ms })),
      ...[...new Set(visible(chart.measured).map((row) => row.method))].map((method) => {
        const rows = chart.measured.filter((row) => row.method === method).sort((a, b) => a.hosts - b.hosts);
        const pick = (key) => rows.map((row) => row[key]);
        return { method, note: "measured", style: styles.get(method), markers: true, whiskers: true, x: pick("hosts"), y: pick("step_ms_p50"), low: pick("step_ms_p20"), high: pick("step_ms_p80") };
      })] }) });
  if (!chart.measured.length) return;
  const timed = chart.measured.filter((row) => Object.keys(row.breakdown_ms).length)
    .map((row) => ({ method: row.method, label: `${row.method}, ${FORMATS.count(row.hosts)} hosts`, parts: row.breakdown_ms }));
  if (timed.length) addBreakdown(grid, `${id}-breakdown`, "where the time of a step goes, measured", timed, TWO_BARS);
  addTable(main, `${id}-table`, [
    nameColumn, column("hosts", (row) => row.hosts, FORMATS.count), column("step p50", (row) => row.step_ms_p50, FORMATS.ms),
    column("p20", (row) => row.step_ms_p20, FORMATS.ms), column("p80", (row) => row.step_ms_p80, FORMATS.ms),
    column("predicted", (row) => row.predicted_ms, FORMATS.ms),
    column("off by", (row) => known(row.predicted_ms) && row.step_ms_p50 ? 100 * (row.predicted_ms / row.step_ms_p50 - 1) : null, (value) => signed(value, " %")),
    column("samples/s", (row) => row.samples_per_s, plain), column("of no communication", (row) => known(row.share_of_noop) ? 100 * row.share_of_noop : null, FORMATS.percent),
    column("sent a step", (row) => row.bytes_per_step, FORMATS.bytes),
  ], chart.measured);
}

function addSources() {
  const line = (source) => html("tr", {},
    html("td", { "data-label": "from" }, html("b", {}, source.name), html("br"), html("span", { className: "quiet" }, [source.what, source.status].filter(Boolean).join(", "))),
    html("td", { "data-label": "command" }, html("span", {}, html("code", {}, source.command), source.command_note ? html("span", { className: "quiet" }, ` (${source.command_note})`) : "")),
    html("td", { "data-label": "commit", className: "short" }, source.commit || "not recorded"), html("td", { "data-label": "hardware" }, source.hardware || "not recorded"),
    html("td", { "data-label": "date", className: "short" }, source.date || "not recorded"),
    html("td", { "data-label": "also" }, html("span", { className: "quiet" }, Object.entries(source.facts).map(([name, value]) => `${name} ${value}`).join(", "))));
  main.append(html("h2", {}, "Where the numbers come from"), html("div", { className: "card", id: "sources" }, html("table", { className: "cards texts" },
    html("thead", {}, html("tr", {}, ...["from", "command", "commit", "hardware", "date", "also"].map((name) => html("th", { scope: "col" }, name)))),
    html("tbody", {}, ...data.sources.map(line)))));
}

function addNotices() {
  for (const { name, status, missing } of data.sources.filter((source) => source.status && source.status !== "finished"))
    document.getElementById("notices").append(html("p", { className: "notice" },
      `${name} is ${status}: this page shows what it has written so far${missing.length ? `; not at their end: ${missing.join(", ")}` : ""}.`));
}

// --- light and dark -------------------------------------------------------------------------------

const theme = document.getElementById("theme");
function setTheme(name) {
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  theme.textContent = { system: "◐ system", light: "☀ light", dark: "☾ dark" }[name];
  theme.onclick = () => setTheme({ system: "dark", dark: "light", light: "system" }[name]);
}

setTheme("system");
if (data.made) document.getElementById("made").textContent = `Made by thinwire ${data.made.version}, ${data.made.date}`;
addNotices();
data.sections.forEach(addSection);
data.scaling.forEach(addScaling);
addSources();
redraw();
