// ------------------------------------------------------------------------------------------------- pointing

/** The activity under a point of the lanes, or the stretch without compute; what is narrow may be missed by 2 pixels. */
function under(x, y) {
  const at = y + scroll.scrollTop, row = rows.find(r => at >= r.top - 1 && at <= r.top + r.height + 1);
  if (!row || x < GUTTER) return null;
  const time = timeOf(x), slack = 2 * (view.to - view.from) / (width - GUTTER);
  let best = null, miss = slack;
  for (const spans of row.lane ? [row.lane] : row.strips.map(name => row.rank[name])) {
    for (let i = after(spans.reach ?? spans.end, time - slack); i < spans.start.length; i++) {
      if (spans.start[i] > time + slack) break;
      const off = Math.max(spans.start[i] - time, time - spans.end[i], 0);
      if (off < miss || (off === 0 && miss === 0)) { best = { row, spans, lane: row.lane, i }; miss = off; }
    }
  }
  return best;
}

/** Bytes with a unit, in powers of ten. */
function size(bytes) {
  for (const [unit, scale] of [['GB', 1e9], ['MB', 1e6], ['kB', 1e3]])
    if (bytes >= scale) return `${+(bytes / scale).toPrecision(3)} ${unit}`;
  return `${bytes} B`;
}

/** What is known of an activity: [name, value], only what there is. */
function told({ row, spans, lane, i }) {
  const ns = spans.end[i] - spans.start[i];
  const times = [['time', duration(ns)], ['from', duration(spans.start[i] - windowOf(view.step).from)]];
  const strip = row.strips?.find(name => spans === row.rank[name]);
  const more = { exposed: ': communication, and no compute beside it', late: ': it had not launched the next kernel yet' };
  if (strip) return { title: page.strips[strip] + (more[strip] ?? ''), rows: times };
  const w = lane.what[i], bytes = what.bytes[w], names = [what.op[w], what.launcher[w], what.name[w]].map(word);
  const kind = [word(what.kind[w]), word(what.group[w]) && `group ${word(what.group[w])}`, word(what.class[w])];
  return {
    title: names.find(name => name) ?? '',
    rows: [
      ...times,
      ['rank', `${row.rank.rank}, ${lane.name}`],
      ['kind', kind.filter(text => text).join(', ')],
      ['op', names[0]],
      ['launched by', names[1]],
      ['kernel', names[2].length > 300 ? `${names[2].slice(0, 300)}…` : names[2]],
      ['layer', what.layer[w] < 0 ? '' : String(what.layer[w])],
      ['bytes', bytes ? size(bytes) : ''],
      ['bandwidth', bytes && ns ? `${(bytes / ns).toPrecision(3)} GB/s over the link` : ''],
    ].filter(([, value]) => value),
  };
}

function point(event) {
  const box = lanesCanvas.getBoundingClientRect(), found = under(event.clientX - box.left, event.clientY - box.top);
  tip.hidden = !found;
  if (!found) return;
  const { title, rows: lines } = told(found), table = document.createElement('table');
  for (const line of lines) {
    const row = table.insertRow();
    for (const text of line) row.insertCell().textContent = text;
  }
  const head = document.createElement('b');
  head.textContent = title;
  tip.replaceChildren(head, table);
  const { width: wide, height: tall } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, window.innerWidth - wide - 8))}px`;
  const below = event.clientY + 16;
  tip.style.top = `${below + tall > window.innerHeight ? Math.max(4, event.clientY - tall - 12) : below}px`;
}

let drag = null;
scroll.addEventListener('pointerdown', event => {
  if (event.button !== 0) return;
  drag = { x: event.clientX, y: event.clientY, from: view.from, to: view.to, top: scroll.scrollTop, moved: false };
  scroll.setPointerCapture(event.pointerId);
});
scroll.addEventListener('pointermove', event => {
  if (!drag) { point(event); return; }
  const dx = event.clientX - drag.x, dy = event.clientY - drag.y;
  if (Math.abs(dx) + Math.abs(dy) > 3) { drag.moved = true; tip.hidden = true; }
  if (!drag.moved) return;
  const by = dx / (width - GUTTER) * (drag.to - drag.from);
  scroll.scrollTop = drag.top - dy;
  show(drag.from - by, drag.to - by);
});
scroll.addEventListener('pointerup', event => {
  const box = lanesCanvas.getBoundingClientRect();
  if (drag && !drag.moved) {
    const found = under(event.clientX - box.left, event.clientY - box.top);
    view.marked = found?.lane ? found : null;
    request();
  }
  drag = null;
});
scroll.addEventListener('pointercancel', () => { drag = null; });
scroll.addEventListener('pointerleave', () => { tip.hidden = true; });
scroll.addEventListener('scroll', request);
scroll.addEventListener('dblclick', fit);
scroll.addEventListener('wheel', event => {
  event.preventDefault();
  tip.hidden = true;
  const lines = event.deltaMode === 1 ? 16 : 1, dx = event.deltaX * lines, dy = event.deltaY * lines;
  if (event.shiftKey || Math.abs(dx) > Math.abs(dy)) pan((dx || dy) / (width - GUTTER));
  else zoom(Math.exp(Math.max(-200, Math.min(dy, 200)) * 0.003), timeOf(event.clientX - lanesCanvas.getBoundingClientRect().left));
}, { passive: false });

document.addEventListener('keydown', event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (['INPUT', 'SELECT'].includes(event.target.tagName)) {
    if (event.key === 'Escape') { event.target.value = ''; search(''); scroll.focus(); }
    return;
  }
  const keys = {
    ArrowLeft: () => pan(-0.15), a: () => pan(-0.15), ArrowRight: () => pan(0.15), d: () => pan(0.15),
    '+': () => zoom(0.7), '=': () => zoom(0.7), w: () => zoom(0.7), '-': () => zoom(1 / 0.7), s: () => zoom(1 / 0.7),
    '0': fit, Home: fit, Enter: () => next(1), n: () => next(1), p: () => next(-1),
    '/': () => find('find').focus(), Escape: () => { view.marked = null; find('find').value = ''; search(''); },
  };
  const action = keys[event.key];
  if (!action || (event.key === 'Enter' && event.target.tagName === 'BUTTON')) return;
  event.preventDefault();
  action();
});

// -------------------------------------------------------------------------------------------------- finding

/** Mark what has a text in its name, op, launcher, group, class or kind; `layer 3` finds a layer. */
function search(text) {
  const wanted = text.trim().toLowerCase();
  view.wanted = null;
  if (wanted) {
    const hit = page.words.map(name => name.toLowerCase().includes(wanted));
    const layer = /^layer (\d+)$/.exec(wanted);
    view.wanted = what.name.map((_, w) => layer ? what.layer[w] === +layer[1]
      : ['op', 'launcher', 'name', 'group', 'class', 'kind'].some(column => hit[what[column][w]]));
  }
  let count = 0, time = 0;
  if (view.wanted) for (const rank of ranks) for (const lane of rank.lanes) for (let i = 0; i < lane.what.length; i++)
    if (view.wanted[lane.what[i]]) { count++; time += lane.end[i] - lane.start[i]; }
  find('found').textContent = view.wanted ? `${count.toLocaleString('en')} found, ${duration(time)} together` : '';
  request();
}

/** Go to the next or previous activity that was found, from the marked one or from the edge of the view; then around. */
function next(direction) {
  if (!view.wanted) return;
  const edge = direction > 0 ? view.from : view.to, around = (all.to - all.from) * 4;
  const origin = view.marked ? view.marked.lane.start[view.marked.i] : edge;
  let best = null, distance = Infinity;
  for (const row of rows) for (let i = 0; row.lane && i < row.lane.what.length; i++) {
    if (!view.wanted[row.lane.what[i]]) continue;
    const off = (row.lane.start[i] - origin) * direction, way = off > 0 ? off : off + around;
    if (way < distance) { best = { row, lane: row.lane, i }; distance = way; }
  }
  if (!best) return;
  view.marked = best;
  const { lane, row, i } = best, long = Math.min(view.to - view.from, Math.max((lane.end[i] - lane.start[i]) * 12, 1000));
  const at = (lane.start[i] + lane.end[i]) / 2;
  if (row.top < scroll.scrollTop || row.top + row.height > scroll.scrollTop + height) scroll.scrollTop = row.top - height / 2;
  show(at - long / 2, at + long / 2);
}

// ------------------------------------------------------------------------------------------------- the page

/** The view is kept in the address, so that a link leads to it: #step=12&from=1.5&to=3.2&find=gather, in ms. */
function remember() {
  const zero = windowOf(view.step).from, ms = time => ((time - zero) / 1e6).toFixed(4);
  const words = [`step=${view.step}`, `from=${ms(view.from)}`, `to=${ms(view.to)}`];
  if (find('find').value) words.push(`find=${encodeURIComponent(find('find').value)}`);
  try { history.replaceState(null, '', `#${words.join('&')}`); } catch { /* a page inside another may not */ }
}

/** Bring back the view that the address names. */
function recall() {
  const words = new URLSearchParams(location.hash.slice(1)), step = Number(words.get('step') ?? NaN);
  choose(numbers.includes(step) ? step : page.step);
  const zero = windowOf(view.step).from, from = parseFloat(words.get('from')), to = parseFloat(words.get('to'));
  if (to > from) show(zero + from * 1e6, zero + to * 1e6);
  else if (page.first && !words.size) show(...page.first);
  find('find').value = words.get('find') ?? '';
  search(find('find').value);
}

function choose(number) {
  view.step = number;
  find('step').value = String(number);
  fit();
}

function legend() {
  const used = new Set(page.ranks.flatMap(rank => [...new Set(rank.what)]).map(w => what.color[w]));
  colorNames.forEach((name, n) => {
    if (!used.has(n) && !page.strips[name]) return;
    const item = document.createElement('span'), swatch = document.createElement('i');
    swatch.className = 'swatch';
    swatch.style.background = page.colors[name];
    item.append(swatch, page.strips[name] ?? name);
    if (used.has(n)) item.onclick = () => { find('find').value = name; search(name); };
    find('legend').append(item);
  });
}

for (const number of numbers) find('step').add(new Option(number, number));
find('step').parentElement.hidden = numbers.length < 2;
find('step').onchange = event => choose(Number(event.target.value));
find('find').oninput = event => search(event.target.value);
find('find').onkeydown = event => { if (event.key === 'Enter') next(event.shiftKey ? -1 : 1); };
find('in').onclick = () => zoom(0.6);
find('out').onclick = () => zoom(1 / 0.6);
find('fit').onclick = fit;
window.addEventListener('hashchange', recall);
new ResizeObserver(resize).observe(scroll);
window.addEventListener('resize', resize);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', resize);
legend();
resize();
recall();
view.ready = true;
draw();
// For checks of the page: what it computed from the activities that it holds.
document.body.dataset.rows = String(ranks.reduce((sum, rank) => sum + rank.lanes.reduce((n, lane) => n + lane.what.length, 0), 0));
document.body.dataset.figures = JSON.stringify(figures());
