"""An export as a library of the Arduino IDE: three text files and a sketch beside the C."""

from tpsgd.export.recipe import Recipe

WORDS = (
    *("net_begin", "net_forward", "net_step", "net_classes", "net_add_class", "net_save"),
    *("net_load", "net_scale", "net_start", "net_read", "net_finish", "net_look", "net_logits"),
)
PROPERTIES = """name=tpsgd_net
version=1.0.0
author=tpsgd.export
maintainer=tpsgd.export
sentence=A neural network that learns on the board, without backpropagation.
paragraph={summary}
category=Data Processing
url=https://arxiv.org/abs/2208.08503
architectures=samd,sam,mbed,mbed_nano,mbed_rp2040,rp2040,esp32,esp8266,stm32,renesas,renesas_uno,nrf52
includes=net.h
"""
README = """# A net that learns on the board

{summary}

It takes {ram:,} bytes of RAM for weights and scratch, besides the stack and one sample of {inputs}
numbers. `src/net.h` explains what can be called. Open `examples/learn/learn.ino`: it reads lines of
numbers over the serial port. A line with a label at its end teaches the net, a line without one
asks it.
"""
SKETCH = """// {inputs} numbers on a line ask the net; with a label after them, it learns.
#include <net.h>

static net_state state;
static net_arena arena;
static float x[NET_INPUT];
static float logits[NET_CLASSES], loss[NET_BLOCKS];

void setup() {{
  Serial.begin(115200);
  net_begin(&state);
}}

// What is left of a line.
static void skip_line() {{
  while (Serial.available() && Serial.read() != '\\n') {{}}
}}

void loop() {{
  if (!Serial.available()) return;
  if (Serial.peek() <= ' ') {{  // between lines
    Serial.read();
    return;
  }}
  for (uint32_t i = 0; i < NET_INPUT; i++) x[i] = Serial.parseFloat();
{scale}  if (Serial.peek() < ' ') {{  // the line ends here: a question
    skip_line();
    if (net_forward(&state, &arena, x, logits) != NET_OK) return;
    uint32_t best = 0;
    for (uint32_t c = 1; c < net_classes(&state); c++)
      if (logits[c] > logits[best]) best = c;
    Serial.println(best);
    return;
  }}
  uint16_t label = (uint16_t)Serial.parseInt();
  skip_line();
  int error = net_step(&state, &arena, x, &label, {rate}, NET_ALL_BLOCKS, loss);
  if (error) Serial.println(error);
  else Serial.println(loss[NET_BLOCKS - 1]);
}}
"""


def as_library(texts: dict[str, str], recipe: Recipe, summary: str, ram: int) -> dict[str, str]:
    """The files of a library by their paths; the sketch learns one sample at a time."""
    words = {"summary": summary, "ram": ram, "inputs": recipe.inputs, "rate": "0.01f"}
    words["scale"] = "  net_scale(x);\n" if "net_scale" in texts["net.h"] else ""
    keywords = "".join(f"{word}\tKEYWORD2\n" for word in WORDS if word in texts["net.h"])
    return {f"src/{name}": text for name, text in texts.items()} | {
        "library.properties": PROPERTIES.format(**words),
        "keywords.txt": keywords,
        "README.md": README.format(**words),
        "examples/learn/learn.ino": SKETCH.format(**words),
    }
