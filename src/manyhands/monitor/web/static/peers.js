// The table of peers: sorted, filtered, and a page of it at a time, so that thousands of peers cost no more than a few.

import * as format from "./format.js";

const PAGE = 25;
const TICK_MS = 1000; // durations move between two updates

export const isAway = (row) => row.state === "gone" || row.state === "left";

export const awayFor = (row, stream) => Math.max(stream.now() - row.last_seen, 0);

function hereFor(row, stream) {
  if (!row.since) return format.NONE;
  return format.duration(Math.max((isAway(row) ? row.last_seen : stream.now()) - row.since, 0));
}

const COLUMNS = [
  { key: "name", title: "Name", sort: (row) => (row.name || `￿${row.peer_id}`).toLowerCase(), ascends: true },
  { key: "state", title: "State", ascends: true,
    show: (row, stream) => (isAway(row) ? `${row.state} ${format.duration(awayFor(row, stream))}` : row.state) },
  { key: "samples", title: "Samples", number: true, show: (row) => format.integer(row.samples) },
  { key: "share", title: "Share", number: true, sort: (row) => row.samples,
    show: (row, stream) => format.share(stream.shareOf(row.samples)) },
  { key: "samples_per_second", title: "Samples/s", number: true,
    show: (row) => (isAway(row) ? format.NONE : format.speed(row.samples_per_second)) },
  { key: "step", title: "Step", number: true, show: (row) => format.integer(row.step) },
  { key: "since", title: "Here for", number: true, sort: (row) => -row.since, show: hereFor },
  { key: "reach", title: "Reach", ascends: true,
    show: (row) => (row.reach === "relayed" ? `relayed by ${format.nameOf("", row.relay)}` : row.reach) },
  { key: "device", title: "Device", ascends: true },
  { key: "version", title: "Version", ascends: true },
];

export class PeersTable {
  #sorted = COLUMNS.find(({ key }) => key === "samples");
  #ascends = false;
  #page = 0;
  #rows = []; // elements
  #shown = []; // peers in them
  #own = "";

  constructor(stream, choose) {
    this.stream = stream;
    this.choose = choose;
    this.table = document.getElementById("peers");
    this.filter = document.getElementById("filter");
    this.#makeHead();
    this.filter.addEventListener("input", () => { this.#page = 0; this.draw(); });
    this.before = document.getElementById("page-before");
    this.next = document.getElementById("page-next");
    this.before.addEventListener("click", () => { this.#page -= 1; this.draw(); });
    this.next.addEventListener("click", () => { this.#page += 1; this.draw(); });
    stream.addEventListener("peers", () => this.draw());
    setInterval(() => this.#fillShown(), TICK_MS);
    this.draw();
  }

  set own(peerId) {
    this.#own = peerId;
    this.draw();
  }

  #makeHead() {
    const head = this.table.tHead.rows[0];
    for (const column of COLUMNS) {
      const cell = document.createElement("th");
      cell.scope = "col";
      if (column.number) cell.className = "num";
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = column.title;
      if (column.key === "samples") button.dataset.unit = "";
      button.addEventListener("click", () => {
        this.#ascends = this.#sorted === column ? !this.#ascends : column.ascends === true;
        this.#sorted = column;
        this.#page = 0;
        this.draw();
      });
      cell.append(button);
      head.append(cell);
    }
  }

  #chosen() {
    const wanted = this.filter.value.trim().toLowerCase();
    const all = [...this.stream.peers.values()];
    const rows = wanted
      ? all.filter((row) => [row.name, row.peer_id, row.state, row.device, row.version, row.reach]
        .some((text) => text.toLowerCase().includes(wanted)))
      : all;
    const key = this.#sorted.sort ?? ((row) => row[this.#sorted.key]);
    const direction = this.#ascends ? 1 : -1;
    const keyed = rows.map((row) => [key(row), row]);
    keyed.sort(([a, one], [b, other]) =>
      a < b ? -direction : a > b ? direction : one.peer_id < other.peer_id ? -1 : 1);
    return keyed.map(([, row]) => row);
  }

  draw() {
    const rows = this.#chosen();
    const pages = Math.max(Math.ceil(rows.length / PAGE), 1);
    this.#page = Math.min(Math.max(this.#page, 0), pages - 1);
    const begin = this.#page * PAGE;
    const shown = this.#shown = rows.slice(begin, begin + PAGE);
    const body = this.table.tBodies[0];
    while (this.#rows.length < shown.length) this.#rows.push(this.#makeRow());
    this.#fillShown();
    for (const element of this.#rows.slice(0, shown.length)) if (!element.isConnected) body.append(element);
    for (const element of this.#rows.slice(shown.length)) element.remove();
    for (const [place, cell] of [...this.table.tHead.rows[0].cells].entries()) {
      if (COLUMNS[place] === this.#sorted) cell.setAttribute("aria-sort", this.#ascends ? "ascending" : "descending");
      else cell.removeAttribute("aria-sort");
    }
    const total = this.stream.peers.size;
    const empty = document.getElementById("peers-empty");
    empty.hidden = shown.length > 0;
    empty.textContent = total ? "No peer has this text." : "No peers are known here yet.";
    document.getElementById("peers-shown").textContent = shown.length
      ? `${format.integer(begin + 1)} to ${format.integer(begin + shown.length)} of ${format.integer(rows.length)}` +
        (rows.length < total ? `, ${format.integer(total)} in all` : "")
      : "";
    this.before.parentElement.hidden = pages === 1;
    this.before.disabled = this.#page === 0;
    this.next.disabled = this.#page >= pages - 1;
  }

  #makeRow() {
    const element = document.createElement("tr");
    for (const column of COLUMNS) {
      const cell = element.insertCell();
      if (column.number) cell.className = "num";
      if (column.key === "device") cell.className = "device";
      if (column.key === "name") {
        const link = document.createElement("a");
        link.addEventListener("click", (event) => {
          if (event.ctrlKey || event.metaKey || event.shiftKey) return;
          event.preventDefault();
          this.choose(element.dataset.peer);
        });
        cell.append(link);
      } else if (column.key === "state") {
        cell.append(Object.assign(document.createElement("span"), { className: "state" }));
      }
    }
    return element;
  }

  #fillShown() {
    this.#shown.forEach((row, place) => this.#fill(this.#rows[place], row));
  }

  #fill(element, row) {
    element.dataset.peer = row.peer_id;
    element.className = row.peer_id === this.#own ? `${row.state} own` : row.state;
    COLUMNS.forEach((column, place) => {
      const cell = element.cells[place];
      const holder = cell.firstElementChild ?? cell;
      let text = column.show ? column.show(row, this.stream) : row[column.key] || format.NONE;
      if (column.key === "name") {
        text = format.nameOf(row.name, row.peer_id);
        holder.href = `?peer=${encodeURIComponent(row.peer_id)}`;
        cell.title = row.peer_id;
      }
      if (column.key === "device") cell.title = row.device;
      if (column.key === "state") cell.title = row.reason;
      if (holder.textContent !== text) holder.textContent = text;
    });
  }
}
