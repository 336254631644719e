// Tables that can be sorted (buttons in the head) and copied (tab-separated, for a spreadsheet).
"use strict";

const fpldTables = (() => {
  const sorted = new Map(); // by table id: [column, direction], so that a live page keeps what was asked for

  const value = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
  };

  function sort(table, column, direction) {
    const body = table.tBodies[0];
    const compare = (a, b) => {
      const [x, y] = [value(a, column), value(b, column)];
      if (typeof x !== typeof y) return typeof x === "number" ? -1 : 1;
      return direction * (typeof x === "number" ? x - y : x.localeCompare(y, undefined, { numeric: true }));
    };
    body.append(...[...body.rows].sort(compare));
    [...table.tHead.rows[0].cells].forEach((cell, i) => {
      cell.setAttribute("aria-sort", i !== column ? "none" : direction > 0 ? "ascending" : "descending");
    });
    sorted.set(table.id, [column, direction]);
  }

  async function copy(table, button) {
    const text = [...table.rows].map((row) => [...row.cells].map((cell) => cell.dataset.value ?? cell.textContent.trim()).join("\t")).join("\n");
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = document.createElement("textarea"); // no permission, or no secure context
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  }

  function attach(root = document) {
    for (const table of root.querySelectorAll("table[id]")) {
      [...table.tHead.rows[0].cells].forEach((cell, column) => {
        cell.querySelector("button").addEventListener("click", () => {
          sort(table, column, cell.getAttribute("aria-sort") === "ascending" ? -1 : 1);
        });
      });
      const button = table.querySelector("button.copy");
      button.addEventListener("click", () => copy(table, button));
      if (sorted.has(table.id)) sort(table, ...sorted.get(table.id));
    }
  }

  return { attach };
})();
