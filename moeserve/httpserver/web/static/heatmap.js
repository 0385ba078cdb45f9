// The heat map itself: a canvas with a cell for each expert of each layer.

const COLD = [38, 50, 62];
// From never to most, in steps that look even: dark blue, purple, orange, pale yellow, on light pages too.
const RAMP = [COLD, [74, 58, 122], [156, 63, 121], [226, 92, 74], [252, 158, 79], [255, 232, 170]];
const MIN_CELL = 5; // CSS pixels
const MAX_CELL = 40;
const LEFT = 34; // room for the layers' numbers
const TOP = 6; // and for half of one above and below
const MARK = "rgb(64 214 196)";

/** Colour of a value from 0 to 1. */
function colour(value) {
  const at = Math.min(Math.max(value, 0), 1) * (RAMP.length - 1);
  const low = Math.min(Math.floor(at), RAMP.length - 2);
  const mixed = RAMP[low].map((from, i) => Math.round(from + (RAMP[low + 1][i] - from) * (at - low)));
  return `rgb(${mixed.join(" ")})`;
}

export function drawLegend(canvas) {
  const context = canvas.getContext("2d");
  for (let x = 0; x < canvas.width; x += 1) {
    context.fillStyle = colour(x / (canvas.width - 1));
    context.fillRect(x, 0, 1, canvas.height);
  }
}

export class HeatMap {
  /** `pointed(layer, column)` is called when the pointer or the arrow keys come to a cell; with nulls: to none. */
  constructor(canvas, pointed) {
    this.canvas = canvas;
    this.pointed = pointed;
    this.cursor = null; // [layer, column]
    canvas.onpointermove = (event) => this.#moveTo(this.#cellAt(event));
    canvas.onpointerleave = () => this.#moveTo(null);
    canvas.onkeydown = (event) => this.#step(event);
    new ResizeObserver(() => this.#draw()).observe(canvas.parentElement);
  }

  /** `values[layer][column]` from 0 to 1; `tiers[layer][column]` is "gpu", "ram" or "disk". */
  show(values, tiers) {
    this.values = values;
    this.tiers = tiers;
    this.#draw();
  }

  #draw() {
    if (!this.values) return;
    const { canvas, values } = this;
    const columns = values[0].length;
    const room = canvas.parentElement.clientWidth - LEFT;
    const cell = (this.cell = Math.min(Math.max(Math.floor(room / columns), MIN_CELL), MAX_CELL));
    const ratio = window.devicePixelRatio;
    const [width, height] = [LEFT + cell * columns, 2 * TOP + cell * values.length];
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    values.forEach((row, layer) => {
      this.#drawLabel(context, layer);
      row.forEach((value, column) => this.#drawCell(context, layer, column, value));
    });
    if (this.cursor) this.#drawCursor(context, ...this.#placeOf(...this.cursor));
  }

  #placeOf(layer, column) {
    return [LEFT + column * this.cell, TOP + layer * this.cell];
  }

  #drawLabel(context, layer) {
    const every = Math.ceil(12 / this.cell);
    if (layer % every) return;
    context.fillStyle = getComputedStyle(this.canvas).color;
    context.font = "10px system-ui, sans-serif";
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillText(layer, LEFT - 8, TOP + (layer + 0.5) * this.cell);
  }

  #drawCell(context, layer, column, value) {
    const [x, y] = this.#placeOf(layer, column);
    const size = this.cell >= 10 ? this.cell - 1 : this.cell;
    context.fillStyle = colour(value);
    context.fillRect(x, y, size, size);
    const tier = this.tiers[layer][column];
    if (tier === "gpu") {
      const thick = Math.max(1.5, this.cell / 8);
      context.fillStyle = MARK;
      context.fillRect(x, y + size - thick, size, thick);
    } else if (tier === "disk") {
      const cut = Math.max(2, this.cell / 3); // the page shows through
      context.clearRect(x + size - cut, y, cut, cut);
    }
  }

  #drawCursor(context, x, y) {
    for (const [style, out] of [["#000", 2], ["#fff", 1]]) {
      context.strokeStyle = style;
      context.lineWidth = 1;
      context.strokeRect(x - out + 0.5, y - out + 0.5, this.cell + 2 * out - 1, this.cell + 2 * out - 1);
    }
  }

  #cellAt(event) {
    const column = Math.floor((event.offsetX - LEFT) / this.cell);
    const layer = Math.floor((event.offsetY - TOP) / this.cell);
    const isInside = this.values && layer >= 0 && layer < this.values.length && column >= 0 && column < this.values[0].length;
    return isInside ? [layer, column] : null;
  }

  #step(event) {
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const step = steps[event.key];
    if (!step || !this.values) return;
    event.preventDefault();
    const [layer, column] = this.cursor ?? [0, 0];
    const within = (value, size) => Math.min(Math.max(value, 0), size - 1);
    const next = [within(layer + step[0], this.values.length), within(column + step[1], this.values[0].length)];
    this.#moveTo(this.cursor ? next : [0, 0]);
  }

  #moveTo(cell) {
    if (String(cell) === String(this.cursor)) return;
    this.cursor = cell;
    this.#draw();
    this.pointed(...(cell ?? [null, null]));
  }
}
