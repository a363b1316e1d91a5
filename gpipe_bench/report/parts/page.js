"use strict";
// Figures: a click enlarges one over the whole window; another shows a part of it. Escape closes.
(() => {
  const [viewer, view] = [document.getElementById("viewer"), document.getElementById("viewer-view")];
  function open(picture) {
    view.replaceChildren(picture.querySelector("svg").cloneNode(true));
    view.classList.remove("near");
    viewer.showModal();
  }
  for (const picture of document.querySelectorAll(".picture")) {
    picture.addEventListener("click", () => open(picture));
    picture.addEventListener("keydown", (event) => { if (event.key === "Enter") open(picture); });
  }
  view.addEventListener("click", () => view.classList.toggle("near"));
  viewer.querySelector("button").addEventListener("click", () => viewer.close());
})();
// Tables: a click on a column's name sorts by it, a word typed above shows the lines that have it.
(() => {
  const value = (row, column) => {
    const text = row.cells[column].textContent;
    return Number.isNaN(parseFloat(text)) ? text : parseFloat(text);
  };
  // Numbers before words, nothing last.
  const rank = (entry) => (entry === "" ? 2 : typeof entry === "number" ? 0 : 1);
  const compare = (a, b, sign) => {
    if (rank(a) !== rank(b)) return rank(a) - rank(b);
    return sign * (typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true }));
  };
  for (const table of document.querySelectorAll("table")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      const rows = [...table.tBodies[0].rows];
      table.tBodies[0].append(...rows.sort((a, b) => compare(value(a, column), value(b, column), sign)));
    }));
  }
  for (const input of document.querySelectorAll("input[data-filters]")) {
    const rows = [...document.getElementById(input.dataset.filters).tBodies[0].rows];
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/);
      for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    });
  }
})();
