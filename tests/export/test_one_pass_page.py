"""The one-pass head of a page: the page's scripts in node beside the same C called from Python."""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from export.chromium import Browser, chromium
from torch import nn

import tpsgd
from tpsgd import rules
from tpsgd_export.heads import reference
from tpsgd_export.heads.compiled import CompiledHead
from tpsgd_export.heads.source import sources
from tpsgd_export.read_model import read_model
from tpsgd_export.to_c.compiled import compiler
from tpsgd_export.to_page import wasm
from tpsgd_export.to_page.page import FOLDER, SCRIPTS, page, page_head

SCRIPT = Path(__file__).with_name("one_pass_page.js")
STEPS = 300
needs_compilers = pytest.mark.skipif(
    wasm.wasm_compiler() is None or compiler() is None,
    reason="no compiler for WebAssembly, or none",
)
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


@pytest.fixture(scope="module")
def digits():
    return tpsgd.data.load("digits")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.LeakyReLU(), nn.Linear(32, 10))


@pytest.fixture(scope="module")
def digits_page(digits, model, tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("page") / "learns.html"
    return page(model, digits, file, rule=rules.readout()).paths[0]


def in_node(script: Path | str, *arguments: str) -> dict:
    """What a script writes as JSON."""
    words = ["-e", script] if isinstance(script, str) else [str(script)]
    command = ["node", *words, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def drawing(k: int) -> np.ndarray:
    """What `one_pass_page.js` draws."""
    i = np.arange(64)
    return ((i % 3 == k % 3) | (i % 8 == 2)).astype(np.float32)


@needs_compilers
@needs_node
def test_the_page_learns_what_the_same_c_learns_in_python(digits_page, digits, model):
    told = in_node(SCRIPT, str(digits_page), str(STEPS))
    order = told["order"][: STEPS + 5]
    assert len(set(order)) == len(order)
    recipe = read_model(model, rules.readout(), (1, 8, 8), spare=3)
    recipe = page_head(recipe, digits, 0)
    head = CompiledHead(sources(recipe))
    x, y = digits.train[0].flatten(1).numpy(), digits.train[1].numpy()
    head.learn_all(x[order], y[order])
    test = digits.test[0].flatten(1).numpy(), digits.test[1].numpy()
    assert told["before"][2] == pytest.approx(head.accuracy(*test))
    assert told["before"][2] > told["before"][0]  # the net has not learned much from so few
    weight = len(order) / 10 / 5
    assert told["weight"] == pytest.approx(weight)
    head.add_class()
    drawings = np.stack([drawing(k) for k in range(5)])
    head.learn_all(drawings, [10] * 5, weight)
    assert told["own"] == [10, 10, 10]
    assert told["after"][2] == pytest.approx(head.accuracy(*test))
    np.testing.assert_array_equal(np.float32(told["scores"]), head.scores(test[0][0]))
    rows = np.concatenate([x[order], drawings])
    labels, weights = [*y[order], *[10] * 5], np.repeat([1.0, weight], [len(order), 5])
    exact = reference.ridge(reference.features(recipe, rows), labels, recipe, weights=weights)
    scores = reference.features(recipe, test[0][:1]) @ exact.T
    np.testing.assert_allclose(told["scores"], scores[0, :11], atol=1e-4)


@needs_compilers
@needs_node
def test_the_head_learns_from_no_sample_twice_and_begins_anew_at_reset(digits_page):
    told = in_node(SCRIPT, str(digits_page), "1500")  # more than an epoch
    assert len(set(told["order"])) == 1438 < len(told["order"])
    assert told["once"] == told["again"] == 1438 + 5
    assert told["left"] == 0 and told["untaught"] is None


@needs_node
def test_the_script_counts_and_weighs_without_its_program():
    """The page's own class on a program that writes down what it is asked."""
    script = f"""{(FOLDER / "one_pass.js").read_text()}
    const calls = [], memory = {{ buffer: new ArrayBuffer(4096) }};
    let classes = 2, samples = 0;
    const program = {{ memory, head_sample_at: () => 0, head_scores_at: () => 1024,
      head_begin() {{ calls.push(["begin"]); classes = 2; samples = 0; }},
      head_learn(label, weight) {{ calls.push([label, weight]); samples += label < classes;
        return label < classes ? 0 : 2; }},
      head_scores() {{ new Float32Array(memory.buffer, 1024, 3).set([0.1, 0.7, 0.4]); }},
      head_add_class() {{ if (classes >= 4) return 4; classes++; return 0; }},
      head_classes: () => classes, head_samples: () => samples }};
    const head = new OnePass(program, {{ shape: [1, 2, 2], classes: ["a", "b"] }});
    const none = head.predict([1, 2, 3, 4]);
    for (let i = 0; i < 40; i++) head.learn(i % 30, [i, 0, 0, 0], i % 2, false);
    head.learn(50, [1, 1, 1, 1], 2, true);
    head.follow(3);
    head.learn(50, [1, 1, 1, 1], 2, true);
    head.learn(50, [1, 1, 1, 1], 2, true);
    head.follow(9);
    console.log(JSON.stringify({{ calls, none, guess: head.predict([1, 2, 3, 4]), classes,
      scores: head.scores([1]).length }}));
    """
    told = in_node(script)
    assert told["calls"][0] == ["begin"] and told["none"] is None
    assert told["calls"][1:31] == [[i % 2, 1] for i in range(30)]
    assert told["calls"][31:] == [[2, 3], [2, 3]]  # one was refused; 30 samples / 2 classes / 5
    assert told["guess"] == 1 and told["classes"] == 4 and told["scores"] == 4


def test_what_the_scripts_name_is_in_the_template():
    template = (FOLDER / "template.html").read_text()
    texts = [(FOLDER / name).read_text() for name in SCRIPTS]
    assert "one_pass.js" in SCRIPTS and SCRIPTS.index("one_pass.js") < SCRIPTS.index("trainer.js")
    for name in ("head-says", "head-accuracy", "head-samples", "once", "once-status", "own-once"):
        assert f'id="{name}"' in template
        assert any(f'"{name}"' in text for text in texts)
    exports = (FOLDER / "one_pass.c").read_text()
    for word in ("begin", "learn", "scores", "add_class", "classes", "samples", "ram"):
        assert f'EXPORT("head_{word}")' in exports


@needs_compilers
@pytest.mark.full
@pytest.mark.skipif(chromium() is None, reason="Chromium is not installed")
def test_a_visitor_sees_a_class_learned_from_five_drawings(digits_page):
    browser = Browser()
    browser.open(digits_page)
    told = browser.run(
        """find("once").click();
        const first = [find("once-status").textContent, find("head-accuracy").textContent];
        find("once").click();
        const again = find("once-status").textContent;
        find("new-name").value = "star"; find("new-form").requestSubmit();
        const star = (k) => [[[.2,.5],[.8,.5]], [[.5,.15],[.5,.85]], [[.28,.26],[.72,.74]],
          [[.72,.26],[.28,.74]]].map((line) => line.map(([x, y], i) =>
            [x + Math.sin(7 * k + i) / 50, y + Math.cos(k + i) / 50]));
        find("rehearse").checked = false;
        for (let k = 0; k < 5; k++) {
          p.input.draw(star(k)); find("labels").lastElementChild.click();
          while (p.teaching) await new Promise(requestAnimationFrame);
        }
        const says = [5.3, 6.1, 7.7, 8.2].map((k) => {
          p.input.draw(star(k)); return find("head-says").textContent; });
        return { first, again, says, own: find("own-once").textContent,
          after: find("head-accuracy").textContent };"""
    )
    assert browser.complaints() == []
    browser.close()
    assert told["first"][0].startswith("1,438 samples in") and "nothing to repeat" in told["again"]
    before, after = (float(text.split()[0]) for text in (told["first"][1], told["after"]))
    assert before > 95 and after > before - 3
    assert told["says"].count("One pass: star") >= 3
    assert "5 of 5" in told["own"]
