const root = document.documentElement;
const heat = $('.heat');
const rows = $$('#rows > tr');

// Theme: auto follows the system; a choice is kept where the browser lets a file keep one.
const themes = ['auto', 'light', 'dark'];
function setTheme(name) {
  if (name === 'auto') delete root.dataset.theme;
  else root.dataset.theme = name;
  $('#theme').textContent = `Theme: ${name}`;
}
function kept(write) {
  try {
    if (write) localStorage.setItem('dsv4-theme', write);
    return localStorage.getItem('dsv4-theme');
  } catch {
    return null;
  }
}
setTheme(themes.includes(kept()) ? kept() : 'auto');
$('#theme').addEventListener('click', () => {
  const next = themes[(themes.indexOf(root.dataset.theme || 'auto') + 1) % themes.length];
  setTheme(next);
  kept(next);
});

// Copying: the clipboard where the page may use it, a selection otherwise.
async function copy(button) {
  const text = button.dataset.copy;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = el('textarea', { class: 'sr' }, text);
    document.body.append(area);
    area.select();
    document.execCommand('copy');
    area.remove();
    button.focus();
  }
  button.textContent = 'Copied';
  button.classList.add('done');
  setTimeout(() => {
    button.textContent = 'Copy';
    button.classList.remove('done');
  }, 1500);
}

// Panels are built when they are first opened.
const siblingOf = (row) => rows.find((r) => r !== row && $('.open', r).textContent === $('.open', row).textContent);
async function panelOf(row) {
  if (row.nextElementSibling?.classList.contains('panel')) return row.nextElementSibling;
  const c = await detail(Number(row.dataset.i));
  if (row.nextElementSibling?.classList.contains('panel')) return row.nextElementSibling;
  const body = el('tr', { class: 'panel', hidden: '' }, el('td', { colspan: 6 }, panel(c, siblingOf(row))));
  row.after(body);
  return body;
}
async function toggle(row, open) {
  const body = await panelOf(row);
  body.hidden = !open;
  $('.open', row).setAttribute('aria-expanded', String(open));
}
async function follow() {
  const row = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!row || !rows.includes(row)) return;
  if (row.classList.contains('more')) uncap();
  if (row.hidden) {
    $('#filter').reset();
    filter();
  }
  await toggle(row, true);
  rows.forEach((r) => r.classList.toggle('here', r === row));
  row.scrollIntoView({ block: 'start' });
  $('.open', row).focus({ preventScroll: true });
}
document.addEventListener('click', (event) => {
  const copyable = event.target.closest('.copy');
  if (copyable) return copy(copyable);
  const opener = event.target.closest('.open');
  if (opener) return toggle(opener.closest('tr'), opener.getAttribute('aria-expanded') !== 'true');
  const filtering = event.target.closest('[data-filter]');
  if (filtering) {
    $('#filter').elements.verdict.value = filtering.dataset.filter;
    return filter();
  }
  const link = event.target.closest('a[href^="#"]');
  if (link && link.hash === location.hash) follow();
  return undefined;
});
addEventListener('hashchange', follow);

// Filter. A long table starts with its first rows; any filter looks through all of them.
function uncap() {
  $('.rows').classList.remove('capped');
  $('#all')?.remove();
}
$('#all')?.addEventListener('click', uncap);
const searchable = rows.map((row) => row.textContent.toLowerCase());
function filter() {
  const { text, verdict, mode } = $('#filter').elements;
  const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  rows.forEach((row, i) => {
    const match = (!verdict.value || row.dataset.v === verdict.value) && (!mode.value || row.dataset.m === mode.value) && words.every((word) => searchable[i].includes(word));
    row.hidden = !match;
    const body = row.nextElementSibling;
    if (body?.classList.contains('panel')) body.hidden = !match || $('.open', row).getAttribute('aria-expanded') !== 'true';
    shown += match;
  });
  if (shown < rows.length) uncap();
  $('#shown').textContent = shown === rows.length ? `${shown.toLocaleString('en-US')} comparisons, failures first` : `${shown.toLocaleString('en-US')} of ${rows.length.toLocaleString('en-US')}`;
  $('#nothing').hidden = shown > 0;
}
$('#filter').addEventListener('input', filter);
$('#filter').addEventListener('submit', (event) => event.preventDefault());

// The map: one tab stop, arrow keys between cells, figures beside it.
const view = () => root.dataset.view;
const linkIn = (cell) => cell && $(`.${view()}[href]`, cell);
function rove(link) {
  $$('a', heat).forEach((a) => { a.tabIndex = a === link ? 0 : -1; });
}
function rowSaid(row) {
  const [verdict, , mode, margin, cost] = [...row.cells].map((cell) => cell.textContent.trim());
  const figures = [[margin, 'margin'], [cost, 'cost']].filter(([v]) => v !== '–').map(([v, unit]) => `${v} × ${unit}`);
  const more = $$('.by, small', row).map((node) => node.textContent);
  return [el('b', null, `${$('.open', row).textContent} · ${mode}`), ` · ${[verdict, ...figures, ...more].join(' · ')}`];
}
function describe(event) {
  const cell = event.target.closest('td');
  const shown = cell && $(`.${view()}`, cell);
  if (!shown) return;
  const row = shown.hash && document.getElementById(decodeURIComponent(shown.hash.slice(1)));
  $('#readout').replaceChildren(...(row && rows.includes(row) ? rowSaid(row) : [shown.title]));
}
heat.addEventListener('pointerover', describe);
heat.addEventListener('focusin', (event) => {
  describe(event);
  if (event.target.closest('a')) rove(event.target.closest('a'));
});
heat.addEventListener('keydown', (event) => {
  const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
  const from = event.target.closest('td');
  if (!step || !from) return;
  event.preventDefault();
  let [y, x] = [from.parentElement.rowIndex, from.cellIndex];
  for (;;) {
    y += step[0];
    x += step[1];
    const line = heat.rows[y];
    if (!line || x < 1 || (step[1] && !line.cells[x])) return;
    const link = linkIn(line.cells[Math.min(x, line.cells.length - 1)]);
    if (link) {
      link.focus();
      return;
    }
  }
});
function switched() {
  root.dataset.view = $('input[name="view"]:checked').value;
  root.dataset.mode = root.dataset.view === 'free' ? 'free' : 'local';
  rove($$(`a.${view()}`, heat)[0]);
  drawTokens();
}
$$('input[name="view"]').forEach((input) => input.addEventListener('change', switched));
$('#token-stage').addEventListener('change', drawTokens);

// The first that did not pass are unpacked ahead: printing shows them, and cannot wait.
const bad = rows.filter((row) => row.dataset.v !== 'PASS').slice(0, 6);
let opened = [];
addEventListener('beforeprint', () => {
  opened = bad.map((row) => row.nextElementSibling).filter((body) => body?.classList.contains('panel') && body.hidden);
  opened.forEach((body) => { body.hidden = false; });
});
addEventListener('afterprint', () => opened.forEach((body) => { body.hidden = true; }));

async function start() {
  meta = await inflate(JSON.parse($('#meta').textContent));
  for (const side of Object.values(meta.map)) side.rows = side.rows.map(([layer, values]) => [layer, list(values)]);
  const some = Object.values(meta.map).some((side) => side.rows.length);
  $('#tokens').hidden = !some;
  if (some) switched();
  else rove($$(`a.${view()}`, heat)[0]);
  if (bad[0] && ['FAIL', 'INVALID'].includes(bad[0].dataset.v)) await toggle(bad[0], true);
  await follow();
  const idle = globalThis.requestIdleCallback || ((work) => setTimeout(work, 50));
  for (const row of bad) await new Promise((done) => idle(() => panelOf(row).then(done)));
  root.dataset.ready = '';
}
start();
