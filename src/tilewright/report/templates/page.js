"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const [BOX_WIDTH, BOX_HEIGHT] = data.box;
  const views = [];
  let colours = {};
  let unpacked = null;

  // Numbers as people read them.

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

  class View {
    constructor(article, graph) {
      this.article = article;
      this.graph = graph;
      this.steps = graph.steps;
      this.canvas = article.querySelector("canvas");
      this.context = this.canvas.getContext("2d");
      this.details = article.querySelector(".details");
      this.found = article.querySelector(".found");
      this.search = article.querySelector(".search input");
      this.body = article.querySelector("table.steps tbody");
      this.rows = [...this.body.rows];
      this.marked = [];
      this.camera = { x: 0, y: 0, k: 1 };
      this.chosen = null;
      this.matches = null;
      this.queued = false;
      this.moved = false;
      this.connect();
      this.listen();
      article.querySelector(".explore").hidden = false;
      article.querySelector(".filter").hidden = false;
      new ResizeObserver(() => this.resize()).observe(this.canvas);
      this.describe();
    }

    connect() {
      this.reads = this.steps.map(() => []);
      this.writes = this.steps.map(() => []);
      this.curves = [];
      for (const [start, end, tensor, bytes, level, lane] of this.graph.edges) {
        const edge = { start, end, tensor, bytes, level, lane };
        if (end !== null) this.reads[end].push(edge);
        if (start !== null) this.writes[start].push(edge);
        if (start !== null && end !== null && start < end) this.curves.push(edge);
      }
      const total = this.graph.seconds;
      this.shares = this.steps.map((s) => (total && secondsOf(s) ? secondsOf(s) / total : 0));
      const most = Math.max(...this.shares, 0) || 1;
      this.heat = this.shares.map((s) => Math.sqrt(s / most));
      this.texts = this.steps.map((s) => `${s.name} ${s.ops.join(" ")} ${s.results.join(" ")}`.toLowerCase());
      this.curves.forEach((e) => {
        this.texts[e.start] += ` ${e.tensor.toLowerCase()}`;
      });
      this.labels = new Map();
    }

    // The camera: a point (x, y) of the drawing stands at the upper left corner, k times as large.

    resize() {
      const ratio = window.devicePixelRatio || 1;
      const { clientWidth, clientHeight } = this.canvas;
      if (!clientWidth) return;
      this.canvas.width = Math.round(clientWidth * ratio);
      this.canvas.height = Math.round(clientHeight * ratio);
      if (this.moved) this.redraw();
      else this.fit();
    }

    fit() {
      const [width, height] = this.graph.size;
      const { clientWidth, clientHeight } = this.canvas;
      const k = Math.min((clientWidth - 32) / width, (clientHeight - 32) / height, 1.2) || 1;
      this.camera = { k, x: (width - clientWidth / k) / 2, y: (height - clientHeight / k) / 2 };
      this.redraw();
    }

    zoom(factor, x = this.canvas.clientWidth / 2, y = this.canvas.clientHeight / 2) {
      const { k } = this.camera;
      const next = Math.min(4, Math.max(0.01, k * factor));
      this.camera.x += x / k - x / next;
      this.camera.y += y / k - y / next;
      this.camera.k = next;
      this.moved = true;
      this.redraw();
    }

    centre(number) {
      const [x, y] = this.graph.boxes[number];
      const { clientWidth, clientHeight } = this.canvas;
      if (this.camera.k < 0.5) this.camera.k = 0.9;
      const { k } = this.camera;
      this.camera.x = x + BOX_WIDTH / 2 - clientWidth / 2 / k;
      this.camera.y = y + BOX_HEIGHT / 2 - clientHeight / 2 / k;
      this.moved = true;
      this.redraw();
    }

    visible(number) {
      const [x, y] = this.graph.boxes[number];
      const { k } = this.camera;
      const left = (x - this.camera.x) * k;
      const top = (y - this.camera.y) * k;
      const room = left + BOX_WIDTH * k < this.canvas.clientWidth && top + BOX_HEIGHT * k < this.canvas.clientHeight;
      return left > 0 && top > 0 && room && k > 0.3;
    }

    redraw() {
      if (this.queued) return;
      this.queued = true;
      requestAnimationFrame(() => {
        this.queued = false;
        this.draw();
      });
    }

    // Drawing.

    draw() {
      const { context: c, camera, canvas } = this;
      const ratio = window.devicePixelRatio || 1;
      const scale = camera.k * ratio;
      c.setTransform(1, 0, 0, 1, 0, 0);
      c.clearRect(0, 0, canvas.width, canvas.height);
      c.setTransform(scale, 0, 0, scale, -camera.x * scale, -camera.y * scale);
      const view = {
        left: camera.x, top: camera.y,
        right: camera.x + canvas.clientWidth / camera.k, bottom: camera.y + canvas.clientHeight / camera.k,
      };
      this.drawEdges(c, view);
      this.drawBoxes(c, view);
    }

    drawEdges(c, view) {
      const { k } = this.camera;
      const near = [];
      for (const [least, most, width] of [[0, 1 << 16, 1], [1 << 16, 1 << 22, 1.6], [1 << 22, Infinity, 2.4]]) {
        c.beginPath();
        for (const e of this.curves) {
          const bytes = e.bytes || 0;
          if (bytes < least || bytes >= most || !this.trace(c, e, view)) continue;
          if (k > 0.75) near.push(e);
        }
        c.strokeStyle = colours.muted;
        c.globalAlpha = this.matches ? 0.15 : 0.5;
        c.lineWidth = Math.max(width, 0.5 / k);
        c.stroke();
      }
      c.globalAlpha = 1;
      if (this.chosen !== null) {
        c.beginPath();
        for (const e of [...this.reads[this.chosen], ...this.writes[this.chosen]])
          if (e.start !== null && e.end !== null && e.start < e.end) this.trace(c, e, view);
        c.strokeStyle = colours.mark;
        c.lineWidth = Math.max(2, 1.2 / k);
        c.stroke();
      }
      if (near.length < 160) this.drawLabels(c, near);
    }

    trace(c, e, view) {
      const [sx, sy] = this.graph.boxes[e.start];
      const [ex, ey] = this.graph.boxes[e.end];
      const x0 = sx + BOX_WIDTH / 2, y0 = sy + BOX_HEIGHT, x1 = ex + BOX_WIDTH / 2, y1 = ey;
      const right = Math.max(x0, x1, e.lane ?? -Infinity), left = Math.min(x0, x1, e.lane ?? Infinity);
      if (right < view.left || left > view.right) return false;
      if (Math.max(y0, y1) + 20 < view.top || Math.min(y0, y1) - 20 > view.bottom) return false;
      c.moveTo(x0, y0);
      if (e.lane === null) {
        const reach = (y1 - y0) / 2;
        c.bezierCurveTo(x0, y0 + reach, x1, y1 - reach, x1, y1);
      } else {
        const leaves = y0 + 13, enters = y1 - 13;
        c.arcTo(x0, leaves, e.lane, leaves, 7);
        c.arcTo(e.lane, leaves, e.lane, enters, 7);
        c.arcTo(e.lane, enters, x1, enters, 7);
        c.arcTo(x1, enters, x1, y1, 7);
        c.lineTo(x1, y1);
      }
      return true;
    }

    drawLabels(c, edges) {
      c.font = `10px ${colours.text}`;
      c.textBaseline = "middle";
      for (const e of edges) {
        const [sx, sy, , sc] = this.graph.boxes[e.start];
        const [ex, ey, , ec] = this.graph.boxes[e.end];
        if (sc !== ec) continue; // its lane is one of many
        const text = `${size(e.bytes)}, ${e.level}`;
        const x = e.lane !== null ? e.lane + 4 : (sx + ex) / 2 + BOX_WIDTH / 2 + 5;
        const y = e.lane !== null ? sy + BOX_HEIGHT + 54 : (sy + BOX_HEIGHT + ey) / 2;
        c.lineWidth = 4;
        c.strokeStyle = colours.surface;
        c.strokeText(text, x, y);
        c.fillStyle = colours.muted;
        c.fillText(text, x, y);
      }
    }

    drawBoxes(c, view) {
      const { k } = this.camera;
      const written = BOX_HEIGHT * k > 17;
      c.textBaseline = "alphabetic";
      this.steps.forEach((step, n) => {
        const [x, y] = this.graph.boxes[n];
        if (x + BOX_WIDTH < view.left || x > view.right || y + BOX_HEIGHT < view.top || y > view.bottom) return;
        const generated = step.how === "generated";
        const dim = this.matches && !this.matches.has(n);
        c.beginPath();
        c.roundRect(x, y, BOX_WIDTH, BOX_HEIGHT, 6);
        c.globalAlpha = 1;
        c.fillStyle = colours.surface;
        c.fill();
        c.globalAlpha = (dim ? 0.2 : 1) * (written ? 0.05 + 0.4 * this.heat[n] : 0.28 + 0.72 * this.heat[n]);
        c.fillStyle = colours.accent;
        c.fill();
        c.globalAlpha = dim ? 0.25 : 1;
        c.strokeStyle = n === this.chosen ? colours.mark : generated ? colours.accent : colours.muted;
        c.setLineDash(generated || n === this.chosen ? [] : [5, 3]);
        c.lineWidth = n === this.chosen ? Math.max(3, 2.5 / k) : this.matches && !dim ? Math.max(2, 1.5 / k) : 1;
        if (written || n === this.chosen || (this.matches && !dim)) c.stroke();
        c.setLineDash([]);
        if (written) this.write(c, n, x, y);
      });
      c.globalAlpha = 1;
    }

    write(c, n, x, y) {
      let label = this.labels.get(n);
      if (!label) {
        const step = this.steps[n];
        const share = this.shares[n] ? percent(this.shares[n]) : "";
        c.font = `600 12px ${colours.text}`;
        const name = shortened(c, step.name, BOX_WIDTH - 70);
        c.font = `11px ${colours.text}`;
        const ops = step.ops.map((op) => op.replace(/^[a-z_]+\.(_*)/, "$1")).join(" · ");
        label = { name, share, ops: shortened(c, ops, BOX_WIDTH - 20) };
        this.labels.set(n, label);
      }
      c.fillStyle = colours.ink;
      c.font = `600 12px ${colours.text}`;
      c.fillText(label.name, x + 10, y + 17);
      c.font = `11px ${colours.text}`;
      c.fillText(label.ops, x + 10, y + 32);
      c.textAlign = "right";
      c.fillText(label.share, x + BOX_WIDTH - 10, y + 17);
      c.textAlign = "left";
    }

    // What users do.

    listen() {
      const { canvas } = this;
      let drag = null;
      canvas.addEventListener("pointerdown", (event) => {
        drag = { x: event.clientX, y: event.clientY, far: 0 };
        canvas.setPointerCapture(event.pointerId);
      });
      canvas.addEventListener("pointermove", (event) => {
        if (!drag) return;
        const dx = event.clientX - drag.x, dy = event.clientY - drag.y;
        drag = { x: event.clientX, y: event.clientY, far: drag.far + Math.abs(dx) + Math.abs(dy) };
        if (drag.far < 4) return;
        canvas.classList.add("moving");
        this.moved = true;
        this.camera.x -= dx / this.camera.k;
        this.camera.y -= dy / this.camera.k;
        this.redraw();
      });
      canvas.addEventListener("pointerup", (event) => {
        if (drag && drag.far < 4) this.choose(this.at(event.offsetX, event.offsetY), {});
        drag = null;
        canvas.classList.remove("moving");
      });
      canvas.addEventListener("pointercancel", () => (drag = null));
      canvas.addEventListener("wheel", (event) => {
        if (!event.ctrlKey && document.activeElement !== canvas) return;
        event.preventDefault();
        this.zoom(Math.exp(-event.deltaY * (event.ctrlKey ? 0.01 : 0.002)), event.offsetX, event.offsetY);
      }, { passive: false });
      canvas.addEventListener("keydown", (event) => this.key(event));
      const does = { in: () => this.zoom(1.4), out: () => this.zoom(1 / 1.4), fit: () => this.fit() };
      this.article.querySelectorAll("button[data-do]").forEach((button) => {
        button.addEventListener("click", does[button.dataset.do]);
      });
      this.search.addEventListener("input", () => this.find(this.search.value));
      this.search.addEventListener("keydown", (event) => {
        if (event.key === "Enter") this.next(event.shiftKey ? -1 : 1);
      });
      this.article.addEventListener("click", (event) => {
        const hit = event.target.closest("[data-step]");
        if (hit) this.choose(Number(hit.dataset.step), { centre: true, from: hit });
      });
      this.listenToTable();
    }

    listenToTable() {
      const table = this.body.parentElement;
      const heads = [...table.querySelectorAll("th[data-sort]")];
      const sort = (head) => {
        const down = head.getAttribute("aria-sort") === "descending" || (!head.ariaSort && !head.matches(".n"));
        heads.forEach((h) => h.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "ascending" : "descending");
        this.sort(Number(head.dataset.sort), down ? 1 : -1);
      };
      heads.forEach((head) => {
        head.tabIndex = 0;
        head.addEventListener("click", () => sort(head));
        head.addEventListener("keydown", (event) => {
          if (event.key === "Enter" || event.key === " ") {
            event.preventDefault();
            sort(head);
          }
        });
      });
      this.article.querySelector(".filter input").addEventListener("input", (event) => {
        const wanted = event.target.value.trim().toLowerCase();
        for (const row of this.rows)
          row.hidden = !`${row.textContent} ${this.texts[row.dataset.step]}`.toLowerCase().includes(wanted);
      });
      table.parentElement.addEventListener("keydown", (event) => {
        const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
        if (!by || event.target !== table.parentElement) return;
        event.preventDefault();
        const shown = this.rows.filter((row) => !row.hidden);
        const at = shown.findIndex((row) => Number(row.dataset.step) === this.chosen);
        const row = shown[Math.max(0, Math.min(shown.length - 1, at + by))];
        if (row) this.choose(Number(row.dataset.step), { centre: true });
      });
    }

    sort(column, sign) {
      const s = this.steps;
      const over = (n) => (s[n].moved !== null && s[n].bound ? s[n].moved / s[n].bound : null);
      const of = [
        (n) => n, (n) => s[n].name, (n) => secondsOf(s[n]), (n) => s[n].modelled, (n) => s[n].measured,
        (n) => s[n].moved, over, (n) => s[n].ends || `a call (${s[n].reason})`, (n) => s[n].ops.join(" "),
      ][column];
      const keyed = this.rows.map((row) => [of(Number(row.dataset.step)), row]);
      keyed.sort(([a], [b]) => {
        if (a === null || b === null) return (a === null) - (b === null);
        return sign * (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
      });
      this.rows = keyed.map(([, row]) => row);
      this.body.append(...this.rows);
    }

    key(event) {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (event.key === "+" || event.key === "=") this.zoom(1.25);
      else if (event.key === "-") this.zoom(0.8);
      else if (event.key === "0") this.fit();
      else if (event.key === "Enter") this.details.focus();
      else if (this.chosen === null && event.key.startsWith("Arrow")) this.choose(this.slowest(), { centre: true });
      else if (by) this.choose(Math.max(0, Math.min(this.steps.length - 1, this.chosen + by)), { centre: true });
      else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
        const down = event.key === "ArrowDown";
        const edges = (down ? this.writes : this.reads)[this.chosen];
        const next = edges.map((e) => (down ? e.end : e.start)).filter((n) => n !== null && n !== this.chosen);
        if (next.length) this.choose(down ? Math.min(...next) : Math.max(...next), { centre: true });
      } else return;
      event.preventDefault();
    }

    slowest() {
      return this.shares.indexOf(Math.max(...this.shares));
    }

    at(x, y) {
      const px = this.camera.x + x / this.camera.k, py = this.camera.y + y / this.camera.k;
      const found = this.graph.boxes.findIndex(
        ([left, top]) => px >= left && px <= left + BOX_WIDTH && py >= top && py <= top + BOX_HEIGHT,
      );
      return found < 0 ? null : found;
    }

    find(text) {
      const wanted = text.trim().toLowerCase();
      this.matches = null;
      this.found.textContent = "";
      if (wanted) {
        this.matches = new Set();
        this.texts.forEach((t, n) => t.includes(wanted) && this.matches.add(n));
        this.found.textContent = `${this.matches.size} of ${this.steps.length}`;
      }
      this.redraw();
    }

    next(by) {
      if (!this.matches || !this.matches.size) return;
      const order = [...this.matches];
      const at = order.indexOf(this.chosen);
      const next = order[(at < 0 ? (by > 0 ? 0 : order.length - 1) : at + by + order.length) % order.length];
      this.choose(next, { centre: true });
      this.found.textContent = `${order.indexOf(next) + 1} of ${order.length}`;
    }

    choose(number, { centre = false, from = null }) {
      this.chosen = number;
      this.marked.forEach((e) => e.classList.remove("chosen"));
      this.marked = number === null ? [] : [...this.article.querySelectorAll(`[data-step="${number}"]`)];
      this.marked = this.marked.filter((e) => !e.matches("button"));
      this.marked.forEach((e) => e.classList.add("chosen"));
      if (number !== null && centre && !this.visible(number)) this.centre(number);
      this.marked.filter((e) => e.matches("tr") && !e.contains(from)).forEach((row) => {
        const box = row.closest(".scroll");
        box.scrollTop = row.offsetTop - box.clientHeight / 2;
      });
      this.describe();
      this.redraw();
    }

    // The details of a step.

    describe() {
      const pane = this.details;
      pane.replaceChildren();
      if (this.chosen === null) {
        pane.append(element("h3", "", "Nothing is chosen"));
        pane.append(element("p", "muted", "Click a box, a row or a point; or use the arrow keys in the graph."));
        if (this.steps.length) {
          const most = this.slowest();
          pane.append(this.link(`What takes longest is ${this.steps[most].name}`, most));
        }
        return;
      }
      const n = this.chosen, step = this.steps[n];
      pane.append(element("h3", "", step.name));
      const whose = { generated: "a generated kernel", own: "a routine of our own", choice: "a library call, as the faster way", need: "a library call, for lack of a kernel" };
      pane.append(element("p", "muted", `number ${n}, ${whose[step.how] || step.how}`));
      this.describeFigures(pane, step, n);
      this.paragraph(pane, step.how === "generated" ? "Why it ends there" : "Why it is a call", step.ends && !step.reason.startsWith(step.ends) ? `${step.ends}. ` : "", step.reason, step.notes);
      this.tensors(pane, "Reads", this.reads[n], "start");
      this.tensors(pane, "Makes", this.writes[n], "end");
      if (!this.writes[n].length && step.results.length) this.paragraph(pane, "Makes", "", step.results.join(", "), []);
      this.paragraph(pane, "Ops", "", step.ops.join("  "), []);
      if (step.schedule) {
        pane.append(element("h4", "", "Schedule"), element("pre", "", step.schedule));
      }
      if (step.source !== null) this.source(pane, step);
    }

    describeFigures(pane, step, n) {
      const list = element("dl");
      const row = (name, value) => value !== null && list.append(element("dt", "", name), element("dd", "", value));
      const seconds = secondsOf(step);
      row("share of the time", this.shares[n] ? percent(this.shares[n]) : null);
      row("modelled", duration(step.modelled));
      row("measured", step.measured === null ? null : duration(step.measured));
      row("bytes moved", size(step.moved));
      row("lower bound", size(step.bound));
      row("stays on chip", step.kept ? `${step.kept} tensors, ${size(step.keptBytes)}` : null);
      row("operations", count(step.flops, "flop"));
      row("exponentials", step.exps ? count(step.exps, "") : null);
      row("intensity", step.flops && step.moved ? `${three(step.flops / step.moved)} flop/byte` : null);
      row("speed", step.flops && seconds ? count(step.flops / seconds, "flop/s") : null);
      row("draws", step.moved && seconds ? `${size(step.moved / seconds)}/s` : null);
      pane.append(list);
      if (this.graph.machine && seconds && step.moved) {
        const [bandwidth, flops] = this.graph.machine;
        const byBytes = step.moved / bandwidth, byWork = (step.flops || 0) / flops;
        const part = Math.max(byBytes, byWork) / seconds;
        const bound = byBytes < byWork ? "operations" : part > 1 ? "bytes, from caches" : "bytes";
        row(`of the roof (${bound})`, percent(part));
        this.gauge(pane, part);
      }
    }

    gauge(pane, part) {
      const gauge = element("div", "gauge"), fill = element("i");
      fill.style.width = `${100 * Math.min(1, part)}%`;
      gauge.append(fill);
      pane.append(gauge);
    }

    paragraph(pane, title, first, text, notes) {
      if (!first && !text) return;
      pane.append(element("h4", "", title), element("p", "", first + text));
      notes.forEach((note) => pane.append(element("p", "muted", note)));
    }

    tensors(pane, title, edges, end) {
      if (!edges.length) return;
      pane.append(element("h4", "", title));
      const list = element("ul");
      for (const e of edges.slice(0, 60)) {
        const item = element("li");
        const other = e[end];
        const where = end === "start" ? "from the caller" : "to the caller";
        if (other === null) item.append(element("span", "", `${e.tensor} ${where}`));
        else item.append(this.link(`${e.tensor} ${end === "start" ? "from" : "for"} ${this.steps[other].name}`, other));
        item.append(element("span", "", `${size(e.bytes)}, ${e.level}`));
        list.append(item);
      }
      if (edges.length > 60) list.append(element("li", "muted", `and ${edges.length - 60} more`));
      pane.append(list);
    }

    link(text, number) {
      const button = element("button", "link", text);
      button.type = "button";
      button.dataset.step = number;
      return button;
    }

    async source(pane, step) {
      const title = element("h4", "", "Source");
      const block = element("pre", "source", "...");
      pane.append(title, block);
      try {
        const text = (await sources()).get(String(step.source));
        block.textContent = text ?? "The page would be too large with it: `tilewright explain MODEL --source` shows it.";
      } catch (error) {
        block.textContent = `This browser cannot unpack it: ${error}`;
      }
    }
  }

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

  const shownView = () => views.find((view) => !view.article.hidden);

  function begin() {
    document.documentElement.classList.add("scripted");
    readColours();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      readColours();
      views.forEach((view) => view.redraw());
    });
    data.graphs.forEach((graph, n) => views.push(new View(document.getElementById(`graph-${n}`), graph)));
    const choice = document.getElementById("graph-choice");
    if (choice) {
      const show = () => views.forEach((view, n) => (view.article.hidden = n !== Number(choice.value)));
      choice.parentElement.hidden = false;
      choice.addEventListener("change", show);
      show();
    }
    document.addEventListener("keydown", (event) => {
      const view = shownView();
      if (!view) return;
      if (event.key === "/" && !event.target.matches("input, select")) {
        event.preventDefault();
        view.search.focus();
      } else if (event.key === "Escape") {
        if (view.search.value) {
          view.search.value = "";
          view.find("");
        } else view.choose(null, {});
      }
    });
  }

  begin();
})();
