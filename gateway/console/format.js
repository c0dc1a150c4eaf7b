// Figures as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const share = new Intl.NumberFormat("en", { style: "percent", maximumFractionDigits: 1 });

export const count = (value) => whole.format(value);
export const compact = (value) => (Math.abs(value) < 10_000 ? whole.format(value) : short.format(value));
export const percent = (value) => share.format(value);

/** A latency in seconds: 45 ms, 1.24 s. */
export function latency(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.9995) return `${seconds < 0.01 ? (seconds * 1000).toFixed(1) : Math.round(seconds * 1000)} ms`;
  return `${seconds < 9.995 ? seconds.toFixed(2) : seconds.toFixed(1)} s`;
}

/** A latency on an axis or of a goal: 250 ms, 5 s, 1 h. */
export function axisTime(seconds) {
  if (seconds < 1) return `${Number((seconds * 1000).toPrecision(3))} ms`;
  return seconds < 90 ? `${Number(seconds.toPrecision(3))} s` : span(seconds);
}

/** A span in seconds: 0.4 s, 12 s, 3 min, 2 h, 5 d. */
export function span(seconds) {
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  for (const [unit, size] of [["d", 86_400], ["h", 3600], ["min", 60]]) {
    if (seconds >= 1.5 * size) return `${Math.round(seconds / size)} ${unit}`;
  }
  return `${Math.round(seconds)} s`;
}

/** A moment in Unix seconds: 40 s ago. */
export const ago = (unix) => `${span(Math.max(0, Date.now() / 1000 - unix))} ago`;

/** A limit as an operator types it: 120, 1_000, 50k, 2.5M; null for none. Throws an Error where it is no number. */
export function parseLimit(text) {
  const plain = text.trim().toLowerCase().replace(/(?<=\d)[,_](?=\d)/g, "");
  if (["", "none", "no limit"].includes(plain)) return null;
  const match = /^(\d+(?:\.\d+)?)([km]?)$/.exec(plain);
  const exact = match ? Number(match[1]) * { "": 1, k: 1e3, m: 1e6 }[match[2]] : 0;
  const value = Math.round(exact);
  if (value < 1 || Math.abs(value - exact) > 1e-6) throw new Error(`“${text}” is no limit: give a number such as 600, 50k or 2M, or leave it empty`);
  return value;
}
