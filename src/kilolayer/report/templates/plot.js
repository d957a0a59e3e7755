// A chart of curves: drawn on canvases, zoomed, read off. What the curves are comes from `source`; texts of runs are set as text,
// never as markup.
"use strict";

const find = (id) => document.getElementById(id);
const bounded = (value, low, length) => Math.min(Math.max(value, low), low + length);
const darkness = window.matchMedia("(prefers-color-scheme: dark)");

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function seen(colour) {
  // On a dark page a dark colour is mixed with white until it stands out.
  if (!darkness.matches) return colour;
  const parts = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  const light = (0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]) / 255;
  const share = light < 0.5 ? (0.5 - light) / (1 - light) : 0;
  return `rgb(${parts.map((part) => Math.round(part + share * (255 - part))).join(", ")})`;
}

function swatch(look) {
  const language = "http://www.w3.org/2000/svg";
  const made = document.createElementNS(language, "svg"), line = document.createElementNS(language, "line");
  made.setAttribute("class", "swatch");
  made.setAttribute("viewBox", "0 0 26 10");
  made.setAttribute("aria-hidden", "true");
  const attributes = {
    x1: 0, x2: 26, y1: 5, y2: 5, stroke: seen(look.colour), "stroke-width": 3.5, "stroke-dasharray": look.dash.join(" "),
  };
  for (const [key, content] of Object.entries(attributes)) line.setAttribute(key, content);
  made.append(line);
  return made;
}

function scaledCurve(xs, ys, logX, logY) {
  // On the scales' own lengths: logarithms where an axis is logarithmic, NaN where there is nothing to draw.
  const scale = (isLog) => (isLog ? (value) => (value > 0 ? Math.log10(value) : NaN) : (value) => value);
  const [scaleX, scaleY] = [scale(logX), scale(logY)];
  const kept = [...xs.keys()].filter((i) => !Number.isNaN(scaleX(xs[i])));
  return {
    steps: kept.map((i) => xs[i]), values: kept.map((i) => ys[i]),
    x: Float64Array.from(kept, (i) => scaleX(xs[i])),
    y: Float64Array.from(kept, (i) => (ys[i] === null ? NaN : scaleY(ys[i]))),
  };
}

function firstAt(xs, x) {
  // The first index whose x is not below.
  let low = 0, high = xs.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low;
}

function sensibleRange(values, every) {
  // Of all values; without the highest fiftieth if there are many values and those reach far beyond the rest. As in curves_plot.py.
  const order = Float64Array.from(values).sort();
  const low = order[0], high = order[order.length - 1], most = order[Math.floor(0.98 * (order.length - 1))];
  const isFar = most > low && high - low > 10 * (most - low);
  return [low, !every && order.length >= 200 && isFar ? low + 1.1 * (most - low) : high];
}

// --- Numbers and ticks ---

function show(value, digits = 5) {
  if (value === 0) return "0";
  const much = Math.abs(value);
  if (much >= 1e7 || much < 1e-4) {
    return value.toExponential(Math.max(digits - 1, 0)).replace(/\.?0+e/, "e").replace("e+", "e");
  }
  return value.toLocaleString("en", { maximumSignificantDigits: much >= 1e4 ? 21 : digits, maximumFractionDigits: 20 });
}

function short(value, digits) {
  // For the side of an axis: 2M.
  if (Math.abs(value) < 1e6 || Math.abs(value) >= 1e15) return show(value, digits);
  return value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: Math.min(digits, 6) });
}

function evenTicks(low, high, count, least = 0) {
  const rough = Math.max((high - low) / count, least), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9 && found.length < 50; n++) found.push(n * step);
  const digits = Math.max(1, Math.ceil(Math.log10(Math.max(Math.abs(low), Math.abs(high)) / step) + 1));
  return found.map((at) => ({ at, text: short(Math.abs(at) < step / 1e6 ? 0 : at, Math.min(digits, 12)) }));
}

function ticks(low, high, count, isLog, least = 0) {
  // least: of the distance between two ticks on a linear axis.
  if (!isLog) return evenTicks(low, high, count, least);
  if (high - low < 0.7) return evenTicks(10 ** low, 10 ** high, count).map(({ at, text }) => ({ at: Math.log10(at), text }));
  const leads = high - low < 3 ? [1, 2, 5] : [1], every = Math.max(1, Math.ceil((high - low) / count / leads.length));
  const found = [];
  for (let power = Math.floor(low); power <= high; power++) {
    if (leads.length === 1 && power % every) continue;
    for (const lead of leads) {
      const at = power + Math.log10(lead);
      if (at >= low && at <= high) found.push({ at, text: power > 5 ? `${lead}e${power}` : short(+(lead + "e" + power), 3) });
    }
  }
  return found;
}

// --- One chart ---

// source: curves(), of each {x, y, steps, values}; isOn(curve), look(curve), isFatal(curve), labelLines(curve, index);
// logX(), logY(); xLabel; order: of drawing; height(width); ends: of x, where they do not follow from the curves; fromZero;
// needsFocus: whether the wheel turns the page until the chart is chosen; onMark(mark); onZoom(view, or null for all of it).
function makePlot(chart, source) {
  const margin = source.margin ?? { left: 62, right: 14, top: 12, bottom: 42 };
  const lines = element("canvas"), above = element("canvas", undefined, "above");
  chart.replaceChildren(lines, above);
  let size = { width: 0, height: 0 }, plot = size;   // pixels of the canvas, and of the curves' part of it
  let view = null;        // x0, x1, y0, y1 on the scales' own lengths
  let zoomed = false, dragged = null, marked = null, awaited = false;
  const isOn = (curve) => source.isOn(curve);
  const ink = (name) => getComputedStyle(chart).getPropertyValue(`--${name}`).trim();

  function extent(every) {
    // Of all that is on; of the y of all points if `every`.
    const found = [];
    let x0 = Infinity, x1 = -Infinity;
    source.curves().forEach((curve, index) => {
      if (!isOn(index)) return;
      for (let i = 0; i < curve.x.length; i++) {
        if (Number.isNaN(curve.y[i])) continue;
        found.push(curve.y[i]);
        x0 = Math.min(x0, curve.x[i]);
        x1 = Math.max(x1, curve.x[i]);
      }
    });
    if (!found.length) return { x0: 0, x1: 1, y0: 0, y1: 1 };
    if (source.ends) [x0, x1] = source.ends;
    const [y0, y1] = sensibleRange(found, every);
    const isFlat = y1 <= y0, tall = isFlat ? Math.max(Math.abs(y0), 1) * 0.1 : y1 - y0, wide = x1 > x0 ? x1 - x0 : 1;
    if (source.fromZero && !source.logY() && y0 >= 0) return { x0: x0 - 0.01 * wide, x1: x1 + 0.01 * wide, y0: 0, y1: (y1 || 1) * 1.05 };
    return { x0: x0 - 0.01 * wide, x1: x1 + 0.01 * wide, y0: y0 - 0.04 * tall, y1: y1 + 0.04 * tall };
  }

  const toPixelX = (x) => margin.left + ((x - view.x0) / (view.x1 - view.x0)) * plot.width;
  const toPixelY = (y) => margin.top + ((view.y1 - y) / (view.y1 - view.y0)) * plot.height;
  const fromPixelX = (px) => view.x0 + ((px - margin.left) / plot.width) * (view.x1 - view.x0);
  const fromPixelY = (py) => view.y1 - ((py - margin.top) / plot.height) * (view.y1 - view.y0);

  function canvasOf(canvas) {
    const dense = window.devicePixelRatio || 1, pen = canvas.getContext("2d");
    canvas.width = Math.round(size.width * dense);
    canvas.height = Math.round(size.height * dense);
    canvas.style.width = size.width + "px";
    canvas.style.height = size.height + "px";
    pen.setTransform(dense, 0, 0, dense, 0, 0);
    pen.lineJoin = "bevel";   // a mitre of a spike would reach beyond its point
    return pen;
  }

  function drawFrame(pen) {
    const { width, height } = plot, bottom = margin.top + height;
    pen.font = "12px system-ui, sans-serif";
    pen.fillStyle = ink("ink");
    pen.strokeStyle = ink("line");
    pen.lineWidth = 1;
    pen.textAlign = "center";
    pen.textBaseline = "top";
    let last = -Infinity;
    // Steps and layers are whole numbers.
    for (const { at, text } of ticks(view.x0, view.x1, Math.max(4, width / 55), source.logX(), 1)) {
      const px = toPixelX(at), half = pen.measureText(text).width / 2;
      stroke(pen, px, margin.top, px, bottom);
      const middle = Math.min(px, size.width - half);
      if (middle - half < last + 8) continue;
      pen.fillText(text, middle, bottom + 6);
      last = middle + half;
    }
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const { at, text } of ticks(view.y0, view.y1, Math.max(4, height / 60), source.logY())) {
      const py = toPixelY(at);
      stroke(pen, margin.left, py, margin.left + width, py);
      pen.fillText(text, margin.left - 6, py);
    }
    pen.strokeStyle = ink("muted");
    stroke(pen, margin.left, margin.top, margin.left, bottom);
    stroke(pen, margin.left, bottom, margin.left + width, bottom);
    pen.textAlign = "center";
    pen.textBaseline = "bottom";
    pen.fillText(source.xLabel, margin.left + width / 2, size.height - 2);
  }

  function stroke(pen, x0, y0, x1, y1) {
    pen.beginPath();
    pen.moveTo(x0, y0);
    pen.lineTo(x1, y1);
    pen.stroke();
  }

  function clipped(pen, draw) {
    pen.save();
    pen.beginPath();
    pen.rect(margin.left, margin.top - 4, plot.width + 6, plot.height + 4);
    pen.clip();
    draw();
    pen.restore();
  }

  function drawCurve(pen, run, width, colour) {
    const { x, y } = source.curves()[run];
    const from = Math.max(firstAt(x, view.x0) - 1, 0), to = Math.min(firstAt(x, view.x1) + 1, x.length);
    pen.strokeStyle = pen.fillStyle = colour;
    pen.lineWidth = width;
    pen.setLineDash(source.look(run).dash);
    pen.beginPath();
    let open = false, last = -1;
    for (let i = from; i < to; i++) {
      if (Number.isNaN(y[i])) { open = false; continue; }
      if (open) pen.lineTo(toPixelX(x[i]), toPixelY(y[i]));
      else pen.moveTo(toPixelX(x[i]), toPixelY(y[i]));
      open = true;
      last = i;
    }
    pen.stroke();
    pen.setLineDash([]);
    if (to - from < plot.width / 14) {
      for (let i = from; i < to; i++) if (!Number.isNaN(y[i])) dot(pen, x[i], y[i], width + 1);
    }
    if (source.isFatal(run) && last >= 0 && y.subarray(last + 1).every(Number.isNaN)) cross(pen, x[last], y[last]);
  }

  function dot(pen, x, y, radius) {
    pen.beginPath();
    pen.arc(toPixelX(x), toPixelY(y), radius, 0, 7);
    pen.fill();
  }

  function cross(pen, x, y) {
    const px = toPixelX(x), py = Math.max(toPixelY(y), margin.top + 2);
    pen.lineWidth = 2;
    stroke(pen, px - 5, py - 5, px + 5, py + 5);
    stroke(pen, px - 5, py + 5, px + 5, py - 5);
  }

  function draw() {
    if (awaited) return;
    awaited = true;
    requestAnimationFrame(() => {
      awaited = false;
      if (size.width < 120) return;
      if (!view) view = extent(false);
      const pen = canvasOf(lines);
      drawFrame(pen);
      const on = source.order.filter(isOn), many = on.length > 12;
      pen.globalAlpha = many ? 0.8 : 1;
      clipped(pen, () => on.forEach((run) => drawCurve(pen, run, many ? 1 : 1.4, seen(source.look(run).colour))));
      drawAbove();
    });
  }

  function isInView({ run, index }) {
    const x = source.curves()[run].x[index];
    return x >= view.x0 && x <= view.x1;
  }

  function drawAbove() {
    const pen = canvasOf(above);
    if (marked && isOn(marked.run)) {
      clipped(pen, () => {
        drawCurve(pen, marked.run, 5, ink("paper"));
        drawCurve(pen, marked.run, 2.6, seen(source.look(marked.run).colour));
      });
      if (marked.index !== null && isInView(marked)) {
        const curve = source.curves()[marked.run];
        pen.fillStyle = ink("ink");
        dot(pen, curve.x[marked.index], curve.y[marked.index], 4.5);
        label(pen, toPixelX(curve.x[marked.index]), toPixelY(curve.y[marked.index]), source.labelLines(marked.run, marked.index));
      }
    }
    if (dragged && dragged.box) {
      const { left, top, width, height } = dragged.box;
      pen.fillStyle = "rgba(60, 150, 220, .2)";
      pen.strokeStyle = ink("accent");
      pen.lineWidth = 1;
      pen.fillRect(left, top, width, height);
      pen.strokeRect(left, top, width, height);
    }
  }

  function label(pen, px, py, texts) {
    // Beside the point, on the side that has room.
    pen.font = "600 12px system-ui, sans-serif";
    const longest = Math.max(...texts.map((text) => pen.measureText(text).width));
    const width = Math.min(longest + 14, plot.width), height = 17 * texts.length + 8;
    const left = bounded(px + 12 + width > size.width ? px - 12 - width : px + 12, 2, size.width - width - 4);
    const top = bounded(py - height - 8, 2, size.height - height - 4);
    pen.fillStyle = ink("paper");
    pen.strokeStyle = ink("muted");
    pen.lineWidth = 1;
    pen.fillRect(left, top, width, height);
    pen.strokeRect(left, top, width, height);
    pen.fillStyle = ink("ink");
    pen.textAlign = "left";
    pen.textBaseline = "top";
    texts.forEach((text, line) => pen.fillText(text, left + 7, top + 6 + 17 * line, width - 14));
  }

  function mark(next) {
    marked = next;
    source.onMark?.(marked);
    if (view) drawAbove();
  }

  function nearest(px, py) {
    let best = null, least = Infinity;
    source.curves().forEach((curve, run) => {
      if (!isOn(run)) return;
      const from = Math.max(firstAt(curve.x, fromPixelX(px - 30)) - 1, 0);
      const to = Math.min(firstAt(curve.x, fromPixelX(px + 30)) + 1, curve.x.length);
      for (let i = from; i < to; i++) {
        if (Number.isNaN(curve.y[i]) || curve.x[i] < view.x0 || curve.x[i] > view.x1) continue;
        const away = (toPixelX(curve.x[i]) - px) ** 2 + (toPixelY(curve.y[i]) - py) ** 2;
        if (away < least) { least = away; best = { run, index: i }; }
      }
    });
    return best;
  }

  function follow(step) {
    // Along the run that is read, over gaps.
    const curve = source.curves()[marked.run];
    let index = marked.index === null ? 0 : marked.index + step;
    index = Math.min(Math.max(index, 0), curve.x.length - 1);
    const way = Math.sign(step) || 1;
    while (index >= 0 && index < curve.x.length && Number.isNaN(curve.y[index])) index += way;
    if (index < 0 || index >= curve.x.length) return;
    const shift = curve.x[index] < view.x0 ? curve.x[index] - view.x0 : curve.x[index] > view.x1 ? curve.x[index] - view.x1 : 0;
    if (shift) {
      view.x0 += shift;
      view.x1 += shift;
      draw();
    }
    mark({ run: marked.run, index });
  }

  function changeRun(way) {
    const curves = source.curves();
    const on = [...curves.keys()].filter((run) => isOn(run) && curves[run].y.some((y) => !Number.isNaN(y)));
    if (!on.length) return;
    const now = marked ? on.indexOf(marked.run) : way > 0 ? -1 : 0;
    const run = on[(now + way + on.length) % on.length], curve = curves[run];
    const x = marked && marked.index !== null ? curves[marked.run].x[marked.index] : (view.x0 + view.x1) / 2;
    mark({ run, index: null });
    marked.index = Math.max(Math.min(firstAt(curve.x, x), curve.x.length - 1), 0);
    follow(0);
  }

  // --- Zooming ---

  function stretched(low, high, at, factor, least, most) {
    // Around `at`, which stays in its place unless an end of what there is to see is reached.
    const length = Math.min((high - low) * factor, Math.max(most - least, high - low));
    let from = at - ((at - low) / (high - low)) * length;
    if (factor > 1) from = Math.max(Math.min(from, most - length), least);
    return [from, from + length];
  }

  function zoom(factor, px = margin.left + plot.width / 2, py = margin.top + plot.height / 2) {
    const all = extent(true);
    for (const side of ["x0", "y0"]) all[side] = Math.min(all[side], view[side]);
    for (const side of ["x1", "y1"]) all[side] = Math.max(all[side], view[side]);
    const [x0, x1] = stretched(view.x0, view.x1, fromPixelX(px), factor, all.x0, all.x1);
    const [y0, y1] = stretched(view.y0, view.y1, fromPixelY(py), factor, all.y0, all.y1);
    const before = (view.x1 - view.x0) * (view.y1 - view.y0), after = (x1 - x0) * (y1 - y0);
    const tooClose = x1 - x0 < 1e-9 * (all.x1 - all.x0) || y1 - y0 < 1e-9 * (all.y1 - all.y0);
    if (tooClose || Math.abs(after / before - 1) < 1e-9) return false;
    zoomTo({ x0, x1, y0, y1 });
    return true;
  }

  function zoomTo(next) {
    view = next;
    zoomed = next !== null;
    source.onZoom?.(view);
    draw();
  }

  const reset = () => zoomTo(null);

  const inside = (event) => {
    const box = chart.getBoundingClientRect();
    return { px: event.clientX - box.left, py: event.clientY - box.top };
  };

  function boxTo({ px, py }) {
    const { width, height } = plot;
    const x = bounded(px, margin.left, width), y = bounded(py, margin.top, height);
    const box = {
      left: Math.min(x, dragged.px), width: Math.abs(x - dragged.px),
      top: Math.min(y, dragged.py), height: Math.abs(y - dragged.py),
    };
    // A flat or narrow rectangle means one direction alone.
    if (box.height < 14) Object.assign(box, { top: margin.top, height });
    else if (box.width < 14) Object.assign(box, { left: margin.left, width });
    return box;
  }

  chart.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || !view) return;
    const { px, py } = inside(event);
    dragged = { px: bounded(px, margin.left, plot.width), py: bounded(py, margin.top, plot.height), box: null };
    chart.setPointerCapture(event.pointerId);
  });
  chart.addEventListener("pointermove", (event) => {
    if (!view) return;
    const at = inside(event);
    if (dragged && Math.hypot(at.px - dragged.px, at.py - dragged.py) > 6) {
      dragged.box = boxTo(at);
      drawAbove();
    } else if (!dragged || !dragged.box) mark(nearest(at.px, at.py));
  });
  chart.addEventListener("pointerup", (event) => {
    const box = dragged && dragged.box;
    dragged = null;
    if (box) {
      zoomTo({
        x0: fromPixelX(box.left), x1: fromPixelX(box.left + box.width),
        y0: fromPixelY(box.top + box.height), y1: fromPixelY(box.top),
      });
    } else if (view) {
      const at = inside(event);
      mark(nearest(at.px, at.py));
    }
  });
  chart.addEventListener("pointercancel", () => { dragged = null; if (view) drawAbove(); });
  chart.addEventListener("pointerleave", (event) => { if (!dragged && event.pointerType === "mouse") mark(null); });
  chart.addEventListener("dblclick", reset);
  chart.addEventListener("wheel", (event) => {
    const { px, py } = inside(event);
    if (source.needsFocus && document.activeElement !== chart && !event.ctrlKey) return;
    // Where there is nothing left to zoom out to, the page scrolls.
    const turned = Math.min(Math.max(event.deltaY, -120), 120);
    if (view && zoom(Math.exp(0.0022 * turned), px, py)) event.preventDefault();
  }, { passive: false });
  chart.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !view) return;
    const step = event.shiftKey ? 10 : 1;
    const keys = {
      ArrowLeft: () => (marked ? follow(-step) : changeRun(1)), ArrowRight: () => (marked ? follow(step) : changeRun(1)),
      ArrowUp: () => changeRun(-1), ArrowDown: () => changeRun(1), "+": () => zoom(0.7), "=": () => zoom(0.7),
      "-": () => zoom(1 / 0.7), 0: reset, Home: reset, Escape: () => { dragged = null; mark(null); },
    };
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });

  darkness.addEventListener("change", () => draw());
  new ResizeObserver(() => {
    const width = Math.floor(chart.clientWidth);
    if (width === size.width) return;
    size = { width, height: source.height(width) };
    plot = { width: width - margin.left - margin.right, height: size.height - margin.top - margin.bottom };
    draw();
  }).observe(chart);

  return {
    draw, reset, mark,
    zoom: (factor) => view && zoom(factor),
    changed(keepZoom) {
      // Other curves, or other scales: of what was zoomed into nothing stays unless `keepZoom`.
      mark(null);
      if (!keepZoom || !zoomed) { view = null; zoomed = false; }
      draw();
    },
    showX(other) {
      // The x of another chart's view; the y of all that is there.
      view = other ? { ...extent(false), x0: other.x0, x1: other.x1 } : null;
      zoomed = other !== null;
      draw();
    },
  };
}
