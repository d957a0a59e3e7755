// The curves of a comparison, in the chart of plot.js: which metric, which runs, in which colours.
(function () {
  const data = JSON.parse(find("data").textContent);
  if (!data.metrics.length || !find("moving")) return;

  const chart = find("chart"), reading = find("reading");
  const controls = {
    metric: find("metric"), colour: find("colour"), line: find("line"), smooth: find("smooth"), logX: find("log-x"), logY: find("log-y"),
  };
  const offValues = data.axes.map(() => new Set()), offRuns = new Set();
  const rows = [...find("runs").tBodies[0].rows];
  // Runs that look alike lie together in the table; drawn in this order, no colour lies above all others.
  const order = data.runs.map((_, run) => run).sort((a, b) => (a * 0.618034) % 1 - (b * 0.618034) % 1);
  let scaled = null, read = null;

  const valueOf = (run, axis) => data.axes[axis].values[data.runs[run].values[axis]];
  const lined = () => (controls.line.value === "" || controls.line.value === controls.colour.value ? null : +controls.line.value);

  function look(run) {
    const { colour, dash } = valueOf(run, +controls.colour.value), axis = lined();
    return { colour, dash: axis === null ? dash : valueOf(run, axis).line };
  }

  const isOn = (run) => !offRuns.has(run) && data.runs[run].values.every((value, axis) => !offValues[axis].has(value));

  // --- Curves on the scales of the moment ---

  function smoothed(xs, ys, width) {
    // The mean of what lies within half a width on both sides; a gap stays one.
    const sums = [0], counts = [0];
    for (let i = 0; i < ys.length; i++) {
      const there = ys[i] !== null;
      sums.push(sums[i] + (there ? ys[i] : 0));
      counts.push(counts[i] + (there ? 1 : 0));
    }
    let from = 0, to = 0;
    return ys.map((y, i) => {
      while (xs[from] < xs[i] - width / 2) from++;
      while (to < xs.length && xs[to] <= xs[i] + width / 2) to++;
      return y === null ? null : (sums[to] - sums[from]) / (counts[to] - counts[from]);
    });
  }

  function curves() {
    if (scaled) return scaled;
    const metric = +controls.metric.value, share = +controls.smooth.value;
    const farthest = data.runs.reduce((most, run) => Math.max(most, run.curves[metric][0].at(-1) ?? 0), 0);
    scaled = data.runs.map((run) => {
      let [xs, ys, middles, means] = run.curves[metric];
      if (share) [xs, ys] = [middles ?? xs, smoothed(middles ?? xs, means ?? ys, share * farthest)];
      return scaledCurve(xs, ys, controls.logX.checked, controls.logY.checked);
    });
    return scaled;
  }

  // --- Reading off ---

  function labelLines(index, point) {
    // Run, step, value, outcome.
    const run = data.runs[index], curve = curves()[index], smooth = +controls.smooth.value ? " (smoothed)" : "";
    const value = `${data.metrics[controls.metric.value]}${smooth} ${show(curve.values[point])}`;
    return [run.name, `step ${show(curve.steps[point], 12)}: ${value}`, run.outcome];
  }

  function onMark(marked) {
    if (read) rows[read.run].classList.remove("read");
    read = marked;
    reading.replaceChildren();
    if (marked) rows[marked.run].classList.add("read");
    if (marked && marked.index !== null) {
      const [name, value, outcome] = labelLines(marked.run, marked.index);
      reading.append(swatch(look(marked.run)), " ", element("b", name), ` ${value}, ${outcome}`);
    }
  }

  const plot = makePlot(chart, {
    curves, isOn, look, labelLines, order, onMark, xLabel: "step",
    isFatal: (run) => data.runs[run].fatal,
    logX: () => controls.logX.checked,
    logY: () => controls.logY.checked,
    height: (width) => Math.round(Math.min(Math.max(width * 0.5, 280), 540)),
  });

  // --- Controls, legend, table of runs ---

  function changed() {
    rows.forEach((row, run) => row.classList.toggle("off", !isOn(run)));
    plot.changed(true);
  }

  function toggle(axis, value, alone) {
    const off = offValues[axis], every = data.axes[axis].values.keys();
    if (alone) {
      const only = !off.has(value) && off.size === data.axes[axis].values.length - 1;
      off.clear();
      if (!only) for (const other of every) if (other !== value) off.add(other);
    } else if (!off.delete(value)) off.add(value);
    for (const button of find("legend").querySelectorAll(`[data-axis="${axis}"]`)) {
      button.setAttribute("aria-pressed", String(!off.has(+button.dataset.value)));
    }
    changed();
  }

  function makeLegend() {
    const legend = find("legend"), coloured = +controls.colour.value;
    legend.replaceChildren();
    data.axes.forEach((axis, index) => {
      if (index === data.axes.length - 1 && data.axes.length > 1) return;   // each run has its switch in the table
      const group = element("div", undefined, "legend");
      group.setAttribute("role", "group");
      group.setAttribute("aria-label", axis.title);
      group.append(element("span", axis.title, "name"));
      axis.values.forEach((value, valueIndex) => {
        const button = element("button");
        button.type = "button";
        button.dataset.axis = index;
        button.dataset.value = valueIndex;
        button.setAttribute("aria-pressed", String(!offValues[index].has(valueIndex)));
        if (index === coloured) button.append(swatch(lined() === null ? value : { colour: value.colour, dash: [] }));
        else if (index === lined()) button.append(swatch({ colour: "#767676", dash: value.line }));
        button.append(element("span", value.label));
        button.addEventListener("click", (event) => toggle(index, valueIndex, event.shiftKey));
        group.append(button);
      });
      legend.append(group);
    });
    rows.forEach((row, run) => {
      row.querySelector(".swatch")?.remove();
      row.querySelector("label").append(swatch(look(run)));
    });
  }

  function makeSwitches() {
    rows.forEach((row, run) => {
      const head = row.cells[0], label = element("label"), box = element("input");
      box.type = "checkbox";
      box.checked = true;
      box.setAttribute("aria-label", `Show ${data.runs[run].name}`);
      label.append(box);
      head.prepend(label);
      box.addEventListener("change", () => {
        if (box.checked) offRuns.delete(run);
        else offRuns.add(run);
        changed();
      });
      row.addEventListener("pointerenter", () => isOn(run) && plot.mark({ run, index: null }));
      row.addEventListener("pointerleave", () => plot.mark(null));
    });
  }

  function makeSorting() {
    const numberIn = (row, column) => parseFloat(row.cells[column].textContent.replace(/,/g, ""));
    [...find("runs").tHead.rows[0].cells].forEach((head, column) => {
      const button = element("button", head.textContent);
      button.type = "button";
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const way = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
        for (const other of find("runs").tHead.rows[0].cells) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
        const order = [...rows].sort((one, other) => {
          const a = numberIn(one, column), b = numberIn(other, column);
          const [text, next] = [one, other].map((row) => row.cells[column].textContent);
          if (Number.isNaN(a) && Number.isNaN(b)) return way * text.localeCompare(next);
          if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) ? 1 : -1;   // what has no number stands last
          return way * (a - b);
        });
        find("runs").tBodies[0].append(...order);
      });
    });
  }

  function fill(select, titles, chosen) {
    titles.forEach((title, value) => {
      const option = element("option", title);
      option.value = value;
      select.append(option);
    });
    select.value = chosen;
  }

  fill(controls.metric, data.metrics, 0);
  fill(controls.colour, data.axes.map((axis) => axis.title), data.colour);
  controls.line.append(new Option("nothing", ""));
  fill(controls.line, data.axes.slice(0, -1).map((axis) => axis.title), data.line ?? "");
  makeSwitches();
  makeSorting();
  makeLegend();
  for (const control of [controls.metric, controls.smooth, controls.logX, controls.logY]) {
    control.addEventListener("change", () => {
      scaled = null;
      plot.changed(control === controls.smooth);
    });
  }
  for (const control of [controls.colour, controls.line]) {
    control.addEventListener("change", () => { makeLegend(); plot.draw(); });
  }
  darkness.addEventListener("change", makeLegend);
  find("closer").addEventListener("click", () => plot.zoom(0.7));
  find("farther").addEventListener("click", () => plot.zoom(1 / 0.7));
  find("whole").addEventListener("click", plot.reset);
  if (data.thinned) {
    find("thinned").textContent = ` Curves with more than ${show(data.thinned, 12)} points are thinned to that many: ` +
      "the lowest and highest point of each interval are kept. Smoothing uses the means of the intervals.";
  }
  find("still").hidden = true;
  find("moving").hidden = false;
})();
