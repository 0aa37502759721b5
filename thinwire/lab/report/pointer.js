// The pointer on a chart: a line that snaps to the nearest point, and every method's value there.

const tooltip = document.getElementById("tooltip");

/** rows: [{style, name, value, more, ended}]; beside the pointer, on a phone at the edge that the finger is away from. */
function showTooltip(title, rows, clientX, clientY) {
  const grid = html("div", { className: "rows" });
  for (const { style, name, value, more, ended } of rows)
    grid.append(style ? sample(style) : html("i"), html("span", { className: ended ? "ended" : "" }, name),
      html("span", { className: "value" }, value, more ? html("small", {}, more) : null));
  tooltip.replaceChildren(html("b", {}, title), grid);
  tooltip.hidden = false;
  const box = tooltip.getBoundingClientRect();
  const narrow = innerWidth < 600, right = clientX + 16;
  const left = right + box.width < innerWidth - 8 ? right : clientX - 16 - box.width;
  const top = !narrow ? clientY + 14 : clientY > innerHeight / 2 ? 56 : innerHeight;
  tooltip.style.left = `${Math.max(8, Math.min(left, innerWidth - box.width - 8))}px`;
  tooltip.style.top = `${Math.max(8, Math.min(top, innerHeight - box.height - 8))}px`;
}

function hideTooltip() {
  tooltip.hidden = true;
  for (const mark of document.querySelectorAll(".crosshair")) mark.remove();
}

/** Index of the last point of a curve that is not after x (all points of a curve are in order); -1 before the first. */
function lastBefore(curve, x) {
  let low = 0, high = curve.x.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (curve.x[middle] <= x * (1 + 1e-9)) low = middle + 1;
    else high = middle;
  }
  while (low > 0 && !known(curve.y[low - 1])) low--;
  return low - 1;
}

/** The x of the point nearest to the pointer, in pixels. */
function nearestX(drawn, px) {
  let best = null, distance = Infinity;
  for (const curve of drawn.shown)
    for (let i = 0; i < curve.x.length; i++) {
      const away = Math.abs(drawn.x(curve.x[i]) - px);
      if (known(curve.y[i]) && away < distance) [best, distance] = [curve.x[i], away];
    }
  return best;
}

/** What each method had reached at x; on charts of exact places (numbers of hosts) only what lies right there. */
function valuesAt(chart, drawn, x) {
  const show = (value) => FORMATS[chart.y.tip](value, chart.exact ? 3 : 4);
  const rows = [];
  for (const curve of drawn.shown) {
    const i = lastBefore(curve, x);
    if (i < 0 || (chart.exact && curve.x[i] !== x)) continue;
    const ended = i === curve.x.length - 1 && curve.x[i] < x * (1 - 1e-9);
    rows.push({ curve, i, ended, style: curve.style, name: curve.method, value: show(curve.y[i]), more: [ended && "at its end", curve.note,
      known(curve.low?.[i]) && `${show(curve.low[i])} to ${show(curve.high[i])}`].filter(Boolean).join(", ") });
  }
  if (chart.exact) // measured and predicted in one row
    for (const row of rows.filter((one) => one.curve.whiskers)) {
      const line = rows.find((other) => other.name === row.name && other !== row);
      if (line) {
        row.more += `; predicted ${line.value}`;
        rows.splice(rows.indexOf(line), 1);
      }
    }
  return rows.sort((a, b) => (b.curve.y[b.i] - a.curve.y[a.i]) * (chart.y.lowerFirst ? -1 : 1));
}

function pointAt(chart, drawn, x, clientX, clientY) {
  hideTooltip();
  const { top, bottom } = drawn.plot;
  const rows = valuesAt(chart, drawn, x);
  const mark = svg("g", { class: "crosshair", "pointer-events": "none" },
    svg("line", { x1: drawn.x(x), x2: drawn.x(x), y1: top, y2: bottom, stroke: "var(--quiet)", "stroke-dasharray": "3 3" }));
  for (const { curve, i, style } of rows) {
    const [px, py] = [drawn.x(curve.x[i]), drawn.y(curve.y[i])];
    if (Number.isFinite(px) && py >= top - 5 && py <= bottom + 5)
      mark.append(marker(style, px, py, 4.5, { stroke: "var(--card)", "stroke-width": 1.5 }));
  }
  drawn.node.append(mark);
  showTooltip(`${chart.x.name}: ${FORMATS[chart.x.tip](x * (chart.x.unit || 1), 4)}`, rows, clientX, clientY);
}

/** Mouse, finger and arrow keys. `current` returns {chart, drawn} as it is drawn now. */
function followPointer(figure, canvas, current) {
  const move = (event) => {
    const { chart, drawn } = current();
    if (!drawn?.plot) return;
    const box = drawn.node.getBoundingClientRect();
    const px = ((event.clientX - box.left) / box.width) * drawn.node.viewBox.baseVal.width;
    const x = nearestX(drawn, px);
    if (x !== null) pointAt(chart, drawn, x, event.clientX, event.clientY);
  };
  canvas.addEventListener("pointermove", move);
  canvas.addEventListener("pointerdown", move);
  canvas.addEventListener("pointerleave", hideTooltip);
  figure.addEventListener("blur", hideTooltip);
  figure.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return hideTooltip();
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const { chart, drawn } = current();
    if (!step || !drawn?.plot || event.target !== figure) return;
    event.preventDefault();
    const places = [...new Set(drawn.shown.flatMap((curve) => curve.x.filter((_, i) => known(curve.y[i]))))].sort((a, b) => a - b);
    const at = places.indexOf(figure.place);
    figure.place = places[at < 0 ? (step > 0 ? 0 : places.length - 1) : Math.max(0, Math.min(places.length - 1, at + step))];
    const box = drawn.node.getBoundingClientRect();
    const scale = box.width / drawn.node.viewBox.baseVal.width;
    pointAt(chart, drawn, figure.place, box.left + drawn.x(figure.place) * scale, box.top + drawn.plot.top * scale);
  });
}

/** Bars and dots: the row under the pointer, with all its parts. */
function followRows(canvas, current) {
  canvas.addEventListener("pointermove", (event) => {
    const group = event.target.closest("g[data-method]");
    const { chart, drawn } = current();
    if (!group || !drawn) return hideTooltip();
    const row = drawn.rows[[...drawn.node.querySelectorAll("g[data-method]")].indexOf(group)];
    if (row) showTooltip(row.label || row.method, chart.tip(row), event.clientX, event.clientY);
  });
  canvas.addEventListener("pointerleave", hideTooltip);
}

addEventListener("scroll", hideTooltip, { passive: true });
