# ruff: noqa: E501 (rules of CSS are one line each)
"""The looks and the script of a sweep's page: one member lit up everywhere, sorting, marking."""

from __future__ import annotations

SWEEP_STYLE = """
:root { --low: #b9c0cc; --mid: #4f86d9; --high: #0a8f5b; --pick: #d9480f; --pale: #eef1f5; }
@media (prefers-color-scheme: dark) {
  :root { --low: #465066; --mid: #5b93e6; --high: #55e0a3; --pick: #ff9d57; --pale: #222936; } }
.card { margin-bottom: 16px; } .row .card { margin-bottom: 0; } p { margin-bottom: 14px; }
h2 .small, h2.above .small { font-weight: 400; margin-left: 8px; } h2.above { margin: 22px 0 10px; }
.winner { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(400px, 100%), 1fr)); gap: 8px 40px;
          border-left: 5px solid var(--high); }
.winner .big { font-size: clamp(19px, 3.4vw, 27px); overflow-wrap: anywhere; }
.figures { display: flex; flex-wrap: wrap; gap: 8px 34px; margin: 12px 0; }
.figures div { display: flex; flex-direction: column; } .figures b { font-size: 21px; }
.figures .pm { color: var(--soft); font-weight: 400; font-size: 16px; }
.winner p { color: var(--ink); margin: 6px 0; } .winner li { margin-bottom: 6px; }
.ramp { display: inline-block; width: 90px; height: 9px; border-radius: 5px; margin: 0 7px;
        background: linear-gradient(90deg, var(--low), var(--mid), var(--high)); }
.legend .best::before { content: "\\2501\\00a0"; color: var(--pick); }
.m { --c: color-mix(in oklab, color-mix(in oklab, var(--low), var(--mid) calc(min(var(--s), 50%) * 2)),
     var(--high) calc(max(0%, var(--s) - 50%) * 2)); }
svg polyline.m { stroke: var(--c); stroke-width: 1.3; stroke-opacity: .75; }
svg.many polyline.m { stroke-width: 1; stroke-opacity: .5; }
svg polyline.none { stroke: var(--soft); stroke-dasharray: 3 4; stroke-opacity: .5; }
svg polyline.m.best { stroke: var(--pick); stroke-width: 2.6; stroke-opacity: 1; stroke-dasharray: none; }
circle.m { fill: var(--c); fill-opacity: .8; } circle.best { fill: var(--pick); fill-opacity: 1; }
.mean rect { fill: var(--ink); } .mean line { stroke: var(--ink); stroke-width: 1.4; }
.parallel { overflow-x: auto; } .parallel svg { min-width: 660px; }
.axis { stroke: var(--soft); } .tick { stroke: var(--soft); } svg .name { font-size: 13px; font-weight: 600; fill: var(--ink); }
.halo { paint-order: stroke; stroke: var(--card); stroke-width: 4px; stroke-linejoin: round; }
.small-multiples { grid-template-columns: repeat(auto-fill, minmax(min(300px, 100%), 1fr)); }
.lit polyline.m:not(.on):not(.pin), .lit circle.m:not(.on):not(.pin) { stroke-opacity: .12; fill-opacity: .12; }
svg polyline.m.on, svg polyline.m.pin { stroke: var(--ink); stroke-width: 2.6; stroke-opacity: 1; }
svg polyline.m.best.on { stroke: var(--pick); } circle.on, circle.pin { fill: var(--ink); fill-opacity: 1; }
.scroll { max-height: 560px; overflow: auto; } .members table { font-variant-numeric: tabular-nums; }
.members td, .members th { text-align: right; padding: 4px 12px 4px 4px; white-space: nowrap; }
.members td:last-child { overflow-wrap: normal; }
.members th { position: sticky; top: 0; background: var(--card); cursor: pointer; color: var(--soft); font-weight: 600; z-index: 1; }
.members th[aria-sort=ascending]::after { content: " \\25b4"; } .members th[aria-sort=descending]::after { content: " \\25be"; }
.members tr.best td { font-weight: 650; } .members tr.best td:first-child { box-shadow: inset 4px 0 var(--pick); }
.members tbody tr { cursor: pointer; } .members tr.on td { background: var(--pale); } .members tr.pin td { background: var(--pale); }
.score { background: linear-gradient(90deg, color-mix(in oklab, var(--high) 22%, transparent) var(--s), transparent var(--s)); }
.diverged, .failed { color: var(--pick); } .pruned, .cancelled { color: var(--soft); }
h1.graph { font-size: 21px; margin: 34px 0 12px; } h1.graph .small { font-size: 14px; font-weight: 400; margin-left: 8px; }
.graphs th { text-align: left; color: var(--soft); font-weight: 600; } .graphs td, .graphs th { padding-right: 16px; }
.graphs th:last-child { text-align: right; padding-right: 0; } .graphs td:last-child { padding-right: 0; white-space: nowrap; }
a { color: var(--val); }
#tip { position: fixed; pointer-events: none; background: var(--ink); color: var(--page); border-radius: 6px;
       padding: 5px 9px; font-size: 13px; max-width: 380px; z-index: 9; }
"""

SCRIPT = r"""
document.querySelectorAll("section").forEach((section) => {
  const data = JSON.parse(section.querySelector(".data").textContent);
  const tip = document.getElementById("tip");
  const all = (selector, root = section) => [...root.querySelectorAll(selector)];
  const of = new Map();
  all("[data-i]").forEach((node) => {
    const list = of.get(node.dataset.i) || [];
    list.push(node);
    of.set(node.dataset.i, list);
  });
  let lit = null;
  const light = (i, event) => {
    if (i !== lit) {
      (of.get(lit) || []).forEach((node) => node.classList.remove("on"));
      (of.get(i) || []).forEach((node) => node.classList.add("on"));
      section.classList.toggle("lit", i !== null || section.querySelector(".pin") !== null);
      lit = i;
    }
    tip.hidden = i === null || !event;
    if (tip.hidden) return;
    const task = data.tasks[i];
    const score = task.score === null ? "not evaluated" : data.metric + " " + task.score.toFixed(4);
    tip.textContent = task.name + " · " + score + (task.status === "finished" ? "" : " · " + task.status);
    const width = document.documentElement.clientWidth;
    tip.style.left = Math.min(event.clientX + 14, width - tip.offsetWidth - 8) + "px";
    tip.style.top = event.clientY + 16 + "px";
  };
  const pin = (i) => {
    (of.get(i) || []).forEach((node) => node.classList.toggle("pin"));
    section.classList.toggle("lit", section.querySelector(".pin") !== null || lit !== null);
  };

  // The line nearest to the pointer: every line goes from left to right, so its height there is known.
  const height = (points, pointer) => {
    const first = points[0][0], last = points[points.length - 1][0];
    const x = Math.min(Math.max(pointer, first), last);
    if (Math.abs(x - pointer) > 15) return null;
    if (first === last) return points[0][1];
    for (let k = 1; k < points.length; k++) {
      if (points[k][0] >= x && points[k - 1][0] <= x) {
        const share = (x - points[k - 1][0]) / (points[k][0] - points[k - 1][0] || 1);
        return points[k - 1][1] + share * (points[k][1] - points[k - 1][1]);
      }
    }
    return null;
  };
  all("svg.lines").forEach((svg) => {
    const lines = all("polyline.m", svg).map((node) => ({
      i: node.dataset.i,
      points: node.getAttribute("points").split(" ").map((pair) => pair.split(",").map(Number)),
    }));
    if (lines.length > 40) svg.classList.add("many");
    const nearest = (event) => {
      const box = svg.getBoundingClientRect();
      const scale = svg.viewBox.baseVal.width / box.width;
      const x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
      let found = null, least = 30;
      for (const line of lines) {
        const at = height(line.points, x);
        if (at !== null && Math.abs(at - y) < least) { least = Math.abs(at - y); found = line.i; }
      }
      return found;
    };
    svg.addEventListener("mousemove", (event) => light(nearest(event), event));
    svg.addEventListener("mouseleave", () => light(null));
    svg.addEventListener("click", (event) => { const i = nearest(event); if (i !== null) pin(i); });
  });
  all("circle.m").forEach((node) => {
    node.addEventListener("mousemove", (event) => light(node.dataset.i, event));
    node.addEventListener("mouseleave", () => light(null));
    node.addEventListener("click", () => pin(node.dataset.i));
  });

  const table = section.querySelector(".members table");
  const body = table.tBodies[0];
  all("tr", body).forEach((row) => {
    row.addEventListener("mouseenter", () => light(row.dataset.i));
    row.addEventListener("mouseleave", () => light(null));
    row.addEventListener("click", () => pin(row.dataset.i));
  });
  const value = (cell) => {
    const number = cell.dataset.v === undefined ? Number(cell.textContent) : Number(cell.dataset.v);
    return cell.textContent !== "" && Number.isFinite(number) ? number : cell.textContent;
  };
  const compare = (a, b) => {
    if (typeof a === typeof b) return a < b ? -1 : a > b ? 1 : 0;
    return typeof a === "number" ? -1 : 1;
  };
  all("th", table).forEach((heading, column) => {
    const sort = () => {
      const down = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      all("th", table).forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", down === 1 ? "ascending" : "descending");
      const rows = all("tr", body).map((row) => ({ row, key: value(row.cells[column]) }));
      rows.sort((a, b) => down * compare(a.key, b.key));
      body.append(...rows.map((each) => each.row));
    };
    heading.addEventListener("click", sort);
    heading.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
  });
});
"""
