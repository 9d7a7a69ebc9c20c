// The page's own scripts in node: `node one_pass_page.js PAGE [STEPS]` prints what its heads learned as JSON.
"use strict";
const { readFileSync } = require("node:fs");
const html = readFileSync(process.argv[2], "utf-8"), steps = Number(process.argv[3]);
const record = JSON.parse(html.match(/<script type="application\/json" id="record">([^]*?)<\/script>/)[1]);
const script = html.match(/<script>\n"use strict";\n([^]*)<\/script>/)[1];
const classes = script.slice(0, script.indexOf("class Sketch")); // net.js, one_pass.js, trainer.js

async function learn() {
  const { Net, Samples, Trainer } = new Function(`${classes}; return { Net, Samples, Trainer };`)();
  const net = await Net.open(record), { samples } = record;
  const [train, held] = await Promise.all([samples.train, samples.held].map((set) => Samples.open(set, samples)));
  const trainer = new Trainer(net, train, held, record.lr), order = [], next = trainer.next.bind(trainer);
  trainer.next = (n) => { const some = next(n); order.push(...some); return some; };
  trainer.steps(steps);
  trainer.steps(5);
  const held_out = () => [...trainer.accuracies(), trainer.onePass.accuracy(held)], before = held_out();
  net.addClass();
  const drawing = (k) => Float32Array.from({ length: train.size }, (_, i) => (i % 3 === k % 3 || i % 8 === 2 ? 1 : 0));
  for (let k = 0; k < 5; k++) for (const _ of trainer.teach(drawing(k), record.classes.length, true));
  const { onePass } = trainer, weight = onePass.weight, own = [0, 1, 2].map((k) => onePass.predict(drawing(k)));
  const once = onePass.samples;
  trainer.once(order);
  const scores = Array.from(onePass.scores(held.at(0))), after = held_out();
  const again = onePass.samples;
  trainer.reset();
  return { order, before, after, once, again, weight, own, scores, left: onePass.samples, untaught: onePass.predict(held.at(0)) };
}

learn().then((learned) => console.log(JSON.stringify(learned)));
