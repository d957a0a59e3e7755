// The plots of a run's page, in the charts of plot.js: each in the place of its still picture.
(function () {
  const data = JSON.parse(find("data").textContent);
  const plots = [];

  function makeChart(figure, chart) {
    const host = element("div", undefined, "chart"), legend = element("div", undefined, "legend");
    const off = new Set(), box = element("input");
    box.type = "checkbox";
    box.checked = chart.log;
    let scaled = null;

    function curves() {
      scaled ??= chart.curves.map((curve) => scaledCurve(curve.x, curve.y, false, box.checked));
      return scaled;
    }

    function labelLines(index, point) {
      const curve = curves()[index];
      const value = `${chart.x_label} ${show(curve.steps[point], 12)}: ${show(curve.values[point])}`;
      return chart.curves.length > 1 ? [chart.curves[index].name, value] : [value];
    }

    host.tabIndex = 0;
    host.setAttribute("role", "application");
    host.setAttribute("aria-label", chart.about);
    const plot = makePlot(host, {
      curves, labelLines,
      isOn: (index) => !off.has(index),
      look: (index) => chart.curves[index],
      isFatal: (index) => chart.curves[index].fatal,
      logX: () => false,
      logY: () => box.checked,
      order: chart.curves.map((_, index) => index),
      xLabel: chart.x_label,
      ends: chart.ends,
      fromZero: chart.from_zero,
      needsFocus: true,
      margin: { left: 56, right: 10, top: 10, bottom: 36 },
      height: (width) => Math.round(bounded(width * 0.62, 200, 120)),
      onZoom: (view) => plots.filter((each) => each.group === chart.x_label && each.plot !== plot).forEach((each) => each.plot.showX(view)),
    });
    plots.push({ group: chart.x_label, plot });

    function makeLegend() {
      legend.replaceChildren();
      if (chart.curves.length > 1) {
        chart.curves.forEach((curve, index) => {
          const button = element("button");
          button.type = "button";
          button.setAttribute("aria-pressed", String(!off.has(index)));
          button.append(swatch(curve), element("span", curve.name));
          button.addEventListener("click", () => {
            if (!off.delete(index)) off.add(index);
            makeLegend();
            plot.changed(true);
          });
          legend.append(button);
        });
      }
      const label = element("label");
      label.append(box, "log");
      if (chart.curves.every((curve) => curve.y.every((y) => y === null || y > 0))) legend.append(label);
    }

    box.addEventListener("change", () => { scaled = null; plot.changed(false); });
    darkness.addEventListener("change", makeLegend);
    makeLegend();
    figure.querySelector("svg").replaceWith(host, legend);
  }

  const byName = new Map(data.charts.map((chart) => [chart.name, chart]));
  for (const figure of document.querySelectorAll("figure[data-chart]")) makeChart(figure, byName.get(figure.dataset.chart));
  for (const hint of document.querySelectorAll(".script-only")) hint.hidden = false;
})();
