"use strict";
// Numbers and names as people read them; the texts of the page, and its colours.

const data = JSON.parse(document.getElementById("data").textContent);
const MOST_OPS = data.mostOps;
const colours = {};
let unpacked = null;

const three = (n) => n.toFixed(Math.max(0, Math.min(2, n ? 2 - Math.floor(Math.log10(Math.abs(n))) : 0)));
const duration = (s) => {
  if (s === null) return "-";
  if (Math.abs(s) * 1e6 < 999.5) return `${three(s * 1e6)} us`;
  if (Math.abs(s) * 1e3 < 999.5) return `${three(s * 1e3)} ms`;
  return `${three(s)} s`;
};
const size = (n) => {
  if (n === null) return "-";
  for (const unit of ["B", "KiB", "MiB"]) {
    if (n < 1024) return unit === "B" ? `${n} B` : `${n.toFixed(1)} ${unit}`;
    n /= 1024;
  }
  return `${n.toFixed(2)} GiB`;
};
const count = (n, unit) => {
  if (n === null) return "-";
  for (const letter of ["", "k", "M", "G"]) {
    if (n < 999.5) return `${Number.isInteger(n) ? n : three(n)} ${letter}${unit}`.trim();
    n /= 1e3;
  }
  return `${three(n)} T${unit}`;
};
const percent = (part) => `${(100 * part).toFixed(1)} %`;
const secondsOf = (step) => (step.measured === null ? step.modelled : step.measured);

// Elements: names reach the page as text alone.

const element = (tag, name, text) => {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
};

async function sources() {
  if (unpacked === null) {
    const bytes = Uint8Array.from(atob(data.sources), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    unpacked = new Response(stream).text().then((text) => new Map(Object.entries(JSON.parse(text))));
  }
  return unpacked;
}

function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["surface", "ink", "muted", "line", "accent", "mark"])
    colours[name] = style.getPropertyValue(`--${name}`).trim();
  colours.text = style.getPropertyValue("--text");
}

const ended = (text, most) => (text.length <= most ? text : `${text.slice(0, most - 1)}…`);

function shortened(c, text, width) {
  if (text.length > 400) text = text.slice(0, 400);
  if (c.measureText(text).width <= width) return text;
  let low = 0, high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (c.measureText(`${text.slice(0, middle)}…`).width <= width) low = middle;
    else high = middle - 1;
  }
  return `${text.slice(0, low)}…`;
}
