"use strict";
// Shows values under the pointer: data-tip as it is, data-series by the nearest point of every line.
const tip = document.getElementById("tip");
const LETTERS = "ABCDEFGH";

function show(event, text) {
  tip.textContent = text;
  tip.hidden = false;
  const room = 14;
  const width = tip.offsetWidth, height = tip.offsetHeight;
  const x = event.clientX + room + width > innerWidth ? event.clientX - room - width : event.clientX + room;
  const y = event.clientY + room + height > innerHeight ? event.clientY - room - height : event.clientY + room;
  tip.style.left = Math.max(0, x) + "px";
  tip.style.top = Math.max(0, y) + "px";
}

function nearest(points, x) {
  let best = points[0];
  for (const point of points) if (Math.abs(point[0] - x) < Math.abs(best[0] - x)) best = point;
  return best;
}

for (const svg of document.querySelectorAll("svg[data-series]")) {
  const series = JSON.parse(svg.dataset.series);
  const cross = document.createElementNS(svg.namespaceURI, "line");
  cross.setAttribute("class", "cross");
  cross.setAttribute("y1", 24);
  cross.setAttribute("visibility", "hidden");
  svg.append(cross);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.viewBox.baseVal;
    const x = ((event.clientX - svg.getBoundingClientRect().left) / svg.clientWidth) * box.width;
    const found = series.map((line) => [line, nearest(line.points, x)]);
    const lines = found.map(([line, point]) =>
      (series.length > 1 ? LETTERS[line.run] + " " : "") + line.name + "  " + point[2]);
    cross.setAttribute("x1", x);
    cross.setAttribute("x2", x);
    cross.setAttribute("y2", box.height - 42);
    cross.setAttribute("visibility", "visible");
    show(event, lines.join("\n"));
  });
  svg.addEventListener("pointerleave", () => {
    cross.setAttribute("visibility", "hidden");
    tip.hidden = true;
  });
}

for (const mark of document.querySelectorAll("[data-tip]")) {
  mark.querySelector("title")?.remove(); // it stands for a page without scripts
  mark.addEventListener("pointermove", (event) => {
    event.stopPropagation();
    show(event, mark.dataset.tip);
  });
  mark.addEventListener("pointerleave", () => { tip.hidden = true; });
}
