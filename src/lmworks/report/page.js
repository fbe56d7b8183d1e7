
for (const svg of document.querySelectorAll("svg[data-chart]")) {
  const { place, x: name, lines, marks } = JSON.parse(svg.dataset.chart);
  const cursor = svg.querySelector(".cursor"), readout = svg.parentElement.querySelector(".readout");
  const nearest = (points, x) => points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
  svg.addEventListener("pointermove", event => {
    const at = (event.offsetX / svg.clientWidth) * svg.viewBox.baseVal.width;
    const wanted = place.low + (at - place.left) / (place.right - place.left) * (place.high - place.low);
    const step = nearest(lines[0].points, wanted)[0];
    const x = place.left + (step - place.low) / (place.high - place.low) * (place.right - place.left);
    cursor.setAttribute("x1", x); cursor.setAttribute("x2", x); cursor.setAttribute("visibility", "visible");
    const values = lines.filter(line => line.points.length).map(line => {
      const [from, value] = nearest(line.points, step);
      return `${line.name} ${value}` + (from === step ? "" : ` (at ${from})`);
    });
    const close = Math.abs(place.high - place.low) / 100;
    const near = marks.flatMap(mark => mark.points.filter(([x]) => Math.abs(x - wanted) <= close)
      .map(([x, text]) => `${mark.name} at ${x}: ${text}`));
    readout.textContent = [`${name} ${step}:  ${values.join("  ·  ")}`, ...near].join("\n");
  });
  svg.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden"); readout.textContent = "\u00a0";
  });
}
