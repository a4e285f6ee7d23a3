// The graph of kernels and calls on a canvas. Boxes and lanes come with the data.

const [BOX_WIDTH, BOX_HEIGHT] = data.box;

class Drawing {
  constructor(canvas, graph) {
    this.canvas = canvas;
    this.graph = graph;
    this.steps = graph.steps;
    this.context = canvas.getContext("2d");
    this.camera = { x: 0, y: 0, k: 1 };
    this.chosen = null;
    this.matches = null;
    this.queued = false;
    this.moved = false;
    this.connect();
    new ResizeObserver(() => this.resize()).observe(canvas);
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
}
