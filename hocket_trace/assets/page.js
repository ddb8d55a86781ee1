'use strict';
// The timeline. Times are nanoseconds since the page's origin; a row is one activity of one rank.

const page = JSON.parse(document.getElementById('data').textContent);
const find = id => document.getElementById(id);
const scroll = find('scroll'), lanesCanvas = find('lanes'), axisCanvas = find('axis'), tip = find('tip');
const GUTTER = 148, MAIN = 24, STRIP = 6, LOW = 12, SPACE = 2, GAP = 14, SHADES = 8;
const colorNames = Object.keys(page.colors);
const what = page.what; // columns: one entry per distinct activity
const word = n => page.words[n];

// ---------------------------------------------------------------------------------------------------- data

/** The first index whose value is greater than `x`, in an ascending array. */
function after(values, x) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > x) high = middle; else low = middle + 1;
  }
  return low;
}

/** Rows of a rank as typed arrays, with its lanes and the spans of compute, communication and exposed time. */
function decode(rank) {
  const n = rank.gap.length, start = new Float64Array(n), end = new Float64Array(n);
  let now = 0;
  for (let i = 0; i < n; i++) { now += rank.gap[i]; start[i] = now; end[i] = now + rank.length[i]; }
  const kinds = rank.what.map(w => what.compute[w]);
  const pick = flag => {
    const rows = [];
    for (let i = 0; i < n; i++) if (kinds[i] === flag) rows.push(i);
    return union(rows, start, end);
  };
  const compute = pick(1), communication = pick(0);
  const lanes = rank.lanes.map(([name, main]) => {
    const rows = [];
    for (let i = 0; i < n; i++) if (what.lane[rank.what[i]] === name) rows.push(i);
    const s = Float64Array.from(rows, i => start[i]), e = Float64Array.from(rows, i => end[i]);
    const reach = e.slice(); // largest end so far: finds the first row that can be seen
    for (let i = 1; i < reach.length; i++) reach[i] = Math.max(reach[i], reach[i - 1]);
    return { name: word(name), main, start: s, end: e, reach, what: Int32Array.from(rows, i => rank.what[i]) };
  });
  const late = { start: Float64Array.from(rank.late, span => span[0]), end: Float64Array.from(rank.late, span => span[1]) };
  const exposed = subtract(communication, compute), alone = subtract(compute, communication);
  const beside = subtract(compute, alone);
  return { rank: rank.rank, steps: rank.steps, lanes, compute, communication, exposed, late, alone, beside };
}

/** The union of the intervals of some rows, which ascend by start: {start, end}. */
function union(rows, start, end) {
  const s = [], e = [];
  for (const i of rows) {
    if (end[i] <= start[i]) continue;
    if (s.length && start[i] <= e[e.length - 1]) e[e.length - 1] = Math.max(e[e.length - 1], end[i]);
    else { s.push(start[i]); e.push(end[i]); }
  }
  return { start: Float64Array.from(s), end: Float64Array.from(e) };
}

/** The points of `a` that are not in `b`. */
function subtract(a, b) {
  const s = [], e = [];
  let j = 0;
  for (let i = 0; i < a.start.length; i++) {
    let from = a.start[i];
    while (j < b.start.length && b.end[j] <= from) j++;
    for (let k = j; k < b.start.length && b.start[k] < a.end[i]; k++) {
      if (b.start[k] > from) { s.push(from); e.push(b.start[k]); }
      from = Math.max(from, b.end[k]);
    }
    if (from < a.end[i]) { s.push(from); e.push(a.end[i]); }
  }
  return { start: Float64Array.from(s), end: Float64Array.from(e) };
}

/** How long `spans` are between two times. */
function measure(spans, from, to) {
  let sum = 0;
  for (let i = after(spans.end, from); i < spans.start.length && spans.start[i] < to; i++)
    sum += Math.min(spans.end[i], to) - Math.max(spans.start[i], from);
  return sum;
}

const ranks = page.ranks.map(decode);
const numbers = [...new Set(ranks.flatMap(rank => rank.steps.map(step => step[0])))].sort((a, b) => a - b);

/** Every step of every rank, from the activities that the page holds. */
function figures() {
  return ranks.flatMap(({ rank, steps, compute, communication, exposed }) => steps.map(([step, from, to]) => ({
    rank, step,
    rank_seconds: (to - from) / 1e9,
    compute_seconds: measure(compute, from, to) / 1e9,
    communication_seconds: measure(communication, from, to) / 1e9,
    exposed_seconds: measure(exposed, from, to) / 1e9,
  })));
}

// ---------------------------------------------------------------------------------------------------- view

const view = { from: 0, to: 1, step: null, wanted: null, marked: null, ready: false };
const all = { from: page.from, to: page.to };

/** From the first start of a step to its last end. */
function windowOf(number) {
  const steps = ranks.flatMap(rank => rank.steps.filter(step => step[0] === number));
  if (!steps.length) return all;
  return { from: Math.min(...steps.map(step => step[1])), to: Math.max(...steps.map(step => step[2])) };
}

function show(from, to) {
  const least = 100, most = (all.to - all.from) * 1.2; // 100 ns, and a little more than everything
  const length = Math.min(Math.max(to - from, least), most), middle = (from + to) / 2;
  view.from = middle - length / 2;
  view.to = middle + length / 2;
  const low = all.from - length * 0.9, high = all.to + length * 0.9;
  if (view.from < low) { view.to += low - view.from; view.from = low; }
  if (view.to > high) { view.from -= view.to - high; view.to = high; }
  request();
}

function fit() {
  const { from, to } = windowOf(view.step), edge = (to - from) * 0.005;
  show(from - edge, to + edge);
}

function zoom(factor, at) {
  const middle = at ?? (view.from + view.to) / 2;
  show(middle - (middle - view.from) * factor, middle + (view.to - middle) * factor);
}

const pan = share => { const by = (view.to - view.from) * share; show(view.from + by, view.to + by); };

// ------------------------------------------------------------------------------------------------- drawing

const rows = []; // what stands where, from top to bottom, in pixels of the whole picture
let total = 0;
for (const rank of ranks) {
  total += total ? GAP : 4;
  rank.top = total;
  rank.lanes.forEach((lane, n) => {
    const height = lane.main ? MAIN : LOW;
    rows.push({ rank, lane, top: total, height });
    total += height + SPACE;
    if (n === 0) { rows.push({ rank, strips: Object.keys(page.strips), top: total, height: STRIP }); total += STRIP + SPACE; }
  });
}
total += 6;

let colors = {}, width = 0, height = 0, waiting = false;

function request() {
  if (!waiting) { waiting = true; requestAnimationFrame(() => { waiting = false; draw(); }); }
}

/** Sizes of the canvases in real pixels, and the theme's colours. */
function resize() {
  const ratio = window.devicePixelRatio || 1;
  width = scroll.clientWidth;
  height = Math.min(total, Math.max(window.innerHeight * 0.74, 120));
  scroll.style.height = `${height}px`;
  find('space').style.height = `${Math.max(total - height, 0)}px`;
  for (const [canvas, tall] of [[lanesCanvas, height], [axisCanvas, 24]]) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(tall * ratio);
    canvas.style.height = `${tall}px`;
    canvas.getContext('2d').setTransform(ratio, 0, 0, ratio, 0, 0);
  }
  const style = getComputedStyle(document.documentElement);
  for (const name of ['bg', 'fg', 'dim', 'line', 'lane', 'mark']) colors[name] = style.getPropertyValue(`--${name}`).trim();
  draw(); // at once: a canvas that was given a size is empty
}

const xOf = time => GUTTER + (time - view.from) / (view.to - view.from) * (width - GUTTER);
const timeOf = x => view.from + (x - GUTTER) / (width - GUTTER) * (view.to - view.from);

/** Seconds with a unit that fits. */
function duration(ns) {
  const size = Math.abs(ns);
  if (size >= 1e9) return `${+(ns / 1e9).toPrecision(4)} s`;
  if (size >= 1e6) return `${+(ns / 1e6).toPrecision(4)} ms`;
  return `${+(ns / 1e3).toPrecision(4)} µs`;
}

function draw() {
  if (!view.ready) return;
  const pen = lanesCanvas.getContext('2d'), offset = scroll.scrollTop;
  pen.fillStyle = colors.bg;
  pen.fillRect(0, 0, width, height);
  pen.save();
  pen.translate(0, -offset);
  const seen = rows.filter(row => row.top + row.height >= offset && row.top <= offset + height);
  pen.fillStyle = colors.lane;
  for (const row of seen) pen.fillRect(GUTTER, row.top, width - GUTTER, row.height);
  grid(pen, offset);
  pen.save();
  pen.beginPath();
  pen.rect(GUTTER, offset, width - GUTTER, height);
  pen.clip();
  for (const row of seen) {
    if (row.lane) bars(pen, row, row.lane, null);
    else for (const name of row.strips) bars(pen, row, row.rank[name], colorNames.indexOf(name));
  }
  pen.restore();
  pen.textBaseline = 'middle';
  for (const row of seen) {
    if (!row.lane) continue;
    const middle = row.top + row.height / 2 + 0.5;
    pen.font = '11px ui-sans-serif, system-ui, sans-serif';
    pen.fillStyle = colors.dim;
    pen.textAlign = 'right';
    pen.fillText(row.lane.name, GUTTER - 8, middle, GUTTER - 64);
    if (row.top !== row.rank.top) continue;
    pen.font = '600 12px ui-sans-serif, system-ui, sans-serif';
    pen.fillStyle = colors.fg;
    pen.textAlign = 'left';
    pen.fillText(`rank ${row.rank.rank}`, 10, middle);
  }
  pen.restore();
  status();
  remember();
}

/** Lines at round times, and edges of steps; the times stand on the axis, counted from the start of the chosen step. */
function grid(pen, offset) {
  const axis = axisCanvas.getContext('2d'), length = view.to - view.from, zero = windowOf(view.step).from;
  axis.fillStyle = colors.bg;
  axis.fillRect(0, 0, width, 24);
  const rough = length / Math.max(1, (width - GUTTER) / 110), power = 10 ** Math.floor(Math.log10(rough));
  const tick = [1, 2, 5, 10].map(n => n * power).find(step => step >= rough);
  axis.font = '11px ui-sans-serif, system-ui, sans-serif';
  axis.textBaseline = 'middle';
  const digits = Math.max(0, Math.ceil(-Math.log10(tick / 1e6) - 1e-9));
  pen.fillStyle = colors.line;
  axis.fillStyle = colors.dim;
  for (let n = Math.ceil((view.from - zero) / tick); zero + n * tick <= view.to; n++) {
    const x = xOf(zero + n * tick);
    if (x < GUTTER) continue;
    pen.fillRect(Math.round(x), offset, 1, height);
    const time = `${(n * tick / 1e6).toFixed(digits)} ms`;
    if (x + 3 + axis.measureText(time).width <= width) axis.fillText(time, x + 3, 13);
  }
  pen.fillStyle = colors.dim;
  for (const rank of ranks) {
    const bottom = Math.max(...rows.filter(row => row.rank === rank).map(row => row.top + row.height));
    for (const [, from, to] of rank.steps) for (const time of [from, to]) {
      const x = xOf(time);
      if (x >= GUTTER && x <= width) pen.fillRect(Math.round(x), rank.top, 1, bottom - rank.top);
    }
  }
}

/**
 * The bars of a lane, or of spans of one colour. What is narrower than a pixel shares it: the colour that fills most, as
 * opaque as all fill it.
 */
function bars(pen, row, spans, color) {
  const scale = (width - GUTTER) / (view.to - view.from), lane = row.lane, reach = spans.reach ?? spans.end;
  let pixel = -1, filled = new Map();
  const flush = () => {
    if (pixel < 0) return;
    let most = 0, best = 0, sum = 0;
    for (const [name, share] of filled) { sum += share; if (share > most) { most = share; best = name; } }
    box(pen, row, pixel, 1, best, Math.ceil(Math.min(sum, 1) * SHADES) / SHADES);
    pixel = -1;
    filled = new Map();
  };
  for (let i = after(reach, view.from); i < spans.start.length && spans.start[i] < view.to; i++) {
    const left = xOf(Math.max(spans.start[i], view.from - 10 / scale));
    const long = (Math.min(spans.end[i], view.to + 10 / scale) - Math.max(spans.start[i], view.from - 10 / scale)) * scale;
    if (long < 0) continue;
    const kind = color ?? what.color[lane.what[i]];
    const faint = view.wanted && lane && !view.wanted[lane.what[i]];
    if (long >= 1) {
      flush();
      box(pen, row, left, long > 3 ? long - 0.5 : long, faint ? -1 : kind, 1);
      if (lane?.main && long > 40) label(pen, row, i, left, long);
      continue;
    }
    if (Math.floor(left) !== pixel) flush();
    pixel = Math.floor(left);
    const name = faint ? -1 : kind;
    filled.set(name, (filled.get(name) ?? 0) + long);
  }
  flush();
  const marked = view.marked;
  if (lane && marked && marked.lane === lane) {
    const left = xOf(lane.start[marked.i]), long = xOf(lane.end[marked.i]) - left;
    pen.strokeStyle = colors.fg;
    pen.lineWidth = 2;
    pen.strokeRect(left - 1, row.top - 1, Math.max(long, 1) + 2, row.height + 2);
  }
}

function box(pen, row, left, long, color, opacity) {
  pen.globalAlpha = color < 0 ? opacity * 0.25 : opacity;
  pen.fillStyle = color < 0 ? colors.dim : page.colors[colorNames[color]];
  pen.fillRect(left, row.top, long, row.height);
  pen.globalAlpha = 1;
}

/** The name of a bar inside it, as far as it fits. */
function label(pen, row, i, left, long) {
  const w = row.lane.what[i], text = word(what.op[w]) || word(what.launcher[w]) || word(what.name[w]);
  const from = Math.max(left, GUTTER) + 4, room = Math.min(left + long, width) - from - 4;
  const fits = Math.floor(room / 5.6);
  if (fits < 4) return;
  pen.font = '10px ui-sans-serif, system-ui, sans-serif';
  pen.textBaseline = 'middle';
  pen.textAlign = 'left';
  pen.fillStyle = '#10151c';
  pen.fillText(text.length > fits ? `${text.slice(0, fits - 1)}…` : text, from, row.top + row.height / 2 + 0.5);
}

const percent = share => `${(share * 100).toFixed(1)} %`;

/** What the visible stretch of time holds, as a mean of the ranks. */
function status() {
  const length = view.to - view.from;
  const mean = name => ranks.reduce((sum, rank) => sum + measure(rank[name], view.from, view.to), 0) / ranks.length;
  const compute = mean('compute'), communication = mean('communication'), exposed = mean('exposed');
  const hidden = communication ? `, ${percent(1 - exposed / communication)} of communication hidden` : '';
  find('view').textContent =
    `in view ${duration(length)}: compute ${percent(compute / length)}, exposed ${percent(exposed / length)}${hidden}`;
}
