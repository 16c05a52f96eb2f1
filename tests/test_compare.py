"""lib.compare: cosines that are known beforehand, float64 where float32 fails, nulls and deflation."""

import math

import pytest
import torch

from lib.compare import (
    Deflation,
    Reference,
    contradictions,
    error_of_row,
    frobenius_cosine,
    relative_error,
    row_normalised_cosine,
    shuffle_tokens,
)
from lib.model import AttentionOnlyTransformer
from lib.results import REPOSITORY, load_run, run_name
from lib.theory import predict
from tests import dense

V, T, N, L = 9, 6, 30, 2


@pytest.fixture(scope="module")
def tokens():
    return dense.split(dense.irregular_tokens(N, T, V))


@pytest.fixture(scope="module")
def reference(tokens):
    return Reference.from_tokens(*tokens, V)


def filled(reference, step, eta, factor=1.0):
    """A model whose weights are exactly `factor` times what theory predicts."""
    model, expected = (
        AttentionOnlyTransformer(V, T, L).double(),
        predict(reference.statistics, step, eta),
    )
    with torch.no_grad():
        model.output.copy_(factor * expected["output"])
        for layer in model.layers:
            for name in ("value", "query_key", "position"):
                getattr(layer, name).copy_(factor * expected[name])
    return model


def test_cosine_is_reflexive_scale_free_and_signed():
    a = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    assert frobenius_cosine(a, a) == pytest.approx(1)
    assert frobenius_cosine(a, -3 * a) == pytest.approx(-1)
    assert frobenius_cosine(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])) == pytest.approx(
        1 / math.sqrt(2)
    )


def test_cosine_survives_the_size_of_early_query_key_weights():
    a = torch.tensor([1e-23, 2e-23], dtype=torch.float32)  # their squares are zero in float32
    assert not (a * a).any()
    assert frobenius_cosine(a, torch.tensor([1.0, 2.0])) == pytest.approx(1, abs=1e-6)


def test_undefined_is_nan_and_shapes_must_agree():
    zero, one = torch.zeros(2, 2), torch.ones(2, 2)
    assert math.isnan(frobenius_cosine(zero, one)) and math.isnan(row_normalised_cosine(zero, one))
    assert math.isnan(relative_error(one, zero)) and relative_error(zero, one) == 1
    with pytest.raises(ValueError, match="one shape"):
        frobenius_cosine(torch.ones(2, 3), torch.ones(3, 2))


def test_rows_count_alike_when_normalised():
    a = torch.tensor([[100.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    b = torch.tensor([[100.0, 0.0], [1.0, 0.0], [1.0, 1.0]])
    assert frobenius_cosine(a, b) > 0.99
    assert row_normalised_cosine(a, b) == pytest.approx(
        0.5
    )  # one row agrees, one is orthogonal, one is zero


def test_deflation_removes_what_dominates():
    left, right = (torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))[0] for _ in range(2))
    values = torch.tensor([100.0, 50.0, 3.0, 2.0, 1.0, 0.5], dtype=torch.float64)
    term = left @ torch.diag(values) @ right.T
    assert Deflation(term, 1)(term).norm().item() == pytest.approx(values[1:].norm().item())
    assert torch.linalg.matrix_rank(Deflation(term, 2)(term), atol=1e-9) == 4
    assert Deflation(term, 1).share == pytest.approx((values[0] ** 2 / (values**2).sum()).item())
    anything = torch.randn(6, 6, dtype=torch.float64)
    remaining = Deflation(term, 2)(anything)
    assert (left[:, :2].T @ remaining).abs().max() < 1e-12  # on the left
    assert (remaining @ right[:, :2]).abs().max() < 1e-12  # and on the right
    other = left @ torch.diag(values * torch.tensor([1, -1, 1, 1, 1, 1])) @ right.T
    deflate = Deflation(term, 2)
    assert (
        frobenius_cosine(other, term) < 0.7
        and frobenius_cosine(deflate(other), deflate(term)) > 0.999
    )


def test_shuffling_keeps_the_tokens_and_loses_the_order(tokens):
    inputs, targets = shuffle_tokens(*tokens)
    whole, shuffled = (torch.cat([x, y[:, -1:]], dim=1) for x, y in (tokens, (inputs, targets)))
    assert torch.equal(whole.flatten().bincount(), shuffled.flatten().bincount())
    assert not torch.equal(whole, shuffled) and torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(shuffle_tokens(*tokens)[0], inputs)
    assert not torch.equal(shuffle_tokens(*tokens, seed=1)[0], inputs)


def test_compare_of_the_prediction_itself(reference):
    rows = reference.compare(filled(reference, 5, 0.1, factor=1.5), 5, 0.1)
    assert [(r["parameter"], r["layer"]) for r in rows] == [("output", 0)] + [
        (name, layer) for layer in (1, 2) for name in ("value", "query_key", "position")
    ]
    for row in rows:
        assert row["cosine"] == pytest.approx(1) and row["relative_error"] == pytest.approx(0.5)
        assert row["magnitude_ratio"] == pytest.approx(1.5)
        assert row["null_shuffled"] < 0.999
        if row["parameter"] == "position":  # a vector, and its unigram term is zero
            assert all(
                math.isnan(row[key])
                for key in ("null_unigram", "deflated_1", "deflated_5", "row_normalised")
            )
        else:
            assert row["deflated_1"] == pytest.approx(1) and row["deflated_5"] == pytest.approx(1)
            assert row["null_unigram"] < 0.999 and row["row_normalised"] == pytest.approx(1)


def test_compare_sees_a_transpose(reference):
    model = filled(reference, 5, 0.1)
    with torch.no_grad():
        model.layers[1].query_key.copy_(model.layers[1].query_key.T.clone())
    good, bad = (
        [
            r
            for r in reference.compare(model, 5, 0.1)
            if (r["parameter"], r["layer"]) == ("query_key", n)
        ][0]
        for n in (1, 2)
    )
    assert good["relative_error"] < 1e-12 and bad["relative_error"] > 0.1


def test_zero_weights_have_no_cosine(reference):
    for row in reference.compare(AttentionOnlyTransformer(V, T, L), 0, 0.1):
        assert math.isnan(row["cosine"]) and math.isnan(row["relative_error"])


# Within the record of a run ---------------------------------------------------------------------

TRAINED = [
    folder.name
    for folder in sorted((REPOSITORY / "data" / "results").iterdir())
    if (folder / "metrics.jsonl").exists() and not folder.name.startswith("horizon")
]


@pytest.mark.parametrize("name", TRAINED)
def test_the_committed_records_contradict_nothing(name):
    found = load_run(name, REPOSITORY / "data" / "results")
    assert run_name(found["run"]["parameters"]) == name
    assert contradictions(found) == []


def test_a_row_gives_its_error_and_that_of_another_count():
    weight, term = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(3))
    row = {
        "magnitude_ratio": (weight.norm() / term.norm()).item(),
        "cosine": frobenius_cosine(weight, term),
    }
    assert error_of_row(row) == pytest.approx(relative_error(weight, term), rel=1e-6)
    assert error_of_row(row, 0.7) == pytest.approx(relative_error(weight, 0.7 * term), rel=1e-6)


def tampered(change):
    found = load_run(TRAINED[-1], REPOSITORY / "data" / "results")
    change(found)
    return contradictions(found)


def first_row(found):
    return next(row for row in found["metrics"][-1]["comparisons"] if row["cosine"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: r["run"]["parameters"].update(learning_rate=0.05), "s eta at update 1"),
        (lambda r: r["metrics"][3].update(step=5), "epoch at update 5"),
        (lambda r: r["metrics"].reverse(), "order of the lines"),
        (lambda r: r["metrics"].pop(), "last update"),
        (lambda r: r["summary"].update(loss=0.0), "summary and last line"),
        (lambda r: first_row(r).update(cosine=0.5), "error of output 0"),
        (lambda r: first_row(r).update(magnitude_ratio=2.0), "error of output 0"),
    ],
)
def test_a_record_that_was_tampered_with_contradicts_itself(change, says):
    assert any(line.startswith(says) for line in tampered(change))
    assert tampered(lambda r: None) == []
