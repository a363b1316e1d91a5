"use strict";
// Tables: a click on a column's name sorts by it, a word typed above shows the lines that have it, and the columns that
// name a line stay in view.
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
  // What names a line stays where it is while the rest scrolls: as many columns as fill no more than half of the window.
  const share = 0.5;
  const stick = (table) => {
    const box = table.closest(".scroll");
    const heads = [...table.tHead.rows[0].cells];
    if (!box.clientWidth) return;
    for (const cell of table.querySelectorAll(".stuck")) {
      cell.classList.remove("stuck", "last");
      cell.style.left = "";
    }
    const starts = [0];
    heads.forEach((head, column) => starts.push(starts[column] + head.offsetWidth));
    const wide = table.offsetWidth > box.clientWidth;
    const keys = Math.min(Number(table.dataset.keys), heads.length - 1);
    const fit = starts.slice(1, keys + 1).filter((end) => end <= share * box.clientWidth).length;
    const count = wide ? Math.max(1, fit) : 0;
    for (const row of table.rows) {
      for (let column = 0; column < count; column += 1) {
        row.cells[column].classList.add("stuck");
        row.cells[column].classList.toggle("last", column === count - 1);
        row.cells[column].style.left = `${starts[column]}px`;
      }
    }
  };
  const tables = [...document.querySelectorAll("table[data-keys]")];
  const watcher = new ResizeObserver((entries) => entries.forEach((entry) => stick(entry.target.querySelector("table"))));
  for (const table of tables) watcher.observe(table.closest(".scroll"));
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
