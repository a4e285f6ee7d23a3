// What users do: choose, search, sort, and read the details of a step.

const views = [];

class View extends Drawing {
  constructor(article, graph) {
    super(article.querySelector("canvas"), graph);
    this.article = article;
    this.details = article.querySelector(".details");
    this.found = article.querySelector(".found");
    this.search = article.querySelector(".search input");
    this.body = article.querySelector("table.steps tbody");
    this.rows = [...this.body.rows];
    this.marked = [];
    this.listen();
    article.querySelector(".explore").hidden = false;
    article.querySelector(".filter").hidden = false;
    this.describe();
    if (this.rows.length < this.steps.length) requestAnimationFrame(() => setTimeout(() => this.completeRows()));
  }

  // The rows that did not come with the page, in the order of shares, behind those that did.

  completeRows() {
    if (this.rows.length >= this.steps.length) return;
    const known = new Set(this.rows.map((row) => Number(row.dataset.step)));
    const missing = this.steps.map((_, n) => n).filter((n) => !known.has(n));
    missing.sort((a, b) => secondsOf(this.steps[b]) - secondsOf(this.steps[a]) || a - b);
    const made = missing.map((n) => this.makeRow(n));
    this.body.append(...made);
    this.rows.push(...made);
  }

  makeRow(n) {
    const step = this.steps[n], row = element("tr");
    row.dataset.step = n;
    const over = step.moved !== null && step.bound ? `${(step.moved / step.bound).toFixed(2)}x` : "-";
    const share = secondsOf(step) === null || !this.graph.seconds ? "-" : percent(this.shares[n]);
    const figures = [share, duration(step.modelled), duration(step.measured), size(step.moved), over];
    row.append(element("td", "n", `${n}`), element("th", "", ended(step.name, 40)));
    row.append(...figures.map((text) => element("td", "n", text)));
    row.append(element("td", "", step.ends || `a call (${ended(step.reason, 60)})`));
    row.append(element("td", "ops", ended(step.ops.join(" "), MOST_OPS)));
    return row;
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
      this.completeRows();
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
    this.completeRows();
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
    this.completeRows();
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
    const looped = step.looped ? "; it runs in each step of a loop, and figures are for one step" : "";
    pane.append(element("p", "muted", `number ${n}, ${whose[step.how] || step.how}${looped}`));
    this.describeFigures(pane, step, n);
    this.paragraph(pane, step.how === "generated" ? "Why it ends there" : "Why it is a call", step.ends && !step.reason.startsWith(step.ends) ? `${step.ends}. ` : "", step.reason, step.notes);
    this.tensors(pane, "Reads", this.reads[n], "start");
    this.tensors(pane, "Makes", this.writes[n], "end");
    if (!this.writes[n].length && step.results.length) this.paragraph(pane, "Makes", "", step.results.join(", "), []);
    this.paragraph(pane, "Ops", "", step.ops.join("  "), []);
    if (step.schedule) {
      pane.append(element("h4", "", "Schedule"), element("pre", "schedule", step.schedule));
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
