// The leaderboard, and the card of one peer.

import * as format from "./format.js";
import { awayFor, isAway } from "./peers.js";

const FIRST = 8;

const element = (id) => document.getElementById(id);

export function makeBar(rank, who, much, share) {
  const item = document.createElement("li");
  const add = (tag, name, text) => {
    const part = document.createElement(tag);
    part.className = name;
    part.textContent = text;
    item.append(part);
  };
  add("span", "rank", rank);
  add("span", "who", who);
  add("span", "much", much);
  const meter = document.createElement("meter");
  meter.value = share;
  meter.setAttribute("aria-label", `${who}: ${format.share(share)}`);
  item.append(meter);
  return item;
}

export class People {
  #own = "";
  #showsAll = false;
  #asked = null; // the place of a peer beyond the leaderboard: { peer, step, leader }

  constructor(stream) {
    this.stream = stream;
    element("leaders-more").addEventListener("click", () => { this.#showsAll = !this.#showsAll; this.#drawLeaders(); });
    for (const name of ["leaders", "peers", "run"]) stream.addEventListener(name, () => this.#drawYou());
    stream.addEventListener("leaders", () => this.#drawLeaders());
  }

  set own(peerId) {
    this.#own = peerId;
    this.#drawLeaders();
    this.#drawYou();
  }

  #drawLeaders() {
    const { leaders } = this.stream;
    const shown = this.#showsAll ? leaders : leaders.slice(0, FIRST);
    const most = Math.max(...leaders.map((leader) => leader.share), 1e-9);
    element("leaders").replaceChildren(...shown.map((leader) => {
      const who = format.nameOf(leader.name, leader.peer_ids[0] ?? "");
      const item = makeBar(String(leader.rank), who, format.integer(leader.samples), leader.share / most);
      item.querySelector("meter").setAttribute("aria-label", `${format.share(leader.share)} of all`);
      item.title = format.share(leader.share);
      if (leader === this.#ownLeader()) item.classList.add("own");
      return item;
    }));
    element("leaders-empty").hidden = leaders.length > 0;
    const more = element("leaders-more");
    more.hidden = leaders.length <= FIRST;
    more.textContent = this.#showsAll ? "Show fewer" : `Show all ${leaders.length}`;
  }

  // Each row of the leaderboard has the id of only one of its peers; the others are found by their common name.
  #ownLeader() {
    if (!this.#own) return undefined;
    const name = this.stream.peers.get(this.#own)?.name;
    return this.stream.leaders.find((leader) => (name ? leader.name === name : leader.peer_ids[0] === this.#own));
  }

  #drawYou() {
    const card = element("you");
    card.hidden = !this.#own;
    if (!this.#own) return;
    const row = this.stream.peers.get(this.#own);
    const leader = this.#ownLeader() ?? this.#askedLeader();
    const name = row?.name || leader?.name;
    element("you-title").textContent = name || `Peer ${format.shortId(this.#own)}`;
    element("you-name").textContent = `Peer ${this.#own}`;
    const samples = row?.samples ?? leader?.samples;
    element("you-rank").textContent = leader ? format.integer(leader.rank) : format.NONE;
    element("you-samples").textContent = format.integer(samples);
    element("you-share").textContent = samples == null ? format.NONE : format.share(this.stream.shareOf(samples));
    element("you-speed").textContent = !row || isAway(row) ? format.NONE : format.speed(row.samples_per_second);
    element("you-committed").textContent = format.integer(row?.rounds_committed);
    element("you-missed").textContent = format.integer(row?.rounds_missed);
    element("you-reason").textContent = this.#reason(row, leader);
  }

  #reason(row, leader) {
    if (!this.stream.run) return "";
    if (!row) return leader ? "This peer is not here now." : "This monitor does not know this peer.";
    const ago = format.duration(awayFor(row, this.stream));
    if (row.state === "gone") {
      return `Silent for ${ago}: it ended without a goodbye, or its network failed. If it is yours, look at its log.`;
    }
    if (row.state === "left") return `It left ${ago} ago.`;
    if (row.reason) return `Not in the last step: ${row.reason}`;
    return row.rounds_committed ? "Its samples are in the last step." : "It has no step yet.";
  }

  // Asked once for each step.
  #askedLeader() {
    const [peer, step] = [this.#own, this.stream.run?.step];
    if (step == null) return null;
    if (this.#asked?.peer !== peer || this.#asked.step !== step) {
      const before = this.#asked?.peer === peer ? this.#asked.leader : null;
      const asked = { peer, step, leader: before };
      this.#asked = asked;
      fetch(`/api/leader.json?peer=${encodeURIComponent(peer)}`)
        .then((answer) => answer.json())
        .then(({ leader }) => { asked.leader = leader; this.#drawYou(); })
        .catch(() => {}); // asked again with the next step
    }
    return this.#asked.leader;
  }
}
