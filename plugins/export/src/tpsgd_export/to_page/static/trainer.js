// Learning: the net and its control see the same samples in the same order.

const ROUNDS = 40; // at most, until a drawing that was just named is recognised
const SURE = 0.6; // the probability at which it is
const REHEARSED = 10; // built-in samples in each round
const COPIES = 5; // of each of the visitor's samples in an epoch

class Trainer {
  constructor(net, train, held, rate) {
    Object.assign(this, { net, train, held, rate });
    this.controlled = net.record.head !== 0;
    this.onePass = new OnePass(net.c, net.record);
    this.reset();
  }

  reset() {
    this.net.begin();
    this.onePass.begin();
    Object.assign(this, { learned: 0, seconds: 0, timed: 0, own: [], order: [], random: randomNumbers(1), refused: 0 });
  }

  // One of the built-in samples, or, counted on from there, of the visitor's.
  sample(i) {
    const own = this.own[i - this.train.count];
    return own ? [own.numbers, own.label] : [this.train.at(i), this.train.labels[i]];
  }

  // Indices of the next n samples of the epoch; a new epoch has a new order.
  next(n) {
    const indices = [];
    while (indices.length < n) {
      if (!this.order.length) {
        const own = this.own.flatMap((_, i) => Array(COPIES).fill(this.train.count + i));
        const all = Array.from({ length: this.train.count }, (_, i) => i);
        this.order = shuffled([...all, ...own], this.random);
      }
      indices.push(this.order.pop());
    }
    return indices;
  }

  // A step on each sample, first of the net, with the clock, then of the control.
  learn(samples) {
    const start = performance.now();
    for (const [numbers, label] of samples) {
      this.refused = this.net.step(LEARNER, numbers, label, this.rate);
      if (this.refused) return;
    }
    this.seconds += (performance.now() - start) / 1000;
    this.timed += samples.length;
    this.learned += samples.length;
    if (!this.controlled) return;
    for (const [numbers, label] of samples) this.net.step(CONTROL, numbers, label, this.rate);
  }

  steps(n) {
    const indices = this.next(n);
    this.once(indices);
    this.learn(indices.map((i) => this.sample(i)));
  }

  // The one-pass head learns from samples that it has not seen.
  once(indices) {
    this.onePass.follow(this.net.classes);
    for (const i of indices) this.onePass.learn(i, ...this.sample(i), i >= this.train.count);
  }

  // A visitor's sample: rounds of the sample itself and samples to rehearse, until it is recognised.
  * teach(numbers, label, rehearse) {
    const sample = [numbers.slice(), label];
    this.own.push({ numbers: sample[0], label });
    this.once([this.train.count + this.own.length - 1]);
    for (let round = 1; round <= ROUNDS && !this.refused; round++) {
      this.learn([sample, ...(rehearse ? this.rehearsal() : [])]);
      yield round;
      if (this.net.predict(LEARNER, numbers) === label && this.net.probabilities(numbers)[label] >= SURE) return;
    }
  }

  // Built-in samples and one of the visitor's earlier ones, at random.
  rehearsal() {
    const draw = (n) => Math.floor(this.random() * n);
    const indices = Array.from({ length: REHEARSED }, () => draw(this.train.count));
    if (this.own.length > 1) indices.push(this.train.count + draw(this.own.length));
    return indices.map((i) => this.sample(i));
  }

  accuracies() {
    return [this.net.accuracy(LEARNER, this.held), this.controlled ? this.net.accuracy(CONTROL, this.held) : null];
  }
}

// Random numbers in [0, 1) from a seed: the same order of samples on every visit (mulberry32).
function randomNumbers(seed) {
  let a = seed >>> 0;
  return () => {
    a = (a + 0x6d2b79f5) >>> 0;
    let t = Math.imul(a ^ (a >>> 15), 1 | a);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

function shuffled(list, random) {
  const order = list.slice();
  for (let i = order.length - 1; i > 0; i--) {
    const j = Math.floor(random() * (i + 1));
    [order[i], order[j]] = [order[j], order[i]];
  }
  return order;
}
