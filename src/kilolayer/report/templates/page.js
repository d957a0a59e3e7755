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

    function labelLines(place, point) {
      const curve = curves()[place];
      const value = `${chart.x_label} ${show(curve.steps[point], 12)}: ${show(curve.values[point])}`;
      return chart.curves.length > 1 ? [chart.curves[place].name, value] : [value];
    }

    host.tabIndex = 0;
    host.setAttribute("role", "application");
    host.setAttribute("aria-label", chart.about);
    const plot = makePlot(host, {
      curves, labelLines,
      isOn: (place) => !off.has(place),
      look: (place) => chart.curves[place],
      isFatal: (place) => chart.curves[place].fatal,
      logX: () => false,
      logY: () => box.checked,
      order: chart.curves.map((_, place) => place),
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
        chart.curves.forEach((curve, place) => {
          const button = element("button");
          button.type = "button";
          button.setAttribute("aria-pressed", String(!off.has(place)));
          button.append(swatch(curve), element("span", curve.name));
          button.addEventListener("click", () => {
            if (!off.delete(place)) off.add(place);
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
