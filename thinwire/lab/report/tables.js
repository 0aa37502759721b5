// Tables: sorted by a click on a heading, hidden rows for hidden methods, one card a row on a phone.

/** columns: [{label, get(row), show(row), best: "high" | "low"}]; rows have .method. Returns {node, csv()}. */
function makeTable(columns, rows) {
  const there = (value) => value !== null && value !== undefined;
  columns = columns.filter((column, i) => i === 0 || rows.some((row) => there(column.get(row))));
  const eligible = (row) => row.finished !== false && !row.method.startsWith("noop"); // for the best of a column
  const best = columns.map((column) => column.best && rows.length > 1
    ? extent(rows.filter(eligible).map(column.get))?.[column.best === "high" ? 1 : 0] : undefined);
  const isBest = (row, i) => eligible(row) && best[i] !== undefined && columns[i].get(row) === best[i];
  const lines = rows.map((row) => html("tr", { "data-method": row.method, hidden: hidden.has(row.method) },
    ...columns.map((column, i) => html("td", { "data-label": column.label, className: isBest(row, i) ? "best" : "" },
      html("span", {}, ...[column.show(row)].flat())))));
  const body = html("tbody", {}, ...lines);
  const heads = columns.map((column, i) =>
    html("th", { scope: "col" }, html("button", { type: "button", title: "Sort", onclick: () => sort(i) }, column.label)));
  let sorted = null;

  function sort(i) {
    const direction = sorted === i ? -1 : 1;
    sorted = direction === 1 ? i : null;
    const value = new Map(lines.map((line, j) => [line, columns[i].get(rows[j])]));
    body.append(...[...lines].sort((a, b) => {
      const [left, right] = [value.get(a), value.get(b)];
      if (!there(left) || !there(right)) return there(right) - there(left); // what is missing comes last
      return direction * (typeof left === "string" ? left.localeCompare(right) : left - right);
    }));
    heads.forEach((head) => head.removeAttribute("aria-sort"));
    heads[i].setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
  }
  const cell = (value) => (/[",\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);
  const csv = () => [columns.map((column) => cell(column.label)),
    ...rows.map((row) => columns.map((column) => cell(String(column.get(row) ?? ""))))].map((line) => line.join(",")).join("\n") + "\n";
  const table = html("table", { className: "cards" }, html("thead", {}, html("tr", {}, ...heads)), body);
  return { node: html("div", { className: "table" }, table), csv };
}

function addCard(parent, id, title, ...children) {
  const buttons = html("div", { className: "buttons" });
  parent.append(html("div", { className: "card", id }, html("div", { className: "head" }, html("h3", {}, title), buttons), ...children));
  return buttons;
}

function addTable(parent, id, title, columns, rows) {
  const table = makeTable(columns, rows);
  addCard(parent, id, title, table.node).append(html("button", { type: "button", title: "Download as CSV",
    onclick: () => save(`${id}.csv`, new Blob([table.csv()], { type: "text/csv" })) }, "CSV"));
}

const nameColumn = { label: "method", get: (row) => row.method, show: (row) => [sample(styles.get(row.method)), ` ${row.method}`] };
const column = (label, get, format, best) => ({ label, get, best, show: (row) => format(get(row)) });
const fixed = (value) => (known(value) ? value.toFixed(2) : "–");
const signed = (value, unit = "") => (known(value) ? (value > 0 ? "+" : "") + value.toFixed(unit ? 1 : 2) + unit : "–");
const unitOf = (metric) => metric.unit && ` ${metric.unit}`;

/** Whether seconds of its methods do not compare; a notice says why. */
const isUneven = (section) => Object.keys(section.uneven).length > 0;

function addResults(section, parent) {
  const { metric, series } = section;
  const uneven = isUneven(section);
  const several = series.some((one) => one.seeds.length > 1);
  const small = (content) => html("small", {}, ` ${content}`);
  addTable(parent, `${section.id}-table`, "at the end of training", [
    nameColumn,
    ...(several ? [column("seeds", (one) => one.seeds.length, FORMATS.count)] : []),
    { label: metric.name, get: (one) => one.row.metric, best: metric.higher_is_better ? "high" : "low", show: (one) => [
      fixed(one.row.metric) + (known(one.row.metric) ? unitOf(metric) : ""),
      one.seeds.length > 1 && known(one.row.metric_low) ? small(`${fixed(one.row.metric_low)} to ${fixed(one.row.metric_high)}`) : "",
      one.finished ? "" : small("so far")] },
    { label: `to dense${metric.difference_unit ? ` (${metric.difference_unit})` : ""}`, get: (one) => one.row.to_dense, show: (one) => [
      signed(one.row.to_dense), known(one.row.to_dense_step) ? small(`at step ${FORMATS.count(one.row.to_dense_step)}`) : ""] },
    column("loss", (one) => one.row.loss, (value) => plain(value, 4)),
    column("steps", (one) => one.row.steps, FORMATS.count),
    column(uneven ? "time*" : "time", (one) => one.row.seconds, FORMATS.seconds, uneven ? undefined : "low"),
    column(uneven ? "samples/s*" : "samples/s", (one) => one.row.samples_per_s, FORMATS.count, uneven ? undefined : "high"),
    column("sent by a worker", (one) => one.row.bytes_sent, FORMATS.bytes, "low"),
    column("ratio", (one) => one.row.ratio, FORMATS.times, "high"),
    column("link ratio", (one) => one.row.link_ratio, FORMATS.times, "high"),
  ], series);
}

/** What it took each method to reach a value of the metric that the reader chooses: the first epoch at or beyond it. */
function addTarget(section, parent) {
  const { metric } = section;
  const series = section.series.filter((one) => (one.epochs.metric || []).some(known));
  if (!series.length) return;
  const uneven = isUneven(section);
  const sign = metric.higher_is_better ? 1 : -1;
  const [low, high] = extent(series.flatMap((one) => one.epochs.metric));
  const common = sign * Math.min(...series.map((one) => Math.max(...one.epochs.metric.filter(known).map((value) => sign * value))));
  const step = 10 ** Math.floor(Math.log10((high - low || 1) / 100));
  const rounded = (sign > 0 ? Math.floor : Math.ceil)(common / step) * step; // every method has reached it
  const slider = html("input", { type: "range", id: `${section.id}-slider`, min: Math.floor(low / step) * step, max: Math.ceil(high / step) * step, step, value: rounded,
    "aria-label": `${metric.name} to reach` });
  const shown = html("output"), place = html("div");

  function update() {
    const target = Number(slider.value);
    shown.textContent = `${plain(target, 4)}${unitOf(metric)} ${metric.name}`;
    const rows = series.map((one) => {
      const i = one.epochs.metric.findIndex((value) => known(value) && sign * value >= sign * target - 1e-9);
      const at = (name) => (i < 0 ? null : one.epochs[name][i]);
      return { method: one.method, reached: i >= 0, steps: at("step"), seconds: at("seconds"), bytes: at("bytes") };
    });
    const dense = rows.find((row) => row.method === "dense");
    const ratio = (row, name) => (!(uneven && name === "seconds") && dense && row !== dense && known(dense[name]) && row[name] > 0 ? dense[name] / row[name] : null);
    place.replaceChildren(makeTable([
      nameColumn,
      { label: "steps", get: (row) => row.steps, show: (row) => (row.reached ? FORMATS.count(row.steps) : "not reached"), best: "low" },
      column(uneven ? "time*" : "time", (row) => row.seconds, FORMATS.seconds, uneven ? undefined : "low"), column("sent by a worker", (row) => row.bytes, FORMATS.bytes, "low"),
      column("than dense", (row) => ratio(row, "seconds"), (value) => against(value, "sooner", "later")),
      column("bytes", (row) => ratio(row, "bytes"), (value) => against(value, "fewer", "more")),
    ], rows).node);
  }
  slider.oninput = () => { slider.moved = true; update(); };
  update();
  addCard(addFold(parent, `${section.id}-fold-target`, "What it takes to reach a value", "steps, time and bytes to a value that you choose"), `${section.id}-target`, "to reach",
    html("label", { className: "target" }, slider, shown), place, html("p", { className: "quiet" }, "The first epoch at or beyond it."));
}
