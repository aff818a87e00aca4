// Numbers, times and names as text.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const clock = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const clockSeconds = new Intl.DateTimeFormat("en", {
  hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23",
});
const day = new Intl.DateTimeFormat("en", { month: "short", day: "numeric" });

export const NONE = "–";

export const integer = (value) => (value == null ? NONE : whole.format(value));
export const loss = (value) => (value == null ? NONE : value.toFixed(value < 10 ? 4 : 3));
export const share = (value) => `${(100 * value).toFixed(value < 0.0995 ? 2 : 1)}%`;
export const rate = (value) => (value == null ? NONE : String(Number(value.toPrecision(3))));
export const speed = (value) =>
  value == null ? NONE : value < 9.95 ? value.toFixed(2) : value < 99.5 ? value.toFixed(1) : whole.format(value);

export function bytes(value) {
  if (value == null) return NONE;
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (value >= size) return `${(value / size).toFixed(value < 10 * size ? 1 : 0)} ${unit}`;
  }
  return `${value} B`;
}

export function duration(seconds) {
  if (seconds < 100) return `${Math.round(seconds)} s`;
  if (seconds < 100 * 60) return `${Math.round(seconds / 60)} min`;
  if (seconds < 72 * 3600) return `${(seconds / 3600).toFixed(seconds < 36000 ? 1 : 0)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

export function countdown(seconds) {
  if (seconds <= 0) return "a moment";
  if (seconds < 100) return `${Math.ceil(seconds)} s`;
  if (seconds < 3600) {
    const left = Math.ceil(seconds);
    return `${Math.floor(left / 60)}:${String(left % 60).padStart(2, "0")}`;
  }
  return duration(seconds);
}

export function timeOf(seconds) {
  const at = new Date(1000 * seconds);
  return Date.now() / 1000 - seconds < 20 * 3600 ? clock.format(at) : day.format(at);
}

export function moment(seconds) {
  const at = new Date(1000 * seconds);
  return `${day.format(at)}, ${clockSeconds.format(at)}`;
}

export function tick(seconds, step) {
  const at = new Date(1000 * seconds);
  if (step >= 86400 || (at.getHours() === 0 && at.getMinutes() === 0 && at.getSeconds() === 0)) return day.format(at);
  return step < 60 ? clockSeconds.format(at) : clock.format(at);
}

// Peer ids begin alike, so the end tells them apart.
export const shortId = (peerId) => (peerId.length > 10 ? `…${peerId.slice(-8)}` : peerId);
export const nameOf = (name, peerId) => name || shortId(peerId);
