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

const folds = () => [...document.querySelectorAll("details")];
addEventListener("beforeprint", () => { // paper has no folds
  for (const fold of folds()) { fold.wasOpen = fold.open; fold.open = true; }
  figures.forEach((figure) => figure.wide ? figure.draw(360, 300) : figure.draw(250, 230));
});
addEventListener("afterprint", () => { for (const fold of folds()) fold.open = fold.wasOpen; redraw(); });

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
  const figure = { id, chart: null, drawn: null, wide: parent.classList.contains("wide"), options };
  const render = (width, tall, legend) => kind === "lines" ? drawLines(figure.chart, width, tall, legend)
    : (kind === "bars" ? drawBars : drawDots)(figure.chart, width, legend);

  figure.draw = (width = Math.max(240, canvas.clientWidth || 400), tall = width < 500 ? Math.min(height, 300) : height) => {
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
    option.set = (on) => { option.on = on; button.setAttribute("aria-pressed", String(on)); figure.draw(); };
    button.onclick = () => option.set(!option.on);
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

/** Whether the late part of the curves, which readers compare, would be squeezed into a small part of the y axis. */
function squeezed(series) {
  const curves = series.map((one) => (one.epochs.metric || []).filter(known)).filter((values) => values.length > 5);
  const all = extent(curves.flat()), late = extent(curves.flatMap((values) => values.slice(Math.floor(values.length / 2))));
  return Boolean(late && all[1] - all[0] > 4 * (late[1] - late[0]));
}

/** Two large charts with their lines labelled, in `large`; the others in `more`. */
function addCurves(section, large, more) {
  const { metric, series } = section;
  const percent = metric.unit === "%" ? "percent" : "number";
  const yAxes = {
    metric: { label: metric.name + (metric.unit ? ` (${metric.unit})` : ""), kind: "number", tip: percent,
      most: metric.unit === "%" ? 100 : undefined, lowerFirst: !metric.higher_is_better },
    loss: { label: "training loss", kind: "number", tip: "number", lowerFirst: true },
  };
  const long = series.some((one) => reachOf(lengthOf(one)) > 0);
  const axes = { step: { key: "step", name: "step", label: "steps", kind: "count", tip: "count", zero: true }, seconds: timeAxis(series), bytes: byteAxis(series) };
  const timed = !isUneven(section) && !series.some((one) => one.setting.includes("as threads"));
  const first = [timed ? "metric-seconds" : "metric-step", "metric-bytes"];
  const names = first.concat(["metric", "loss"].flatMap((value) => Object.keys(axes).map((key) => `${value}-${key}`)).filter((name) => !first.includes(name)));
  for (const name of names) {
    const [value, key] = name.split("-"), x = axes[key], labelled = first.includes(name);
    const options = { log: { label: "log x", on: Boolean(x.log), title: "Logarithmic x axis" },
      zoom: { label: "zoom y", on: value === "metric" && squeezed(series), title: "Fit the y axis to the second half of every curve" } };
    if (value === "loss" && long) options.smooth = { label: "smooth", on: true, title: "Running mean; what was logged stays faintly visible" };
    addFigure(labelled ? large : more, { id: `${section.id}-${name}`, kind: "lines", options, height: labelled ? 400 : 300, describe: ({ log, zoom, smooth }) => ({
      title: `${value === "metric" ? metric.name : "loss"} over ${{ step: "steps", seconds: "time", bytes: "bytes" }[key]}`, labelled,
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

/** What few readers need: closed until it is clicked, and open on paper. */
function addFold(parent, id, title, about) {
  const body = html("div");
  parent.append(html("details", { id }, html("summary", {}, title, html("span", { className: "quiet" }, about)), body));
  return body;
}

function addHeadline({ sentence, numbers }, parent) {
  if (!sentence) return;
  const big = ({ value, label }) => html("div", {}, html("b", {}, value), html("span", { className: "quiet" }, label));
  parent.append(html("div", { className: "headline" }, html("div", { className: "numbers" }, ...numbers.map(big)), html("p", {}, sentence)));
}

function addSection(section, number) {
  section.id = `${section.recipe.toLowerCase().replace(/[^a-z0-9]+/g, "-")}${data.sections.length > 1 ? `-${number + 1}` : ""}`;
  const seeds = Math.max(...section.series.map((one) => one.seeds.length));
  main.append(html("h2", {}, section.recipe), html("p", { className: "quiet reading" },
    [section.setting, seeds > 1 ? `lines are means over ${seeds} seeds, bands reach from the lowest to the highest run` : ""].filter(Boolean).join("; ")));
  addHeadline(section.headline, main);
  for (const sentence of Object.values(section.uneven)) main.append(html("p", { className: "notice" }, sentence));
  const large = html("div", { className: "charts large wide" }), more = html("div", { className: "charts" }), bars = html("div", { className: "charts wide" });
  main.append(large);
  addResults(section, addFold(main, `${section.id}-fold-table`, "In numbers", "every method at its end"));
  addTarget(section, main);
  addFold(main, `${section.id}-fold-curves`, "More curves", "over steps, time and bytes; the training loss").append(more);
  addCurves(section, large, more);
  const timed = section.series.filter((one) => Object.keys(one.breakdown_ms).length).map((one) => ({ method: one.method, parts: one.breakdown_ms }));
  if (timed.length) addBreakdown(bars, `${section.id}-breakdown`, "where the time of a step goes", timed, `Mean over all logged steps. ${TWO_BARS}`);
  addRatios(section, bars);
  if (bars.childElementCount) addFold(main, `${section.id}-fold-bars`, "Time and bytes", "where a step's time goes, how much less is sent").append(bars);
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
    title: "step time over hosts", exact: true, labelled: true,
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
  const fold = addFold(main, `${id}-fold`, "Measured", "where a step's time goes, and all in numbers");
  const bars = html("div", { className: "charts wide" });
  fold.append(bars);
  const timed = chart.measured.filter((row) => Object.keys(row.breakdown_ms).length)
    .map((row) => ({ method: row.method, label: `${row.method}, ${FORMATS.count(row.hosts)} hosts`, parts: row.breakdown_ms }));
  if (timed.length) addBreakdown(bars, `${id}-breakdown`, "where the time of a step goes, measured", timed, TWO_BARS);
  addTable(fold, `${id}-table`, "in numbers", [
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
  addFold(main, "fold-sources", "Where the numbers come from", "commands, commits, machines").append(html("div", { className: "card", id: "sources" }, html("table", { className: "cards texts" },
    html("thead", {}, html("tr", {}, ...["from", "command", "commit", "hardware", "date", "also"].map((name) => html("th", { scope: "col" }, name)))),
    html("tbody", {}, ...data.sources.map(line)))));
}

function addNotices() {
  for (const { name, status, missing } of data.sources.filter((source) => source.status && source.status !== "finished"))
    document.getElementById("notices").append(html("p", { className: "notice" },
      `${name} is ${data.live ? "not finished" : status}: this page shows what it has written so far${missing.length ? `; not at their end: ${missing.join(", ")}` : ""}.`));
}

// --- light and dark -------------------------------------------------------------------------------

const theme = document.getElementById("theme");
function setTheme(name) {
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  theme.textContent = { system: "◐ system", light: "☀ light", dark: "☾ dark" }[name];
  theme.onclick = () => setTheme({ system: "dark", dark: "light", light: "system" }[name]);
}

// --- while a run goes on --------------------------------------------------------------------------

const KEPT = `thinwire ${location.pathname}`;

/** Load the page again, which has been written anew, and leave there what the reader has chosen. */
function reload() {
  const options = figures.map((figure) => [figure.id, Object.entries(figure.options).map(([name, option]) => [name, option.on])]);
  const sliders = [...document.querySelectorAll("input[type=range]")].filter((slider) => slider.moved).map((slider) => [slider.id, slider.value]);
  const kept = { open: folds().filter((fold) => fold.open).map((fold) => fold.id), hidden: [...hidden], options, sliders,
    theme: document.documentElement.dataset.theme || "system", y: scrollY };
  try { sessionStorage.setItem(KEPT, JSON.stringify(kept)); } catch { /* it is only comfort */ }
  location.reload();
}

/** What the page was left with when it loaded itself again; nothing where a reader has opened it. */
function takeUp() {
  let kept = null;
  try { kept = JSON.parse(sessionStorage.getItem(KEPT)); sessionStorage.removeItem(KEPT); } catch { /* it is only comfort */ }
  if (!kept) return;
  setTheme(kept.theme);
  for (const method of kept.hidden) if (data.methods.includes(method)) hidden.add(method);
  for (const fold of folds()) fold.open = kept.open.includes(fold.id);
  for (const [id, options] of kept.options)
    for (const [name, on] of options) figures.find((figure) => figure.id === id)?.options[name]?.set(on);
  for (const [id, value] of kept.sliders) {
    const slider = document.getElementById(id);
    if (slider) { slider.value = value; slider.oninput(); }
  }
  redraw();
  scrollTo(0, kept.y);
}

/** Not under the reader's hands: while values are shown under the pointer, or a slider is held, it waits. */
function keepLive() {
  const held = !tooltip.hidden || document.querySelector("input:active");
  if (held) setTimeout(keepLive, 1000);
  else reload();
}

setTheme("system");
if (data.made) document.getElementById("made").textContent = `Made by thinwire ${data.made.version}, ${data.made.date}` +
  (data.live ? `; live: loads itself again every ${data.live} seconds` : "");
addNotices();
data.sections.forEach(addSection);
data.scaling.forEach(addScaling);
addSources();
redraw();
takeUp();
if (data.live) {
  history.scrollRestoration = "manual";
  setTimeout(keepLive, 1000 * data.live);
}
