// The live line: time to the first token, rate, time per token and, where the server knows it, per cent of the read limit.

const line = document.getElementById("speed");
const shareRow = document.getElementById("share-row");
const number = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const fine = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

// `readLimitUs` is the time in which the device can read all bytes that one token needs; nothing can be faster.
export class Speed {
  #sent = performance.now();
  #first = 0;
  #last = 0;
  #tokens = 0;
  #readLimitUs;

  constructor(readLimitUs) {
    this.#readLimitUs = readLimitUs;
  }

  // Called for each delta, which is a token, or more where a character needed several.
  token() {
    this.#last = performance.now();
    this.#first ||= this.#last;
    this.#tokens += 1;
  }

  // `timings` are the server's own, in the last chunk; until they come, what the browser saw.
  show(timings) {
    const seenUs = this.#tokens > 1 ? ((this.#last - this.#first) * 1000) / (this.#tokens - 1) : 0;
    const usPerToken = timings?.predicted_per_token_ms ? timings.predicted_per_token_ms * 1000 : seenUs;
    line.hidden = false;
    set("ttft", this.#first ? duration(this.#first - this.#sent) : "…");
    set("rate", usPerToken ? `${fine.format(1e6 / usPerToken)} tok/s` : "…");
    set("time", usPerToken ? `${number.format(usPerToken)} µs/token` : "…");
    shareRow.hidden = !(this.#readLimitUs && usPerToken);
    if (!shareRow.hidden) set("share", `${number.format((100 * this.#readLimitUs) / usPerToken)} %`);
  }
}

export function hideSpeed() {
  line.hidden = true;
}

function duration(ms) {
  return ms < 1000 ? `${fine.format(ms)} ms` : `${fine.format(ms / 1000)} s`;
}

function set(id, text) {
  document.getElementById(id).textContent = text;
}
