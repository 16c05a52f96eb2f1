"""lib.paths: equal to the dense model for every depth, scale, shape and micro-batch, and free of host reads."""

import itertools

import pytest
import torch

from lib import paths
from lib.model import AttentionOnlyTransformer
from lib.model import loss_and_gradients as dense_loss_and_gradients
from lib.paths import along_paths, distinct_tokens, loss_and_gradients
from tests import dense

V, T, N = 11, 7, 13
DEPTHS = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def tokens():
    return dense.split(dense.irregular_tokens(N, T, V))


def model_of(num_layers, scale, seq_len=T, vocab_size=V):
    return AttentionOnlyTransformer(
        vocab_size, seq_len, num_layers, init_std=scale, seed=3
    ).double()


def in_float32(model):
    """A float32 copy of `model`, whose own weights are rounded to float32 so that both hold the same."""
    other = AttentionOnlyTransformer(model.vocab_size, model.seq_len, len(model.layers))
    other.load_state_dict(model.state_dict())
    model.load_state_dict(other.state_dict())
    return other


def relative_errors(found, expected):
    """Per parameter, and for the loss, the norm of the difference over the norm; absolute where that is 0."""
    (loss, gradients), (expected_loss, expected_gradients) = found, expected
    assert list(gradients) == list(expected_gradients)
    pairs = {name: (gradients[name], expected_gradients[name]) for name in gradients}
    pairs["loss"] = loss, expected_loss
    errors = {}
    for name, (a, b) in pairs.items():
        assert a.shape == b.shape and not a.requires_grad, name
        norm = b.double().norm().item()
        errors[name] = (a.double() - b.double()).norm().item() / (norm or 1)
    return errors


def assert_equal(found, expected, tolerance):
    errors = relative_errors(found, expected)
    assert max(errors.values()) < tolerance, errors


@pytest.mark.parametrize("scale", [0.0, 1e-6, 0.02, 0.6])
@pytest.mark.parametrize("num_layers", DEPTHS)
def test_equal_to_the_dense_model(tokens, num_layers, scale):
    model = model_of(num_layers, scale)
    single = in_float32(model)
    expected = dense_loss_and_gradients(model, *tokens)
    assert_equal(loss_and_gradients(model, *tokens), expected, 1e-11)
    found = loss_and_gradients(single, *tokens)
    assert all(a.dtype == torch.float32 for a in (found[0], *found[1].values()))
    tolerance = 1e-5
    if (num_layers, scale) == (
        4,
        0.6,
    ):  # this deep, large weights amplify rounding, the dense model's too
        rounding = relative_errors(dense_loss_and_gradients(single, *tokens), expected)
        tolerance = 3 * max(rounding.values())
    assert_equal(found, expected, tolerance)


@pytest.mark.parametrize("num_layers", DEPTHS)
def test_equal_in_early_training(tokens, num_layers):
    """After five steps from zero the query-key gradients are tiny next to the output's."""
    model = dense.trained(tokens, V, num_layers, learning_rate=0.05, steps=5)
    single = in_float32(model)
    expected = dense_loss_and_gradients(model, *tokens)
    norms = {name: gradient.norm().item() for name, gradient in expected[1].items()}
    assert 0 < norms["layers.0.query_key"] < 1e-5 * norms["output"]
    assert_equal(loss_and_gradients(model, *tokens), expected, 1e-10)
    assert_equal(loss_and_gradients(single, *tokens), expected, 1e-5)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_sequences_shorter_than_the_model(tokens, length):
    model, (inputs, targets) = model_of(3, 0.5), tokens
    batch = inputs[:, :length], targets[:, :length]
    found = loss_and_gradients(model, *batch)
    assert_equal(found, dense_loss_and_gradients(model, *batch), 1e-11)
    assert found[1]["layers.0.position"][length:].abs().max() == 0


def test_repeated_and_distinct_tokens():
    """One token all along, two in turn, a late newcomer, and no token twice, in one micro-batch."""
    rows = [[4] * T, [0, 9] * 4, [1] * (T - 1) + [0], list(range(V))]
    inputs = torch.tensor([row[:T] for row in rows])
    targets = (inputs * 3 + 1) % V
    model = model_of(3, 0.5)
    for micro_batch in (1, 4):
        found = loss_and_gradients(model, inputs, targets, micro_batch=micro_batch)
        assert_equal(found, dense_loss_and_gradients(model, inputs, targets), 1e-11)


def test_a_vocabulary_smaller_than_the_sequence():
    inputs, targets = dense.split(dense.irregular_tokens(5, 12, 3))
    model = model_of(2, 0.5, seq_len=12, vocab_size=3)
    expected = dense_loss_and_gradients(model, inputs, targets)
    assert_equal(loss_and_gradients(model, inputs, targets), expected, 1e-11)


def test_micro_batches_give_the_same_sum(tokens):
    model = model_of(3, 0.5)
    whole = loss_and_gradients(model, *tokens, micro_batch=N)
    for micro_batch in (1, 3, "auto"):
        assert_equal(loss_and_gradients(model, *tokens, micro_batch=micro_batch), whole, 1e-12)


def test_the_model_is_left_alone(tokens):
    model = model_of(2, 0.5)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    _, gradients = loss_and_gradients(model, *tokens)
    gradients["output"].zero_()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) and parameter.grad is None, name


@pytest.mark.parametrize("num_layers", [1, 3])
def test_float32_does_not_drift_in_large_batches(num_layers):
    """Frequent tokens receive tens of thousands of nearly equal addends of one sign."""
    sequences, length, vocab_size = 4000, 16, 20
    inputs, targets = dense.split(dense.irregular_tokens(sequences, length, vocab_size))
    model = model_of(num_layers, 0.01, length, vocab_size)
    single = in_float32(model)
    expected = loss_and_gradients(model, inputs, targets)
    assert_equal(loss_and_gradients(single, inputs, targets, micro_batch=50), expected, 5e-6)


def test_along_paths_is_in_binary_order():
    generator = torch.Generator().manual_seed(0)
    first, second, third, matrix = torch.randn(4, V, V, generator=generator, dtype=torch.float64)
    found = along_paths([first, second, third], matrix)
    assert len(found) == 8 and found[0] is matrix
    for index, (on3, on2, on1) in enumerate(itertools.product([False, True], repeat=3)):
        product = torch.eye(V, dtype=torch.float64)
        for on, value in ((on1, first), (on2, second), (on3, third)):
            product = product @ value if on else product
        torch.testing.assert_close(found[index], product @ matrix)


def test_distinct_tokens_by_loops(tokens):
    local, distinct, seen = distinct_tokens(tokens[0])
    for n, row in enumerate(tokens[0].tolist()):
        order = list(dict.fromkeys(row))
        assert local[n].tolist() == [order.index(token) for token in row]
        assert distinct[n].tolist() == order + [0] * (T - len(order))
        assert seen[n].tolist() == [len(set(row[: t + 1])) for t in range(T)]


def test_bounds_in_place_of_counts(tokens, monkeypatch):
    """Off the CPU the number of distinct tokens is only bounded; that changes the work, not the result."""
    model = model_of(3, 0.5)
    expected = loss_and_gradients(model, *tokens)
    counted = paths._blocks
    monkeypatch.setattr(paths, "_blocks", lambda seen, size: counted(seen.to("meta"), size))
    assert_equal(loss_and_gradients(model, *tokens), expected, 1e-12)


def test_nothing_reads_the_data_on_the_host(tokens):
    """On the meta device tensors hold no data, so whatever looked at them would raise."""
    model = model_of(3, 0.5).to("meta")
    loss, gradients = loss_and_gradients(model, *(part.to("meta") for part in tokens))
    assert loss.device.type == "meta" and loss.shape == ()
    for name, parameter in model.named_parameters():
        assert gradients[name].shape == parameter.shape, name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda_without_waiting(tokens):
    model = model_of(3, 0.5)
    expected = loss_and_gradients(model, *tokens)
    model, batch = model.cuda(), [part.cuda() for part in tokens]
    loss_and_gradients(model, *batch)  # libraries start up
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss, gradients = loss_and_gradients(model, *batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = loss.cpu(), {name: gradient.cpu() for name, gradient in gradients.items()}
    assert_equal(found, expected, 1e-10)


def test_bad_input_is_refused(tokens):
    inputs, targets = tokens
    model = model_of(1, 0.0)
    with pytest.raises(ValueError, match="must be alike and not empty"):
        loss_and_gradients(model, inputs, targets[:, 1:])
    with pytest.raises(ValueError, match="must be alike and not empty"):
        loss_and_gradients(model, inputs[:0], targets[:0])
    with pytest.raises(ValueError, match="at most 7 positions"):
        loss_and_gradients(model, inputs.repeat(1, 2), targets.repeat(1, 2))
    with pytest.raises(ValueError, match="at most 7 positions"):
        loss_and_gradients(model, inputs[0], targets[0])


@pytest.mark.parametrize("token", [-1, V])
def test_tokens_outside_the_vocabulary_are_refused(tokens, token):
    for part in (0, 1):
        batch = [each.clone() for each in tokens]
        batch[part][2, 3] = token
        with pytest.raises((IndexError, RuntimeError)):
            loss_and_gradients(model_of(2, 0.5), *batch)


def test_threads_change_nothing_but_rounding_and_repeat_to_the_same_bits():
    transformer = AttentionOnlyTransformer(40, 15, 3, init_std=0.3, seed=2)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(40, (30, 16), generator=generator)
    batch = tokens[:, :-1], tokens[:, 1:]
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 3, 3):
            torch.set_num_threads(threads)
            found.append(loss_and_gradients(transformer, *batch, micro_batch=4))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    (loss, gradients), several, again = found
    assert abs(loss - several[0]) < 1e-6 * loss
    for name, expected in gradients.items():
        assert (several[1][name] - expected).norm() < 1e-6 * expected.norm()
        assert torch.equal(several[1][name], again[1][name])
