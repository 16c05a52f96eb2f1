"""lib.intervene: projections, changes of the loss to full relative precision, and what removal costs."""

import copy
import json
import math

import mpmath
import numpy as np
import pytest
import torch

from lib.intervene import (
    INTERVENTIONS,
    attention_visibility,
    descent_terms,
    document_losses,
    intervention_table,
    keep_component,
    loss_change,
    loss_changes,
    paired_interval,
    predicted_cost,
    predicted_model,
    remove_component,
    remove_random,
    softmax_change,
)
from lib.model import AttentionOnlyTransformer, loss_and_gradients, token_loss
from lib.statistics import corpus_statistics
from lib.theory import PARAMETERS, leading_coefficients, leading_terms
from tests.dense import irregular_tokens, split, trained

V, T, N, L = 7, 5, 9, 3
TOKENS = split(irregular_tokens(N, T, V))
STATISTICS = corpus_statistics(*TOKENS, V)
TERMS = leading_terms(STATISTICS)
DIRECTION = torch.arange(12, dtype=torch.float64).reshape(3, 4).sin()
WEIGHT = torch.arange(12, dtype=torch.float32).reshape(3, 4).cos()


def random_model(seed, **options):
    return AttentionOnlyTransformer(V, T, L, init_std=0.5, seed=seed).double()


def with_weights(model, changed):
    model = copy.deepcopy(model).double()
    with torch.no_grad():
        for name, weight in changed.items():
            dict(model.named_parameters())[name].copy_(weight)
    return model


# Projections -------------------------------------------------------------------------------------


def test_what_is_removed_and_what_is_kept_make_the_weight():
    removed, kept = remove_component(WEIGHT, DIRECTION), keep_component(WEIGHT, DIRECTION)
    assert removed.dtype == torch.float64
    torch.testing.assert_close(removed + kept, WEIGHT.double(), rtol=0, atol=1e-15)
    assert abs((removed * DIRECTION).sum()) < 1e-14
    torch.testing.assert_close(kept / kept[0, 1], DIRECTION / DIRECTION[0, 1])
    assert (kept * DIRECTION).sum().item() == pytest.approx((WEIGHT * DIRECTION).sum().item())
    torch.testing.assert_close(remove_component(WEIGHT, 5 * DIRECTION), removed)
    assert remove_component(3 * DIRECTION[0], DIRECTION[0]).abs().max() < 1e-15  # a vector, too


def test_a_random_direction_takes_away_the_same_norm():
    weight = WEIGHT.double()
    norm = (weight - remove_component(weight, DIRECTION)).norm().item()
    one, two = remove_random(weight, DIRECTION, 1), remove_random(weight, DIRECTION, 2)
    assert (weight - one).norm().item() == pytest.approx(norm, rel=1e-12)
    assert (weight - two).norm().item() == pytest.approx(norm, rel=1e-12)
    assert torch.equal(one, remove_random(weight, DIRECTION, 1)) and not torch.equal(one, two)
    drawn = torch.stack([weight - remove_random(weight, DIRECTION, s) for s in range(500)])
    assert drawn.mean(dim=0).norm().item() < 4 * norm / math.sqrt(500)  # it prefers no direction


@pytest.mark.parametrize("function", [remove_component, keep_component])
def test_no_direction_is_refused(function):
    with pytest.raises(ValueError, match="The direction is zero"):
        function(WEIGHT, 0 * DIRECTION)
    with pytest.raises(ValueError, match="must be alike"):
        function(WEIGHT, DIRECTION.T)


# Changes of the loss -----------------------------------------------------------------------------

NAMES = [
    ["output"],
    ["layers.0.value"],
    ["layers.2.value"],
    ["layers.0.query_key"],
    ["layers.2.query_key"],
    ["layers.1.position"],
    [f"layers.{i}.query_key" for i in range(L)],
    [name for name, _ in random_model(0).named_parameters()],
]


@pytest.mark.parametrize("names", NAMES, ids=lambda names: f"{names[0]}-{len(names)}")
def test_equals_the_difference_of_two_losses_where_that_is_visible(names):
    model, other = random_model(1), dict(random_model(2).named_parameters())
    changed = {name: other[name] for name in names}
    found = loss_change(model, changed, *TOKENS, micro_batch=4)
    after = with_weights(model, changed)
    plain = document_losses(after, *TOKENS) - document_losses(model, *TOKENS)
    torch.testing.assert_close(found, plain, rtol=1e-11, atol=1e-13)
    assert found.abs().max() > 1e-3


@pytest.mark.parametrize("name", ["output", "layers.0.query_key", "layers.1.value"])
def test_no_change_is_too_large(name):
    model = random_model(1)
    changed = {name: 3e3 * dict(random_model(2).named_parameters())[name]}
    found = loss_change(model, changed, *TOKENS)
    plain = document_losses(with_weights(model, changed), *TOKENS) - document_losses(model, *TOKENS)
    torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-10)
    assert name == "layers.0.query_key" or found.abs().max() > 700  # where an exponential overflows


def test_losses_of_documents_are_those_of_the_model():
    model = random_model(3)
    losses = document_losses(model, *TOKENS, micro_batch=2)
    assert losses.shape == (N,)
    expected = token_loss(model(TOKENS[0]), TOKENS[1]).item()
    assert losses.mean().item() == pytest.approx(expected, rel=1e-14)


def test_many_changes_in_any_micro_batches_are_each_by_itself():
    model, other = random_model(1), random_model(2)
    changes = [{name: weight} for name, weight in other.named_parameters()]
    together = loss_changes(model, changes, *TOKENS, micro_batch=2)
    assert together.shape == (len(changes), N)
    for row, changed in zip(together, changes, strict=True):
        torch.testing.assert_close(row, loss_change(model, changed, *TOKENS), rtol=1e-13, atol=0)
    assert not loss_change(model, dict(model.named_parameters()), *TOKENS).any()


def exact_losses(model, inputs, targets):
    """Loss of each document by the definition of the model, in mpmath numbers."""
    weights = {name: mpmath.matrix(w.tolist()) for name, w in model.named_parameters()}
    size, found = model.vocab_size, []
    for words, following in zip(inputs.tolist(), targets.tolist(), strict=True):
        length = len(words)
        hidden = mpmath.matrix(length, size)
        for t, word in enumerate(words):
            hidden[t, word] = 1
        for i in range(len(model.layers)):
            raw = hidden * weights[f"layers.{i}.query_key"] * hidden.T
            attention = mpmath.matrix(length, length)
            for t in range(length):
                row = [raw[t, k] + weights[f"layers.{i}.position"][t - k] for k in range(t + 1)]
                total = mpmath.fsum(map(mpmath.exp, row))
                for k, score in enumerate(row):
                    attention[t, k] = mpmath.exp(score) / total
            hidden = hidden + attention * hidden * weights[f"layers.{i}.value"]
        logits = hidden * weights["output"]
        losses = [
            mpmath.log(mpmath.fsum(mpmath.exp(logits[t, j]) for j in range(size))) - logits[t, y]
            for t, y in enumerate(following)
        ]
        found.append(mpmath.fsum(losses) / length)
    return found


def tiny(eta, steps):
    tokens = split(irregular_tokens(5, 4, 3, seed=2))
    return tokens, trained(tokens, 3, 2, eta, steps), leading_terms(corpus_statistics(*tokens, 3))


@pytest.mark.parametrize("intervention", INTERVENTIONS)
@pytest.mark.parametrize("names", ["layers.0.query_key", "layers.1.position", "layers.0.value"])
def test_equals_sixty_digits_where_a_difference_of_losses_is_rounding(names, intervention):
    tokens, model, terms = tiny(0.001, 5)
    weight = dict(model.named_parameters())[names]
    make = dict(zip(INTERVENTIONS, (remove_component, keep_component, remove_random), strict=True))
    extra = (4,) if intervention == "random" else ()
    changed = {names: make[intervention](weight, terms[names.split(".")[-1]], *extra)}
    after = with_weights(model, changed)
    with mpmath.workdps(60):
        pairs = zip(exact_losses(after, *tokens), exact_losses(model, *tokens), strict=True)
        exact = torch.tensor([float(new - old) for new, old in pairs], dtype=torch.float64)
    found = loss_change(model, changed, *tokens)
    assert 0 < exact.abs().max() < 1e-8
    # A document of one repeated word feels no position at all: there, rounding stands against 0.
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-12 * exact.abs().max().item())
    if "value" not in names:
        assert exact.abs().max() < 1e-17
        plain = document_losses(after, *tokens) - document_losses(model, *tokens)
        assert (plain - exact).abs().max() > 0.5 * exact.abs().max()


def test_softmax_change_at_every_size():
    scores = torch.tensor([[0.3, -1.0, 2.0, 0.0]], dtype=torch.float64)
    p = scores.softmax(dim=-1)
    step = torch.tensor([[1.0, -2.0, 0.5, 3.0]], dtype=torch.float64)
    torch.testing.assert_close(softmax_change(p, step), (scores + step).softmax(-1) - p)
    linear = p * (step - (p * step).sum())
    for size in (0.3, 0.34, 10, 1e3):  # on both sides of where it changes its way
        expected = (scores + size * step).softmax(-1) - p
        torch.testing.assert_close(softmax_change(p, size * step), expected, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(softmax_change(p, 1e-200 * step) / 1e-200, linear)
    # A constant changes nothing, not even digits (these sums are exact); masked entries feel none.
    size = 2.0**-40
    moved = softmax_change(p, size * step + 0.5) / size
    torch.testing.assert_close(moved, linear, rtol=1e-9, atol=0)
    nothing = torch.zeros(1, 1, dtype=torch.float64)
    masked, far = torch.cat([p, nothing], -1), torch.cat([size * step - 800, nothing], -1)
    moved = softmax_change(masked, far) / size
    torch.testing.assert_close(moved[:, :4], linear, rtol=1e-9, atol=0)
    assert moved[0, 4] == 0


def test_probabilities_too_small_to_be_written_still_count():
    model = AttentionOnlyTransformer(3, 2, 1).double()
    tokens = torch.zeros(1, 2, dtype=torch.long)
    targets = torch.ones_like(tokens)
    with torch.no_grad():
        model.output[0, 1] = 800.0  # the other two have a probability of 0 in float64
    found = loss_change(model, {"output": torch.zeros(3, 3)}, tokens, targets)
    assert found.item() == pytest.approx(math.log(3), rel=1e-12)
    with torch.no_grad():
        model.layers[0].position[0] = 800.0
    with pytest.raises(FloatingPointError, match="attention probability is too small"):
        loss_change(model, {"output": torch.zeros(3, 3)}, tokens, targets)


def test_bad_changes_are_one_sentence():
    model = random_model(1)
    with pytest.raises(ValueError, match="no parameter 'layers.3.value'"):
        loss_change(model, {"layers.3.value": torch.zeros(V, V)}, *TOKENS)
    with pytest.raises(ValueError, match="'output' of shape"):
        loss_change(model, {"output": torch.zeros(V)}, *TOKENS)
    with pytest.raises(ValueError, match="must be alike"):
        loss_change(model, {"output": model.output}, TOKENS[0], TOKENS[1][:, 1:])
    with pytest.raises(FloatingPointError, match="weight is not finite"):
        loss_change(model, {"output": math.nan * model.output}, *TOKENS)


def test_a_float32_model_is_taken_for_the_numbers_it_holds():
    model = random_model(1).float()
    changed = {"layers.1.value": model.layers[0].value}
    assert torch.equal(
        loss_change(model, changed, *TOKENS), loss_change(model.double(), changed, *TOKENS)
    )
    assert model.output.dtype == torch.float64 and model.output.requires_grad


# What removal must cost --------------------------------------------------------------------------

RATES = (0.04, 0.02, 0.01, 0.005)
PLACES = {
    "output": ["output"],
    "value": ["layers.1.value"],
    "query_key": ["layers.1.query_key"],
    "position": ["layers.0.position"],
}


@pytest.fixture(scope="module")
def costs():
    """{(kind, intervention): measured costs over RATES} after five full-batch steps, and predictions."""
    found, expected = {}, {kind: [] for kind in PARAMETERS}
    for rate in RATES:
        model = trained(TOKENS, V, L, rate, 5)
        weights = dict(model.named_parameters())
        for kind, names in PLACES.items():
            every = names if kind == "output" else [f"layers.{i}.{kind}" for i in range(L)]
            for label, make, chosen in (
                ("remove", remove_component, names),
                ("keep", keep_component, names),
                ("remove all", remove_component, every),
            ):
                changed = {name: make(weights[name], TERMS[kind]) for name in chosen}
                cost = loss_change(model, changed, *TOKENS).mean().item()
                found.setdefault((kind, label), []).append(cost)
            expected[kind].append(predicted_cost(STATISTICS, 5, rate)[kind])
    return found, expected


def slope(values):
    return np.polyfit(np.log(RATES), np.log(values), 1)[0]


@pytest.mark.parametrize(
    "kind, order", [("output", 1), ("value", 3), ("query_key", 7), ("position", 7)]
)
def test_removal_costs_twice_the_weights_order_less_one(costs, kind, order):
    found, expected = costs
    ratios = np.array(found[kind, "remove"]) / expected[kind]
    assert abs(slope(found[kind, "remove"]) - order) < 0.05
    gaps = 1 - ratios
    assert abs(gaps[-1]) < 0.01
    assert 1.6 < gaps[-2] / gaps[-1] < 2.2  # what is left falls with the learning rate
    layers = 1 if kind == "output" else L
    together = np.array(found[kind, "remove all"]) / expected[kind] / layers
    assert abs(together[-1] - 1) < 0.01
    # What lies outside of the leading term is one order smaller, and so is what asks for it.
    assert abs(slope(found[kind, "keep"]) - (order + 2)) < 0.1
    assert min(found[kind, "keep"]) > 0


def test_prediction_is_the_formula_of_the_design():
    s, eta = 6, 0.03
    c = leading_coefficients(s, eta)
    norms = {name: (term**2).sum().item() for name, term in TERMS.items()}
    attention = c["query_key"] * s * eta * 15 * eta**2
    assert predicted_cost(STATISTICS, s, eta) == pytest.approx(
        {
            "output": s * eta * norms["output"],
            "value": s * eta * 15 * eta**2 * norms["value"],
            "query_key": attention * norms["query_key"],
            "position": attention * norms["position"],
        },
        rel=1e-12,
    )
    assert predicted_cost(STATISTICS, 2, eta)["query_key"] == 0


def test_another_text_asks_for_its_own_terms():
    own = descent_terms(STATISTICS, *TOKENS)
    for name, term in TERMS.items():
        torch.testing.assert_close(own[name], term, rtol=1e-12, atol=1e-18)
    other = split(irregular_tokens(6, T, V, seed=5))
    asked, rate = descent_terms(STATISTICS, *other), 0.002
    model = trained(TOKENS, V, L, rate, 5)
    _, gradients = loss_and_gradients(model, *other)
    passed = {"output": 1, "value": 5 * rate, "query_key": 50 * rate**3, "position": 50 * rate**3}
    for kind, (name,) in PLACES.items():
        direction = -gradients[name] / passed[kind]
        assert ((direction - asked[kind]).norm() / asked[kind].norm()).item() < 0.03
    costs = predicted_cost(STATISTICS, 5, rate, text=asked)
    for kind, names in PLACES.items():
        changed = {
            n: remove_component(dict(model.named_parameters())[n], TERMS[kind]) for n in names
        }
        assert loss_change(model, changed, *other).mean().item() == pytest.approx(
            costs[kind], rel=0.05
        )


# Intervals and the table -------------------------------------------------------------------------


def test_the_interval_covers_the_mean_as_often_as_it_says():
    generator, hits = np.random.default_rng(0), 0
    for trial in range(200):
        low, high = paired_interval(generator.exponential(size=60) - 1, trial, resamples=500)
        hits += low < 0 < high
    assert 0.87 <= hits / 200 <= 0.99


def test_an_interval_is_repeatable_scales_and_needs_two_documents():
    values = torch.arange(30, dtype=torch.float64).sin()
    assert paired_interval(values, 3) == paired_interval(values, 3) != paired_interval(values, 4)
    assert paired_interval(values * 2.0**-60, 3) == pytest.approx(
        tuple(2.0**-60 * edge for edge in paired_interval(values, 3)), rel=1e-12
    )
    assert paired_interval(torch.full((9,), 0.25)) == (0.25, 0.25)
    with pytest.raises(ValueError, match="two documents or more"):
        paired_interval(values[:1])


def test_the_table_holds_every_intervention_on_every_text():
    model, held = trained(TOKENS, V, 2, 0.01, 5), split(irregular_tokens(6, T, V, seed=5))
    rows = intervention_table(
        model, STATISTICS, 5, 0.01, {"train": TOKENS, "held_out": held}, micro_batch=4
    )
    keys = [tuple(row[k] for k in ("parameter", "layer", "intervention", "text")) for row in rows]
    places = [("output", 0)] + [(k, i) for k in PARAMETERS[1:] for i in (1, 2, "all")]
    expected = {(*p, i, t) for p in places for i in INTERVENTIONS for t in ("train", "held_out")}
    assert len(keys) == len(expected) and set(keys) == expected
    found = dict(zip(keys, rows, strict=True))
    for row in rows:
        assert row["low"] <= row["mean"] <= row["high"]
        assert row["documents"] == (N if row["text"] == "train" else 6)
        if row["intervention"] == "remove":
            assert row["mean"] == pytest.approx(row["predicted"], rel=0.05)
        else:
            assert row["predicted"] is None
    changed = {"layers.1.value": remove_component(model.layers[1].value, TERMS["value"])}
    direct = loss_change(model, changed, *held).mean().item()
    assert found["value", 2, "remove", "held_out"]["mean"] == pytest.approx(direct, rel=1e-12)
    both = {
        f"layers.{i}.value": keep_component(model.layers[i].value, TERMS["value"]) for i in (0, 1)
    }
    direct = loss_change(model, both, *TOKENS).mean().item()
    assert found["value", "all", "keep", "train"]["mean"] == pytest.approx(direct, rel=1e-12)
    one_layer = intervention_table(
        trained(TOKENS, V, 1, 0.01, 4), STATISTICS, 4, 0.01, {"t": TOKENS}
    )
    assert {row["layer"] for row in one_layer} == {0, 1}


# What attention shows ----------------------------------------------------------------------------


def test_float32_sees_no_change_of_attention_until_scores_pass_its_resolution():
    small, large = (trained(TOKENS, V, 2, rate, 5) for rate in (0.01, 1.0))
    for row in attention_visibility(small, TOKENS[0], micro_batch=2):
        assert 0 < row["score"] < 1e-9 and row["float32"] == 0.0
        assert 0 < row["float64"] < row["score"] * 2
    for row, weights in zip(attention_visibility(large, TOKENS[0]), large.layers, strict=True):
        assert row["float32"] == pytest.approx(row["float64"], abs=1e-6)
        assert row["float64"] > 1e-4
        scores = weights.query_key[TOKENS[0][:, :, None], TOKENS[0][:, None, :]]
        centred = [
            (line[: t + 1] - line[: t + 1].mean()).abs().max().item()
            for text in scores
            for t, line in enumerate(text)
        ]
        assert row["score"] == pytest.approx(max(centred), rel=1e-12)
    uniform = torch.ones(T, T).tril().double() / torch.arange(1, T + 1)[:, None]
    plain = (large.attention(TOKENS[0]) - uniform).abs().amax(dim=(1, 2, 3))
    found = [row["float64"] for row in attention_visibility(large, TOKENS[0])]
    assert found == pytest.approx(plain.tolist(), rel=1e-10)


def test_attention_of_the_predicted_model_is_that_of_the_trained_one():
    step, rate = 6, 1e-3
    models = (predicted_model(STATISTICS, step, rate, L), trained(TOKENS, V, L, rate, step))
    expected, found = (attention_visibility(model, TOKENS[0]) for model in models)
    for row, other in zip(expected, found, strict=True):
        assert row["layer"] == other["layer"]
        for key in ("score", "float64"):
            assert row[key] == pytest.approx(other[key], rel=0.01, abs=0) and row[key] > 0
    found_weights = dict(models[1].named_parameters())
    for name, weight in models[0].named_parameters():
        learned = found_weights[name]
        assert 0 < (weight - learned).norm() < 0.01 * learned.norm(), name
    fewer = attention_visibility(predicted_model(STATISTICS, step - 1, rate, L), TOKENS[0])
    assert fewer[0]["score"] < 0.5 * found[0]["score"]


# The run notebook --------------------------------------------------------------------------------

TINY = {
    "vocab_size": 40,
    "seq_len": 8,
    "max_sequences": 40,
    "batch_size": 20,
    "num_layers": 2,
    "learning_rate": 0.1,
    "steps": 4,
    "samples": 6,
}


@pytest.fixture
def run_notebook(root, tmp_path, monkeypatch):
    """Executes book/runs/intervene with parameters; returns the records by folder name."""
    papermill = pytest.importorskip("papermill")
    monkeypatch.setenv("TQDM_DISABLE", "1")
    monkeypatch.setenv("LEADING_TERMS_CACHE", str(tmp_path / "cache"))
    notebook = root / "book" / "runs" / "intervene.ipynb"

    def execute(**parameters):
        given = TINY | parameters | {"results_root": str(tmp_path / "results")}
        try:
            papermill.execute_notebook(
                notebook, tmp_path / "out.ipynb", given, cwd=notebook.parent, progress_bar=False
            )
        except papermill.PapermillExecutionError as error:
            raise RuntimeError(error.evalue) from error
        folders = (tmp_path / "results").iterdir()
        return {f.name: json.loads((f / "summary.json").read_text()) for f in folders}

    return execute


@pytest.mark.parametrize(
    "parameters, sentence",
    [
        ({"sample": 6}, "Unknown parameter sample"),
        ({"samples": 1}, "samples must be a whole number, 2 or more"),
        ({"holdout": 1.5}, "holdout must be below 1"),
    ],
)
def test_the_run_notebook_refuses_bad_parameters(run_notebook, parameters, sentence):
    with pytest.raises(RuntimeError, match=sentence):
        run_notebook(**parameters)


@pytest.mark.slow
def test_the_run_notebook_trains_and_measures_and_says_when_weights_are_gone(
    run_notebook, tmp_path
):
    records = run_notebook()
    (name,) = [name for name in records if name.startswith("intervene-")]
    assert name.removeprefix("intervene-").removesuffix("-samples=6") in records  # the training run
    found = records[name]
    rows = found["interventions"]
    assert len(rows) == (1 + 3 * 3) * 3 * 2 and all(row["documents"] == 6 for row in rows)
    assert {row["text"] for row in rows} == set(found["loss"]) == {"train", "held_out"}
    assert found["step"] == 4 and len(found["attention"]) == 2
    removed = next(row for row in rows if row["text"] == "held_out")
    assert removed["predicted"] == found["predicted_on"]["held_out"]["output"]
    assert removed["mean"] == pytest.approx(removed["predicted"], rel=0.1)

    train_record = tmp_path / "results" / name.removeprefix("intervene-").removesuffix("-samples=6")
    before = {path.name: path.read_bytes() for path in train_record.iterdir()}
    for path in (tmp_path / "cache" / "checkpoints").iterdir():
        path.unlink()
    with pytest.raises(RuntimeError, match="weights are gone .* with retrain=True"):
        run_notebook(samples=7)
    again = run_notebook(samples=7, retrain=True)[name.replace("samples=6", "samples=7")]
    assert again["predicted"] == found["predicted"]  # the same text, the same statistics
    assert {path.name: path.read_bytes() for path in train_record.iterdir()} == before

    for path in (tmp_path / "cache" / "checkpoints").iterdir():
        path.unlink()  # those of the second training, whose record still says that it is finished
    third = run_notebook(samples=8, retrain=True)[name.replace("samples=6", "samples=8")]
    assert len(third["interventions"]) == len(rows)


@pytest.mark.slow
def test_the_run_notebook_can_predict_without_training(run_notebook):
    ((name, found),) = run_notebook(
        predict_only=True, steps=320, learning_rate=0.005, seq_len=24
    ).items()
    assert name.endswith("predict_only=true-samples=6") and "interventions" not in found
    assert [row["layer"] for row in found["attention"]] == [1, 2]
    assert found["entries"][0]["pair"] == ". → he" and found["entries"][0]["output"] != 0
    attention = leading_coefficients(320, 0.005)["query_key"]
    value = leading_coefficients(320, 0.005)["value"] * 320 * 0.005
    expected = attention * value * found["squared_norms"]["query_key"]
    assert found["predicted"]["query_key"] == pytest.approx(expected, rel=1e-12)
