"""Interventions on weights, and what they do to the loss, to full relative precision.

A direction is taken out of a weight, or alone is kept, or as much of it is taken out along a random
direction. Early in training such a change moves the loss by 1e-7 or 1e-17 nats, while two losses near 8
differ by at least 1e-15 in float64: subtracting them shows rounding. So differences are carried
through the model from the start and no two large numbers are ever subtracted. Source of the
intervention: the paper's appendix on causal intervention; the article, section 6. What it must cost is
derived in the chapter `direction-is-not-behaviour`. All numbers are nats per token, in float64.
"""

import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lib.model import MICRO_BATCH_ELEMENTS, AttentionOnlyTransformer
from lib.statistics import CorpusStatistics, PairCounts, QueryKeyCounts, usefulness
from lib.theory import PARAMETERS, leading_coefficients, leading_terms, predict

INTERVENTIONS = ("remove", "keep", "random")


# --- what is done to a weight --------------------------------------------------------------------


def _with_projection(weight: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    weight = weight.detach().to(torch.float64)
    direction = direction.detach().to(weight)
    if weight.shape != direction.shape:
        raise ValueError(
            f"weight {tuple(weight.shape)} and direction {tuple(direction.shape)} must be alike."
        )
    square = (direction * direction).sum()
    if not (square > 0 and square.isfinite()):
        raise ValueError("The direction is zero or not finite: there is nothing to project on.")
    return weight, (weight * direction).sum() / square * direction


def remove_component(weight: Tensor, direction: Tensor) -> Tensor:
    """weight - <weight, direction> direction / <direction, direction>, in float64; any shape.

    Raises ValueError for unlike shapes or a direction that is zero.
    """
    weight, projection = _with_projection(weight, direction)
    return weight - projection


def keep_component(weight: Tensor, direction: Tensor) -> Tensor:
    """Only the projection of `weight` on `direction`, in float64; raises as `remove_component`."""
    return _with_projection(weight, direction)[1]


def remove_random(weight: Tensor, direction: Tensor, seed: int) -> Tensor:
    """weight - n u: n the norm of what `remove_component` would take away, u a random direction.

    u is uniform over all directions of the weight's shape (Gaussian entries over their norm), drawn
    from `seed`. The weight is not projected on u, since almost nothing of it lies there: the result is
    as far from `weight` as with `remove_component`. Raises as `remove_component`.
    """
    weight, projection = _with_projection(weight, direction)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight.device)
    return weight - projection.norm() / drawn.norm() * drawn


# --- what that does to the loss ------------------------------------------------------------------


def _growth(
    probabilities: Tensor, difference: Tensor, masked=None
) -> tuple[Tensor, Tensor, Tensor]:
    """The differences d less their mean, p expm1(d), and where d is large, [..., K], [..., K], [..., 1].

    A softmax ignores the mean; without it the sum of p expm1(d) is small of second order. Where d
    passes 1, nothing is lost by subtracting, and p expm1(d), which could overflow, is left at 0. What is
    `masked` [..., K] has no say in that.
    """
    centred = difference - (probabilities * difference).sum(dim=-1, keepdim=True)
    felt = centred if masked is None else centred.masked_fill(masked, 0.0)
    large = felt.abs().amax(dim=-1, keepdim=True) > 1
    return centred, probabilities * felt.masked_fill(large, 0.0).expm1(), large


def softmax_change(probabilities: Tensor, difference: Tensor) -> Tensor:
    """softmax(scores + difference) - probabilities, both [..., K], where probabilities = softmax(scores).

    With d the difference less its mean and m = sum p expm1(d), this is p (expm1(d) - m) / (1 + m):
    as exact for differences of 1e-300 as for those of 1. Where a probability is 0 because the
    entry is masked, the difference must be finite.
    """
    _, growth, large = _growth(probabilities, difference, probabilities == 0)
    total = growth.sum(dim=-1, keepdim=True)
    small = (growth - probabilities * total) / (1 + total)
    plain = (probabilities.log() + difference).softmax(dim=-1) - probabilities
    return torch.where(large, plain, small)


def _loss_change(log_probabilities: Tensor, difference: Tensor, targets: Tensor) -> Tensor:
    """Change of the loss [n, T] when the logits move by `difference` [n, T, V]."""
    # Nothing is masked: a probability that is 0 here is only too small to be written.
    centred, growth, large = _growth(log_probabilities.exp(), difference)
    normaliser = growth.sum(dim=-1).log1p()
    if large.any():
        plain = (log_probabilities + centred).logsumexp(dim=-1)
        normaliser = torch.where(large.squeeze(-1), plain, normaliser)
    return normaliser - centred.gather(-1, targets[:, :, None]).squeeze(-1)


@dataclass
class _Pass:
    """The unchanged model on one micro-batch [n, T], float64: what every change is set against."""

    hidden: list[Tensor]  # [n, T, V] before each layer and after the last
    read: list[Tensor]  # hidden @ query_key of each layer
    sent: list[Tensor]  # hidden @ value
    scores: list[Tensor]  # [n, T, T], the future at 0
    attention: list[Tensor]  # [n, T, T]
    log_probabilities: Tensor  # [n, T, V]

    @classmethod
    def of(cls, model, inputs: Tensor) -> "_Pass":
        hidden, read, sent, scores, attention = [model.embed(inputs)], [], [], [], []
        lag, future = _lags(inputs)
        for layer in model.layers:
            read.append(hidden[-1] @ layer.query_key)
            sent.append(hidden[-1] @ layer.value)
            raw = read[-1] @ hidden[-1].mT + layer.position[lag]
            scores.append(raw.masked_fill(future, 0.0))
            attention.append(raw.masked_fill(future, float("-inf")).softmax(dim=-1))
            hidden.append(hidden[-1] + attention[-1] @ sent[-1])
        logits = hidden[-1] @ model.output
        return cls(hidden, read, sent, scores, attention, logits.log_softmax(dim=-1))


def _lags(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Lag [T, T] (0 in the future) and where the future is [T, T]."""
    steps = torch.arange(inputs.shape[1], device=inputs.device)
    lag = steps[:, None] - steps[None, :]
    return lag.clamp(min=0), lag < 0


def _token_changes(model, base: _Pass, changed: dict[str, Tensor], inputs, targets) -> Tensor:
    """Change of the loss of each token [n, T] when the parameters that `changed` names become it."""
    weights = dict(model.named_parameters())
    # Made anew for every micro-batch: next to the products below this costs nothing, and no memory.
    change = {name: new.detach().to(weights[name]) - weights[name] for name, new in changed.items()}
    moved = torch.zeros(())  # what the hidden state has moved by; a scalar while nothing has
    lag, future = _lags(inputs)
    for i, layer in enumerate(model.layers):
        query_key, value, position = (
            change.get(f"layers.{i}.{name}") for name in ("query_key", "value", "position")
        )
        before, attention = base.hidden[i], base.attention[i]
        after = before + moved
        # h' W' h'^T - h W h^T, product by product; likewise h' V' - h V.
        scores = sent = torch.zeros(())
        if query_key is not None:
            scores = scores + after @ query_key @ after.mT
        if value is not None:
            sent = sent + after @ value
        if moved.ndim:
            scores = scores + moved @ layer.query_key @ after.mT + base.read[i] @ moved.mT
            sent = sent + moved @ layer.value
        if position is not None:
            scores = scores + position[lag]
        if scores.ndim:
            shift = scores.expand_as(attention).masked_fill(future, 0.0)
            moved = moved + softmax_change(attention, shift) @ (base.sent[i] + sent)
        if sent.ndim:
            moved = moved + attention @ sent
    logits = torch.zeros_like(base.log_probabilities)
    if moved.ndim:
        logits = logits + moved @ model.output
    if "output" in change:
        logits = logits + (base.hidden[-1] + moved) @ change["output"]
    return _loss_change(base.log_probabilities, logits, targets)


def _double(model) -> AttentionOnlyTransformer:
    return copy.deepcopy(model).double().requires_grad_(False)


def _micro_batches(model, micro_batch, *tensors):
    if len({t.shape for t in tensors}) > 1 or tensors[0].ndim != 2 or tensors[0].numel() == 0:
        raise ValueError(
            "inputs and targets must be alike, [sequences, T] and not empty, got "
            + " and ".join(str(tuple(t.shape)) for t in tensors)
            + "."
        )
    if micro_batch == "auto":
        held = 3 * len(model.layers) + 6  # tensors of one micro-batch, each [n, T, V]
        elements = tensors[0].shape[1] * model.vocab_size * held
        micro_batch = max(1, 4 * MICRO_BATCH_ELEMENTS // elements)  # 256 MiB in float64
    device = model.output.device
    return zip(*(t.to(device).split(micro_batch) for t in tensors), strict=True)


@torch.no_grad()
def loss_changes(model, changes, inputs, targets, *, micro_batch="auto") -> Tensor:
    """Change of the loss of each document, [changes, N], in nats per token.

    Errors are near 1e-15 of the largest change of a token's loss, however small that is.
    `changes` is a list of {parameter name: new weight}; what a change does not name stays. `inputs`,
    `targets` [N, T], one document a row. The unchanged model is computed once for all changes. The
    weights, whatever their type, are taken as the float64 numbers that they are.

    Raises ValueError for an unknown name or another shape, FloatingPointError if a weight is not finite, or
    so large that an attention probability vanishes.
    """
    model = _double(model)
    shapes = {name: weight.shape for name, weight in model.named_parameters()}
    for name, weight in (item for changed in changes for item in changed.items()):
        if weight.shape != shapes.get(name):
            raise ValueError(f"The model has no parameter {name!r} of shape {tuple(weight.shape)}.")
    found = []
    for x, y in _micro_batches(model, micro_batch, inputs, targets):
        base = _Pass.of(model, x)
        past = ~_lags(x)[1]
        if any((past & (attention == 0)).any() for attention in base.attention):
            raise FloatingPointError(  # they would be taken for the future's
                "An attention probability is too small for float64: the weights are too large."
            )
        found.append(
            torch.stack([_token_changes(model, base, each, x, y).mean(dim=1) for each in changes])
        )
    found = torch.cat(found, dim=1).cpu()
    if not found.isfinite().all():
        raise FloatingPointError(
            "A change of the loss is not a number: the model or a changed weight is not finite."
        )
    return found


def loss_change(model, changed, inputs, targets, *, micro_batch="auto") -> Tensor:
    """`loss_changes` of one change {parameter name: new weight}: [N], nats per token."""
    return loss_changes(model, [changed], inputs, targets, micro_batch=micro_batch)[0]


@torch.no_grad()
def document_losses(model, inputs, targets, *, micro_batch="auto") -> Tensor:
    """Loss of each document [N] in nats per token, in float64, of `inputs`, `targets` [N, T]."""
    model = _double(model)
    found = []
    for x, y in _micro_batches(model, micro_batch, inputs, targets):
        chosen = _Pass.of(model, x).log_probabilities.gather(-1, y[:, :, None])
        found.append(-chosen.squeeze(-1).mean(dim=1))
    return torch.cat(found).cpu()


def paired_interval(differences: Tensor, seed: int = 0, *, resamples=4000) -> tuple[float, float]:
    """95 % interval of the mean of `differences` [N], one a document, by bootstrap over documents.

    Each difference is of one document with itself, before and after, so that the intervals are paired.
    Percentiles of the means of `resamples` (whole hundreds) draws of N documents with replacement.
    Raises ValueError for fewer than two documents.
    """
    values = np.asarray(differences, dtype=np.float64)
    if values.ndim != 1 or len(values) < 2:
        raise ValueError(f"differences must hold two documents or more, got shape {values.shape}.")
    generator, means = np.random.default_rng(seed), []
    for _ in range(0, resamples, 100):  # a hundred at a time: memory stays small for any N
        drawn = generator.integers(len(values), size=(100, len(values)))
        means.append(values[drawn].mean(axis=1))
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return float(low), float(high)


# --- what theory expects -------------------------------------------------------------------------


def descent_terms(statistics: CorpusStatistics, inputs: Tensor, targets: Tensor) -> dict:
    """The four terms as a text asks for them: minus its gradients at weights learned elsewhere.

    `statistics` are those of the training text, whose leading terms the weights are; `inputs`,
    `targets` [N, T] are any other. Keys and axes as lib.theory.leading_terms, which this equals for the
    training text itself. Output: the text's bigram; value: its context, read back through the learned
    bigram; query-key and position: its tokens, weighed by the learned usefulness.
    """
    size, length, device = statistics.vocab_size, inputs.shape[1], statistics.bigram.device
    pairs = PairCounts(size, length, device).add(inputs, targets)
    useful = usefulness(statistics.unigram, statistics.bigram, statistics.context)
    queries = QueryKeyCounts(useful, length).add(inputs, targets)
    return {
        "output": pairs.bigram,
        "value": pairs.context.T @ statistics.bigram.T,
        "query_key": queries.query_key / queries.positions,
        "position": queries.position / queries.positions,
    }


def predicted_cost(
    statistics: CorpusStatistics, step: int, learning_rate: float, *, text: dict | None = None
) -> dict[str, float]:
    """What removing a leading term from one layer must cost after `step` updates, nats per token.

    To leading order in eta = `learning_rate`, with s = `step` and c_s = 3 C(s,4) + 2 C(s,3):
    output s eta |B|^2; value C(s,2) eta^2 s eta |Phi^T B^T|^2; query_key and position
    c_s eta^4 C(s,2) eta^2 s eta times |Q|^2 and |Delta|^2. From all L layers it is L times as much.
    `text`, from `descent_terms`, is the text on which it costs; without it, the training text.
    """
    coefficients = leading_coefficients(step, learning_rate)
    # A gradient has passed the matrices between its weight and the loss, at their size.
    output, value = coefficients["output"], coefficients["value"]
    passed = {"output": 1.0, "value": output, "query_key": output * value}
    passed["position"] = passed["query_key"]
    removed = leading_terms(statistics)
    asked = removed if text is None else text
    return {
        name: coefficients[name] * passed[name] * (asked[name] * removed[name]).sum().item()
        for name in PARAMETERS
    }


# --- all of them at once -------------------------------------------------------------------------


def _changes(model, kind: str, direction: Tensor, seed: int):
    """Every intervention on the weights of one kind: (layer, intervention, {name: new weight}).

    `layer` is 1..L, or "all"; 0 for the output matrix.
    """
    weights = {n: w for n, w in model.named_parameters() if n.split(".")[-1] == kind}
    made = {
        "remove": {n: remove_component(w, direction) for n, w in weights.items()},
        "keep": {n: keep_component(w, direction) for n, w in weights.items()},
        "random": {
            n: remove_random(w, direction, seed + layer)
            for layer, (n, w) in enumerate(weights.items())
        },
    }
    for number, name in enumerate(weights):
        layer = 0 if kind == "output" else number + 1
        yield from ((layer, what, {name: made[what][name]}) for what in INTERVENTIONS)
    if len(weights) > 1:
        yield from (("all", what, made[what]) for what in INTERVENTIONS)


def intervention_table(
    model,
    statistics: CorpusStatistics,
    step: int,
    learning_rate: float,
    texts: dict[str, tuple[Tensor, Tensor]],
    *,
    seed: int = 0,
    micro_batch="auto",
) -> list[dict]:
    """Every intervention on every leading term of a `model` trained for `step` updates, on each text.

    `texts` is {name: (inputs, targets)}, each [N, T] with a document a row. One row for each parameter, layer
    (1..L or "all"; 0 for the output matrix), intervention and text: `documents`, `mean` change of the loss
    in nats per token with its 95 % interval `low`, `high`, and for "remove" what theory `predicted` for
    that very text, else None. `seed` draws random directions and bootstraps.
    """
    rows, costs = [], {}
    for text, tokens in texts.items():
        asked = descent_terms(statistics, *tokens)
        costs[text] = predicted_cost(statistics, step, learning_rate, text=asked)
    for kind, direction in leading_terms(statistics).items():  # one by one: the weights take memory
        plan = list(_changes(model, kind, direction, seed))
        for text, tokens in texts.items():
            measured = loss_changes(
                model, [changed for _, _, changed in plan], *tokens, micro_batch=micro_batch
            )
            for (layer, intervention, changed), differences in zip(plan, measured, strict=True):
                low, high = paired_interval(differences, seed)
                cost = costs[text][kind] * len(changed)
                rows.append(
                    {
                        "parameter": kind,
                        "layer": layer,
                        "intervention": intervention,
                        "text": text,
                        "documents": len(differences),
                        "mean": differences.mean().item(),
                        "low": low,
                        "high": high,
                        "predicted": cost if intervention == "remove" else None,
                    }
                )
    return rows


@torch.no_grad()
def predicted_model(
    statistics: CorpusStatistics, step: int, learning_rate: float, num_layers: int
) -> AttentionOnlyTransformer:
    """The model in float64 whose weights, alike in all layers, are those that theory predicts."""
    made = AttentionOnlyTransformer(statistics.vocab_size, statistics.seq_len, num_layers).double()
    predicted = predict(statistics, step, learning_rate)
    for name, weight in made.named_parameters():
        weight.copy_(predicted[name.split(".")[-1]])
    return made


@torch.no_grad()
def attention_visibility(model, inputs: Tensor, *, micro_batch="auto") -> list[dict]:
    """How far attention is from uniform, a row a layer, largest over the documents `inputs` [N, T].

    `score`: the token scores X W X^T, less their mean over each prefix. `float32`: the largest change of
    an attention probability from uniform attention when the model runs in float32, softmax included.
    `float64`: the same change with differences carried in float64, however small.
    """
    single, model = copy.deepcopy(model).float(), _double(model)
    rows = [
        {"layer": i, "score": 0.0, "float32": 0.0, "float64": 0.0}
        for i in range(1, 1 + len(model.layers))
    ]
    for (x,) in _micro_batches(model, micro_batch, inputs):
        _, future = _lags(x)
        prefix = (~future).double()
        uniform = prefix / prefix.sum(dim=-1, keepdim=True)
        flat = torch.zeros_like(uniform).float().masked_fill(future, float("-inf")).softmax(dim=-1)
        base, shown = _Pass.of(model, x), single.attention(x)
        for i, row in enumerate(rows):
            tokens = model.layers[i].query_key[x[:, :, None], x[:, None, :]]
            tokens = (tokens - (uniform * tokens).sum(dim=-1, keepdim=True)) * prefix
            found = {
                "score": tokens,
                "float32": shown[i] - flat,
                "float64": softmax_change(uniform.expand_as(base.scores[i]), base.scores[i]),
            }
            for name, values in found.items():
                row[name] = max(row[name], values.abs().max().item())
    return rows
