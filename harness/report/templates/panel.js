const fact = (name, value, css) => value === null || value === undefined || value === '' ? null
  : el('div', { class: css }, el('dt', null, name), el('dd', null, value));
const copyButton = (text, label) => el('button', { type: 'button', class: 'copy', 'data-copy': text, 'aria-label': label }, 'Copy');
const pairs = (object) => Object.entries(object).map(([key, value]) => `${visible(key)} ${typeof value === 'string' ? visible(value) : num(value, 6)}`);

function worstTable(tensor) {
  if (!tensor.worst.length) return null;
  const head = ['index', 'production', 'reference', 'oracle', 'allowed ±', 'ratio'];
  const rows = tensor.worst.map(([index, production, reference, oracle, bound, ratio]) => el('tr', null,
    el('th', { scope: 'row' }, `[${index.join(', ')}]`),
    [production, reference, oracle].map((v) => el('td', { class: 'n' }, typeof v === 'number' ? num(v, 7) : visible(v ?? '–'))),
    el('td', { class: 'n' }, num(bound, 3)), el('td', { class: ratio > 1 ? 'n hot' : 'n' }, times(ratio))));
  const dims = tensor.dims.length ? `worst elements of [${tensor.dims.map(visible).join(', ')}]` : 'worst element';
  return el('div', { class: 'scroll' }, el('table', { class: 'coords' }, el('caption', null, dims),
    el('thead', null, el('tr', null, head.map((h, i) => el('th', { scope: 'col', class: i ? 'n' : null }, h)))), el('tbody', null, rows)));
}

function tensorBody(t, mode, said) {
  const local = mode === 'local';
  const [oracle, error, own] = t.rms;
  const off = t.slope !== null && Math.abs(t.slope - 1) > 1e-3;
  const figures = el('dl', { class: 'facts' },
    fact('margin: worst element ÷ bound', t.margin === null ? null : times(t.margin), t.margin > 1 ? 'hotfact' : null),
    fact('cost: RMS error ÷ allowed', t.cost === null ? null : times(t.cost), t.cost > 1 ? 'hotfact' : null),
    fact('RMS of the oracle', oracle === null ? null : num(oracle)),
    fact('RMS error, production', error === null ? null : num(error)),
    fact('RMS error, reference', own === null ? null : num(own)),
    fact('slope against the oracle', t.slope === null ? null : num(t.slope, 6), off ? 'hotfact' : null),
    fact('mismatches', t.mismatches === null ? null : num(t.mismatches), t.mismatches ? 'hotfact' : null),
    fact('flips inside the bound', t.flips === null ? null : num(t.flips)),
    fact('dtype', t.dtypes[0] === t.dtypes[1] ? visible(t.dtypes[0]) : `production ${visible(t.dtypes[0])}, reference ${visible(t.dtypes[1])}`),
    fact('shape', `${t.dims.map((d, i) => `${visible(d)} ${t.shape[i]}`).join(' × ')}`));
  const inputs = pairs(t.threshold);
  const rule = t.formula && el('p', { class: 'rule' }, el('b', null, 'Threshold '), el('code', null, visible(t.formula)),
    inputs.length ? el('span', null, ' with ', inputs.join(', ')) : null);
  const charts = [
    t.errors && t.errors[2].length ? histogram(t.errors, local) : null,
    t.density && t.density[2].length ? density(t.density) : null,
  ].filter(Boolean);
  const axes = t.slices.map(slice);
  return [
    t.reason && t.reason !== said ? el('p', { class: 'why' }, visible(t.reason)) : null,
    rule, figures,
    el('div', { class: 'evidence' }, worstTable(t), charts),
    axes.length ? el('div', { class: 'axes' }, axes) : null,
    t.tokens.length ? tokenFigure(t.tokens, t.tokenWidth, local) : null,
  ];
}

function tensorSection(t, mode, said, open) {
  const summary = el('summary', null, el('span', { class: `tag ${t.verdict}` }, t.verdict), ' ', el('b', null, visible(t.name)),
    el('small', null, ` [${t.dims.map(visible).join(', ')}] ${t.role === 'value' ? '' : visible(t.role)} ${[t.margin === null ? '' : `${ratio(t.margin)} × margin`, t.cost === null ? '' : `${ratio(t.cost)} × cost`].filter(Boolean).join(' · ')}`));
  const node = el('details', { class: 'tensor' }, summary);
  const build = () => node.children.length < 2 && node.append(el('div', null, tensorBody(t, mode, said)));
  if (open) build();
  node.open = open;
  node.addEventListener('toggle', () => node.open && build());
  return node;
}

function panel(c, sibling) {
  const rank = ['INVALID', 'FAIL', 'INCONCLUSIVE', 'PASS', 'SKIPPED'];
  const tensors = [...c.tensors].sort((a, b) => rank.indexOf(a.verdict) - rank.indexOf(b.verdict) || (b.name === c.tensor) - (a.name === c.tensor));
  const other = c.mode === 'local' ? 'free' : 'local';
  return el('section', { class: 'panel-body', 'aria-label': `${visible(c.stage)}, ${visible(c.mode)}` },
    c.reproduce ? el('p', { class: 'cmd' }, el('code', null, visible(c.reproduce).split(' ').map((word) => [el('span', null, word), ' '])), copyButton(c.reproduce, 'Copy the command that reproduces this row')) : null,
    el('dl', { class: 'facts' },
      fact('component', visible(c.component)),
      fact('rounding plan', pairs(c.plan).join(', ')),
      c.covers.length > 1 || (c.covers.length && c.covers[0] !== c.stage) ? fact('covers', c.covers.map(visible).join(', ')) : null,
      c.bypass === 'production' ? null : fact('bypassed', visible(c.bypass), 'hotfact'),
      c.replaced ? fact('replaced by', visible(c.replaced), 'hotfact') : null,
      Object.keys(c.streamRms).length ? fact('stream RMS', pairs(c.streamRms).join(', ')) : null,
      fact('time', `${num(c.seconds, 3)} s`),
      sibling ? fact(`in ${other} mode`, el('a', { href: `#${sibling.id}` }, `${sibling.dataset.v} →`)) : null),
    c.cut ? el('p', { class: 'alert' }, `Left out to keep the page small: ${c.cut}. The record file has them.`) : null,
    tensors.length === 1
      ? el('div', { class: 'tensor' }, el('h4', null, visible(tensors[0].name)), tensorBody(tensors[0], c.mode, c.reason))
      : tensors.map((t, i) => tensorSection(t, c.mode, c.reason, i === 0)));
}
