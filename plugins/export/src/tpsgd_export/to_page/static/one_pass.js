// The head that learns from each sample once: random features and recursive least squares, in C.

const FEW = 5; // drawings of a visitor that count as much as a class of built-in samples

class OnePass {
  constructor(program, record) {
    const size = record.shape.reduce((a, b) => a * b);
    this.c = program;
    this.known = record.classes.length;
    this.input = new Float32Array(program.memory.buffer, program.head_sample_at(), size);
    this.begin();
  }

  begin() {
    this.c.head_begin();
    this.seen = new Set(); // indices of the samples that it has learned from
    this.builtIn = 0;
  }

  get samples() { return this.c.head_samples(); }
  get classes() { return this.c.head_classes(); }

  // A sample by its index, unless it came before; one of the visitor's counts as several.
  learn(index, numbers, label, own) {
    if (this.seen.has(index)) return;
    this.input.set(numbers);
    if (this.c.head_learn(label, own ? this.weight : 1) !== 0) return;
    this.seen.add(index);
    this.builtIn += own ? 0 : 1;
  }

  get weight() { return Math.max(1, this.builtIn / this.known / FEW); }

  scores(numbers) {
    this.input.set(numbers);
    this.c.head_scores();
    return new Float32Array(this.c.memory.buffer, this.c.head_scores_at(), this.classes);
  }

  // The class with the largest score; null before it has learned anything.
  predict(numbers) {
    const scores = this.scores(numbers);
    return this.samples ? scores.indexOf(Math.max(...scores)) : null;
  }

  // The share of samples that it gets right; null before it has learned anything.
  accuracy(samples) {
    if (!this.samples) return null;
    let right = 0;
    for (let i = 0; i < samples.count; i++) right += this.predict(samples.at(i)) === samples.labels[i];
    return right / samples.count;
  }

  // As many classes as the net has.
  follow(classes) {
    while (this.classes < classes && this.c.head_add_class() === 0);
  }
}
