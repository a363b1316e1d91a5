"use strict";
// Tables: a click on a column's name sorts by it, a word typed above shows the lines that have it.
(() => {
  const value = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
  };
  const compare = (a, b) => {
    // Numbers before words, nothing last.
    if (a === "" || b === "") return (a === "") - (b === "");
    if (typeof a === "number" && typeof b === "number") return a - b;
    if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
    return a.localeCompare(b, "en", { numeric: true });
  };
  for (const table of document.querySelectorAll("table[data-sortable]")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => {
        const descending = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", descending ? "descending" : "ascending");
        const rows = [...table.tBodies[0].rows];
        rows.sort((a, b) => {
          const [x, y] = [value(a, column), value(b, column)];
          const empty = x === "" || y === "";
          return descending && !empty ? compare(y, x) : compare(x, y);
        });
        table.tBodies[0].append(...rows);
      });
    });
  }
  for (const input of document.querySelectorAll("input[data-filters]")) {
    const id = input.dataset.filters;
    const rows = [...document.getElementById(id).tBodies[0].rows];
    const count = document.querySelector(`[data-counts="${id}"]`);
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
      const shown = rows.filter((row) => !row.hidden).length;
      count.textContent = shown === rows.length ? `${shown} lines` : `${shown} of ${rows.length} lines`;
    });
  }
})();
