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
    check("near", 1e-12, 1e-9, equation="eq-a")
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


def _balance(query, key, share=0.5):
    left, values, right = torch.linalg.svd(query @ key.T)
    width = query.shape[1]
    values = values[:width]
    return left[:, :width] * values**share, right[:width].T * values ** (1 - share)


def test_exercises_of_toy_model():
    checks.check_prefix_softmax([0.25, 0.125, 0.625, 0])
    checks.check_parameter_count(lambda v, t, n: v * v + n * (2 * v * v + t))
    checks.check_balanced_factors(_balance)
    checks.check_blind_basis([[0.0 + 1, 2, 3], [2, 1, 1], [3, 1, 5]])

    seen = torch.tensor([2.0, 1, 5, 1000])
    wrong = [
        (checks.check_prefix_softmax, seen / seen.sum(), "values"),
        (checks.check_prefix_softmax, [0.25, 0.125, 0.625], "shape"),
        (checks.check_parameter_count, lambda v, t, n: v * v + n * 2 * v * v + t, "values"),
        (checks.check_balanced_factors, lambda q, k: (q, k), "Gram"),
        (checks.check_balanced_factors, lambda q, k: _balance(q, k, share=0.4), "Gram"),
        (checks.check_balanced_factors, lambda q, k: (_balance(q, k)[1],) * 2, "product"),
        (
            checks.check_balanced_factors,
            lambda q, k: (q @ k.T, torch.eye(5)),
            "first factor, shape",
        ),
        (checks.check_blind_basis, [[1.0, 2, 3], [4, 1, 1], [3, 1, 5]], "values"),
        (checks.check_blind_basis, torch.eye(3), "no zero"),
        (checks.check_blind_basis, torch.ones(3, 3), "invertible"),
        (checks.check_blind_basis, torch.ones(2, 2), "shape"),
    ]
    for checker, answer, message in wrong:
        with pytest.raises(CheckFailed, match=message):
            checker(answer)


def _context(inputs, targets, vocab_size, *, first=0, centre=True):
    counts = torch.zeros(vocab_size, vocab_size, dtype=torch.float64)
    for sequence, following in zip(inputs.tolist(), targets.tolist(), strict=True):
        for t, a in enumerate(following, start=1):
            for b in sequence[first:t]:
                counts[a, b] += 1 / t
    return (counts - centre * counts.mean(dim=0)) / inputs.numel()


def test_exercises_of_notation():
    checks.check_bigram_by_hand([[-1 / 9, 2 / 9, -1 / 9], [4 / 9, -2 / 9, -2 / 9], [0, 0, 0]])
    checks.check_context_by_counting(_context)
    checks.check_averages({"context", "bigram", "unigram"})
    checks.check_blind_corpus([0, 1, 2, 0, 2, 1, 0])

    wrong = [
        (checks.check_bigram_by_hand, [[0, 1 / 3, 0], [2 / 3, 0, 0], [0, 0, 0]], "values"),
        (checks.check_bigram_by_hand, [[-1 / 9, 2 / 9], [4 / 9, -2 / 9]], "shape"),
        (checks.check_context_by_counting, lambda *a: _context(*a, centre=False), "values"),
        (checks.check_context_by_counting, lambda *a: _context(*a, first=1), "values"),
        (checks.check_context_by_counting, lambda *a: _context(*a).T, "values"),
        (checks.check_averages, ["unigram", "bigram"], "1 of the seven"),
        (checks.check_averages, ["unigram", "bigram", "context", "value_term"], "1 of the seven"),
        (checks.check_blind_corpus, [0, 1, 2, 1, 0], "values"),
        (checks.check_blind_corpus, [0, 1, 0, 1], "holds 0, 1 and 2"),
        (checks.check_blind_corpus, [0, 0, 1, 1, 2, 2, 0, 2, 1, 0], "zero"),
        (checks.check_blind_corpus, [], "holds 0, 1 and 2"),
    ]
    for checker, answer, message in wrong:
        with pytest.raises(CheckFailed, match=message):
            checker(answer)


def _prefix_weight(k, T, first=0):
    return sum(1 / t for t in range(k + first, T + 1))


def _independent_gram(unigram, power=2):
    surplus = unigram - 1 / len(unigram)
    return (unigram**power).sum() * torch.outer(surplus, surplus)


def test_exercises_of_corpus():
    checks.check_independent_gram(_independent_gram)
    checks.check_prefix_weight(_prefix_weight)
    checks.check_lost_kind("classes")
    checks.check_same_successors([[2, 0, 4], [3, 1, 4]])

    wrong = [
        (checks.check_independent_gram, lambda p: _independent_gram(p, power=1), "values"),
        (checks.check_independent_gram, lambda p: p.square().sum() * torch.outer(p, p), "values"),
        (checks.check_independent_gram, lambda p: p, "shape"),
        (checks.check_prefix_weight, lambda k, T: 1 / k, "values"),
        (checks.check_prefix_weight, lambda k, T: _prefix_weight(k, T, first=1), "values"),
        (checks.check_lost_kind, "scenes", "survives"),
        (checks.check_same_successors, [[2, 0, 4], [2, 1, 4]], "of columns 1.00"),
        (checks.check_same_successors, [[2, 0, 4], [3, 1, 5]], "of rows is -"),
        (checks.check_same_successors, [[0, 2], [1, 2]], "predecessor"),
        (checks.check_same_successors, [], "predecessor"),
    ]
    for checker, answer, message in wrong:
        with pytest.raises(CheckFailed, match=message):
            checker(answer)


def test_exercises_of_gradient_map():
    sums = {"output rows", "query_key rows", "position"}
    red = {f"layers.{n}.{kind}" for n in range(3) for kind in ("query_key", "position")}
    red |= {"layers.0.value", "layers.1.value"}
    checks.check_bias_gradient(lambda residual: -residual.mean(dim=(0, 1)))
    checks.check_vanishing_sums(sums)
    checks.check_factor_gradients(lambda g, q, k: (g @ k, g.T @ q))
    checks.check_forgotten_average(red)

    wrong = [
        (checks.check_bias_gradient, lambda r: r.mean(dim=(0, 1)), "values"),
        (checks.check_bias_gradient, lambda r: -r.sum(dim=(0, 1)), "values"),
        (checks.check_bias_gradient, lambda r: -r.mean(dim=0), "shape"),
        (checks.check_vanishing_sums, sums | {"query_key columns"}, "1 of the seven"),
        (checks.check_vanishing_sums, ["position"], "2 of the seven"),
        (checks.check_factor_gradients, lambda g, q, k: (g.T @ k, g @ q), "W_Q.*values"),
        (checks.check_factor_gradients, lambda g, q, k: (g @ k, g @ q), "W_K.*values"),
        (checks.check_factor_gradients, lambda g, q, k: (q.T @ g, k.T @ g), "shape"),
        (checks.check_forgotten_average, red - {"layers.0.value"}, "1 of the ten"),
        (checks.check_forgotten_average, red | {"output", "layers.2.value"}, "2 of the ten"),
    ]
    for checker, answer, message in wrong:
        with pytest.raises(CheckFailed, match=message):
            checker(answer)


def _generation_count(s):
    return 15 * math.comb(s, 6) + 20 * math.comb(s, 5) + 6 * math.comb(s, 4)


def test_exercises_of_counting_steps():
    checks.check_ten_updates((10, 45, 870, 0.696))
    checks.check_generation_count(_generation_count)
    checks.check_frozen_output(lambda s: (1, s - 1, math.comb(s - 1, 2)))
    checks.check_one_after_the_other(
        lambda s: (s, math.comb(s + 1, 2), s * (s + 1) * (s + 2) * (3 * s + 1) // 24)
    )

    wrong = [
        (checks.check_ten_updates, (10, 45, 450, 0.36), "values"),
        (checks.check_ten_updates, (10, 45, 870), "shape"),
        (checks.check_generation_count, lambda s: 15 * math.comb(s, 6), "values"),
        (checks.check_generation_count, lambda s: _generation_count(s + 1), "values"),
        (checks.check_frozen_output, lambda s: (1, s, math.comb(s, 2)), "values"),
        (checks.check_frozen_output, lambda s: (1, s - 1), "shape"),
        (checks.check_one_after_the_other, lambda s: (s, math.comb(s, 2), 0), "values"),
        (checks.check_one_after_the_other, lambda s: (s, math.comb(s + 1, 2)), "shape"),
    ]
    for checker, answer, message in wrong:
        with pytest.raises(CheckFailed, match=message):
            checker(answer)


def _value_from_start(bigram, context, start, steps, rate):
    table = steps * start + math.comb(steps, 2) * rate * bigram
    return rate * context.T @ table.T


def _self_part(inputs, targets, vocab_size, first=1):
    length = inputs.shape[1]
    embedded, labels = (torch.eye(vocab_size, dtype=torch.float64)[x] for x in (inputs, targets))
    residual = labels - 1 / vocab_size
    weights = 1 / torch.arange(first, first + length, dtype=torch.float64)[:, None]
    context = (embedded.mT @ (weights * residual)).sum(dim=0)
    return context @ (embedded.mT @ residual).sum(dim=0).T / inputs.numel() ** 2


def test_exercises_of_value_step():
    surplus = lambda p: (p**2).sum() - 1 / len(p)  # noqa: E731
    checks.check_independent_value(lambda p: surplus(p) * torch.outer(p, p))
    checks.check_value_from_start(_value_from_start)
    checks.check_value_gain(lambda b, c, value, rate: rate * (c.T @ b.T * value).sum())
    checks.check_self_part(_self_part)

    wrong = [
        (checks.check_independent_value, lambda p: (p**2).sum() * torch.outer(p, p), "values"),
        (checks.check_independent_value, lambda p: torch.zeros(5, 5), "values"),
        (checks.check_independent_value, surplus, "shape"),
        (
            checks.check_value_from_start,
            lambda *a: _value_from_start(*a[:3], a[3] + 1, a[4]),
            "values",
        ),
        (checks.check_value_from_start, lambda b, c, m, s, rate: s * rate * c.T @ m.T, "values"),
        (checks.check_value_from_start, lambda *a: _value_from_start(*a).T, "values"),
        (
            checks.check_value_gain,
            lambda b, c, value, rate: rate * (c.T @ b * value).sum(),
            "values",
        ),
        (checks.check_value_gain, lambda b, c, value, rate: (c.T @ b.T * value).sum(), "values"),
        (checks.check_self_part, lambda *a: _self_part(*a, first=2), "values"),
        (checks.check_self_part, lambda *a: _self_part(*a).T, "values"),
        (checks.check_self_part, lambda *a: _self_part(*a)[0], "shape"),
    ]
    for checker, answer, message in wrong:
        with pytest.raises(CheckFailed, match=message):
            checker(answer)


def _lag_one(T, pay_from=0):
    t = torch.arange(1, T + 1, dtype=torch.float64)
    lags = [-(1 / t[max(lag, 1) + pay_from :] ** 2).sum() / T for lag in range(T)]
    lags[1] += (1 / t[1:]).sum() / T
    return torch.stack(lags)


def _without_competition(inputs, targets, useful, centre=False):
    embedded = torch.eye(len(useful), dtype=torch.float64)[inputs]
    length = inputs.shape[1]
    mean = torch.ones(length, length, dtype=torch.float64).tril()
    mean = mean / mean.sum(dim=1, keepdim=True)
    scores = useful[targets[:, :, None], inputs[:, None, :]]
    scores = mean * (scores - centre * (mean * scores).sum(dim=-1, keepdim=True))
    return (embedded.mT @ scores @ embedded).sum(dim=0) / inputs.numel()


def test_exercises_of_query_key_step():
    checks.check_lag_one(_lag_one)
    checks.check_unheard(("next", "constant"))
    checks.check_head_start([2, 3, 3, 2])
    checks.check_without_competition(_without_competition)

    shifted = lambda x, y, useful: _without_competition(x, x, useful)  # noqa: E731
    centred = lambda *a: _without_competition(*a, centre=True)  # noqa: E731
    wrong = [
        (checks.check_lag_one, lambda T: _lag_one(T, pay_from=1), "values"),
        (checks.check_lag_one, lambda T: _lag_one(T).flip(0), "values"),
        (checks.check_lag_one, lambda T: _lag_one(T)[1:], "shape"),
        (checks.check_unheard, ["constant"], "1 of the four"),
        (checks.check_unheard, ["constant", "next", "history"], "1 of the four"),
        (checks.check_head_start, [2, 2, 2, 2], "values"),
        (checks.check_head_start, [2, 3, 3], "shape"),
        (checks.check_without_competition, centred, "values"),
        (checks.check_without_competition, lambda *a: _without_competition(*a).T, "values"),
        (checks.check_without_competition, shifted, "values"),
        (checks.check_without_competition, lambda *a: _without_competition(*a)[0], "shape"),
    ]
    for checker, answer, message in wrong:
        with pytest.raises(CheckFailed, match=message):
            checker(answer)


def test_exercises_of_how_long_it_holds():
    def drowning(signal, size, cosine, power=2):
        return signal * (1 / cosine**power - 1) ** 0.5 / size

    def cut(bigram, context, steps, rate, count=lambda s: s * (s - 1) / 2):
        return count(steps) * rate**2 * context.T @ bigram.T

    checks.check_drowning_std(drowning)
    checks.check_sequences_needed(lambda rho, cosine: rho * cosine**2 / (1 - cosine**2))
    checks.check_cut_value(cut)

    wrong = [
        (checks.check_drowning_std, lambda *a: drowning(*a, power=1), "values"),
        (checks.check_sequences_needed, lambda rho, cosine: rho / (2 * (1 - cosine)), "values"),
        (checks.check_sequences_needed, lambda rho, c: rho * c / (1 - c), "values"),
        (checks.check_cut_value, lambda *a: cut(*a, count=lambda s: s * s / 2), "values"),
        (checks.check_cut_value, lambda *a: cut(*a).T, "values"),
        (checks.check_cut_value, lambda *a: cut(*a)[0], "shape"),
    ]
    for checker, answer, message in wrong:
        with pytest.raises(CheckFailed, match=message):
            checker(answer)


def test_exercises_of_paths():
    def numbers(layers, heads, ways=math.comb):
        return [ways(layers, m) * heads**m for m in range(layers + 1)]

    def twice(length, first=lambda t, k: k):
        positions = range(1, length + 1)
        entry = lambda t, k: sum(1 / j for j in range(first(t, k), t + 1)) / t * (k <= t)  # noqa: E731
        return [[entry(t, k) for k in positions] for t in positions]

    first, second = torch.zeros(3, 3), torch.zeros(3, 3)
    first[0, 1] = second[2, 0] = 1
    checks.check_path_numbers(numbers)
    checks.check_running_mean_twice(twice)
    checks.check_silent_path(first, second)

    wrong = [
        (checks.check_path_numbers, (lambda *a: numbers(*a, ways=math.perm),), "values"),
        (checks.check_path_numbers, (lambda layers, heads: numbers(layers, 1),), "values"),
        (checks.check_path_numbers, (lambda *a: sum(numbers(*a)),), "shape"),
        (checks.check_running_mean_twice, (lambda n: twice(n, lambda t, k: 1),), "values"),
        (checks.check_running_mean_twice, (lambda n: torch.tensor(twice(n)).T,), "values"),
        (checks.check_running_mean_twice, (lambda n: twice(n)[-1],), "shape"),
        (checks.check_silent_path, (second, first), "silent too"),
        (checks.check_silent_path, (first, second + first.T), "values"),
        (checks.check_silent_path, (first[0], second), "shape"),
    ]
    for checker, answers, message in wrong:
        with pytest.raises(CheckFailed, match=message):
            checker(*answers)


def test_exercises_of_bpe():
    def merges(words, number, joined=lambda new, token: new[:-1] + [new[-1] + token], weight=True):
        cut, found = {word: ["␣", *word] for word in words}, []
        for _ in range(number):
            pairs = {}
            for word, tokens in cut.items():
                for pair in zip(tokens, tokens[1:], strict=False):
                    pairs[pair] = pairs.get(pair, 0) + (words[word] if weight else 1)
            found.append(max(pairs, key=pairs.get))
            for word, tokens in cut.items():
                new = []
                for token in tokens:
                    fits = new and (new[-1], token) == found[-1]
                    new = joined(new, token) if fits else [*new, token]
                cut[word] = new
        return found

    def two_rows(p, kappa, size, longer=True, tokens=1):
        p = p / (1 + p) if longer else p
        return p**2 * (1 + kappa - 2 / (size + tokens))

    def longest(text):
        return sum(1 + len(word.encode()) for word in text.split())

    checks.check_merges(merges)
    checks.check_two_rows(two_rows)
    checks.check_longest(longest)

    wrong = [
        (checks.check_merges, lambda *a: merges(*a, weight=False), "values"),
        (checks.check_merges, lambda *a: merges(*a, joined=lambda new, t: [*new, t]), "values"),
        (checks.check_merges, lambda *a: merges(*a)[:1], "shape"),
        (checks.check_two_rows, lambda *a: two_rows(*a, longer=False), "values"),
        (checks.check_two_rows, lambda *a: two_rows(*a, tokens=0), "values"),
        (checks.check_two_rows, lambda *a: [two_rows(*a)] * 2, "shape"),
        (checks.check_longest, lambda text: sum(1 + len(w) for w in text.split()), "values"),
        (checks.check_longest, lambda text: 1 + len(text.encode()), "values"),
    ]
    for checker, answer, message in wrong:
        with pytest.raises(CheckFailed, match=message):
            checker(answer)


def test_exercises_of_direction_is_not_behaviour():
    def steps_until_seen(largest, rate, edge=2.0**-25):
        counts = ((s, 3 * math.comb(s, 4) + 2 * math.comb(s, 3)) for s in range(3, 10**5))
        return next(s for s, count in counts if count * rate**4 * largest >= edge)

    def change(w, delta, x, y):
        return delta * x * (w * x - y + delta * x / 2)

    def subtracted(w, delta, x, y):
        return (((w + delta) * x - y) ** 2 - (w * x - y) ** 2) / 2

    checks.check_steps_until_seen(steps_until_seen)
    checks.check_change_of_square_loss(change)
    checks.check_layers_at_once(torch.tensor(2.99))
    checks.check_harmful_term([1, 1, 1, 1, 1])

    wrong = [
        (checks.check_steps_until_seen, lambda *a: steps_until_seen(*a, edge=2.0**-24), "values"),
        (checks.check_steps_until_seen, lambda *a: steps_until_seen(*a) - 1, "values"),
        (checks.check_change_of_square_loss, subtracted, "values"),
        (checks.check_change_of_square_loss, lambda w, d, x, y: d * x * (w * x - y), "values"),
        (checks.check_layers_at_once, 9.0, "values"),
        (checks.check_layers_at_once, 27.0, "values"),
        (checks.check_harmful_term, [0, 1, 2, 0, 3], "values"),
        (checks.check_harmful_term, [1, 1, 1], "shape"),
        (checks.check_harmful_term, [4, 4, 4, 4, 4], "shape"),
    ]
    for checker, answer, message in wrong:
        with pytest.raises(CheckFailed, match=message):
            checker(answer)
