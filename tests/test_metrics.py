"""The records of a run: files, resuming, TensorBoard, and what the console shows."""

import io
import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import masked_crc32c

from train import metrics
from train.metrics import MetricsWriter, RecordFile, read_records
from train.progress import ProgressBar, summary


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def scalars(folder):
    """(step, name, value) of the events of a TensorBoard folder, and where it was purged."""
    found, purged = [], []
    for file in sorted(folder.glob("events*")):
        data = file.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            assert int.from_bytes(data[8:12], "little") == masked_crc32c(data[:8])
            event = event_pb2.Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            if event.HasField("session_log"):
                purged.append(event.step)
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return found, purged


def test_one_line_a_step_on_disk_at_once(tmp_path):
    run = tmp_path / "runs" / "first"
    with MetricsWriter(run) as writer:
        assert writer.last_evaluation == -1
        writer.write_evaluation(0, {"evaluation/accuracy": 0.25})
        writer.write(1, {"reward/mean": jnp.float32(0.5), "policy/loss": np.float64(-1.5)})
        # Before the writer is closed: a killed run has lost nothing.
        assert lines(run / "metrics.jsonl") == [
            {"step": 1, "reward/mean": 0.5, "policy/loss": -1.5}
        ]
        writer.write(2, {"reward/mean": 1})
        assert writer.last_evaluation == 0
    assert [record["step"] for record in read_records(run / "metrics.jsonl")] == [1, 2]
    assert lines(run / "evaluation.jsonl") == [{"step": 0, "evaluation/accuracy": 0.25}]
    assert scalars(run / "tensorboard")[0] == [
        (0, "evaluation/accuracy", 0.25),
        (1, "reward/mean", 0.5),
        (1, "policy/loss", -1.5),
        (2, "reward/mean", 1.0),
    ]
    versions = json.loads((run / "versions.json").read_text())
    assert {"python", "jax", "jaxlib", "flax", "optax"} <= versions.keys()


def test_numbers_that_are_not_finite_leave_valid_json(tmp_path):
    record = {"a": float("nan"), "b": float("inf"), "c": -float("inf"), "d": 0.1}
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, record)

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=refuse) == {
        "step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 0.1
    }  # fmt: skip
    np.testing.assert_equal(read_records(tmp_path / "metrics.jsonl"), [{"step": 1, **record}])


def test_resuming_leaves_one_record_for_each_step(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write_evaluation(0, {"evaluation/accuracy": 0.1})
        for step in range(1, 8):
            writer.write(step, {"reward/mean": step})
        writer.write_evaluation(7, {"evaluation/accuracy": 0.7})
    with MetricsWriter(tmp_path, resume_step=5) as writer:
        assert writer.last_evaluation == 0
        for step in range(6, 9):
            writer.write(step, {"reward/mean": 10 * step})
        writer.write_evaluation(8, {"evaluation/accuracy": 0.8})
    got = [(r["step"], r["reward/mean"]) for r in lines(tmp_path / "metrics.jsonl")]
    assert got == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 60), (7, 70), (8, 80)]
    got = [(r["step"], r["evaluation/accuracy"]) for r in lines(tmp_path / "evaluation.jsonl")]
    assert got == [(0, 0.1), (8, 0.8)]
    assert scalars(tmp_path / "tensorboard")[1] == [6]
    # From before the first step: everything is made again, but the evaluation at step 0.
    with MetricsWriter(tmp_path, resume_step=0):
        pass
    assert lines(tmp_path / "metrics.jsonl") == []
    assert len(lines(tmp_path / "evaluation.jsonl")) == 1


@settings(max_examples=30, deadline=None)
@given(cut=st.integers(1, 80))
def test_a_line_cut_by_a_kill_is_made_again(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("cut") / "metrics.jsonl"
    file = RecordFile(path, None)
    for step in (1, 2, 3):
        file.append(step, {"reward/mean": 0.5})
    file.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    kept = whole[:-cut].count(b"\n")
    file = RecordFile(path, 3)
    for step in range(kept + 1, 4):
        file.append(step, {"reward/mean": 0.5})
    file.close()
    assert path.read_bytes() == whole


def test_errors(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"a": 1})
        with pytest.raises(ValueError, match=r"step=1: .*already has step 1; steps must increase"):
            writer.write(1, {"a": 1})
    # A new run never mixes with, or wipes out, an older one.
    with pytest.raises(FileExistsError, match=re.escape(str(tmp_path / "metrics.jsonl"))):
        MetricsWriter(tmp_path)
    assert len(lines(tmp_path / "metrics.jsonl")) == 1
    with pytest.raises(FileNotFoundError):
        read_records(tmp_path / "other.jsonl")
    for text in ("{\n", "[1]\n", '{"a": 1}\n', '{"step": "x"}\n', '{"step": 1, "a": null}\n'):
        bad = tmp_path / "bad.jsonl"
        bad.write_text('{"step": 1}\n' + text + '{"step": 3}\n')
        with pytest.raises(ValueError, match=r"bad.jsonl, line 2: not a record"):
            read_records(bad)
        # It is not thrown away in silence when resuming either.
        with pytest.raises(ValueError, match="line 2"):
            RecordFile(bad, 9)
        assert '{"step": 3}' in bad.read_text()


def test_a_full_disk_is_an_error(tmp_path, monkeypatch):
    file = RecordFile(tmp_path / "metrics.jsonl", None)
    monkeypatch.setattr(metrics.os, "write", lambda descriptor, data: 3)
    with pytest.raises(OSError, match="only 3 of 12 bytes"):
        file.append(1, {})
    monkeypatch.undo()
    file.close()


# ------------------------------------------------------------------------------- the console

RECORD = {
    "reward/mean": 0.51234,
    "gap/max_abs": 0.0,
    "policy/entropy": 1.5,
    "time/tokens_per_second": 12345.6,
}


def test_summary():
    assert summary(RECORD) == "reward 0.512  gap 0  entropy 1.500  tokens/s 12,346"
    assert summary({"gap/max_abs": 1e-12}) == "gap 1.0e-12"
    assert summary({}) == ""


def test_plain_lines_without_a_terminal():
    for every, shown in ((3600.0, [1, 5]), (0.0, [1, 2, 3, 4, 5])):
        out = io.StringIO()
        with ProgressBar(5, console=Console(file=out, width=20), every=every) as bar:
            for step in range(1, 6):
                bar.update(step, RECORD)
            bar.print("held-out accuracy [0.5]")
        figures = "reward 0.512  gap 0  entropy 1.500  tokens/s 12,346"
        expected = [f"GRPO {step}/5  {figures}" for step in shown] + ["held-out accuracy [0.5]"]
        assert out.getvalue().splitlines() == expected


def test_bar_on_a_terminal():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, color_system=None)
    with ProgressBar(5, start=2, console=console) as bar:
        bar.update(3, RECORD)
    assert re.search(r"GRPO .* 3/5 .*reward 0.512  gap 0  entropy 1.500", out.getvalue())
