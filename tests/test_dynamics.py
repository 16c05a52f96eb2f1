"""The further predictions against training with attention and residual held, step by step."""

import math

import pytest
import torch

from lib.dynamics import Feedback, attention_terms, context_powers, frozen_residual
from lib.model import AttentionOnlyTransformer
from lib.statistics import corpus_statistics
from lib.theory import predict
from tests.dense import irregular_tokens, split

V, T, RATE, STEPS = 7, 5, 0.7, 6
INPUTS, TARGETS = split(irregular_tokens(9, T, V))


def held(num_layers, steps=STEPS):
    """Weights after each step of the real model when the loss is linear in the logits, minus
    <R, logits>, and attention does not move; what query-key and position would add is summed."""
    model = AttentionOnlyTransformer(V, T, num_layers).double()
    residual = torch.eye(V, dtype=torch.float64)[TARGETS] - 1 / V
    sums = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for _ in range(steps):
        loss = -(residual * model(INPUTS)).sum() / TARGETS.numel()
        names, parameters = zip(*model.named_parameters(), strict=True)
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for name, parameter, gradient in zip(names, parameters, gradients, strict=True):
                sums[name] = sums[name] - RATE * gradient
                if name.endswith(("output", "value")):
                    parameter -= RATE * gradient
        yield {name: total.clone() for name, total in sums.items()}


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_frozen_residual_is_what_training_does_when_residual_and_attention_are_held(num_layers):
    contexts = context_powers(INPUTS, TARGETS, V, num_layers)
    predictions = frozen_residual(contexts, num_layers, RATE, STEPS)
    for expected, found in zip(held(num_layers), predictions, strict=True):
        for name, weight in expected.items():
            if name in found:
                torch.testing.assert_close(found[name], weight, rtol=1e-10, atol=1e-14)


def test_context_powers_by_matrix_products():
    x = torch.eye(V, dtype=torch.float64)[INPUTS]
    residual = torch.eye(V, dtype=torch.float64)[TARGETS] - 1 / V
    mean = torch.ones(T, T, dtype=torch.float64).tril()
    mean = mean / mean.sum(dim=1, keepdim=True)
    for found in context_powers(INPUTS, TARGETS, V, 3):
        expected = (residual.mT @ x).sum(dim=0) / INPUTS.numel()
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)
        x = mean @ x
    with pytest.raises(ValueError, match="alike"):
        context_powers(INPUTS, TARGETS[:, 1:], V, 1)


def test_feedback_is_one_hop_of_the_frozen_residual():
    """With one layer there is one hop; more layers multiply S^2, which is checked through the counts."""
    statistics = corpus_statistics(INPUTS, TARGETS, V)
    contexts = context_powers(INPUTS, TARGETS, V, 1)
    feedback = Feedback.from_statistics(statistics, 1)
    *_, expected = frozen_residual(contexts, 1, RATE, STEPS)
    found = feedback.predict(STEPS, RATE)
    for name in ("value", "usefulness"):
        torch.testing.assert_close(found[name], expected[f"layers.0.{name}"], rtol=1e-9, atol=1e-14)
    torch.testing.assert_close(found["output"], expected["output"], rtol=1e-9, atol=1e-14)

    context, bigram = statistics.context, statistics.bigram
    squared = 3 * context @ context.T
    output = sum(
        math.comb(STEPS, 2 * k + 1) * RATE ** (2 * k + 1) * torch.linalg.matrix_power(squared, k)
        for k in range(3)
    )
    value = sum(
        math.comb(STEPS, 2 * k + 2) * RATE ** (2 * k + 2) * torch.linalg.matrix_power(squared, k)
        for k in range(3)
    )
    found = Feedback.from_statistics(statistics, 3).predict(STEPS, RATE)
    torch.testing.assert_close(found["output"], bigram @ output, rtol=1e-9, atol=1e-14)
    torch.testing.assert_close(found["value"], context.T @ value @ bigram.T, rtol=1e-9, atol=1e-14)


def test_feedback_starts_as_the_leading_terms():
    statistics = corpus_statistics(INPUTS, TARGETS, V)
    found = Feedback.from_statistics(statistics, 3).predict(5, 1e-6)
    found |= attention_terms(found["usefulness"], INPUTS, TARGETS)
    for name, expected in predict(statistics, 5, 1e-6).items():
        torch.testing.assert_close(found[name] / expected.norm(), expected / expected.norm())


def test_too_few_contexts_are_refused():
    with pytest.raises(ValueError, match="3 layers need 4 contexts, got 2"):
        next(frozen_residual(context_powers(INPUTS, TARGETS, V, 1), 3, RATE, 1))
