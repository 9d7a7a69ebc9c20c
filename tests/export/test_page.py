"""A page that learns: its samples and its file, and what it does in Chromium."""

import copy
import importlib.util
import shutil
from base64 import b64decode
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from export.chromium import Browser, chromium
from torch import nn

import tpsgd
from tpsgd import rules
from tpsgd.common.errors import TpsgdError
from tpsgd.data.dataset import Data
from tpsgd_export.records import read_weights
from tpsgd_export.to_c.compiled import CompiledNet, compiler
from tpsgd_export.to_page import wasm
from tpsgd_export.to_page.page import CALIBRATION, page
from tpsgd_export.to_page.samples import chosen, drawing

needs_compiler = pytest.mark.skipif(
    wasm.wasm_compiler() is None, reason="no compiler for WebAssembly: clang with lld, or ziglang"
)
LR = 0.01
SEVEN = [(0.3, 0.17), (0.5, 0.17), (0.7, 0.17), (0.57, 0.5), (0.45, 0.86)]
STAR = """[[[.2,.5],[.8,.5]], [[.5,.15],[.5,.85]], [[.28,.26],[.72,.74]], [[.72,.26],[.28,.74]]]
  .map((line) => line.map(([x, y], i) => [x + Math.sin(7 * k + i) / 50, y + Math.cos(k + i) / 50]))
"""


@pytest.fixture(scope="module")
def digits() -> Data:
    return tpsgd.data.load("digits")


@pytest.fixture(scope="module")
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.LeakyReLU(), nn.Linear(32, 10))


@pytest.fixture(scope="module")
def digits_page(digits, model, tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("page") / "learns.html"
    exported = page(model, digits, file, rule=rules.readout(), lr=LR)
    assert exported.paths == (file,) and "fit" in exported.checked
    return file


@pytest.fixture(scope="module")
def browser():
    browser = Browser()
    yield browser
    browser.close()


def table(columns: int = 4, samples: int = 60) -> Data:
    """Three classes of numbers around different means, scaled as a CSV file is."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(samples) % 3
    x = torch.randn(samples, columns, generator=generator) * 0.3 + y[:, None]
    scaling = {"method": "standard", "shift": [10.0] * columns, "scale": [2.0] * columns}
    reading = {"columns": [f"feature {i}" for i in range(columns)], "scaling": scaling}
    pairs = (x[:45], y[:45]), (x[45:], y[45:])
    return Data("table.csv", *pairs, ("low", "middle", "<high>"), (columns,), "", None, reading)


class Links(HTMLParser):
    """The addresses that a page names, and the tags that could load something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        assert tag not in ("iframe", "object", "embed", "img")
        self.links += [value for name, value in attrs if name in ("src", "href", "action")]


def needs_browser(test):
    """Run a test in Chromium where it is installed, and only in make test-all."""
    absent = pytest.mark.skipif(chromium() is None, reason="Chromium is not installed")
    return pytest.mark.full(absent(test))


# ---- samples ----


def test_digits_are_stored_without_loss(digits):
    samples = chosen(digits, 200_000, seed=0)
    for (stored, labels), (x, y) in (
        (samples.train, digits.train),
        (samples.held_out, digits.test),
    ):
        np.testing.assert_array_equal(samples.numbers(stored), x.flatten(1).numpy())
        np.testing.assert_array_equal(labels, y.numpy())


def test_features_of_a_table_are_within_half_a_level():
    data = table()
    samples = chosen(data, 200_000, seed=0)
    x = data.train[0].numpy()
    error = np.abs(samples.numbers(samples.train[0]) - x)
    assert (error <= np.ptp(x, axis=0) / 255 * 0.501).all()


def test_samples_are_left_out_until_they_fit_and_no_class_is_lost(digits):
    samples = chosen(digits, 20_000, seed=0)
    record = samples.record()
    assert 15_000 < len(record["train"]["x"]) + len(record["held"]["x"]) <= 20_000
    assert len(samples.held_out[1]) <= 0.25 * len(samples.train[1])
    for _, labels in (samples.train, samples.held_out):
        assert set(labels) == set(range(10))
    with pytest.raises(TpsgdError, match="too large for a page"):
        chosen(digits, 300, seed=0)


def test_the_frame_of_signs_is_measured():
    pictures = np.zeros((50, 28, 28), np.float32)
    pictures[:, 4:24, 12:16] = 1  # a bar of 20 rows and 4 columns
    frame = drawing(pictures, (1, 28, 28))
    assert frame == {
        "paper": 0.0, "ink": 1.0, "stroke": pytest.approx(80 / 48), "area": 80.0, "fits": True,
        "height": 20.0, "width": 4.0, "x": 14.0, "y": 14.0,
    }  # fmt: skip
    dark = drawing(1 - pictures, (1, 28, 28))
    assert (dark["paper"], dark["ink"], dark["area"]) == (1.0, 0.0, 80.0)


# ---- the file ----


def test_without_a_compiler_a_sentence_says_what_to_install(monkeypatch, digits, model, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TpsgdError, match=r"pip install ziglang.*clang and lld"):
        page(model, digits, tmp_path / "learns.html")
    assert not list(tmp_path.iterdir())


def test_what_has_no_page_is_refused(digits, model, tmp_path):
    with pytest.raises(TpsgdError, match=r"learns\.html"):
        page(model, digits, tmp_path / "learns.txt")
    with pytest.raises(TpsgdError, match="no folder"):
        page(model, digits, tmp_path / "nowhere" / "learns.html")
    cell = nn.Sequential(tpsgd.Recurrent(8, 4), nn.Linear(4, 10))
    rows = Data(
        "rows", (digits.train[0][:40, 0], digits.train[1][:40]),
        (digits.test[0][:40, 0], digits.test[1][:40]), digits.classes, (8, 8), "",
    )  # fmt: skip
    with pytest.raises(TpsgdError, match="recurrent"):
        page(cell, rows, tmp_path / "learns.html")
    with pytest.raises(TpsgdError, match=r"data must be a data set"):
        page(model, digits.train, tmp_path / "learns.html")
    with pytest.raises(TpsgdError, match="7 outputs, and the data 10 classes"):
        page(nn.Sequential(nn.Flatten(), nn.Linear(64, 7)), digits, tmp_path / "learns.html")
    assert not list(tmp_path.iterdir())
    (tmp_path / "learns.html").write_text("mine")
    with pytest.raises(TpsgdError, match="already there"):
        page(model, digits, tmp_path / "learns.html")


class Compiled(Exception):
    """A program would be compiled from these sources."""


@pytest.mark.skipif(compiler() is None, reason="no C compiler")
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("rule", [None, rules.readout(), rules.tpsgd_l2()])
def test_the_program_of_a_page_is_the_exported_c(
    rule, optimizer, digits, model, monkeypatch, tmp_path
):
    def compiled(texts):
        raise Compiled(texts)

    monkeypatch.setattr(wasm, "compiled", compiled)
    settings = {"rule": rule, "optimizer": optimizer, "spare": 2, "seed": 5}
    with pytest.raises(Compiled) as told:
        page(model, digits, tmp_path / "learns.html", **settings)
    (texts,) = told.value.args
    samples = digits.train[0][:CALIBRATION]
    tpsgd.export.c(model, tmp_path / "net", shape=(1, 8, 8), samples=samples, **settings)
    for file in (tmp_path / "net").iterdir():
        assert texts[file.name] == file.read_text()


@pytest.mark.parametrize("lr", [float("nan"), -1, 0, 1001, float("inf"), "0.1"])
def test_a_rate_that_no_step_takes_is_refused(digits, model, tmp_path, lr):
    with pytest.raises(TpsgdError, match="lr must be above 0"):
        page(model, digits, tmp_path / "learns.html", lr=lr)


@needs_compiler
def test_the_file_is_small_and_names_nothing_outside_itself(digits_page):
    text = digits_page.read_text()
    assert len(text) < 300_000
    assert "base-uri 'none'; form-action 'none'" in text
    assert "default-src 'none'" in text and "connect-src" not in text
    assert all(link.startswith("data:") for link in Links(text).links)
    assert not [word for word in ("@import", "url(", "fetch(", "XMLHttpRequest") if word in text]
    assert text.count("http") == text.count("http-equiv") + text.count("http://www.w3.org/2000/svg")


# ---- in Chromium ----


@needs_compiler
@needs_browser
def test_the_page_opens_and_requests_nothing(browser, digits_page):
    browser.open(digits_page)
    browser.run("p.trainer.steps(10); p.evaluate(); return 0")
    assert browser.requests() == [digits_page.resolve().as_uri()]
    assert browser.complaints() == []


@needs_compiler
@needs_browser
@pytest.mark.skipif(compiler() is None, reason="no C compiler")
def test_weights_have_the_bits_of_the_same_c_on_this_machine(
    browser, digits_page, digits, model, tmp_path
):
    browser.open(digits_page)
    order, saved = browser.run(
        """const order = [], next = p.trainer.next.bind(p.trainer);
        p.trainer.next = (n) => { const some = next(n); order.push(...some); return some; };
        p.trainer.steps(150); p.trainer.steps(50);
        p.evaluate();
        return [order, btoa(String.fromCharCode(...p.net.save()))];"""
    )
    samples = digits.train[0][:CALIBRATION]
    settings = {"rule": rules.readout(), "shape": (1, 8, 8), "spare": 3, "samples": samples}
    tpsgd.export.c(model, tmp_path / "net", **settings)
    net = CompiledNet(tmp_path / "net")
    assert len(set(order)) == 200
    for i in order:
        net.step(digits.train[0][i], digits.train[1][i].view(1), LR)
    assert b64decode(saved) == net.save()


@needs_compiler
@needs_browser
def test_the_page_learns_and_its_weights_go_back_into_python(browser, digits_page, digits, model):
    browser.open(digits_page)
    start, net, control, saved = browser.run(
        """const [start] = p.trainer.accuracies(); p.trainer.steps(3 * p.trainer.train.count);
        return [start, ...p.trainer.accuracies(), btoa(String.fromCharCode(...p.net.save()))];"""
    )
    assert start < 0.3 and net > 0.9 and control < net - 0.05
    learned = copy.deepcopy(model)
    assert read_weights(learned, b64decode(saved)) == 10
    assert tpsgd.evaluate(learned, digits.test) == pytest.approx(net, abs=0.003)


@needs_compiler
@needs_browser
def test_buttons_train_pause_step_and_reset(browser, digits_page):
    browser.open(digits_page)
    learned = browser.run(
        """const wait = (ms) => new Promise((done) => setTimeout(done, ms)), counts = [];
        const count = () => counts.push(p.trainer.learned);
        find("step").click(); count();
        find("play").click(); await wait(400); find("play").click(); count();
        await wait(100); count();
        find("epoch").click(); while (p.playing) await wait(20); count();
        find("reset").click(); count();
        return [counts, p.chart.points.length, Math.max(...p.net.changes(p.net.weights.length))];"""
    )
    counts, points, change = learned
    assert counts[0] == 1 < counts[1] == counts[2] < counts[3] == counts[2] + 1438
    assert counts[4] == 0 and points == 1 and change == 0


@needs_compiler
@needs_browser
def test_a_digit_drawn_by_mouse_or_finger_is_recognised_and_learned(browser, digits_page):
    browser.open(digits_page)
    browser.run("p.trainer.steps(5 * p.trainer.train.count); p.evaluate(); return 0")
    for draw in (browser.mouse, browser.touch):
        box = browser.run(
            """find("clear").click(); find("sheet").scrollIntoView({block: "center"});
            const box = find("sheet").getBoundingClientRect(); return [box.x, box.y, box.width];"""
        )
        draw([(box[0] + x * box[2], box[1] + y * box[2]) for x, y in SEVEN])
        says, strokes = browser.run(
            "return [find('says').textContent, p.input.strokes.map((s) => s.length)]"
        )
        assert says == "The net says 7" and len(strokes) == 1 and strokes[0] >= len(SEVEN) - 1
    before, after = browser.run(
        """const sample = p.input.sample(), before = p.net.probabilities(sample)[4];
        find("labels").children[4].click();
        while (p.teaching) await new Promise(requestAnimationFrame);
        return [before, p.net.probabilities(sample)[4]];"""
    )
    assert before < 0.3 and after > 0.5


@needs_compiler
@needs_browser
def test_a_new_class_is_learned_and_the_others_stay(browser, digits_page, model):
    browser.open(digits_page)
    result = browser.run(
        f"""p.trainer.steps(4 * p.trainer.train.count); p.evaluate();
        const before = p.accuracy, star = (k) => {STAR};
        find("new-name").value = "star"; find("new-form").requestSubmit();
        for (let k = 0; k < 4; k++) {{
          p.input.draw(star(k)); find("labels").lastElementChild.click();
          while (p.teaching) await new Promise(requestAnimationFrame);
        }}
        const says = (k) => {{ p.input.draw(star(k)); return find("says").textContent; }};
        const unseen = [5.3, 6.1, 7.7, 8.2].map(says);
        return {{ before, unseen, after: p.accuracy, gallery: find("own-title").textContent,
          record: btoa(String.fromCharCode(...p.net.save())) }};"""
    )
    assert result["unseen"].count("The net says star") >= 3
    assert result["after"] > result["before"] - 0.04 > 0.85
    assert result["gallery"] == "Your drawings: 4 of 4 recognised"
    learned = copy.deepcopy(model)
    assert read_weights(learned, b64decode(result["record"])) == 11 == learned[-1].out_features


@needs_compiler
@needs_browser
def test_weights_are_downloaded_and_loaded_and_a_damaged_file_is_refused(browser, digits_page):
    browser.open(digits_page)
    same, kept, said = browser.run(
        """let blob; const make = URL.createObjectURL;
        URL.createObjectURL = (b) => { blob = b; return make(b); };
        p.trainer.steps(300); find("download").click(); URL.createObjectURL = make;
        const learned = p.net.weights.slice(), equal = (a, b) => a.every((v, i) => v === b[i]);
        find("reset").click();
        await p.load(new File([blob], "w.bin"));
        const same = equal(learned, p.net.weights);
        const bytes = new Uint8Array(await blob.arrayBuffer());
        bytes[100] ^= 1;
        await p.load(new File([bytes], "bad.bin"));
        return [same, equal(learned, p.net.weights), find("keep-status").textContent];"""
    )
    assert same and kept and "damaged" in said


@needs_compiler
@needs_browser
def test_held_out_samples_cannot_be_learned_from(browser, digits_page):
    browser.open(digits_page)
    learned, disabled = browser.run(
        """find("sample").click(); p.teach(3);
        return [p.trainer.learned, [...find("labels").children].every((chip) => chip.disabled)];"""
    )
    assert learned == 0 and disabled


@needs_compiler
@needs_browser
def test_a_rate_that_is_too_large_is_said_and_not_learned(browser, digits_page):
    browser.open(digits_page)
    finite, said = browser.run(
        """p.trainer.rate = 1e30; p.trainer.steps(200); p.evaluate();
        return [p.net.weights.every(Number.isFinite), find("taught").textContent];"""
    )
    assert finite and "smaller" in said


@needs_compiler
@needs_browser
def test_a_table_has_sliders_in_its_own_units(browser, tmp_path):
    model = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(), nn.Linear(8, 3))
    file = page(model, table(), tmp_path / "table.html", spare=1).paths[0]
    browser.open(file)
    names, number, guess, chip, bar = browser.run(
        """p.trainer.steps(900); p.evaluate();
        const sliders = [...document.querySelectorAll(".sliders input")];
        const slide = (s) => { s.value = 255; s.dispatchEvent(new Event("input")); };
        sliders.forEach(slide);
        return [[...document.querySelectorAll(".sliders label")].map((l) => l.textContent),
          ...[find("number-0"), find("says"), find("labels").lastElementChild,
            find("bars").lastElementChild.firstElementChild]
            .map((element) => element.textContent)];"""
    )
    top = float(table().train[0][:, 0].max()) * 2 + 10
    assert names == [f"feature {i}" for i in range(4)]
    assert float(number) == pytest.approx(top, rel=0.01)
    assert guess == "The net says <high>" and chip == bar == "<high>"


@needs_compiler
@needs_browser
def test_small_and_constant_features_show_their_numbers(browser, tmp_path):
    data = table(2)
    x = data.train[0].clone()
    x[:, 0], x[:, 1] = -1.5, x[:, 1] * 1e-5
    reading = {"columns": ["constant", "small"], "scaling": {"shift": [10, 0], "scale": [2, 1]}}
    data = replace(data, train=(x, data.train[1]), reading=reading)
    model = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(), nn.Linear(8, 3))
    browser.open(page(model, data, tmp_path / "table.html").paths[0])
    constant, frozen, small, sample = browser.run(
        """const slider = find("feature-1");
        slider.value = 255; slider.dispatchEvent(new Event("input"));
        return [find("number-0").textContent, find("feature-0").disabled,
          find("number-1").textContent, p.input.sample()[0]];"""
    )
    assert (constant, frozen, sample) == ("7", True, -1.5)
    assert float(small) == pytest.approx(float(x[:, 1].max()), rel=0.01)


@needs_compiler
@needs_browser
@pytest.mark.parametrize("shape", [(40,), (3, 6, 6), (1, 12, 12)])
def test_other_samples_have_a_page_that_fits_a_phone(browser, shape, tmp_path):
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(40) % 2
    x = torch.rand(40, *shape, generator=generator) * 0.5 + 0.5 * y.view(-1, *[1] * len(shape))
    data = Data("own", (x[:30], y[:30]), (x[30:], y[30:]), ("dim", "bright"), shape, "")
    model = nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 4), nn.Tanh(), nn.Linear(4, 2))
    file = page(model, data, tmp_path / "own.html", rule=rules.tpsgd_l2()).paths[0]
    browser.resize(360, 740)
    browser.open(file)
    accuracy, width = browser.run(
        """p.trainer.steps(900); p.evaluate(); find("sample").click();
        return [p.accuracy, document.documentElement.scrollWidth];"""
    )
    browser.resize(1280, 900)
    assert accuracy > 0.9 and width == 360
    assert browser.complaints() == []
