"""The report of a run: what the page and the pictures show, and what a bad run folder gives."""

import base64
import html.parser
import json
import re

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from train import charts
from train.metrics import MetricsWriter
from train.plotting import STYLE, label_ends
from train.report import headline, warnings, write_report

PNG_START = b"\x89PNG\r\n\x1a\n"
NASTY = "<script>alert('x')</script> & \"more\""


def record(step):
    return {
        "reward/mean": 0.3 + 0.02 * step,
        "reward/zero_variance": 0.25,
        "gap/mean_abs": 0.0,
        "gap/max_abs": 0.0,
        "gap/k3": 0.0,
        "policy/entropy": 1.0 / step,
        "policy/kl": 0.01,
        "policy/clip_low": 0.001,
        "policy/clip_high": 0.002,
        "policy/ratio_min": 0.8,
        "policy/ratio_max": 1.25,
        "optimizer/gradient_norm": 0.5,
        "optimizer/skipped": 0.0,
        "length/mean": 10.0,
        "length/min": 4.0,
        "length/max": 16.0,
        "length/truncated": 0.1,
        "time/step": 2.5,
        "time/tokens_per_second": 1000.0 + step,
    }


class Page(html.parser.HTMLParser):
    """The text, the pictures and the tags of a page."""

    def __init__(self, source):
        super().__init__()
        self.tags, self.images, self.text, self.open = [], [], "", []
        self.feed(source)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "img":
            self.images.append(dict(attrs))
        if tag not in ("img", "meta"):
            self.open.append(tag)
        for _, value in attrs:
            assert not re.match(r"(https?:)?//", value or ""), "the page needs another file"

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data + " "


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "tiny <1>"
    with MetricsWriter(run) as writer:
        writer.write_evaluation(0, {"evaluation/accuracy": 0.375})
        for step in range(1, 31):
            writer.write(step, record(step))
        writer.write_evaluation(30, {"evaluation/accuracy": 0.875})
    recipe = {
        "seed": 7,
        "model": {"checkpoint": None, "sizes": {"layers": 2, "kinds": ["moe", "dense"]}},
        "data": {"note": NASTY},
        "empty": {},
    }
    (run / "recipe.json").write_text(json.dumps(recipe))
    return run


def test_page_is_complete_and_self_contained(run):
    path = write_report(run)
    assert path == run / "report" / "index.html"
    source = path.read_text()
    page = Page(source)
    # Every chart is in the page and beside it, byte for byte.
    assert len(page.images) == len(charts.CHARTS)
    for chart, image in zip(charts.CHARTS, page.images, strict=True):
        kind, data = image["src"].split(",")
        assert kind == "data:image/png;base64"
        picture = base64.b64decode(data)
        assert picture.startswith(PNG_START)
        assert picture == (run / "report" / f"{chart.file}.png").read_bytes()
        assert image["alt"]
    assert (run / "report" / "summary.png").read_bytes().startswith(PNG_START)
    # The results: first ten 0.32..0.50, last ten 0.72..0.90.
    for text in ("tiny <1>", "0.41 → 0.81", "37.5% → 87.5%", "exactly 0", "in 1 min 15 s",
                 "1,016 tokens/s"):  # fmt: skip
        assert text in page.text, text
    # Recipe and versions, as text and not as markup.
    for text in ("seed", "7", "sizes.layers", '["moe", "dense"]', "null", NASTY, "jaxlib"):
        assert text in page.text, text
    assert "script" not in page.tags
    assert "<script" not in source
    # Again, in place: no second copy of anything.
    before = sorted((run / "report").iterdir())
    assert write_report(run) == path
    assert sorted((run / "report").iterdir()) == before
    assert path.read_text() == source


def test_a_run_of_one_step_without_anything_else(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"reward/mean": 0.5})
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "kl.png").write_bytes(b"of an earlier report")
    page = Page(write_report(tmp_path).read_text())
    assert len(page.images) == 1
    assert "Recipe" not in page.text
    assert sorted(p.name for p in (tmp_path / "report").iterdir()) == [
        "index.html", "reward.png", "summary.png"
    ]  # fmt: skip


def test_numbers_that_are_not_finite_are_shown_and_named(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 6):
            late = step > 3
            values = {
                "policy/kl": float("nan") if late else 0.1,
                "gap/max_abs": float("inf") if late else 0.0,
                "optimizer/gradient_norm": float("nan"),
                "optimizer/skipped": 2.0,
            }
            writer.write(step, values)
    text = Page(write_report(tmp_path).read_text()).text
    assert "gap/max_abs (2), optimizer/gradient_norm (5), policy/kl (2)" in text
    assert "skipped for want of a usable gradient: 2" in text
    assert "exactly 0" not in text  # three zeros and two infinities are no zero gap


def test_headline_and_warnings():
    steps = [{"step": s, "gap/max_abs": g} for s, g in ((1, 0.0), (2, 2.5e-4), (3, 1e-5))]
    assert ("Log-prob gap", "2.5e-04", "largest over 3 steps, in nats") in headline(steps, [])
    assert warnings(steps) == []
    found = headline([{"step": 4.0}], [{"step": 0.0, "evaluation/accuracy": 0.5}])
    assert found == [("Steps", "4", ""), ("Held-out accuracy", "50.0%", "after 0 steps")]


def drawn(chart_file, records):
    """Axes with a chart on them, its subtitle, and all of its text."""
    chart = next(c for c in charts.CHARTS if c.file == chart_file)
    with matplotlib.rc_context(STYLE):
        ax = Figure().subplots()
        subtitle, ends = chart.draw(ax, records)
    texts = [t.get_text() for t in ax.texts] + [text for _, text, _ in ends]
    return ax, subtitle, " | ".join(texts)


def test_gap_chart_says_exactly_zero_only_when_it_is():
    zeros = [{"step": s, "gap/max_abs": 0.0, "gap/mean_abs": 0.0, "gap/k3": 0.0} for s in (1, 2, 3)]
    ax, _, text = drawn("gap", zeros)
    assert "exactly 0\nat each of 3 steps" in text
    assert ax.get_yscale() == "linear"
    tiny = [*zeros, {"step": 4, "gap/max_abs": 1e-9, "gap/mean_abs": 1e-11, "gap/k3": 0.0}]
    ax, subtitle, text = drawn("gap", tiny)
    assert "exactly 0 at 3 of 4 steps" in subtitle
    assert "exactly" not in text
    assert "max 1.0e-09 | mean 1.0e-11" in text
    assert ax.get_yscale() == "log"


def test_curves_show_the_records():
    values = np.random.default_rng(0).random(48)
    steps = [{"step": s + 1, "reward/mean": v} for s, v in enumerate(values)]
    ax, subtitle, text = drawn("reward", steps)
    raw, mean = ax.get_lines()
    np.testing.assert_array_equal(raw.get_xdata(), np.arange(1, 49))
    np.testing.assert_array_equal(raw.get_ydata(), values)
    # 48 / 24 = 2 steps on either side, fewer at the ends.
    expected = [values[max(i - 2, 0) : i + 3].mean() for i in range(48)]
    np.testing.assert_allclose(mean.get_ydata(), expected)
    assert "mean of 5 steps" in subtitle
    assert f"{expected[-1]:.2f}" in text


def test_labels_do_not_touch():
    ax = Figure().subplots()
    ax.set_ylim(0, 1)
    label_ends(ax, [(0.5, "a", "k"), (0.5, "b", "k"), (0.49, "c", "k"), (1.0, "d", "k")])
    heights = {text.get_text(): text.get_position()[1] for text in ax.texts}
    assert heights["c"] < heights["a"] < heights["b"] < heights["d"] <= 1.0
    assert np.diff(sorted(heights.values())).min() > 0.08


def test_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"metrics.jsonl does not exist: .*training run"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path))):
        write_report(tmp_path)
    path = tmp_path / "metrics.jsonl"
    path.write_text("")
    with pytest.raises(ValueError, match=r"metrics.jsonl is empty"):
        write_report(tmp_path)
    path.write_text("what\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 1"):
        write_report(tmp_path)
    path.write_text('{"step": 1, "reward/mean": 0.5}\n')
    for text, message in (("{", "is not JSON"), ("[]", "must hold a JSON object, found list")):
        (tmp_path / "recipe.json").write_text(text)
        with pytest.raises(ValueError, match=rf"recipe.json {message}"):
            write_report(tmp_path)
