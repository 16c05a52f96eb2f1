"""Trajectories and horizons on a small corpus: what is compared is what training does."""

import math

import pytest
import torch

from lib.compare import Reference, frobenius_cosine, relative_error
from lib.horizon import PREDICTIONS, Trajectory, follow, horizon
from lib.theory import PARAMETERS, predict
from tests.dense import irregular_tokens, split, trained

V, T = 7, 5
TOKENS = split(irregular_tokens(9, T, V))
REFERENCE = Reference.from_tokens(*TOKENS, V)


def run(**settings):
    usual = {"num_layers": 2, "learning_rate": 0.5, "sum_learning_rate": 4.0}
    return follow(Trajectory("a run", **(usual | settings)), *TOKENS, REFERENCE)


def test_compares_the_weights_that_plain_training_gives():
    record = run()
    assert [s["step"] for s in record["snapshots"]] == [1, 2, 3, 4, 6, 8]
    last = record["snapshots"][-1]
    model = trained(TOKENS, V, 2, 0.5, 8)
    expected = predict(REFERENCE.statistics, 8, 0.5)
    for kind in PARAMETERS:
        weights = [model.output] if kind == "output" else [getattr(x, kind) for x in model.layers]
        cosine, error = last["compared"]["leading"][kind]
        assert cosine == pytest.approx(min(frobenius_cosine(w, expected[kind]) for w in weights))
        assert error == pytest.approx(max(relative_error(w, expected[kind]) for w in weights))
    output = last["nulls"]["output"]
    assert output["shuffled"] == pytest.approx(
        frobenius_cosine(model.output, REFERENCE.shuffled.bigram)
    )
    assert output["deflated_1"] > output["unigram"]


def test_each_prediction_is_nearer_than_what_it_extends():
    record = run(predictions=PREDICTIONS, learning_rate=0.05, sum_learning_rate=0.5)
    compared = record["snapshots"][-1]["compared"]
    errors = {name: rows["output"][1] for name, rows in compared.items()}
    assert errors["next_order"] < errors["leading"] / 20  # small sη: the expansion is in order
    assert errors["uniform_attention"] < errors["next_order"]
    assert errors["frozen_residual"] != errors["feedback"]
    assert errors["frozen_residual"] == pytest.approx(errors["feedback"], rel=1e-2)
    for kind in PARAMETERS:
        assert compared["uniform_attention"][kind][1] < 1e-4


def test_uniform_attention_is_exact_until_attention_has_moved():
    rows = run(predictions=("uniform_attention",))["snapshots"]
    for kind in PARAMETERS:
        first = next(r["compared"]["uniform_attention"][kind] for r in rows if r["step"] == 3)
        assert first == pytest.approx([1.0, 0.0], abs=1e-12)
    assert rows[-1]["compared"]["uniform_attention"]["output"][1] > 1e-12


def test_a_gaussian_start_also_reports_what_moved():
    record = run(init_std=1e-7)
    assert "moved" in record["snapshots"][0] and "moved" not in run()["snapshots"][0]
    last = record["snapshots"][-1]
    assert last["moved"]["query_key"][0] > last["compared"]["leading"]["query_key"][0]


def test_batches_are_epochs_without_the_incomplete_one():
    record = run(batch_size=4, seed=3)
    losses = [s["loss"] for s in record["snapshots"]]
    assert losses == [s["loss"] for s in run(batch_size=4, seed=3)["snapshots"]]
    assert losses != [s["loss"] for s in run(batch_size=4, seed=4)["snapshots"]]


def curve(*points):
    return [
        {"sum_learning_rate": x, "compared": {"p": {"output": [cosine, error]}}}
        for x, cosine, error in points
    ]


def test_horizon_is_linear_between_snapshots():
    points = curve((1, math.nan, math.nan), (2, 1.0, 0.05), (3, 0.995, 0.15), (4, 0.985, None))
    assert horizon(points, "p", "output", error=0.1) == pytest.approx(2.5)
    assert horizon(points, "p", "output", cosine=0.99) == pytest.approx(3.5)
    assert horizon(points, "p", "output", error=0.5) == 4  # it has ceased to exist
    assert horizon(points, "p", "output", cosine=0.5) == math.inf
    assert horizon(points[2:], "p", "output", error=0.1) == 3
    with pytest.raises(ValueError, match="exactly one limit"):
        horizon(points, "p", "output")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"predictions": ("leading", "magic")}, "Unknown prediction magic"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0"),
        ({"sum_learning_rate": 0.1}, "at least as large"),
    ],
)
def test_bad_settings_are_one_sentence(settings, message):
    with pytest.raises(ValueError, match=message):
        run(**settings)


def test_double_precision_whatever_the_default():
    assert torch.get_default_dtype() == torch.float32
    assert run()["snapshots"][2]["compared"]["leading"]["query_key"][0] > 0.99
