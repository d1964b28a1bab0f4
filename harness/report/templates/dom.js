// Elements are built, never parsed: no string of a record can become markup (the page's policy forbids it as well).
const $ = (query, root = document) => root.querySelector(query);
const $$ = (query, root = document) => [...root.querySelectorAll(query)];
const SVG = 'http://www.w3.org/2000/svg';

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== ''));
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const sv = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const title = (text) => sv('title', null, text);

function num(value, digits = 4) {
  if (value === null || value === undefined) return '–';
  if (typeof value !== 'number') return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return value.toLocaleString('en-US');
  if (size >= 1000 && size < 1e7) return Math.round(value).toLocaleString('en-US');
  return size >= 1e-4 && size < 1e7 ? String(Number(value.toPrecision(digits))) : value.toExponential(digits - 1);
}
// A multiple of a limit, never rounded onto the limit.
function ratio(value) {
  if (value === null || value === undefined || value < 0.9995 || value >= 1.0005 || value === 1) return num(value, 3);
  return value < 1 ? '0.999' : num(Math.max(value, 1.000001), 7);
}
const times = (value) => (value === null || value === undefined ? '–' : `${ratio(value)} ×`);

function brief(value) {
  if (value === null || value === undefined) return '–';
  if (value === 0) return '0';
  if (value < 0.005) return '<.01';
  if (value < 0.995) return value.toFixed(2).slice(1);
  if (value < 1) return '.99';
  if (value < 9.95) return value.toFixed(1);
  return value < 999.5 ? value.toFixed(0) : value.toExponential(0).replace('+', '');
}

// Control and formatting characters written out, as the rest of the page does.
const visible = (text) =>
  String(text).replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (c) => `\\u${c.codePointAt(0).toString(16).padStart(4, '0')}`);

const blobs = JSON.parse($('#blobs').textContent);
const unpacked = new Map();

async function inflate(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('deflate-raw'));
  return JSON.parse(await new Response(stream).text());
}

// Lists of numbers travel as text, empty where there is none.
const list = (text) => (text ? text.split(',').map((v) => (v === '' ? null : Number(v))) : []);

function unlist(c) {
  for (const t of c.tensors) {
    t.tokens = list(t.tokens);
    t.slices = (t.slices || []).map(([dim, width, worst, relative]) => [dim, width, list(worst), list(relative)]);
    if (t.errors) t.errors[2] = list(t.errors[2]);
    if (t.density) t.density[2] = t.density[2].map(list);
  }
  return c;
}

function detail(index) {
  if (!unpacked.has(index)) unpacked.set(index, inflate(blobs[index]).then(unlist));
  return unpacked.get(index);
}
