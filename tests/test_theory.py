"""The leading terms: gradients at staged zeros, and whole trajectories in magnitude, for all four."""

import math

import pytest
import torch
from torch.nn.functional import one_hot

from lib.checks import largest_error
from lib.compare import relative_error
from lib.model import AttentionOnlyTransformer, loss_and_gradients, token_loss
from lib.statistics import corpus_statistics
from lib.theory import (
    PARAMETERS,
    leading_coefficients,
    leading_terms,
    output_next_order,
    predict,
    theorem_steps,
)
from tests import dense

V, T, N, L = 11, 13, 40, 3  # all different, as the rates below need


@pytest.fixture(scope="module")
def tokens():
    return dense.split(dense.irregular_tokens(N, T, V))


@pytest.fixture(scope="module")
def statistics(tokens):
    found = corpus_statistics(*tokens, V)
    assert torch.linalg.matrix_rank(found.query_key_term) >= 2
    assert all(term.any() for term in leading_terms(found).values())
    return found


def weights_of(model):
    return {"output": [model.output]} | {
        name: [getattr(layer, name) for layer in model.layers] for name in PARAMETERS[1:]
    }


def train(tokens, learning_rate, steps):
    return dense.trained(tokens, V, L, learning_rate, steps)


def staged(statistics, stage, scale=1e-3):
    """A model in which the first `stage` parameters (output, value, query-key) hold their leading
    terms times `scale` and all later ones are exactly zero."""
    model = AttentionOnlyTransformer(V, T, L).double()
    terms = leading_terms(statistics)
    with torch.no_grad():
        if stage >= 1:
            model.output.copy_(scale * terms["output"])
        if stage >= 2:
            for layer in model.layers:
                layer.value.copy_(scale * terms["value"])
    return model


def test_from_zero_only_the_output_moves(tokens, statistics):
    _, gradients = loss_and_gradients(staged(statistics, 0), *tokens)
    assert largest_error(-gradients["output"], statistics.bigram) < 1e-13
    assert not any(gradient.any() for name, gradient in gradients.items() if name != "output")


def test_with_an_output_only_values_follow(tokens, statistics):
    """Exact at any output matrix: the message of history is the running mean read back through it."""
    model = staged(statistics, 1)
    _, gradients = loss_and_gradients(model, *tokens)
    x = one_hot(tokens[0], V).double()
    owed = one_hot(tokens[1], V).double() - (x @ model.output).softmax(-1)
    mean = torch.ones(T, T).tril().double() / torch.arange(1, T + 1)[:, None]
    expected = torch.einsum("tk,nka,ntb->ab", mean, x, owed) @ model.output.T / (N * T)
    for layer in range(L):
        assert largest_error(-gradients[f"layers.{layer}.value"], expected) < 1e-12
        assert not gradients[f"layers.{layer}.query_key"].any()
        assert not gradients[f"layers.{layer}.position"].any()
    errors = []
    for scale in (1e-2, 1e-3):
        _, gradients = loss_and_gradients(staged(statistics, 1, scale), *tokens)
        errors.append(largest_error(-gradients["layers.1.value"] / scale, statistics.value_term))
    assert errors[1] < 1e-3 and errors[1] == pytest.approx(errors[0] / 10, rel=0.05)


def test_with_values_attention_follows(tokens, statistics):
    errors = {"query_key": [], "position": []}
    for scale in (1e-2, 1e-3):
        _, gradients = loss_and_gradients(staged(statistics, 2, scale), *tokens)
        for name, found in errors.items():
            expected = leading_terms(statistics)[name]
            found.append(
                max(
                    largest_error(-gradients[f"layers.{i}.{name}"] / scale**2, expected)
                    for i in range(L)
                )
            )
    for found in errors.values():
        assert found[1] < 1e-2 and found[1] == pytest.approx(found[0] / 10, rel=0.1)
    transposed = -gradients["layers.0.query_key"].T / scale**2
    assert largest_error(transposed, statistics.query_key_term) > 0.1


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_staged_gradients_by_finite_differences(tokens, statistics, stage):
    """Along a random direction of each parameter, by Richardson-extrapolated central differences."""
    model = staged(statistics, stage, scale=1.0)
    _, gradients = loss_and_gradients(model, *tokens)
    generator = torch.Generator().manual_seed(3)

    def slope(parameter, direction, h):
        values = []
        with torch.no_grad():
            for sign in (1, -1):
                parameter += sign * h * direction
                values.append(token_loss(model(tokens[0]), tokens[1]).item())
                parameter -= sign * h * direction
        return (values[0] - values[1]) / (2 * h)

    largest = max(g.abs().max() for g in gradients.values())
    for name, parameter in model.named_parameters():
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        estimate = (4 * slope(parameter, direction, 5e-4) - slope(parameter, direction, 1e-3)) / 3
        exact = (gradients[name] * direction).sum().item()
        assert abs(estimate - exact) < 1e-9 * max(1, largest), name


def test_coefficients_are_the_sums_they_come_from():
    eta = 0.01
    for s in range(8):
        outputs = [r * eta for r in range(s + 1)]  # the output matrix before update r + 1
        values = [sum(outputs[:r]) * eta for r in range(s + 1)]
        attention = sum(o * v for o, v in zip(outputs[:s], values[:s], strict=True)) * eta
        found = leading_coefficients(s, eta)
        assert list(found) == list(PARAMETERS)
        for name, expected in zip(
            PARAMETERS, (outputs[s], values[s], attention, attention), strict=True
        ):
            assert found[name] == pytest.approx(expected, rel=1e-12), (s, name)


@pytest.mark.parametrize("steps", [3, 5])
def test_trajectory_in_magnitude_with_linear_error(tokens, statistics, steps):
    """Coefficient times term against trained weights: all parameters, all layers, error linear in eta."""
    errors = {name: [] for name in PARAMETERS}
    for eta in (0.04, 0.02, 0.01):
        expected = predict(statistics, steps, eta)
        for name, found in weights_of(train(tokens, eta, steps)).items():
            errors[name].append(max(relative_error(weight, expected[name]) for weight in found))
    for name, (first, second, third) in errors.items():
        assert third < 0.01, name
        assert first / second == pytest.approx(2, rel=0.12) and second / third == pytest.approx(
            2, rel=0.06
        ), name


def test_a_wrong_prediction_does_not_pass(tokens, statistics):
    trained, expected = weights_of(train(tokens, 0.01, 4)), predict(statistics, 4, 0.01)
    for name in PARAMETERS[:3]:
        assert relative_error(trained[name][0], expected[name].T) > 0.1  # transposed
    for name in PARAMETERS:
        assert relative_error(trained[name][0], -expected[name]) > 1
        assert (
            relative_error(trained[name][0], predict(statistics, 5, 0.01)[name]) > 0.1
        )  # one step off
    uncentred = statistics.bigram + statistics.unigram[:, None] / V
    assert relative_error(trained["output"][0] / (4 * 0.01), uncentred) > 0.1


def test_next_order_of_the_output(tokens, statistics):
    first, second = [], []
    for eta in (0.1, 0.05):
        weight = train(tokens, eta, 3).output
        first.append(relative_error(weight, predict(statistics, 3, eta)["output"]))
        second.append(relative_error(weight, output_next_order(statistics, 3, eta)))
    assert first[0] / first[1] == pytest.approx(2, rel=0.05)
    assert second[0] / second[1] == pytest.approx(4, rel=0.1)
    assert second[0] < first[0] / 5


def test_the_theorem_covers_four_steps_of_the_published_run():
    assert theorem_steps(0.005, 3, 200) == 4
    assert theorem_steps(0.05, 3, 200) == 0
    assert theorem_steps(1e-4, 1, 200) == math.floor(5 / (8 * math.sqrt(200)) / 1e-4) - 1


def test_bad_input_is_refused():
    for step, eta in ((-1, 0.1), (1, 0.0), (1, math.nan)):
        with pytest.raises(ValueError, match="step must be at least 0"):
            leading_coefficients(step, eta)
