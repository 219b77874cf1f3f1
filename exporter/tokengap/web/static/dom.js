// Elements, numbers and tables. Whatever comes from outside becomes text and never HTML; what did not change is left
// alone, so that a selection, the focus and a screen reader's place survive the next beat.

export const NOT_KNOWN = "not known";

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setClass(node, name) {
  if (node.className !== name) node.className = name;
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenths = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

export function count(value) {
  return value == null ? NOT_KNOWN : whole.format(value);
}

export function sum(numbers) {
  return Object.values(numbers).reduce((all, number) => all + number, 0);
}

export function percent(value) {
  return value == null ? NOT_KNOWN : `${whole.format(100 * value)} %`;
}

export function seconds(value) {
  if (value == null) return NOT_KNOWN;
  if (Math.abs(value) < 120) return `${tenths.format(value)} s`;
  const minutes = Math.trunc(value / 60);
  if (Math.abs(minutes) < 120) return `${minutes} min ${whole.format(Math.abs(value % 60))} s`;
  return `${Math.trunc(minutes / 60)} h ${Math.abs(minutes % 60)} min`;
}

export function quantity(value, divisor, unit, digits = 0) {
  if (value == null) return NOT_KNOWN;
  return `${(value / divisor).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })} ${unit}`;
}

// Makes `list` hold one child for each item, in their order: `make` creates a child, `update` shows an item in it.
export function keep(list, items, make, update) {
  while (list.children.length > items.length) list.lastElementChild.remove();
  items.forEach((item, number) => {
    if (number >= list.children.length) list.append(make());
    update(list.children[number], item);
  });
}

// A table with these columns: {title, cell, number, spare}. `cell` gives a text, or [text, class]; the first column heads
// its row. `spare` columns are not there on a narrow screen. `mark` gives the class of a row.
export class Table {
  constructor(place, label, columns, mark = () => "") {
    this.columns = columns;
    this.mark = mark;
    this.body = element("tbody");
    const heads = columns.map((column) => element("th", { scope: "col", class: looks(column) }, column.title));
    const table = element("table", { "aria-label": label }, element("thead", {}, element("tr", {}, ...heads)), this.body);
    place.replaceChildren(element("div", { class: "scroll", role: "region", "aria-label": label, tabindex: "0" }, table));
  }

  show(rows) {
    keep(this.body, rows, () => this.#row(), (line, row) => {
      setClass(line, this.mark(row));
      this.columns.forEach((column, number) => {
        const [text, kind] = [column.cell(row)].flat();
        setText(line.children[number], text);
        setClass(line.children[number], kind ? `${looks(column)} ${kind}` : looks(column));
      });
    });
  }

  #row() {
    return element("tr", {}, ...this.columns.map((_, n) => (n ? element("td") : element("th", { scope: "row" }))));
  }
}

function looks(column) {
  return [column.number && "number", column.spare && "spare"].filter(Boolean).join(" ");
}
