// The page of a run.

import { Charts } from "./charts.js";
import * as format from "./format.js";
import { makeBar, People } from "./people.js";
import { PeersTable } from "./peers.js";
import { Stream } from "./stream.js";

const SILENT_S = 60;
const stream = new Stream();
const element = (id) => document.getElementById(id);

function say(id, text) {
  const place = element(id);
  if (place.textContent !== text) place.textContent = text;
}

// The numbers of the run

stream.addEventListener("run", () => {
  const { run } = stream;
  say("run-id", run.run_id);
  document.title = `${run.run_id} · step ${format.integer(run.step)} · manyhands`;
  say("step", format.integer(run.step));
  say("loss", format.loss(run.last?.loss));
  say("speed", format.speed(run.samples_per_second));
  say("num-peers", format.integer(run.num_peers));
  sayUnit(run.unit);
  say("committed", format.integer(run.committed_samples));
  say("committed-since", run.committed_since == null ? "so far" : `since ${format.timeOf(run.committed_since)}`);
  say("bytes", format.bytes(run.last?.bytes_sent));
  say("lr", format.rate(run.last?.learning_rate));
  move();
});

// The unit of credit: samples, or the unit that the run counts instead.
function sayUnit(unit) {
  if (document.documentElement.dataset.unit === unit) return;
  document.documentElement.dataset.unit = unit;
  const capital = unit[0].toUpperCase() + unit.slice(1);
  for (const place of document.querySelectorAll("[data-unit]:not(html)")) {
    place.textContent = /^[A-Z]/.test(place.textContent) ? capital : unit;
  }
}

function saySamples(run, samples, runs) {
  const target = run.target_batch_size;
  if (!run.num_peers && !samples) {
    return run.step ? "Nobody trains now. The run goes on when a trainer comes." : "Nobody trains yet.";
  }
  if (!target) return "How many samples a step needs is not known here yet.";
  const counted = `${format.integer(samples)} of ${format.integer(target)} samples`;
  return runs ? counted : `${counted}: the first batches are computed`;
}

// The countdown and the bar move on their own between two updates.
function move() {
  const { run } = stream;
  if (!run) return;
  const passed = Math.max(stream.now() - run.time, 0);
  const target = run.target_batch_size;
  const runs = run.eta_s != null;
  const left = runs ? run.eta_s - passed : null;
  say("countdown-label", runs ? "Next step in" : "Next step");
  say("countdown", runs ? format.countdown(left) : run.time ? "waiting" : format.NONE);
  let samples = run.samples;
  if (runs && run.eta_s > 0 && target > samples) samples += (target - samples) * Math.min(passed / run.eta_s, 1);
  const bar = element("progress");
  bar.max = target || 1;
  bar.value = Math.min(samples, target || 1);
  say("samples", saySamples(run, samples, runs));
  say("looked", run.time && passed > SILENT_S ? `no news of the run for ${format.duration(passed)}` : "");
}
const calm = matchMedia("(prefers-reduced-motion: reduce)");
let movedAt = 0;
function frame(now) {
  if (now - movedAt >= (calm.matches ? 1000 : 100)) {
    movedAt = now;
    move();
  }
  requestAnimationFrame(frame);
}
requestAnimationFrame(frame);

// The connection

function connection(text, name) {
  const place = element("connection");
  if (place.textContent === text) return;
  place.textContent = text;
  place.className = `pill ${name}`;
}
stream.addEventListener("connected", () => {
  document.documentElement.classList.remove("stale");
  connection("live", "live");
});
stream.addEventListener("lost", () => {
  document.documentElement.classList.add("stale");
  connection("connection lost, trying again", "lost");
});

// Events

stream.addEventListener("events", () => {
  element("events").replaceChildren(...stream.events.slice(0, 12).map((event) => {
    const item = document.createElement("li");
    item.className = event.kind;
    const time = document.createElement("time");
    time.dateTime = new Date(1000 * event.time).toISOString();
    time.title = format.moment(event.time);
    time.textContent = format.timeOf(event.time);
    const text = document.createElement("p");
    text.textContent = event.text;
    item.append(time, text);
    return item;
  }));
  element("events-empty").hidden = stream.events.length > 0;
});

// People

const people = new People(stream);
const table = new PeersTable(stream, (peerId) => choosePeer(peerId, true));

function choosePeer(peerId, isNew) {
  if (isNew) history.pushState(null, "", peerId ? `?peer=${encodeURIComponent(peerId)}` : location.pathname);
  people.own = peerId;
  table.own = peerId;
  if (isNew && peerId) element("you").scrollIntoView({ behavior: calm.matches ? "auto" : "smooth", block: "nearest" });
}
const chosen = () => new URLSearchParams(location.search).get("peer") ?? "";
addEventListener("popstate", () => choosePeer(chosen(), false));
element("you-close").addEventListener("click", () => choosePeer("", true));
choosePeer(chosen(), false);

// The theme

const charts = new Charts(stream);
const themes = ["auto", "light", "dark"];
function theme() {
  return document.documentElement.dataset.theme ?? "auto";
}
function sayTheme() {
  say("theme", `Theme: ${theme()}`);
}
element("theme").addEventListener("click", () => {
  const next = themes[(themes.indexOf(theme()) + 1) % themes.length];
  if (next === "auto") {
    delete document.documentElement.dataset.theme;
    localStorage.removeItem("manyhands theme");
  } else {
    document.documentElement.dataset.theme = next;
    localStorage.setItem("manyhands theme", next);
  }
  sayTheme();
  charts.recolour();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.recolour());
sayTheme();

// The model

if (document.documentElement.dataset.model === "yes") {
  element("model").hidden = false;
  element("fill").addEventListener("submit", async (event) => {
    event.preventDefault();
    say("fill-said", "Computing …");
    element("fill-guesses").replaceChildren();
    try {
      const answer = await (await fetch(`/api/fill.json?text=${encodeURIComponent(element("fill-text").value)}`)).json();
      say("fill-said", answer.error ?? answer.text);
      const bars = (answer.guesses ?? []).flatMap((guesses, mask) => guesses.map((guess, place) =>
        makeBar(answer.guesses.length > 1 && place === 0 ? String(mask + 1) : "", guess.token,
          format.share(guess.share), guess.share)));
      element("fill-guesses").replaceChildren(...bars);
    } catch {
      say("fill-said", "The server does not answer.");
    }
  });
}

stream.open();
