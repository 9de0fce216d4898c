"use strict";
// The benchmark report: filters, a table that sorts, a ratio chart and a roofline, all from one JSON document.
const data = JSON.parse(document.getElementById("data").textContent);
const rows = data.rows;
const classes = [...new Set(rows.map(row => row.class))];
const SHAPES = ["circle", "square", "diamond", "triangle", "cross", "ring"];
const SVG = "http://www.w3.org/2000/svg";
const byId = id => document.getElementById(id);

function element(name, attributes = {}, text) {
  const made = name.startsWith("svg:") ? document.createElementNS(SVG, name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function mean(values) {
  return values.length ? Math.exp(values.reduce((sum, value) => sum + Math.log(value), 0) / values.length) : null;
}

const short = value => value === null || value === undefined ? "–" : Number(value.toPrecision(3)).toString();
const time = seconds => seconds === null || seconds === undefined ? "–"
  : seconds < 1e-3 ? `${short(seconds * 1e6)} µs` : `${short(seconds * 1e3)} ms`;
const lost = row => row.wrong || (row.ratio !== null && row.ratio < 1);

// --- filters ---------------------------------------------------------------------------------------------------------

const filter = {text: "", class: "", dtype: "", gradient: "", lost: false};
const sort = {key: "ratio", down: false};

function buildFilters() {
  const box = byId("filters");
  const search = element("input", {type: "search", id: "filter-text", placeholder: "layer, model, problem"});
  search.addEventListener("input", () => { filter.text = search.value.toLowerCase(); redraw(); });
  const label = element("label", {}, "search");
  label.append(search);
  box.append(label);
  for (const key of ["class", "dtype", "gradient"]) {
    const select = element("select", {id: `filter-${key}`});
    select.append(element("option", {value: ""}, "all"));
    for (const value of new Set(rows.map(row => row[key]))) select.append(element("option", {value}, value));
    select.addEventListener("change", () => { filter[key] = select.value; redraw(); });
    const around = element("label", {}, key);
    around.append(select);
    box.append(around);
  }
  const check = element("input", {type: "checkbox", id: "filter-lost"});
  check.addEventListener("change", () => { filter.lost = check.checked; redraw(); });
  const around = element("label", {class: "check"});
  around.append(check, "lost rows only");
  box.append(around);
}

function shown() {
  return rows.filter(row => ["class", "dtype", "gradient"].every(key => !filter[key] || row[key] === filter[key])
    && (!filter.lost || lost(row))
    && (!filter.text || `${row.layer} ${row.model} ${row.problem} ${row.kernel}`.toLowerCase().includes(filter.text)));
}

// --- tables ----------------------------------------------------------------------------------------------------------

const COLUMNS = [
  ["ratio", "ratio", row => short(row.ratio)], ["layer", "layer", row => row.layer],
  ["class", "class", row => row.class, "wide"], ["dtype", "dtype", row => row.dtype],
  ["gradient", "gradient", row => row.gradient], ["ours_s", "ours", row => time(row.ours_s)],
  ["peer_s", "peer", row => time(row.peer_s)], ["untuned_ratio", "untuned", row => short(row.untuned_ratio), "wide"],
  ["host_ratio", "with host", row => short(row.host_ratio), "wide"],
  ["first_ratio", "channels first", row => short(row.first_ratio), "wide"],
  ["gflops", "GFLOP/s", row => short(row.gflops), "wide"],
  ["of_ceiling", "of ceiling", row => row.of_ceiling === null ? "–" : `${Math.round(100 * row.of_ceiling)} %`],
  ["kernel", "kernel", row => row.kernel, "wide"], ["verified", "checked", row => row.verified, "wide"],
  ["problem", "problem", row => row.problem],
].filter(([key]) => ["ratio", "layer", "problem"].includes(key) || rows.some(row => row[key] !== null && row[key] !== ""));
const NUMBERS = new Set(["ratio", "ours_s", "peer_s", "untuned_ratio", "host_ratio", "first_ratio", "gflops", "of_ceiling"]);

function ordered(list) {
  const {key, down} = sort;
  const rank = row => row[key] === null || row[key] === undefined ? (NUMBERS.has(key) ? Infinity : "") : row[key];
  return [...list].sort((a, b) => (rank(a) < rank(b) ? -1 : rank(a) > rank(b) ? 1 : 0) * (down ? -1 : 1));
}

function drawRows(list) {
  const table = byId("rows");
  const active = document.activeElement?.dataset?.sort;
  const head = element("tr");
  for (const [key, title, , extra] of COLUMNS) {
    const cell = element("th", {scope: "col", class: `${NUMBERS.has(key) ? "number" : ""} ${extra ?? ""}`});
    cell.setAttribute("aria-sort", sort.key === key ? (sort.down ? "descending" : "ascending") : "none");
    const button = element("button", {type: "button", "data-sort": key},
                           title + (sort.key === key ? (sort.down ? " ▾" : " ▴") : ""));
    button.addEventListener("click", () => {
      sort.down = sort.key === key && !sort.down;
      sort.key = key;
      redraw();
    });
    cell.append(button);
    head.append(cell);
  }
  const body = element("tbody");
  for (const row of ordered(list)) {
    const line = element("tr");
    for (const [key, , text, extra] of COLUMNS) {
      const cell = element("td", {class: `${NUMBERS.has(key) ? "number" : key} ${extra ?? ""}`});
      if (key === "problem") {
        cell.append(element("code", {}, row.problem), " ");
        const copy = element("button", {type: "button", "aria-label": `copy ${row.problem}`}, "copy");
        copy.addEventListener("click", () => copyText(row.problem));
        cell.append(copy);
      } else {
        cell.textContent = key === "ratio" && row.wrong ? "WRONG" : text(row);
        if (key.endsWith("ratio") && row[key] !== null) cell.classList.add(row[key] < 1 ? "lost" : "won");
      }
      line.append(cell);
    }
    body.append(line);
  }
  const thead = element("thead");
  thead.append(head);
  table.replaceChildren(thead, body);
  if (active) table.querySelector(`[data-sort=${active}]`).focus();
  byId("count").textContent = `${list.length} of ${rows.length}, ${list.filter(lost).length} lost`;
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // a page opened from a file may have no clipboard
    const area = element("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  byId("copied").textContent = `copied: ${text}`;
}

function fill(table, head, lines) {
  const top = element("tr");
  head.forEach((title, place) => top.append(element("th", {scope: "col", class: place > 2 ? "number" : ""}, title)));
  const body = element("tbody");
  for (const cells of lines) {
    const line = element("tr");
    cells.forEach((cell, place) => {
      const [text, kind] = Array.isArray(cell) ? cell : [cell, ""];
      line.append(element("td", {class: `${place > 2 ? "number" : ""} ${kind}`}, text));
    });
    body.append(line);
  }
  const thead = element("thead");
  thead.append(top);
  table.replaceChildren(thead, body);
}

const judged = value => [short(value), value === null ? "" : value < 1 ? "lost" : "won"];

function drawClasses() {
  const groups = new Map();
  for (const row of rows) {
    const key = [row.class, row.dtype, row.gradient].join("\t");
    groups.set(key, [...(groups.get(key) ?? []), row]);
  }
  const extras = [["untuned_ratio", "untuned"], ["host_ratio", "with host"], ["first_ratio", "channels first"]]
    .filter(([key]) => rows.some(row => row[key] !== null));
  fill(byId("classes"), ["class", "dtype", "gradient", "rows", "mean", "lowest", "lost",
                         ...extras.map(([, title]) => title)],
       [...groups].map(([key, group]) => {
         const counted = group.filter(row => row.ratio !== null && !row.unsearched);
         const ratios = counted.map(row => row.ratio);
         const below = group.filter(lost).length;
         return [...key.split("\t"), String(group.length), judged(mean(ratios)),
                 judged(ratios.length ? Math.min(...ratios) : null), [String(below), below ? "lost" : ""],
                 ...extras.map(([name]) => judged(mean(group.map(row => row[name]).filter(value => value !== null))))];
       }));
  if (data.models.length) {
    byId("models-section").hidden = false;
    fill(byId("models"), ["model", "dtype", "layout", "peer", "ours", "ratio"],
         data.models.map(row => [row.model, row.dtype, row.layout, time(row.peer_s), time(row.ours_s),
                                 judged(row.ratio)]));
  }
}

// --- charts ----------------------------------------------------------------------------------------------------------

function mark(shape, x, y, size, colour, open) {
  const look = open ? {fill: "var(--paper)", stroke: "var(--lost)", "stroke-width": 2.5}
                    : {fill: colour, stroke: colour, "stroke-width": 1.5};
  const path = {
    square: `M${x - size} ${y - size}h${2 * size}v${2 * size}h${-2 * size}z`,
    diamond: `M${x} ${y - 1.3 * size}l${1.3 * size} ${1.3 * size}l${-1.3 * size} ${1.3 * size}l${-1.3 * size} ${-1.3 * size}z`,
    triangle: `M${x} ${y - 1.2 * size}l${1.2 * size} ${2.2 * size}h${-2.4 * size}z`,
    cross: `M${x - size} ${y - size}l${2 * size} ${2 * size}M${x - size} ${y + size}l${2 * size} ${-2 * size}`,
  }[shape];
  return path ? element("svg:path", {d: path, ...look}) : element("svg:circle", {cx: x, cy: y, r: size, ...look});
}

const colourOf = row => `var(--c${classes.indexOf(row.class) % 6})`;
const shapeOf = row => SHAPES[classes.indexOf(row.class) % SHAPES.length];
const about = row => `${row.layer} ${row.dtype} ${row.gradient}: ratio ${short(row.ratio)}, ours ${time(row.ours_s)}, `
  + `peer ${time(row.peer_s)}, ${short(row.gflops)} GFLOP/s · ${row.problem}`;

function powers(low, high, base) {
  const found = [];
  for (let e = Math.ceil(Math.log(low) / Math.log(base) - 1e-9); base ** e <= high * 1.0001; e++) found.push(base ** e);
  return found;
}

// One tab stop for a chart: arrow keys walk over its marks, the live line below says what the current one is.
function interactive(svg, live, marks) {
  let current = -1;
  const ring = element("svg:circle", {r: 9, fill: "none", stroke: "var(--focus)", "stroke-width": 3, visibility: "hidden"});
  svg.append(ring);
  const go = place => {
    current = place;
    const {x, y, row} = marks[place];
    ring.setAttribute("cx", x); ring.setAttribute("cy", y); ring.setAttribute("visibility", "visible");
    live.textContent = about(row);
  };
  svg.onkeydown = event => {
    const step = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[event.key];
    if (!step || !marks.length) return;
    event.preventDefault();
    go((current + step + marks.length) % marks.length);
  };
  svg.onpointermove = svg.onclick = event => {
    const box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
    const x = (event.clientX - box.left) * view.width / box.width, y = (event.clientY - box.top) * view.height / box.height;
    let best = -1, near = 400;
    marks.forEach((m, place) => {
      const far = (m.x - x) ** 2 + (m.y - y) ** 2;
      if (far < near) { near = far; best = place; }
    });
    if (best >= 0 && best !== current) go(best);
  };
}

function drawRatios(list) {
  const svg = byId("ratios"), counted = list.filter(row => row.ratio !== null);
  const width = 1100, left = 110, right = 20, lane = 96;
  const present = classes.filter(name => counted.some(row => row.class === name));
  const height = 40 + lane * Math.max(1, present.length);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren();
  const low = Math.min(0.7, ...counted.map(row => row.ratio)) / 1.08, high = Math.max(1.5, ...counted.map(row => row.ratio)) * 1.08;
  const at = ratio => left + (width - left - right) * Math.log(ratio / low) / Math.log(high / low);
  for (const tick of [0.1, 0.2, 0.5, 0.8, 1, 1.5, 2, 3, 5, 10, 20, 50, 100, 300, 1000]) {
    if (tick < low || tick > high) continue;
    svg.append(element("svg:line", {x1: at(tick), x2: at(tick), y1: 8, y2: height - 26, class: tick === 1 ? "one" : "grid"}));
    svg.append(element("svg:text", {x: at(tick), y: height - 10, "text-anchor": "middle", class: "axis"}, `${tick}×`));
  }
  const marks = [];
  present.forEach((name, place) => {
    const group = counted.filter(row => row.class === name).sort((a, b) => a.ratio - b.ratio);
    const top = 14 + place * lane;
    svg.append(element("svg:text", {x: 8, y: top + lane / 2 - 6}, name));
    svg.append(element("svg:text", {x: 8, y: top + lane / 2 + 10, class: "axis"}, `${group.length} rows, ${group.filter(lost).length} lost`));
    group.forEach((row, index) => {
      const x = at(row.ratio), y = top + 6 + (lane - 18) * (group.length > 1 ? index / (group.length - 1) : 0.5);
      svg.append(mark(shapeOf(row), x, y, 4, colourOf(row), lost(row)));
      marks.push({x, y, row});
    });
  });
  interactive(svg, byId("ratios-live"), marks);
}

function drawRoofline(list) {
  const svg = byId("roofline"), width = 1100, height = 520, left = 80, bottom = 44, top = 16, right = 20;
  const points = list.filter(row => row.gflops && row.intensity);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren();
  if (!points.length) return;
  const roofs = data.roofs, peak = Math.max(...roofs.map(roof => roof.flops / 1e9), ...points.map(row => row.gflops));
  const lowX = Math.min(...points.map(row => row.intensity)) / 1.5, highX = Math.max(...points.map(row => row.intensity)) * 1.5;
  const lowY = Math.min(...points.map(row => row.gflops)) / 1.5, highY = peak * 1.6;
  const x = value => left + (width - left - right) * Math.log(value / lowX) / Math.log(highX / lowX);
  const y = value => height - bottom - (height - bottom - top) * Math.log(value / lowY) / Math.log(highY / lowY);
  for (const tick of powers(lowX, highX, highX / lowX > 1e3 ? 10 : 2)) {
    svg.append(element("svg:line", {x1: x(tick), x2: x(tick), y1: top, y2: height - bottom, class: "grid"}));
    svg.append(element("svg:text", {x: x(tick), y: height - bottom + 18, "text-anchor": "middle", class: "axis"}, short(tick)));
  }
  for (const tick of powers(lowY, highY, 10)) {
    svg.append(element("svg:line", {x1: left, x2: width - right, y1: y(tick), y2: y(tick), class: "grid"}));
    svg.append(element("svg:text", {x: left - 8, y: y(tick) + 4, "text-anchor": "end", class: "axis"}, short(tick)));
  }
  svg.append(element("svg:text", {x: (left + width) / 2, y: height - 6, "text-anchor": "middle", class: "axis"}, "FLOP per byte"));
  svg.append(element("svg:text", {x: 8, y: 14, class: "axis"}, "GFLOP/s"));
  for (const roof of roofs) {
    const knee = roof.flops / data.copy_bytes, from = Math.max(lowX, lowY * 1e9 / data.copy_bytes);
    const bend = Math.min(Math.max(knee, lowX), highX);
    svg.append(element("svg:polyline", {class: "roof", points: `${x(from)},${y(Math.min(from * data.copy_bytes, roof.flops) / 1e9)} `
      + `${x(bend)},${y(Math.min(bend * data.copy_bytes, roof.flops) / 1e9)} ${x(highX)},${y(Math.min(highX * data.copy_bytes, roof.flops) / 1e9)}`}));
    svg.append(element("svg:text", {x: width - right - 4, y: y(roof.flops / 1e9) - 6, "text-anchor": "end", class: "axis"},
                       `${roof.name} ${short(roof.flops / 1e9)} GFLOP/s`));
  }
  const marks = points.sort((a, b) => a.intensity - b.intensity).map(row => ({x: x(row.intensity), y: y(row.gflops), row}));
  for (const {x: px, y: py, row} of marks) svg.append(mark(shapeOf(row), px, py, 4, colourOf(row), lost(row)));
  interactive(svg, byId("roofline-live"), marks);
}

function drawLegend() {
  classes.forEach(name => {
    const item = element("span"), svg = element("svg:svg", {viewBox: "0 0 14 14", "aria-hidden": "true"});
    svg.append(mark(SHAPES[classes.indexOf(name) % SHAPES.length], 7, 7, 4.5, `var(--c${classes.indexOf(name) % 6})`, false));
    item.append(svg, ` ${name}`);
    byId("legend").append(item);
  });
  const item = element("span"), svg = element("svg:svg", {viewBox: "0 0 14 14", "aria-hidden": "true"});
  svg.append(mark("circle", 7, 7, 4.5, "", true));
  item.append(svg, " lost");
  byId("legend").append(item);
}

function redraw() {
  const list = shown();
  drawRows(list);
  drawRatios(list);
  drawRoofline(list);
}

for (const sentence of data.conditions) byId("conditions").append(element("p", {}, sentence));
buildFilters();
drawLegend();
drawClasses();
redraw();
