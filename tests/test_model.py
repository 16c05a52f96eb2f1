"""lib.model: causality, conventions, initialisation, and gradients at staged zeros by three witnesses."""

import math

import pytest
import torch
from torch.nn.functional import one_hot

from lib.checks import largest_error
from lib.model import AttentionOnlyTransformer, loss_and_gradients, token_loss
from tests import dense

V, T, N, L = 6, 5, 8, 3


def irregular_model(num_layers=L, scale=0.5, seed=1):
    return AttentionOnlyTransformer(V, T, num_layers, init_std=scale, seed=seed).double()


@pytest.fixture(scope="module")
def tokens():
    return dense.split(dense.irregular_tokens(N, T, V))


def test_forward_by_loops(tokens):
    """The definition, one position at a time, with no tensor algebra beyond row times matrix."""
    model, inputs = irregular_model(num_layers=2), tokens[0][:3]
    logits = model(inputs)
    for n, row in enumerate(inputs):
        hidden = [one_hot(token, V).double() for token in row]
        for layer in model.layers:
            after = []
            for t in range(T):
                scores = [
                    hidden[t] @ layer.query_key @ hidden[k] + layer.position[t - k]
                    for k in range(t + 1)
                ]
                weights = torch.stack(scores).exp()
                weights = weights / weights.sum()
                after.append(
                    hidden[t] + sum(w * hidden[k] for k, w in enumerate(weights)) @ layer.value
                )
            hidden = after
        for t in range(T):
            assert largest_error(logits[n, t], hidden[t] @ model.output) < 1e-12


def test_the_future_is_invisible(tokens):
    model, inputs = irregular_model(), tokens[0].clone()
    before = model(inputs)
    inputs[:, 3] = (inputs[:, 3] + 1) % V
    after = model(inputs)
    assert torch.equal(before[:, :3], after[:, :3])
    assert (before[:, 3:] != after[:, 3:]).any(dim=-1).all()


def test_attention_is_a_causal_distribution(tokens):
    maps = irregular_model().attention(tokens[0])
    assert maps.shape == (L, N, T, T)
    assert largest_error(maps.sum(-1), torch.ones(L, N, T)) < 1e-14
    assert maps.triu(1).abs().max() == 0
    zero = AttentionOnlyTransformer(V, T, L).attention(tokens[0])
    running_mean = torch.ones(T, T).tril() / torch.arange(1, T + 1)[:, None]
    assert largest_error(zero, running_mean.expand(L, N, T, T)) < 1e-6


def test_zero_and_gaussian_initialisation(tokens):
    zero = AttentionOnlyTransformer(V, T, L)
    assert not any(p.any() for p in zero.parameters())
    assert token_loss(zero(tokens[0]), tokens[1]).item() == pytest.approx(math.log(V))
    one, two, other = irregular_model(seed=1), irregular_model(seed=1), irregular_model(seed=2)
    for (name, a), b, c in zip(
        one.named_parameters(), two.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(a, b) and not torch.equal(a, c), name
    drawn = torch.cat(
        [p.flatten() for p in AttentionOnlyTransformer(60, T, L, init_std=0.3).parameters()]
    )
    assert drawn.std().item() == pytest.approx(0.3, rel=0.02)


def test_parameter_names():
    names = {name for name, _ in AttentionOnlyTransformer(V, T, 1).named_parameters()}
    assert names == {"output", "layers.0.query_key", "layers.0.value", "layers.0.position"}


def test_micro_batches_accumulate_to_the_same_gradient(tokens):
    model = irregular_model()
    loss, gradients = loss_and_gradients(model, *tokens, micro_batch=N)
    for size in (1, 3):
        other_loss, others = loss_and_gradients(model, *tokens, micro_batch=size)
        assert other_loss.item() == pytest.approx(loss.item(), rel=1e-13)
        for name, gradient in gradients.items():
            assert largest_error(others[name], gradient) < 1e-12, name


def test_gradients_by_finite_differences(tokens):
    """Every entry of every parameter, away from zero, by central differences."""
    model = irregular_model(num_layers=2)
    _, gradients = loss_and_gradients(model, *tokens)
    step = 1e-5
    for name, parameter in model.named_parameters():
        estimate = torch.zeros_like(parameter).flatten()
        flat = parameter.data.view(-1)
        with torch.no_grad():
            for i in range(len(flat)):
                kept = flat[i].item()
                flat[i] = kept + step
                up = token_loss(model(tokens[0]), tokens[1])
                flat[i] = kept - step
                down = token_loss(model(tokens[0]), tokens[1])
                flat[i] = kept
                estimate[i] = (up - down) / (2 * step)
        assert largest_error(gradients[name].flatten(), estimate) < 1e-7, name


def test_bad_input_is_refused(tokens):
    with pytest.raises(ValueError, match="num_layers must be at least 1"):
        AttentionOnlyTransformer(V, T, 0)
    with pytest.raises(ValueError, match="init_std"):
        AttentionOnlyTransformer(V, T, 1, init_std=-1.0)
    with pytest.raises(ValueError, match="at most 5 positions"):
        AttentionOnlyTransformer(V, T, 1)(torch.zeros(1, T + 1, dtype=torch.long))
    with pytest.raises(ValueError, match="must be alike"):
        loss_and_gradients(irregular_model(), tokens[0], tokens[1][:, 1:])


def test_every_target_counts():
    model = AttentionOnlyTransformer(5, 3, 1)
    tokens = torch.zeros(1, 3, dtype=torch.long)
    with pytest.raises(IndexError):  # torch would pass over -100
        loss_and_gradients(model, tokens, tokens - 100)
