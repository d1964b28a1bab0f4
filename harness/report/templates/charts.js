const EDGES = [0.1, 0.3, 1, 3, 10, 100, 1000];
const RELATIVE_EDGES = [1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 1];
const binIn = (edges, prefix) => (value) => {
  const at = edges.findIndex((edge) => value <= edge);
  return prefix + (at < 0 ? edges.length : at);
};
const limitBin = binIn(EDGES, 'b');
const relativeBin = binIn(RELATIVE_EDGES, 'r');
const largest = (values) =>
  values.reduce((best, v, i) => (v !== null && (best < 0 || v > values[best]) ? i : best), -1);

const chart = (css, width, height, label, ...parts) =>
  sv('svg', { class: `chart ${css}`, viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: 'none', role: 'img', 'aria-label': label }, ...parts);
const figure = (heading, picture, caption) =>
  el('figure', { class: 'fig' }, el('h5', null, heading), picture, el('figcaption', null, caption));

// One path per colour class with runs merged: a row of a thousand tokens stays a handful of elements.
function strip(values, bin, label) {
  const paths = new Map();
  for (let i = 0; i < values.length; ) {
    let j = i + 1;
    const css = values[i] === null ? null : bin(values[i]);
    while (j < values.length && (values[j] === null ? null : bin(values[j])) === css) j += 1;
    if (css) paths.set(css, `${paths.get(css) || ''}M${i} 0H${j}V1H${i}z`);
    i = j;
  }
  const parts = [...paths].map(([css, d]) => sv('path', { class: css, d }));
  return sv('svg', { class: 'strip-map', viewBox: `0 0 ${values.length} 1`, preserveAspectRatio: 'none', role: 'img', 'aria-label': label }, ...parts);
}

function histogram([low, high, counts], local) {
  const top = Math.log1p(Math.max(...counts, 1));
  const at = (value) => ((value - low) / (high - low || 1)) * counts.length;
  const beyond = (i) => local && Math.abs(low + ((i + 0.5) / counts.length) * (high - low)) > 1;
  const bars = counts.map((count, i) => {
    const height = (60 * Math.log1p(count)) / top;
    return count && sv('rect', { class: beyond(i) ? 'col out' : 'col', x: i + 0.08, y: 60 - height, width: 0.84, height },
      title(`${num(low + (i / counts.length) * (high - low), 3)} to ${num(low + ((i + 1) / counts.length) * (high - low), 3)}: ${num(count)} elements`));
  });
  const marks = (local ? [-1, 0, 1] : [0]).filter((v) => v >= low && v <= high);
  const lines = marks.map((v) => sv('path', { class: v ? 'limit' : 'uniform', d: `M${at(v)} 0V60` }));
  const unit = local ? 'the bound' : 'the RMS error';
  const picture = chart('histogram', counts.length, 60, `Signed errors from ${num(low, 3)} to ${num(high, 3)} times ${unit}`, bars.filter(Boolean), lines);
  const scale = el('div', { class: 'axis' }, el('span', null, num(low, 3)), el('span', null, `× ${unit}`), el('span', null, num(high, 3)));
  const note = `production − oracle; heights are logarithmic${local ? '; lines at 0 and ±1, the limit' : ''}`;
  return figure('Signed error', el('div', null, picture, scale), note);
}

function density([low, high, rows]) {
  const size = rows.length;
  const top = Math.log1p(Math.max(1, ...rows.map((row) => Math.max(...row))));
  const paths = ['', '', '', '', ''];
  rows.forEach((row, i) => row.forEach((count, j) => {
    if (count) paths[Math.min(4, Math.floor((5 * Math.log1p(count)) / top))] += `M${j} ${size - i - 1}h1v1h-1z`;
  }));
  const picture = chart('density', size, size, 'Density of production against reference values',
    sv('path', { class: 'diagonal', d: `M0 ${size}L${size} 0` }), paths.map((d, i) => d && sv('path', { class: `d${i}`, d })));
  const scale = el('div', { class: 'axis' }, el('span', null, num(low, 3)), el('span', null, 'reference →'), el('span', null, num(high, 3)));
  return figure('Density', el('div', null, picture, scale), 'production upwards; the diagonal is agreement, darker is more (log)');
}

// The axes that docs/stages.md names by letters; any other name stands for itself.
const AXES = { B: 'row', S: 'position', H: 'head', D: 'channel', d: 'channel', N: 'stream', M: 'stream out', E: 'expert', k: 'pick', K: 'pick', T: 'compressed entry', F: 'expert channel', V: 'vocabulary', G: 'group', J: 'key', QL: 'channel', OL: 'channel', R2: 'rope pair', HI: 'index head', DI: 'index channel' };
const axis = (dim) => (AXES[dim] ? `${AXES[dim]} (${dim})` : visible(dim));

// One axis of a tensor: labelled cells where they fit, bars on a log scale where they do not.
function slice([dim, width, worst, relative]) {
  const ruled = worst.some((v) => v !== null);
  const values = ruled ? worst : relative;
  const bin = ruled ? limitBin : relativeBin;
  const at = largest(values);
  const name = (i) => (width > 1 ? `${i * width}–${(i + 1) * width - 1}` : String(i));
  const said = (i) => `${AXES[dim] || visible(dim)} ${name(i)}: ` + (ruled ? `worst ${times(worst[i])} bound, ` : '') + `relative error ${num(relative[i], 3)}`;
  let caption = 'no figures';
  if (at >= 0) {
    const over = worst.filter((v) => v !== null && v > 1).length;
    caption = `largest at ${name(at)}: ${ruled ? times(values[at]) : num(values[at], 3)}`;
    if (ruled) caption += over ? `; ${over} of ${values.length} beyond the bound` : '; none beyond the bound';
  }
  let picture;
  if (values.length <= 16) {
    picture = el('ol', { class: 'cells', start: 0 }, values.map((v, i) =>
      el('li', { class: v === null ? 'none' : bin(v), title: said(i) }, ruled ? brief(v) : v === null ? '–' : v.toPrecision(2))));
  } else {
    const known = values.filter((v) => v > 0);
    const high = Math.max(ruled ? 1 : 0, ...known) * 1.05;
    const low = Math.min(...known, high) / 2;
    const y = (v) => 40 * (1 - Math.log(v / low) / Math.log(high / low));
    picture = chart('slice', values.length, 40, caption,
      values.map((v, i) => v > 0 && sv('rect', { class: bin(v), x: i + 0.06, width: 0.88, y: y(v), height: 40 - y(v) })).filter(Boolean),
      ruled && low < 1 ? [sv('path', { class: 'limit', d: `M0 ${y(1)}H${values.length}` })] : [],
      values.map((v, i) => sv('rect', { class: 'hit', x: i, width: 1, height: 40 }, title(said(i)))));
  }
  return figure(`By ${axis(dim)}`, picture, caption);
}
