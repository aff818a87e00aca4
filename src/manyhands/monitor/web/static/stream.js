// The stream of updates: what the page knows of the run. All text in it was written by strangers: show it as text alone.

const AGAIN_MS = 5000;
const OWN_PAGE = new URL(import.meta.url).pathname.split("/")[2]; // the digest of all files of the page

// The server was upgraded while this page was open: take its page, which reads its stream. Once for each, so that two
// servers behind one address cannot have the page reload for ever.
function reloadIfOther(page) {
  const key = `manyhands reloaded for ${page}`;
  if (page === OWN_PAGE || sessionStorage.getItem(key)) return;
  sessionStorage.setItem(key, "yes");
  location.reload();
}

export class Stream extends EventTarget {
  run = null;
  leaders = [];
  events = [];
  peers = new Map(); // peer id -> row
  #skew = 0; // clock of the server minus ours, seconds
  #source = null;
  #again = 0; // timer
  #lostAt = null; // while the connection is lost: what is shown stands still at this time

  // Seconds since 1970, by the clock of the server.
  now() {
    return this.#lostAt ?? Date.now() / 1000 + this.#skew;
  }

  // A hidden tab has no connection: a browser has six for one server, and they would all be taken by tabs nobody sees.
  open() {
    document.addEventListener("visibilitychange", () => (document.hidden ? this.#disconnect() : this.#connect()));
    if (!document.hidden) this.#connect();
  }

  #disconnect() {
    clearTimeout(this.#again);
    this.#source?.close();
  }

  #connect() {
    this.#disconnect();
    const source = new EventSource("/events");
    this.#source = source;
    source.onopen = () => {
      this.#lostAt = null;
      this.#tell("connected");
    };
    source.onerror = () => {
      this.#lostAt ??= this.now();
      this.#tell("lost");
      if (source.readyState === EventSource.CLOSED) { // the server was full or away: the browser itself gives up
        this.#again = setTimeout(() => this.#connect(), AGAIN_MS);
      }
    };
    this.#on("page", reloadIfOther);
    this.#on("clock", (now) => { this.#skew = now - Date.now() / 1000; });
    this.#on("run", (run) => { this.run = run; });
    this.#on("leaders", (leaders) => { this.leaders = leaders; });
    this.#on("events", (events) => { this.events = events; });
    this.#on("peers", (message) => this.#takePeers(message));
  }

  #on(name, take) {
    this.#source.addEventListener(name, (event) => {
      take(JSON.parse(event.data));
      this.#tell(name);
    });
  }

  #tell(name) {
    this.dispatchEvent(new Event(name));
  }

  #takePeers({ whole, columns, rows, gone }) {
    if (whole) this.peers = new Map();
    for (const cells of rows) {
      const row = Object.fromEntries(columns.map((column, place) => [column, cells[place]]));
      this.peers.set(row.peer_id, row);
    }
    for (const peerId of gone) this.peers.delete(peerId);
  }

  shareOf(samples) {
    return this.run?.committed_samples ? samples / this.run.committed_samples : 0;
  }
}
