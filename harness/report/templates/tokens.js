// Tokens: buckets of a flattened [batch, position] axis. Only row 0 has text.
let meta = { tokens: [], batch: 1, length: 0, map: {} };

function tokenName(bucket, width) {
  const first = bucket * width;
  const row = meta.length && meta.batch > 1 ? Math.floor(first / meta.length) : 0;
  const position = meta.length ? first % meta.length : first;
  const words = row ? [] : meta.tokens.slice(position, position + width).map((word) => `“${visible(word)}”`);
  const span = width > 1 ? `tokens ${position}–${position + width - 1}` : `token ${position}`;
  return (meta.batch > 1 ? `row ${row}, ` : '') + span + (words.length ? ` ${words.join(' ')}` : '');
}

// Says what is under the pointer; arrow keys move when the strip has the focus.
function readable(picture, values, say) {
  let at = 0;
  const show = (i) => {
    at = Math.max(0, Math.min(values.length - 1, i));
    say(at);
  };
  picture.tabIndex = 0;
  picture.addEventListener('pointermove', (event) => {
    const box = picture.getBoundingClientRect();
    show(Math.floor(((event.clientX - box.left) / box.width) * values.length));
  });
  picture.addEventListener('focus', () => show(Math.max(0, largest(values))));
  picture.addEventListener('keydown', (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, PageDown: 16, PageUp: -16, Home: -values.length, End: values.length }[event.key];
    if (!step) return;
    event.preventDefault();
    show(at + step);
  });
}

function tokenFigure(values, width, local) {
  const bin = local ? limitBin : relativeBin;
  const say = (i) => `${tokenName(i, width)}: ${values[i] === null ? 'no figure' : local ? `${times(values[i])} bound` : `relative error ${num(values[i], 3)}`}`;
  const worst = largest(values);
  const rest = worst < 0 ? 'no figures' : `largest at ${say(worst)}`;
  const caption = el('span', null, rest);
  const picture = strip(values, bin, rest);
  readable(picture, values, (i) => { caption.textContent = say(i); });
  picture.addEventListener('pointerleave', () => { caption.textContent = rest; });
  return figure('By token', picture, caption);
}

const currentMode = () => document.documentElement.dataset.mode;

// [layer, figures] of one stage over the layers, from the panels' own detail.
async function stageRows(name, mode) {
  const found = [];
  for (const row of $$('#rows > tr[data-i]')) {
    const stage = $('.open', row).textContent;
    const layer = stage.match(/\.(\d+)\.(.+)$/);
    if (row.dataset.m === mode && layer && layer[2] === name) found.push([Number(layer[1]), await detail(Number(row.dataset.i))]);
  }
  let width = 1;
  const rows = found.map(([layer, c]) => {
    const tensor = c.tensors.find((t) => t.name === c.tensor && t.tokens.length) || c.tensors.find((t) => t.tokens.length);
    width = tensor ? tensor.tokenWidth : width;
    return [layer, tensor ? tensor.tokens : []];
  });
  return { width, rows: rows.filter(([, values]) => values.length).sort((a, b) => a[0] - b[0]) };
}

async function drawTokens() {
  const mode = currentMode();
  const local = mode === 'local';
  const stage = $('#token-stage').value;
  const { width, rows } = stage ? await stageRows(stage, mode) : meta.map[mode] || { width: 1, rows: [] };
  const readout = $('#token-readout');
  const lines = rows.map(([layer, values]) => {
    const label = layer === null ? 'model' : `layer ${layer}`;
    const figureOf = (v) => (v === null ? 'no figure' : local ? `${times(v)} its bound` : `relative error ${num(v, 3)}`);
    const worst = largest(values);
    const picture = strip(values, local ? limitBin : relativeBin, worst < 0 ? label : `${label}: largest at ${tokenName(worst, width)}, ${figureOf(values[worst])}`);
    readable(picture, values, (i) => readout.replaceChildren(el('b', null, `${label} · ${tokenName(i, width)}`), ` · ${figureOf(values[i])}`));
    const last = worst < 0 ? '' : `${local ? times(values[worst]) : num(values[worst], 2)} at ${worst * width}`;
    return el('div', { class: 'token-row' }, el('span', null, label), picture, el('span', { title: last }, last));
  });
  $('#token-map').replaceChildren(...(lines.length ? lines : [el('p', { class: 'note' }, 'No figures by token on record for this choice.')]));
}
