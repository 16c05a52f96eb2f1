"""How long each prediction holds: training runs from zero (or near it) beside what theory expects.

A `Trajectory` is one training run described by its settings; `follow` trains it and sets every weight
beside the predictions asked for; `horizon` reads off where a curve crosses a limit. The run notebook
`book/runs/horizon` goes through a list of them, the chapter `how-long-it-holds` shows the records.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lib.compare import Reference, frobenius_cosine, relative_error
from lib.dynamics import Feedback, attention_terms, context_powers, frozen_residual
from lib.model import AttentionOnlyTransformer, loss_and_gradients
from lib.theory import PARAMETERS, NextOrder, leading_terms, predict

# From the least to the most that a prediction knows.
PREDICTIONS = ("leading", "next_order", "feedback", "frozen_residual", "uniform_attention")


@dataclass(frozen=True)
class Trajectory:
    """Settings of one training run: `name`, L, eta, how far it goes in s eta, batch (None: all
    sequences), the standard deviation of a Gaussian start, seed, and which PREDICTIONS to compare."""

    name: str
    num_layers: int
    learning_rate: float
    sum_learning_rate: float
    batch_size: int | None = None
    init_std: float = 0.0
    seed: int = 0
    predictions: tuple[str, ...] = ("leading",)

    def __post_init__(self):
        if unknown := sorted(set(self.predictions) - set(PREDICTIONS)):
            raise ValueError(f"Unknown prediction {', '.join(unknown)}; choose from {PREDICTIONS}.")
        if not (self.learning_rate > 0 and self.sum_learning_rate >= self.learning_rate):
            raise ValueError(
                f"learning_rate must be above 0 and sum_learning_rate at least as large, got "
                f"{self.learning_rate} and {self.sum_learning_rate}."
            )

    @property
    def steps(self) -> int:
        return math.floor(self.sum_learning_rate / self.learning_rate + 1e-9)

    def snapshots(self) -> list[int]:
        """Updates after which weights are compared: the first three, then one per unit of s eta."""
        every = max(1, round(1 / self.learning_rate))
        return sorted({s for s in range(1, self.steps + 1) if s <= 3 or s % every == 0})


def _batches(trajectory: Trajectory, count: int):
    """Index tensors of the batches, for ever; all sequences when the trajectory has no batch size."""
    generator = torch.Generator().manual_seed(trajectory.seed)
    size = trajectory.batch_size or count
    while True:
        order = torch.randperm(count, generator=generator) if size < count else torch.arange(count)
        yield from order[: count // size * size].split(size)


def _train(trajectory: Trajectory, inputs, targets, vocab_size: int, *, hold_attention=False):
    """Yields (step, loss, weights by name, weights at the start) at every snapshot, in float64.

    With `hold_attention` query-key and position stay where they are in the model, and what their
    gradients would have added is reported instead.
    """
    model = AttentionOnlyTransformer(
        vocab_size,
        inputs.shape[1],
        trajectory.num_layers,
        init_std=trajectory.init_std,
        seed=trajectory.seed,
    ).double()
    held = {
        name: torch.zeros_like(parameter)
        for name, parameter in model.named_parameters()
        if hold_attention and name.endswith(("query_key", "position"))
    }
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    wanted, batches = set(trajectory.snapshots()), _batches(trajectory, len(inputs))
    for step in range(1, trajectory.steps + 1):
        rows = next(batches)
        loss, gradients = loss_and_gradients(model, inputs[rows], targets[rows])
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                held.get(name, parameter).sub_(trajectory.learning_rate * gradients[name])
        if step in wanted:
            weights = {name: held.get(name, p).detach() for name, p in model.named_parameters()}
            yield step, loss.item(), weights, start


def _by_kind(weights: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """Weights by parameter name -> for each of PARAMETERS the matrices of all layers in order."""
    return {
        kind: [weights[name] for name in weights if name.split(".")[-1] == kind]
        for kind in PARAMETERS
    }


def _predictors(trajectory: Trajectory, inputs, targets, reference: Reference) -> dict:
    """For each prediction a function of the step that gives {kind: list over layers}."""
    statistics, layers, rate = reference.statistics, trajectory.num_layers, trajectory.learning_rate

    def every_layer(weights):
        return {k: [w] * (1 if k == "output" else layers) for k, w in weights.items()}

    def feedback(step):
        weights = loop.predict(step, rate)
        weights |= attention_terms(weights.pop("usefulness"), inputs, targets)
        return every_layer(weights)

    found = {"leading": lambda step: every_layer(predict(statistics, step, rate))}
    if "next_order" in trajectory.predictions:
        order = NextOrder.from_tokens(inputs, targets, statistics)
        found["next_order"] = lambda step: every_layer(order.predict(step, rate))
    if "feedback" in trajectory.predictions:
        loop = Feedback.from_statistics(statistics, layers)
        found["feedback"] = feedback
    if "frozen_residual" in trajectory.predictions:
        contexts = context_powers(inputs, targets, statistics.vocab_size, layers)
        frozen = dict(enumerate(frozen_residual(contexts, layers, rate, trajectory.steps), start=1))

        def all_hops(step):
            weights = dict(frozen[step])
            for layer in range(layers):
                useful = weights.pop(f"layers.{layer}.usefulness")
                for kind, term in attention_terms(useful, inputs, targets).items():
                    weights[f"layers.{layer}.{kind}"] = term
            return _by_kind(weights)

        found["frozen_residual"] = all_hops
    if "uniform_attention" in trajectory.predictions:
        twin = {
            step: _by_kind({name: w.clone() for name, w in weights.items()})
            for step, _, weights, _ in _train(
                trajectory, inputs, targets, statistics.vocab_size, hold_attention=True
            )
        }
        found["uniform_attention"] = twin.__getitem__
    return {name: found[name] for name in trajectory.predictions}


def follow(trajectory: Trajectory, inputs: Tensor, targets: Tensor, reference: Reference) -> dict:
    """Train `trajectory` on `inputs`, `targets` [N, T] and compare at every snapshot.

    Returns {"name", settings …, "snapshots": [{"step", "sum_learning_rate", "loss", "compared":
    {prediction: {kind: [smallest cosine, largest relative error] over the layers}}, "nulls": {kind:
    {"shuffled", "unigram", "deflated_1", "deflated_5": cosine of layer 1}}, "moved": like "compared"
    for leading, of the weights minus their start, if init_std is not 0}]}. Numbers that do not
    exist (a zero or overflown prediction) are NaN.
    """
    vocab_size = reference.statistics.vocab_size
    predictors = _predictors(trajectory, inputs, targets, reference)
    snapshots = []
    for step, loss, weights, start in _train(trajectory, inputs, targets, vocab_size):
        learned = _by_kind(weights)
        snapshots.append(
            {
                "step": step,
                "sum_learning_rate": step * trajectory.learning_rate,
                "loss": loss,
                "compared": {
                    name: _compare(learned, expected(step)) for name, expected in predictors.items()
                },
            }
        )
        snapshots[-1]["nulls"] = _nulls(learned, reference)
        if trajectory.init_std:
            moved = _by_kind({name: weights[name] - start[name] for name in weights})
            snapshots[-1]["moved"] = _compare(moved, predictors["leading"](step))
    settings = {k: v for k, v in vars(trajectory).items() if k != "predictions"}
    return settings | {"sequences": len(inputs), "seq_len": inputs.shape[1], "snapshots": snapshots}


def _compare(learned: dict, expected: dict) -> dict:
    """{kind: [smallest cosine, largest relative error]} over the layers; NaN if any is undefined."""
    rows = {}
    for kind, matrices in learned.items():
        pairs = list(zip(matrices, expected[kind], strict=True))
        if any(not torch.isfinite(b).all() or not b.any() for _, b in pairs):
            rows[kind] = [math.nan, math.nan]
        else:
            rows[kind] = [
                _short(min(frobenius_cosine(a, b) for a, b in pairs)),
                _short(max(relative_error(a, b) for a, b in pairs)),
            ]
    return rows


def _short(number: float) -> float:
    """Nine significant digits: a record holds thousands of numbers."""
    return float(f"{number:.9g}")


def _nulls(learned: dict, reference: Reference) -> dict:
    """Cosines of the first layer with the terms of the null corpora, and without strong directions."""
    nulls = {"shuffled": reference.shuffled, "unigram": reference.unigram}
    rows = {}
    for kind, term in leading_terms(reference.statistics).items():
        weight = learned[kind][0]
        rows[kind] = {
            n: _short(frobenius_cosine(weight, leading_terms(s)[kind])) for n, s in nulls.items()
        }
        rows[kind] |= {
            f"deflated_{k}": _short(frobenius_cosine(remove(weight), remove(term)))
            for k, remove in reference.deflations.get(kind, {}).items()
        }
    return rows


def horizon(snapshots: list[dict], prediction: str, kind: str, *, cosine=None, error=None) -> float:
    """s eta at which a curve first passes a limit: the cosine falls below `cosine`, or the relative
    error exceeds `error`; linear between snapshots. Infinity if it never does within the record.

    A prediction that has ceased to exist (NaN after a number) has passed every limit.
    Raises ValueError unless exactly one limit is given.
    """
    if (cosine is None) == (error is None):
        raise ValueError("Give exactly one limit, cosine or error.")
    place, limit, sign = (0, cosine, -1) if error is None else (1, error, 1)
    before = None
    for snapshot in snapshots:
        value = snapshot["compared"][prediction][kind][place]
        undefined = value is None or math.isnan(value)
        if undefined and before is None:
            continue
        here = snapshot["sum_learning_rate"]
        if undefined:
            return here
        if sign * (value - limit) > 0:
            if before is None:
                return here
            (x, y), span = before, here - before[0]
            return x + span * (limit - y) / (value - y)
        before = (here, value)
    return math.inf
