"use strict";
// Draws the index sets of a convolution's gradients: i = o * stride + k * dilation - low, on each axis.
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const LETTERS = {1: ["L"], 2: ["H", "W"], 3: ["D", "H", "W"]};
const MOST = {size: 64, kernel: 16, stride: 8, dilation: 8, low: 16, high: 16};
const LEAST = {size: 1, kernel: 1, stride: 1, dilation: 1, low: 0, high: 0};
const byId = id => document.getElementById(id);

function element(name, attributes = {}, text) {
  const made = name.startsWith("svg:") ? document.createElementNS(SVG, name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// --- geometry --------------------------------------------------------------------------------------------------------

const state = {...data.conv, picked: {tensor: "dx", at: null}};
const outSize = axis => Math.max(0, Math.floor((axis.size + axis.low + axis.high - axis.dilation * (axis.kernel - 1) - 1) / axis.stride) + 1);
const inputOf = (axis, o, k) => o * axis.stride + k * axis.dilation - axis.low;
const phaseOf = (axis, i) => (i + axis.low) % axis.stride;

// The (output, tap, input) triples of one axis in which the given index takes part; "dx", "dw", "dy" say which it is.
function triples(axis, tensor, index) {
  const found = [];
  for (let o = 0; o < outSize(axis); o++) {
    for (let k = 0; k < axis.kernel; k++) {
      const i = inputOf(axis, o, k);
      if (i < 0 || i >= axis.size) continue;
      if ({dx: i, dw: k, dy: o}[tensor] === index) found.push({o, k, i});
    }
  }
  return found;
}

function products(lists) {
  return lists.reduce((all, list) => all.flatMap(head => list.map(item => [...head, item])), [[]]);
}

function problemString() {
  const each = f => state.axes.map(f).join("x");
  const words = [data.result, data.dtype, `n${state.batch}`, `c${state.inChannels}`, `k${state.outChannels}`,
                 "i" + each(a => a.size), "w" + each(a => a.kernel)];
  if (state.axes.some(a => a.stride > 1)) words.push("s" + each(a => a.stride));
  if (state.axes.some(a => a.low || a.high)) words.push("p" + each(a => a.low === a.high ? a.low : `${a.low}:${a.high}`));
  if (state.axes.some(a => a.dilation > 1)) words.push("d" + each(a => a.dilation));
  if (state.groups > 1) words.push(`g${state.groups}`);
  return [...words, ...data.rest].join(" ");
}

function refusal() {
  const {inChannels, outChannels, groups} = state;
  if (inChannels % groups) return `groups=${groups} does not divide in_channels=${inChannels}`;
  if (outChannels % groups) return `groups=${groups} does not divide out_channels=${outChannels}`;
  const empty = state.axes.findIndex(axis => outSize(axis) === 0);
  if (empty >= 0) return `axis ${LETTERS[state.axes.length][empty]}: the padded input is smaller than the spread kernel, so the output is empty`;
  return "";
}

// --- controls --------------------------------------------------------------------------------------------------------

function number(title, id, value, least, most, change) {
  const label = element("label", {}, title), box = element("span");
  const slide = element("input", {type: "range", min: least, max: most, value, id, "aria-label": title});
  const exact = element("input", {type: "number", min: least, max: most, value, "aria-label": `${title}, exact`});
  const set = text => {
    const wanted = Math.min(most, Math.max(least, Math.round(Number(text)) || least));
    slide.value = exact.value = wanted;
    change(wanted);
    draw();
  };
  slide.addEventListener("input", () => set(slide.value));
  exact.addEventListener("change", () => set(exact.value));
  box.append(slide, " ", exact);
  label.append(box);
  return label;
}

function buildControls() {
  const general = byId("general");
  general.replaceChildren();
  const count = element("select", {id: "rank"});
  for (const rank of [1, 2, 3]) count.append(element("option", {value: rank}, `${rank}-D`));
  count.value = state.axes.length;
  count.addEventListener("change", () => {
    const rank = Number(count.value);
    while (state.axes.length > rank) state.axes.shift();
    while (state.axes.length < rank) state.axes.unshift({...state.axes[0], size: Math.min(state.axes[0].size, rank === 3 ? 4 : 12)});
    state.picked = {tensor: "dx", at: null};
    buildControls();
    draw();
  });
  const label = element("label", {}, "rank");
  label.append(count);
  general.append(label);
  for (const [title, key, most] of [["input channels", "inChannels", 32], ["output channels", "outChannels", 32], ["groups", "groups", 32]])
    general.append(number(title, key, state[key], 1, Math.max(most, state[key]), value => { state[key] = value; }));
  const box = byId("axes");
  box.replaceChildren();
  state.axes.forEach((axis, place) => {
    const line = element("fieldset", {class: "axis-row"});
    const letter = LETTERS[state.axes.length][place];
    line.append(element("legend", {}, `axis ${letter}`));
    for (const [key, title] of [["size", "size"], ["kernel", "kernel"], ["stride", "stride"], ["dilation", "dilation"], ["low", "pad low"], ["high", "pad high"]])
      line.append(number(`${title} ${letter}`, `${key}-${letter}`, axis[key], LEAST[key], Math.max(MOST[key], axis[key]),
                         value => { axis[key] = value; state.picked.at = null; }));
    box.append(line);
  });
}

// --- grids -----------------------------------------------------------------------------------------------------------

const LIMIT = 32;  // more cells than this along an axis are not drawn
const extents = {dx: () => state.axes.map(a => a.size), dw: () => state.axes.map(a => a.kernel), dy: () => state.axes.map(outSize)};

// Place of an element in the drawing: planes of a volume lie below each other, rows and columns as usual.
function layout(sizes, pads) {
  const shown = sizes.map(size => Math.min(size, LIMIT));
  const [d, h, w] = [...Array(3 - sizes.length).fill(1), ...shown];
  const [, top, left] = [...Array(3 - sizes.length).fill(0), ...pads.map(p => p.low)];
  const [, lower, right] = [...Array(3 - sizes.length).fill(0), ...pads.map(p => p.high)];
  const cell = Math.max(9, Math.min(26, Math.floor(420 / (w + left + right))));
  const plane = (top + h + lower) * cell + 14;
  return {shown, cell, width: (left + w + right) * cell + 2, height: d * plane,
          place: at => {
            const [z, y, x] = [...Array(3 - sizes.length).fill(0), ...at];
            return {x: (x + left) * cell + 1, y: z * plane + (y + top) * cell + 1};
          }, box: [d, h, w], pads: {top, left, lower, right}, plane};
}

function drawGrid(tensor, title, picks, pads) {
  const sizes = extents[tensor](), form = layout(sizes, pads);
  const figure = element("figure");
  const cut = sizes.some(size => size > LIMIT) ? `, first ${LIMIT} drawn` : "";
  figure.append(element("figcaption", {}, `${title} ${sizes.join(" × ")}${cut}`));
  const svg = element("svg:svg", {viewBox: `0 0 ${form.width} ${form.height}`, width: form.width, height: form.height,
                                  tabindex: 0, role: "application", id: `grid-${tensor}`,
                                  "aria-label": `${title}, arrow keys move, Enter picks`});
  const {top, left, lower, right} = form.pads, [d, h, w] = form.box;
  for (let z = 0; z < d; z++) for (let y = -top; y < h + lower; y++) for (let x = -left; x < w + right; x++) {
    if (y >= 0 && y < h && x >= 0 && x < w) continue;
    svg.append(element("svg:rect", {x: (x + left) * form.cell + 1, y: z * form.plane + (y + top) * form.cell + 1,
                                    width: form.cell, height: form.cell, class: "cell pad"}));
  }
  for (const at of products(form.shown.map(size => [...Array(size).keys()]))) {
    const {x, y} = form.place(at), key = at.join(",");
    const phases = tensor === "dx" ? state.axes.map((axis, n) => phaseOf(axis, at[n])) : [];
    const phase = tensor === "dx" ? state.axes.reduce((sum, axis, n) => sum * axis.stride + phases[n], 0) % 8 : tensor === "dw" ? 1 : 2;
    const chosen = state.picked.tensor === tensor && state.picked.at && state.picked.at.join(",") === key;
    const on = picks && picks.has(key);
    const rect = element("svg:rect", {x, y, width: form.cell, height: form.cell, "data-at": key,
                                      class: `cell phase${phase} ${chosen ? "picked" : on ? "on" : picks ? "faint" : ""}`});
    rect.append(element("svg:title", {}, `${title}[${key}]`));
    rect.addEventListener("click", () => pick(tensor, at));
    svg.append(rect);
  }
  svg.addEventListener("keydown", event => move(event, tensor, sizes));
  figure.append(svg);
  return figure;
}

function pick(tensor, at) {
  state.picked = {tensor, at};
  draw();
}

function move(event, tensor, sizes) {
  const last = sizes.length - 1;
  const step = {ArrowRight: [last, 1], ArrowLeft: [last, -1], ArrowDown: [Math.max(0, last - 1), 1], ArrowUp: [Math.max(0, last - 1), -1],
                PageDown: [0, 1], PageUp: [0, -1], Enter: [last, 0], " ": [last, 0]}[event.key];
  if (!step) return;
  event.preventDefault();
  const at = state.picked.tensor === tensor && state.picked.at ? [...state.picked.at] : sizes.map(() => 0);
  const moved = state.picked.tensor === tensor && state.picked.at ? step[1] : 0;
  at[step[0]] = Math.min(Math.min(sizes[step[0]], LIMIT) - 1, Math.max(0, at[step[0]] + moved));
  pick(tensor, at);
  byId(`grid-${tensor}`).focus();
}

function draw() {
  const why = refusal();
  byId("refusal").textContent = why;
  byId("problem").textContent = why ? "" : problemString();
  const {tensor, at} = state.picked;
  const terms = at && !why ? products(state.axes.map((axis, n) => triples(axis, tensor, at[n]))) : null;
  const set = key => terms && new Set(terms.map(term => term.map(item => item[key]).join(",")));
  const none = state.axes.map(() => ({low: 0, high: 0})), capped = state.axes.map(a => ({low: a.low, high: a.high}));
  byId("grids").replaceChildren(
    drawGrid("dx", tensor === "dw" ? "x" : "dx", set("i"), capped), drawGrid("dw", tensor === "dw" ? "dw" : "w", set("k"), none),
    drawGrid("dy", "dy", set("o"), none));
  byId("said").textContent = terms ? sentence(tensor, at, terms) : "nothing picked: click an element, or focus a grid and use the arrow keys";
  const phases = state.axes.reduce((all, axis) => all * axis.stride, 1);
  byId("sum").textContent = `${phases === 1 ? "One phase" : `${phases} phases`}; output ${state.axes.map(outSize).join(" × ")}; `
    + `an element of dw sums ${state.axes.reduce((all, axis) => all * outSize(axis), state.batch)} terms at most.`;
  drawChannels();
}

function sentence(tensor, at, terms) {
  const many = {dx: state.outChannels / state.groups, dw: state.batch, dy: state.inChannels / state.groups}[tensor];
  const per = {dx: "output channels", dw: "samples", dy: "input channels"}[tensor];
  const text = term => ({dx: `dy[${term.map(t => t.o)}]·w[${term.map(t => t.k)}]`, dw: `x[${term.map(t => t.i)}]·dy[${term.map(t => t.o)}]`,
                         dy: `dx[${term.map(t => t.i)}] by w[${term.map(t => t.k)}]`}[tensor]);
  const shown = terms.slice(0, 6).map(text).join(tensor === "dy" ? ", " : " + ");
  const rest = terms.length > 6 ? ` … ${terms.length - 6} more` : "";
  if (tensor === "dy") return `dy[${at}] goes to ${terms.length ? shown + rest : "nothing: every tap lands in padding"}`;
  return `${tensor}[${at}] = ${terms.length ? shown + rest : "+0: no tap reaches it"} (${terms.length} terms, for each of ${many} ${per})`;
}

function drawChannels() {
  const {inChannels, outChannels, groups} = state;
  for (const [id, channels] of [["in-channels", inChannels], ["out-channels", outChannels]]) {
    const first = channels / groups;
    byId(id).replaceChildren(...[...Array(Math.min(channels, 64)).keys()].map(c =>
      element("span", {class: c < first ? "on" : "", title: `channel ${c}, group ${Math.floor(c / first)}`})));
  }
}

// --- an Ascend C tiling ----------------------------------------------------------------------------------------------

function buildTiling() {
  const tiling = data.tiling;
  if (!tiling) return;
  byId("tiling").hidden = false;
  byId("tiling-facts").textContent = tiling.facts.join(" · ");
  const step = byId("step");
  step.max = tiling.blocks.length - 1;
  step.addEventListener("input", drawBlock);
  byId("previous").addEventListener("click", () => { step.value = Number(step.value) - 1; drawBlock(); });
  byId("next").addEventListener("click", () => { step.value = Number(step.value) + 1; drawBlock(); });
  drawBlock();
}

function plane(title, rows, columns, classOf) {
  const cell = Math.max(2, Math.min(16, Math.floor(420 / Math.max(rows, columns))));
  const figure = element("figure");
  figure.append(element("figcaption", {}, title));
  const svg = element("svg:svg", {viewBox: `0 0 ${columns * cell} ${rows * cell}`, width: columns * cell, height: rows * cell});
  for (let y = 0; y < rows; y++) for (let x = 0; x < columns; x++)
    svg.append(element("svg:rect", {x: x * cell, y: y * cell, width: cell, height: cell, class: `cell ${classOf(y, x)}`}));
  figure.append(svg);
  return figure;
}

function drawBlock() {
  const {blocks, rows, columns, dyRows, dyColumns} = data.tiling, block = blocks[Number(byId("step").value)];
  const first = block.first[0] * columns + block.first[1], last = block.last[0] * columns + block.last[1];
  const dx = (y, x) => { const p = y * columns + x; return p >= first && p <= last ? "phase0 on" : "phase0 faint"; };
  const dy = y => block.dy_rows && y >= block.dy_rows[0] && y <= block.dy_rows[1] ? "phase2 on" : "phase2 faint";
  byId("tiling-grids").replaceChildren(plane(`dX plane, depth ${block.depth}`, rows, columns, dx),
                                       plane("dY rows that are loaded", dyRows, dyColumns, dy));
  byId("tiling-said").textContent = `core ${block.core}, Iterate ${block.iterate} (m ${block.m}, n ${block.n}): channels `
    + `${block.channels.join("..")}, ${block.products} products, ${block.skipped ? "writes nothing"
    : `writes ${block.runs} × ${block.run_length} elements from ${block.offset}`}`;
  const table = byId("loads"), head = element("tr"), body = element("tbody");
  for (const title of ["load", "into", "kernel depth", "slices of K", "bytes"]) head.append(element("th", {scope: "col"}, title));
  for (const load of block.loads) {
    const line = element("tr");
    for (const cell of [load.queue === "A" ? "dY" : "weights", `L1 ${load.queue} ${load.buffer}`, load.kernel_depth,
                        `${load.first_slice}..${load.first_slice + load.slices - 1}`, load.bytes.toLocaleString("en")])
      line.append(element("td", {}, String(cell)));
    body.append(line);
  }
  const thead = element("thead");
  thead.append(head);
  table.replaceChildren(thead, body);
}

byId("copy").addEventListener("click", async () => {
  try { await navigator.clipboard.writeText(problemString()); byId("copied").textContent = "copied"; }
  catch { byId("copied").textContent = problemString(); }
});
buildControls();
buildTiling();
draw();
