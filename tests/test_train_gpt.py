"""The training example: the loss falls, tiled trains as dense does, and a wrong backend is told."""

import importlib.util
from pathlib import Path

import pytest
import torch

from tilewise import dispatch
from tilewise.backends.tiled import TiledBackend

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def train_gpt():
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLES / "train_gpt.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_loss_falls(train_gpt):
    losses = train_gpt.train("tiled", 10, 48, "cpu")
    assert losses.dtype == torch.float64
    assert (losses.diff() < 0).all()
    assert losses[0] - losses[-1] > 1.5  # nats a byte


def test_two_backends_within_the_budget(train_gpt, capsys):
    assert train_gpt.main(["--backend", "tiled", "--compare", "dense", "--steps", "4", "--length", "40"]) == 0
    said = capsys.readouterr().out
    assert "tiled" in said.splitlines()[0]
    assert "dense" in said.splitlines()[0]
    assert len([x for x in said.splitlines() if x[:4].strip().isdigit()]) == 4
    assert "within the budget" in said


class Skewed(TiledBackend):
    """Right in the forward; its gradients are a hundredth too large."""

    name = "skewed"

    def backward(self, r, *rest):
        grads = super().backward(r, *rest)
        return grads._replace(q=grads.q * 1.01, v=grads.v * 1.01)


def test_a_wrong_gradient_is_beyond_it(train_gpt, capsys, monkeypatch):
    monkeypatch.setitem(dispatch.BACKENDS, "skewed", Skewed())
    argv = ["--backend", "skewed", "--compare", "dense", "--steps", "10", "--length", "40"]
    assert train_gpt.main(argv) == 1
    assert "BEYOND THE BUDGET" in capsys.readouterr().out


def test_one_curve_alone(train_gpt, capsys):
    assert train_gpt.main(["--backend", "dense", "--steps", "2", "--length", "16"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_the_text_is_the_sonnets():
    text = (EXAMPLES / "data" / "sonnets.txt").read_text(encoding="ascii")
    assert len(text.strip().split("\n\n")) == 154
    assert len(text) < 100_000
    assert text.startswith("From fairest creatures we desire increase,")
