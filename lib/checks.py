"""Checks that run inside chapters: an error against a tolerance, and proof that it could fail.

`check` guards a statement; `control` runs a deliberately broken version through the same measure and
insists that it fails; `table` shows what ran. With LEADING_TERMS_CHECKS set to a file, nothing is raised
and every result is appended to it as one JSON line: the equation gate in tests/ reads that.
"""

import html
import json
import math
import os
from dataclasses import asdict, dataclass

import torch


class CheckFailed(AssertionError):
    """A check whose error exceeds its tolerance, or a control that a broken version passed."""


@dataclass(frozen=True)
class Result:
    """One executed check: `error` and `tolerance` are plain numbers on the same scale."""

    name: str
    equation: str | None
    error: float
    tolerance: float
    kind: str  # "check" or "control"
    passed: bool


_ran: list[Result] = []


def _record(name, error, tolerance, equation, kind) -> float:
    error, tolerance = float(error), float(tolerance)
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise ValueError(
            f"The tolerance of '{name}' must be a finite number of at least 0, got {tolerance}."
        )
    # A NaN error is never small: it fails a check. Nor does it prove anything: it fails a control.
    passed = error <= tolerance if kind == "check" else error > tolerance
    result = Result(name, equation, error, tolerance, kind, passed)
    _ran.append(result)
    if target := os.environ.get("LEADING_TERMS_CHECKS"):
        with open(target, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result)) + "\n")
    elif not passed:
        relation = "exceeds" if kind == "check" else "does not exceed"
        raise CheckFailed(
            f"{kind} '{name}': error {error:.3g} {relation} the tolerance {tolerance:.3g}"
        )
    return error


def check(name: str, error, tolerance: float, *, equation: str | None = None) -> float:
    """Assert that `error` is at most `tolerance`; returns the error.

    `equation` is the label `eq-…` of the displayed equation under test.
    Raises CheckFailed if the error is larger or NaN, ValueError for a tolerance that is not a number.
    """
    return _record(name, error, tolerance, equation, "check")


def control(name: str, error, tolerance: float, *, equation: str | None = None) -> float:
    """Assert that a deliberately broken version misses by more than `tolerance`; returns the error.

    Raises CheckFailed if the broken version would have passed (or its error is NaN).
    """
    return _record(name, error, tolerance, equation, "control")


def reset() -> None:
    """Forget what ran (tests use it; a chapter's kernel starts empty)."""
    _ran.clear()


class Table:
    """What was checked, for a page: rows in the order in which they ran."""

    def __init__(self, results):
        self.results = list(results)

    def _rows(self):
        head = ("what", "equation", "largest error", "tolerance", "verdict")
        verdict = {"check": "holds", "control": "broken version caught"}
        rows = [
            (
                r.name,
                r.equation or "",
                f"{r.error:.1e}",
                f"{r.tolerance:.0e}",
                verdict[r.kind] if r.passed else "FAILED",
            )
            for r in self.results
        ]
        return [head, *rows]

    def __str__(self):
        rows = self._rows()
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join(
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )

    __repr__ = __str__

    def _repr_html_(self):
        head, *rows = ([html.escape(cell) for cell in row] for row in self._rows())
        line = lambda cells, tag: "<tr>" + "".join(f"<{tag}>{c}</{tag}>" for c in cells) + "</tr>"  # noqa: E731
        body = "".join(line(row, "td") for row in rows)
        return (
            f'<table class="table"><thead>{line(head, "th")}</thead><tbody>{body}</tbody></table>'
        )


def table() -> Table:
    """All checks and controls that ran in this process."""
    return Table(_ran)


def largest_error(actual, expected) -> float:
    """max|actual - expected| / max|expected| in float64 (plain maximum where `expected` is zero).

    Raises ValueError when the shapes differ, so that broadcasting never hides a transpose.
    """
    actual, expected = (
        torch.as_tensor(a, dtype=torch.float64).detach() for a in (actual, expected)
    )
    if actual.shape != expected.shape:
        raise ValueError(f"shape {tuple(actual.shape)} where {tuple(expected.shape)} is expected")
    if expected.numel() == 0:
        raise ValueError("nothing to compare: both sides are empty")
    scale = expected.abs().max().item()
    return (actual - expected).abs().max().item() / (scale or 1.0)


def check_answer(name: str, answer, expected, tolerance: float = 1e-9) -> None:
    """Exercise helper: say whether the shape or the value of `answer` is wrong, or that it is right."""
    try:
        error = largest_error(answer, expected)
    except (ValueError, TypeError) as problem:
        raise CheckFailed(f"{name}: {problem}.") from None
    if not error <= tolerance:
        raise CheckFailed(
            f"{name}: the shape is right, the values are off by {error:.2g} (tolerance {tolerance:.0e})."
        )
    print(f"{name}: correct (largest error {error:.0e}, tolerance {tolerance:.0e})")


def check_horizon(covered) -> None:
    """Exercise in `reproduction`: covered(learning_rate, num_layers, seq_len) -> number of updates."""
    cases = {(0.005, 3, 200): 4, (0.05, 3, 200): 0, (0.001, 1, 100): 61, (0.01, 1, 10_000): 0}
    check_answer("covered", [covered(*case) for case in cases], list(cases.values()), 0.0)


def check_deflated_cosine(deflated_cosine) -> None:
    """Exercise in `reproduction`: deflated_cosine(weight, term, k) of two matrices -> number.

    The expected values are known beforehand: `weight` has the directions of `term`, other strengths.
    """
    angle = torch.arange(16, dtype=torch.float64).reshape(4, 4).sin()
    (left, _), (right, _) = (
        torch.linalg.qr(angle + torch.eye(4)),
        torch.linalg.qr(angle.T - torch.eye(4)),
    )
    strong = torch.tensor([8.0, 4.0, 2.0, 1.0], dtype=torch.float64)
    other = torch.tensor([-8.0, 4.0, -2.0, 1.0], dtype=torch.float64)
    mixed = torch.outer(left[:, 0], right[:, 3]) - torch.outer(left[:, 3], right[:, 0])
    term, weight = left @ torch.diag(strong) @ right.T, left @ torch.diag(other) @ right.T + mixed
    expected = [(16 - 4 + 1) / 21, (-4 + 1) / 5]
    check_answer("deflated_cosine", [deflated_cosine(weight, term, k) for k in (1, 2)], expected)


def _joint_frequencies() -> torch.Tensor:
    """Irregular joint frequencies [current, next] of five words, no two alike, for the exercises."""
    joint = torch.arange(1, 26, dtype=torch.float64).reshape(5, 5).sin() + 1.2
    return joint / joint.sum()


def check_reversed_bigram(reversed_bigram) -> None:
    """Exercise in `output-step`: reversed_bigram(bigram [V, V], unigram [V]) -> [V, V]."""
    joint = _joint_frequencies()
    unigram, backwards = joint.sum(dim=1), joint.T
    expected = backwards - backwards.sum(dim=1, keepdim=True) / len(joint)
    answer = reversed_bigram(joint - unigram[:, None] / len(joint), unigram)
    check_answer("reversed_bigram", answer, expected)


def check_unshifted(unshifted) -> None:
    """Exercise in `output-step`: unshifted(unigram [V]) -> the first step over eta, [V, V]."""
    unigram = _joint_frequencies().sum(dim=1)
    rows = [[p * ((x == y) - 0.2) for y in range(5)] for x, p in enumerate(unigram.tolist())]
    check_answer("unshifted", unshifted(unigram), torch.tensor(rows, dtype=torch.float64))


def check_loss_after_first_step(loss_after_first_step) -> None:
    """Exercise in `output-step`: loss_after_first_step(bigram, unigram, learning_rate) -> nats."""
    joint = _joint_frequencies()
    unigram = joint.sum(dim=1)
    bigram = joint - unigram[:, None] / len(joint)
    rate = torch.zeros((), dtype=torch.float64, requires_grad=True)
    loss = -(joint * (rate * bigram).log_softmax(dim=1)).sum()
    (first,) = torch.autograd.grad(loss, rate, create_graph=True)
    (second,) = torch.autograd.grad(first, rate)
    expected = [(loss + first * eta + second * eta**2 / 2).item() for eta in (0.5, 40.0)]
    answers = [float(loss_after_first_step(bigram, unigram, eta)) for eta in (0.5, 40.0)]
    check_answer("loss_after_first_step", answers, expected)


def check_linear_output(linear_output) -> None:
    """Exercise in `output-step`: linear_output(bigram, unigram, steps, learning_rate) -> [V, V]."""
    joint = _joint_frequencies()
    unigram = joint.sum(dim=1)
    bigram = joint - unigram[:, None] / len(joint)
    output = torch.zeros_like(bigram)
    for _ in range(7):
        output = output + 2.0 * (bigram - unigram[:, None] * output / len(joint))
    check_answer("linear_output", linear_output(bigram, unigram, 7, 2.0), output)


def check_prefix_softmax(row) -> None:
    """Exercise in `toy-model`: attention of the third of four positions, scores ln 2, 0, ln 5."""
    loudness = torch.tensor([2.0, 1.0, 5.0, 0.0], dtype=torch.float64)
    check_answer("prefix_softmax", row, loudness / loudness.sum())


def check_parameter_count(count) -> None:
    """Exercise in `toy-model`: count(V, T, L) -> number of parameters."""
    sizes = [(3, 2, 1), (7, 5, 3), (3000, 200, 3)]
    expected = [sum([v * v] + [v * v + v * v + t for _ in range(n)]) for v, t, n in sizes]
    check_answer("parameter_count", [count(*size) for size in sizes], expected, 0.0)


def check_balanced_factors(balance) -> None:
    """Exercise in `toy-model`: balance(W_Q, W_K) -> two factors, same product, equal Gram matrices."""
    angle = torch.arange(1, 11, dtype=torch.float64).reshape(5, 2)
    query, key = angle.sin(), (angle * angle).cos()
    new_query, new_key = balance(query, key)
    check_answer("first factor, shape", torch.zeros_like(new_query), torch.zeros_like(query))
    check_answer("second factor, shape", torch.zeros_like(new_key), torch.zeros_like(key))
    check_answer("product", new_query @ new_key.T, query @ key.T)
    check_answer("Gram matrices", new_query.T @ new_query, new_key.T @ new_key)


def check_blind_basis(matrix) -> None:
    """Exercise in `toy-model`: a 3 by 3 basis for which the inverse needs no transpose."""
    matrix = torch.as_tensor(matrix, dtype=torch.float64)
    if matrix.shape != (3, 3):
        raise CheckFailed(f"blind_basis: the shape is {tuple(matrix.shape)} where (3, 3) is expected.")
    if not (matrix != 0).all() or torch.linalg.matrix_rank(matrix) < 3:
        raise CheckFailed("blind_basis: the matrix must be invertible and have no zero entry.")
    inverse = torch.linalg.inv(matrix)
    check_answer("blind_basis", matrix @ inverse.T, torch.eye(3))
