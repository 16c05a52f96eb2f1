"""lib.checks must be able to fail, and say what failed."""

import json
import math

import pytest
import torch

from lib import checks
from lib.checks import CheckFailed, check, check_answer, control, largest_error


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv("LEADING_TERMS_CHECKS", raising=False)
    checks.reset()
    yield
    checks.reset()


def test_check_passes_fails_and_remembers():
    assert check("near", 1e-12, 1e-9, equation="eq-a") == 1e-12
    with pytest.raises(CheckFailed, match="'far': error 0.5 exceeds the tolerance 1e-09"):
        check("far", 0.5, 1e-9)
    with pytest.raises(CheckFailed):
        check("undefined", math.nan, 1e-9)
    shown = str(checks.table())
    assert "near" in shown and "eq-a" in shown and "holds" in shown and shown.count("FAILED") == 2


def test_control_needs_the_broken_version_to_fail():
    control("transposed", 0.3, 1e-9)
    for error in (1e-12, math.nan):
        with pytest.raises(CheckFailed, match="does not exceed"):
            control("too gentle", error, 1e-9)


def test_a_tolerance_must_be_a_number():
    for tolerance in (math.nan, math.inf, -1.0):
        with pytest.raises(ValueError, match="finite number"):
            check("anything", 0.0, tolerance)


def test_record_mode_never_raises(monkeypatch, tmp_path):
    monkeypatch.setenv("LEADING_TERMS_CHECKS", str(tmp_path / "seen.jsonl"))
    check("far", 0.5, 1e-9, equation="eq-a")
    control("flipped", 2.0, 1e-9, equation="eq-a")
    first, second = map(json.loads, (tmp_path / "seen.jsonl").read_text().splitlines())
    assert first["passed"] is False and first["equation"] == "eq-a" and second["passed"] is True


def test_largest_error_is_relative_and_never_broadcasts():
    assert largest_error(torch.tensor([2.0, 4.0]), torch.tensor([2.0, 5.0])) == pytest.approx(0.2)
    assert largest_error([0.5], [0.0]) == 0.5
    third = torch.tensor(1 / 3, dtype=torch.float64)
    assert (
        largest_error([third], [third]) == 0 == largest_error([third], [1 / 3])
    )  # no detour by float32
    with pytest.raises(ValueError, match="shape"):
        largest_error(torch.ones(2, 3), torch.ones(3, 2))
    with pytest.raises(ValueError, match="empty"):
        largest_error([], [])


def test_answers_say_shape_or_value(capsys):
    check_answer("ex", [1.0, 2.0], [1.0, 2.0])
    assert "ex: correct" in capsys.readouterr().out
    with pytest.raises(CheckFailed, match="shape"):
        check_answer("ex", [1.0], [1.0, 2.0])
    with pytest.raises(CheckFailed, match="the shape is right, the values are off"):
        check_answer("ex", [1.0, 2.1], [1.0, 2.0])


def test_html_is_escaped():
    check("a < b & c", 0.0, 1.0)
    assert "a &lt; b &amp; c" in checks.table()._repr_html_()


def _deflated(weight, term, k, sides="both"):
    left, _, right = torch.linalg.svd(term)
    left, right, parts = left[:, :k], right[:k].T, []
    for matrix in (weight, term):
        if sides in ("both", "left"):
            matrix = matrix - left @ (left.T @ matrix)
        if sides in ("both", "right"):
            matrix = matrix - (matrix @ right) @ right.T
        parts.append(matrix)
    return (parts[0] * parts[1]).sum() / (parts[0].norm() * parts[1].norm())


def test_exercises_of_reproduction():
    checks.check_deflated_cosine(_deflated)
    for sides in ("left", "right", "neither"):
        with pytest.raises(CheckFailed):
            checks.check_deflated_cosine(
                lambda weight, term, k, sides=sides: _deflated(weight, term, k, sides)
            )
    checks.check_horizon(
        lambda rate, layers, length: max(
            0, int(min(1 / (12 * layers), 0.625 / length**0.5) / rate + 1e-9) - 1
        )
    )
    with pytest.raises(CheckFailed):  # forgets that s + 1 updates must fit
        checks.check_horizon(
            lambda rate, layers, length: int(min(1 / (12 * layers), 0.625 / length**0.5) / rate)
        )


def test_exercises_of_output_step():
    def backwards(bigram, unigram):
        joint = bigram + unigram[:, None] / len(unigram)
        return joint.T - joint.T.mean(dim=1, keepdim=True)

    checks.check_reversed_bigram(backwards)
    checks.check_unshifted(lambda unigram: torch.diag(unigram) - unigram[:, None] / len(unigram))

    def loss(bigram, unigram, rate, curvature=1.0):
        rows = (bigram**2).sum(dim=1)
        second = curvature * rate**2 / 2 * (unigram * rows).sum() / len(unigram)
        return math.log(len(unigram)) - rate * rows.sum() + second

    checks.check_loss_after_first_step(loss)

    def linear(bigram, unigram, steps, rate):
        shrink = rate * unigram[:, None] / len(unigram)
        return rate * bigram * (1 - (1 - shrink) ** steps) / shrink

    checks.check_linear_output(linear)

    wrong = [
        (checks.check_reversed_bigram, lambda bigram, unigram: bigram.T),
        (checks.check_unshifted, torch.diag),
        (checks.check_loss_after_first_step, lambda b, p, rate: loss(b, p, rate, curvature=2.0)),
        (checks.check_linear_output, lambda b, p, steps, rate: linear(b, p, steps + 1, rate)),
        (checks.check_linear_output, lambda b, p, steps, rate: steps * rate * b),
    ]
    for checker, answer in wrong:
        with pytest.raises(CheckFailed, match="values"):
            checker(answer)
