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
