// The gateway's memory of the last hours, fetched as often as it changes.

import { admin } from "./api.js";
import { ofShownModel } from "./models.js";

export const SPANS = { 10: "10 min", 30: "30 min", 120: "2 h", 720: "12 h", 1440: "24 h" };

/** A long range has a point a minute, and the mean of the minute that is not over. */
const MOST_SECONDS = 30;

/** Figures over time for the charts of one view. */
export class Feed {
  minutes = 10;
  #points = { step_seconds: 5, times: [], series: {} };
  #fetched = 0;
  #asked = "";

  choose(minutes) {
    this.minutes = minutes;
  }

  /** Fetches where the gateway has a new point by now. */
  async refresh() {
    const { times, step_seconds: step } = this.#points;
    const seconds = times.length < 2 ? 5 : Math.min(step, MOST_SECONDS);
    const query = () => `history?minutes=${this.minutes}${ofShownModel()}`;
    const asked = query();
    if (asked === this.#asked && performance.now() - this.#fetched < seconds * 1000) return;
    [this.#asked, this.#fetched] = [asked, performance.now()];
    const points = await admin("GET", asked);
    if (asked === query()) this.#points = points;
  }

  /** What a chart of the figures `names` draws. */
  of(names, more = {}) {
    const { times, step_seconds: step, series } = this.#points;
    const unknown = times.map(() => null);
    return { times, step, minutes: this.minutes, series: names.map((name) => series[name] ?? unknown), goal: null, ...more };
  }
}
