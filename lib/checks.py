"""Checks that run inside chapters: an error against a tolerance, and proof that it could fail.

`check` guards a statement; `control` runs a deliberately broken version through the same measure and
insists that it fails; `table` shows what ran. With LEADING_TERMS_CHECKS set to a file, nothing is raised
and every result is appended to it as one JSON line: the equation gate in tests/ reads that.
"""

import html
import itertools
import json
import math
import os
from dataclasses import asdict, dataclass
from fractions import Fraction

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


def _record(name, error, tolerance, equation, kind) -> None:
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


def check(name: str, error, tolerance: float, *, equation: str | None = None) -> None:
    """Assert that `error` is at most `tolerance`.

    `equation` is the label `eq-…` of the displayed equation under test.
    Raises CheckFailed if the error is larger or NaN, ValueError for a tolerance that is not a number.
    """
    _record(name, error, tolerance, equation, "check")


def control(name: str, error, tolerance: float, *, equation: str | None = None) -> None:
    """Assert that a deliberately broken version misses by more than `tolerance`.

    Raises CheckFailed if the broken version would have passed (or its error is NaN).
    """
    _record(name, error, tolerance, equation, "control")


def reset() -> None:
    """Forget what ran (tests use it; a chapter's kernel starts empty)."""
    _ran.clear()


class Table:
    """What was checked, for a page: rows in the order in which they ran."""

    def __init__(self, results):
        self.results = list(results)

    def _rows(self):
        head = ("what", "equation", "largest error", "tolerance", "verdict")
        verdict = {"check": "holds", "control": "caught"}
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


def _joint_frequencies():
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
        raise CheckFailed(
            f"blind_basis: the shape is {tuple(matrix.shape)} where (3, 3) is expected."
        )
    if not (matrix != 0).all() or torch.linalg.matrix_rank(matrix) < 3:
        raise CheckFailed("blind_basis: the matrix must be invertible and have no zero entry.")
    inverse = torch.linalg.inv(matrix)
    check_answer("blind_basis", matrix @ inverse.T, torch.eye(3))


def check_bigram_by_hand(matrix) -> None:
    """Exercise in `notation`: the bigram matrix of `fish the fish the`, words the, fish, saw."""
    pairs = torch.zeros(3, 3, dtype=torch.float64)
    for current, following in ((1, 0), (0, 1), (1, 0)):
        pairs[current, following] += 1 / 3
    check_answer("bigram_by_hand", matrix, pairs - pairs.sum(dim=1, keepdim=True) / 3)


def check_context_by_counting(context) -> None:
    """Exercise in `notation`: context(inputs, targets, vocab_size) -> [next, history]."""
    inputs = torch.tensor([[0, 3, 1, 1], [2, 0, 4, 0], [1, 1, 0, 3]])
    targets = torch.tensor([[3, 1, 1, 2], [0, 4, 0, 2], [1, 0, 3, 4]])
    one_hot = torch.eye(6, dtype=torch.float64)  # word 5 occurs nowhere
    mean = torch.ones(4, 4, dtype=torch.float64).tril()
    mean = mean / mean.sum(dim=1, keepdim=True)
    expected = ((one_hot[targets] - 1 / 6).mT @ mean @ one_hot[inputs]).sum(dim=0) / inputs.numel()
    check_answer("context_by_counting", context(inputs, targets, 6), expected)


def check_averages(names) -> None:
    """Exercise in `notation`: the statistics that are linear in the corpus."""
    wrong = set(names) ^ {"unigram", "bigram", "context"}
    if wrong:
        raise CheckFailed(f"averages: {len(wrong)} of the seven names are on the wrong side.")
    print("averages: correct")


def check_blind_corpus(tokens) -> None:
    """Exercise in `notation`: a sequence over 0, 1, 2 whose bigram matrix is symmetric, not zero."""
    tokens = torch.as_tensor(tokens)
    if tokens.ndim != 1 or set(tokens.tolist()) != {0, 1, 2}:
        raise CheckFailed(
            "blind_corpus: one list is expected that holds 0, 1 and 2, and nothing else."
        )
    one_hot = torch.eye(3, dtype=torch.float64)
    bigram = one_hot[tokens[:-1]].T @ (one_hot[tokens[1:]] - 1 / 3) / (len(tokens) - 1)
    if not bigram.abs().max() > 1e-12:
        raise CheckFailed("blind_corpus: the bigram matrix is zero, so that nothing is compared.")
    check_answer("blind_corpus", bigram.T, bigram)


def check_independent_gram(gram) -> None:
    """Exercise in `corpus`: gram(unigram [V]) -> interchangeability of independent words, [V, V]."""
    unigram = torch.tensor([0.4, 0.25, 0.2, 0.1, 0.05], dtype=torch.float64)
    joint = torch.outer(unigram, unigram)
    bigram = joint - joint.mean(dim=1, keepdim=True)
    check_answer("independent_gram", gram(unigram), bigram.T @ bigram)


def check_prefix_weight(weight) -> None:
    """Exercise in `corpus`: weight(k, T) -> what position k adds to all prefixes of a sequence."""
    cases = [(1, 4), (3, 4), (10, 64), (64, 64)]
    mean = {T: torch.ones(T, T, dtype=torch.float64).tril() for T in (4, 64)}
    mean = {T: ones / ones.sum(dim=1, keepdim=True) for T, ones in mean.items()}
    expected = [mean[T][:, k - 1].sum() for k, T in cases]
    check_answer("prefix_weight", [weight(k, T) for k, T in cases], expected)


def check_lost_kind(kind) -> None:
    """Exercise in `corpus`: the kind of association that shuffling every story destroys."""
    if kind != "classes":
        raise CheckFailed(f"lost_kind: {kind!r} survives, or is none of the three kinds.")
    print("lost_kind: correct")


def check_same_successors(sequences) -> None:
    """Exercise in `corpus`: a text in which 0 and 1 share successors and are not interchangeable."""
    pairs = [(a, b) for row in sequences for a, b in zip(row[:-1], row[1:], strict=True)]
    size = max((word for pair in pairs for word in pair), default=0) + 1
    joint = torch.zeros(size, size, dtype=torch.float64)
    for a, b in pairs:
        joint[a, b] += 1 / len(pairs)
    if size < 2 or not (joint[:2].any(dim=1).all() and joint[:, :2].any(dim=0).all()):
        raise CheckFailed("same_successors: 0 and 1 must each have a predecessor and a successor.")
    bigram = joint - joint.mean(dim=1, keepdim=True)
    cosine = torch.nn.functional.cosine_similarity
    rows, columns = cosine(bigram[0], bigram[1], dim=0), cosine(bigram[:, 0], bigram[:, 1], dim=0)
    if not (rows > 0.99 and columns < 0.1):
        raise CheckFailed(
            f"same_successors: the cosine of rows is {rows:.2f} (above 0.99 is asked for), "
            f"that of columns {columns:.2f} (below 0.1)."
        )
    print(f"same_successors: correct (cosine of rows {rows:.2f}, of columns {columns:.2f})")


def check_bias_gradient(bias_gradient) -> None:
    """Exercise in `gradient-map`: bias_gradient(residual [N, T, V]) -> [V]."""
    logits = torch.arange(2 * 3 * 5, dtype=torch.float64).reshape(2, 3, 5).sin()
    targets = torch.tensor([[0, 4, 1], [1, 1, 3]])
    bias = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    log_probability = (logits + bias).log_softmax(dim=-1)
    loss = -log_probability.gather(-1, targets[..., None]).mean()
    (expected,) = torch.autograd.grad(loss, bias)
    residual = torch.eye(5, dtype=torch.float64)[targets] - logits.softmax(dim=-1)
    check_answer("bias_gradient", bias_gradient(residual), expected)


def check_vanishing_sums(names) -> None:
    """Exercise in `gradient-map`: which sums over the four gradients of one layer are always zero."""
    wrong = set(names) ^ {"output rows", "query_key rows", "position"}
    if wrong:
        raise CheckFailed(f"vanishing_sums: {len(wrong)} of the seven names are on the wrong side.")
    print("vanishing_sums: correct")


def check_factor_gradients(factor_gradients) -> None:
    """Exercise in `gradient-map`: factor_gradients(G [query, key], W_Q, W_K) -> two gradients.

    The loss is <G, W_Q W_K^T>, whose gradient in the product is G; autograd gives those of the factors.
    """
    angle = torch.arange(1, 26, dtype=torch.float64).reshape(5, 5)
    gradient, query, key = angle.cos(), angle[:, :2].sin(), (angle[:, :2] ** 2).sin()
    factors = [query.clone().requires_grad_(), key.clone().requires_grad_()]
    expected = torch.autograd.grad((gradient * (factors[0] @ factors[1].T)).sum(), factors)
    for name, answer, right in zip(
        ("W_Q", "W_K"), factor_gradients(gradient, query, key), expected, strict=True
    ):
        check_answer(f"factor_gradients, {name}", answer, right)


def check_forgotten_average(names) -> None:
    """Exercise in `gradient-map`: the gradients of three layers that J = A * U makes wrong."""
    right = {"output", "layers.2.value"}
    wrong = {f"layers.{n}.{kind}" for n in range(3) for kind in ("value", "query_key", "position")}
    missed = set(names) ^ (wrong - right)
    if missed:
        raise CheckFailed(f"forgotten_average: {len(missed)} of the ten are on the wrong side.")
    print("forgotten_average: correct")


def check_ten_updates(numbers) -> None:
    """Exercise in `counting-steps`: counts after ten updates, and query-key's over that of flow."""
    output = value = query_key = 0
    for _ in range(10):
        output, value, query_key = output + 1, value + output, query_key + output * value
    expected = [output, value, query_key, query_key * 8 / 10**4]
    check_answer("ten_updates", numbers, expected, 1e-3)


def check_generation_count(count) -> None:
    """Exercise in `counting-steps`: count(s) -> sum over r < s of r times the query-key count."""
    expected, total, query_key = [], 0, 0
    for r in range(30):
        expected.append(total)
        total, query_key = total + r * query_key, query_key + r * (r * (r - 1) // 2)
    check_answer("generation_count", [count(s) for s in range(30)], expected, 0.0)


def check_frozen_output(counts) -> None:
    """Exercise in `counting-steps`: counts(s) -> three counts if the output matrix moves only once."""
    expected, value, query_key = [], 0, 0
    for _ in range(11):
        expected.append([1, value, query_key])
        value, query_key = value + 1, query_key + value
    check_answer("frozen_output", [list(counts(s)) for s in range(1, 12)], expected, 0.0)


def check_one_after_the_other(counts) -> None:
    """Exercise in `counting-steps`: counts(s) -> three counts if each kind sees those before it."""
    expected, output, value, query_key = [], 0, 0, 0
    for _ in range(11):
        output += 1
        value += output
        query_key += output * value
        expected.append([output, value, query_key])
    check_answer("one_after_the_other", [list(counts(s)) for s in range(1, 12)], expected, 0.0)


def check_independent_value(value) -> None:
    """Exercise in `value-step`: value(unigram [V]) -> value term of independent words, [V, V]."""
    unigram = torch.tensor([0.4, 0.25, 0.2, 0.1, 0.05], dtype=torch.float64)
    joint = torch.outer(unigram, unigram)  # [current, next], and [next, history] all the same
    bigram, context = joint - joint.mean(dim=1, keepdim=True), joint - joint.mean(dim=0)
    check_answer("independent_value", value(unigram), context.T @ bigram.T)


def check_value_from_start(value) -> None:
    """Exercise in `value-step`: value(bigram, context, start, steps, learning_rate) -> [V, V]."""
    bigram, context, start = torch.arange(1, 76, dtype=torch.float64).reshape(3, 5, 5).sin()
    output, expected = start.clone(), torch.zeros_like(start)
    for _ in range(4):
        expected = expected + 0.2 * context.T @ output.T
        output = output + 0.2 * bigram
    check_answer("value_from_start", value(bigram, context, start, 4, 0.2), expected)


def check_value_gain(gain) -> None:
    """Exercise in `value-step`: gain(bigram, context, value, learning_rate) -> nats per token."""
    angle = torch.arange(1, 76, dtype=torch.float64).reshape(3, 5, 5).sin()
    bigram, context, value = angle[0], angle[1], angle[2]
    bigram, context = bigram - bigram.mean(dim=1, keepdim=True), context - context.mean(dim=0)
    expected = 0.3 * torch.einsum("cb,rc,br->", context, bigram, value)
    check_answer("value_gain", float(gain(bigram, context, value, 0.3)), expected)


def check_self_part(self_part) -> None:
    """Exercise in `value-step`: self_part(inputs, targets, vocab_size) -> [history, hidden]."""
    inputs = torch.tensor([[0, 3, 1, 1], [2, 0, 4, 0], [1, 1, 0, 3]])
    targets = torch.tensor([[3, 1, 1, 2], [0, 4, 0, 2], [1, 0, 3, 4]])
    context = torch.zeros(6, 6, dtype=torch.float64)  # [next, history]; word 5 occurs nowhere
    joint = torch.zeros(6, 6, dtype=torch.float64)
    for row, following in zip(inputs.tolist(), targets.tolist(), strict=True):
        for t, (a, b) in enumerate(zip(row, following, strict=True), start=1):
            context[b, a] += 1 / (12 * t)
            joint[a, b] += 1 / 12
    context = context - context.mean(dim=0)
    check_answer("self_part", self_part(inputs, targets, 6), context.T @ joint.T)


def check_lag_one(term) -> None:
    """Exercise in `query-key-step`: term(T) -> position term [lag] if only the previous token helps."""
    for length in (2, 9):
        score = torch.zeros(length, length, dtype=torch.float64)
        score[range(1, length), range(length - 1)] = 1.0
        steps = torch.arange(1, length + 1, dtype=torch.float64)[:, None]
        centred = ((score - score.sum(dim=1, keepdim=True) / steps) / steps).tril()
        expected = [centred.diagonal(-lag).sum() / length for lag in range(length)]
        check_answer(f"lag_one, T = {length}", term(length), torch.stack(expected))


def check_unheard(names) -> None:
    """Exercise in `query-key-step`: the changes of usefulness that leave the terms as they are."""
    wrong = set(names) ^ {"constant", "next"}
    if wrong:
        raise CheckFailed(f"unheard: {len(wrong)} of the four names are on the wrong side.")
    print("unheard: correct")


def check_head_start(steps) -> None:
    """Exercise in `query-key-step`: first step in which query-key moves, for four kinds of value."""
    check_answer("head_start", steps, [2, 3, 3, 2], 0.0)


def check_without_competition(term) -> None:
    """Exercise in `query-key-step`: term(inputs, targets, useful) -> [query, key] without a softmax."""
    inputs = torch.tensor([[0, 3, 1, 1], [2, 0, 4, 0], [1, 1, 0, 3]])
    targets = torch.tensor([[3, 1, 1, 2], [0, 4, 0, 2], [1, 0, 3, 4]])
    useful = torch.arange(1, 26, dtype=torch.float64).reshape(5, 5).sin()
    expected = torch.zeros(5, 5, dtype=torch.float64)
    for words, following in zip(inputs.tolist(), targets.tolist(), strict=True):
        for t, (query, after) in enumerate(zip(words, following, strict=True), start=1):
            for key in words[:t]:
                expected[query, key] += useful[after, key] / t / 12
    check_answer("without_competition", term(inputs, targets, useful), expected)


def check_drowning_std(drowning_std) -> None:
    """Exercise in `how-long-it-holds`: drowning_std(signal, vocab_size, cosine) -> deviation."""
    cases = [(3.0, 5, 0.6), (1.0, 10, 0.8), (0.02, 300, 0.99)]
    expected = [signal * math.tan(math.acos(cosine)) / size for signal, size, cosine in cases]
    check_answer("drowning_std", [drowning_std(*case) for case in cases], expected)


def check_sequences_needed(sequences_needed) -> None:
    """Exercise in `how-long-it-holds`: sequences_needed(rho, cosine) -> number of sequences."""
    cases = [(6.0, 0.5), (9.0, 0.999), (1.5, 0.9999)]
    expected = [rho / math.tan(math.acos(cosine)) ** 2 for rho, cosine in cases]
    inverse = [rho / sequences_needed(rho, cosine) for rho, cosine in cases]
    expected = [rho / number for (rho, _), number in zip(cases, expected, strict=True)]
    check_answer("sequences_needed, rho / n", [1 + x for x in inverse], [1 + x for x in expected])


def check_cut_value(cut_value) -> None:
    """Exercise in `how-long-it-holds`: cut_value(bigram, context, steps, learning_rate) -> [V, V]."""
    bigram = torch.arange(1, 26, dtype=torch.float64).reshape(5, 5).sin()
    context = (bigram * bigram).cos()
    output, value = torch.zeros_like(bigram), torch.zeros_like(bigram)
    for _ in range(6):
        output, value = output + 0.3 * bigram, value + 0.3 * context.T @ output.T
    check_answer("cut_value", cut_value(bigram, context, 6, 0.3), value)


def check_path_numbers(numbers) -> None:
    """Exercise in `paths`: numbers(layers, heads) -> paths through exactly 0, 1, ... layers."""
    for layers, heads in ((2, 1), (3, 2), (4, 3)):
        expected = [0] * (layers + 1)
        for choice in itertools.product(range(heads + 1), repeat=layers):  # 0: past the layer
            expected[layers - choice.count(0)] += 1
        name = f"path_numbers, {layers} layers of {heads}"
        check_answer(name, numbers(layers, heads), expected, 0.0)


def check_running_mean_twice(twice) -> None:
    """Exercise in `paths`: twice(T) -> the running mean of running means [query, key]."""
    for length in (3, 8):
        mean = torch.ones(length, length, dtype=torch.float64).tril()
        mean = mean / mean.sum(dim=1, keepdim=True)
        check_answer(f"running_mean_twice, T = {length}", twice(length), mean @ mean)


def check_silent_path(first, second) -> None:
    """Exercise in `paths`: value matrices [3, 3] whose product is zero, but not in the other order."""
    first, second = (torch.as_tensor(each, dtype=torch.float64) for each in (first, second))
    if first.shape != (3, 3) or second.shape != (3, 3):
        raise CheckFailed(f"silent_path: shape {tuple(first.shape)} and {tuple(second.shape)}.")
    if (second @ first).abs().max() < 1e-3:
        raise CheckFailed("silent_path: the broken program is silent too.")
    check_answer("silent_path", first @ second, torch.zeros(3, 3))


def check_merges(merges) -> None:
    """Exercise in `bpe`: merges(words, number) -> the first pairs that byte-pair encoding joins."""
    cases = [
        ({"low": 3, "slow": 2, "own": 1}, [("o", "w"), ("l", "ow"), ("␣", "low")]),
        ({"aaab": 5, "cab": 2}, [("a", "a"), ("a", "b")]),
        ({"on": 9, "son": 2, "and": 3, "ant": 4, "anna": 1}, [("o", "n"), ("␣", "on")]),
    ]
    for words, expected in cases:
        found = [tuple(pair) for pair in merges(dict(words), len(expected))]
        if len(found) != len(expected):
            raise CheckFailed(f"merges: shape {len(found)} where {len(expected)} is expected.")
        if found != expected:
            raise CheckFailed(f"merges: the values for {words} are wrong, {found}.")
    print("merges: correct")


def check_two_rows(two_rows) -> None:
    """Exercise in `bpe`: two_rows(p, kappa, V) -> what a word cut in two adds to |B|^2."""
    for size, every in ((5, 3), (7, 2)):
        text = [0 if i % every == 0 else 1 + i * i % (size - 1) for i in range(360)]  # a circle
        longer = [piece for word in text for piece in ((0, size) if word == 0 else (word,))]

        def row(tokens, current):
            after = [
                b for a, b in zip(tokens, tokens[1:] + tokens[:1], strict=True) if a == current
            ]
            certainty = sum((after.count(b) / len(after)) ** 2 for b in set(after))
            return len(after) / len(tokens), certainty

        expected = sum(p**2 * (k - 1 / (size + 1)) for p, k in (row(longer, 0), row(longer, size)))
        check_answer(f"two_rows, V = {size}", two_rows(*row(text, 0), size), expected)


def check_longest(longest) -> None:
    """Exercise in `bpe`: longest(text) -> the largest number of byte-level tokens it can have."""
    cases = {"low": 4, "Zoë": 5, " a  b\n": 4, "東": 4, "": 0, "€5 – no": 12}
    check_answer("longest", [longest(text) for text in cases], list(cases.values()), 0.0)


def check_steps_until_seen(steps_until_seen) -> None:
    """Exercise in `direction-is-not-behaviour`: (largest, learning_rate) -> updates."""
    expected, cases = [], [(1e-9, 0.005), (1e-3, 0.1), (1.0, 0.5), (2e-6, 0.05)]
    for largest, rate in cases:
        step, output, value, attention = 0, 0.0, 0.0, 0.0
        while attention * largest < 2.0**-25:  # three coefficients, update by update
            output, value, attention = (
                output + rate,
                value + rate * output,
                attention + rate * output * value,
            )
            step += 1
        expected.append(step)
    check_answer("steps_until_seen", [steps_until_seen(*case) for case in cases], expected, 0.0)


def check_change_of_square_loss(change_of_square_loss) -> None:
    """Exercise in `direction-is-not-behaviour`: (w, delta, x, y) -> change of (w x - y)^2 / 2."""
    cases = [(1.5, 1e-20, 2.0, -1.0), (0.3, -2e-18, 0.7, 4.2), (-2.0, 0.5, 3.0, 1.0)]
    answers, expected = [], []
    for case in cases:
        w, delta, x, y = map(Fraction, case)
        change = (((w + delta) * x - y) ** 2 - (w * x - y) ** 2) / 2
        answers.append(change_of_square_loss(*case) / float(change))
        expected.append(1.0)
    check_answer("change_of_square_loss over the exact one", answers, expected, 1e-12)


def check_layers_at_once(ratio) -> None:
    """Exercise in `direction-is-not-behaviour`: cost from three layers over that from one."""
    check_answer("layers_at_once", float(ratio), 3.0, 0.02)


def check_harmful_term(text) -> None:
    """Exercise in `direction-is-not-behaviour`: five words that the learned term makes less likely."""
    words = [int(word) for word in text]
    if len(words) != 5 or not all(0 <= word < 4 for word in words):
        raise CheckFailed("harmful_term: the shape is five word ids from 0 to 3.")
    learned, there = (torch.zeros(4, 4, dtype=torch.float64) for _ in range(2))
    for table, tokens in ((learned, [0, 1, 2, 0, 3]), (there, words)):
        for current, following in itertools.pairwise(tokens):
            table[current] -= 1 / 16
            table[current, following] += 1 / 4
    product = (learned * there).sum().item()
    if product >= 0:
        raise CheckFailed(
            f"harmful_term: the values give an inner product of {product:.3f}, not below 0."
        )
    print(f"harmful_term: correct (inner product {product:.3f})")
