// The stream of updates: what the page knows of the run. All text in it was written by strangers: show it as text alone.

const AGAIN_MS = 5000;

export class Stream extends EventTarget {
  run = null;
  leaders = [];
  events = [];
  peers = new Map(); // peer id -> row
  #skew = 0; // clock of the server minus ours, seconds
  #source = null;

  // Seconds since 1970, by the clock of the server.
  now() {
    return Date.now() / 1000 + this.#skew;
  }

  open() {
    const source = new EventSource("/events");
    this.#source = source;
    source.onopen = () => this.#tell("connected");
    source.onerror = () => {
      this.#tell("lost");
      if (source.readyState === EventSource.CLOSED) { // the server was full or away: the browser itself gives up
        setTimeout(() => this.open(), AGAIN_MS);
      }
    };
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
