"""Learned weights against leading terms: cosines, their nulls, and their deflated forms.

A cosine near 1 says little by itself, because the leading terms are nearly of rank one. Each cosine is
therefore reported with two nulls (the terms of a shuffled corpus; of independent tokens with the same
frequencies) and after the dominant directions are removed. Everything is float64: early query-key
entries are near 1e-18, and their squares vanish in float32. An undefined number is NaN.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.sparse.linalg import svds
from torch import Tensor

from lib.statistics import CorpusStatistics, corpus_statistics, unigram_statistics
from lib.theory import PARAMETERS, leading_coefficients, leading_terms

DEFLATIONS = (1, 5)  # how many singular directions of the leading term are removed


def _float64(*tensors):
    converted = [t.detach().to(torch.float64) for t in tensors]
    if len({t.shape for t in converted}) > 1:
        raise ValueError(
            f"Only tensors of one shape compare, got {[tuple(t.shape) for t in converted]}."
        )
    return [t.to(converted[0].device) for t in converted]


def frobenius_cosine(a: Tensor, b: Tensor) -> float:
    """<a, b> / (||a|| ||b||) over all entries, in float64; NaN if either is zero.

    Raises ValueError when the shapes differ.
    """
    a, b = _float64(a, b)
    norms = a.norm() * b.norm()
    return ((a * b).sum() / norms).item() if norms > 0 else math.nan


def relative_error(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b|| in float64; NaN if b is zero. Raises ValueError when the shapes differ."""
    a, b = _float64(a, b)
    return ((a - b).norm() / b.norm()).item() if b.any() else math.nan


def error_of_row(row: dict, scale: float = 1.0) -> float:
    """Relative error of a row of Reference.compare, from its size and cosine alone.

    With `scale`, what it would be if the prediction were so many times as large: for another count of
    updates, the ratio of the coefficients.
    """
    size = row["magnitude_ratio"] / scale
    return math.sqrt(max(0.0, size**2 - 2 * size * row["cosine"] + 1))


def contradictions(record: dict) -> list[str]:
    """What does not fit together within the record of a training run (lib.results.load_run); [] if all does.

    Each line's s eta and epoch must follow from its update and the settings, each row's error from its
    cosine and size (to 1e-5: a cosine of a million entries is good to about 1e-12, and the error is a
    root of its distance from 1); lines must rise, and a summary must repeat the last of them at the
    planned update.
    """
    settings, lines, summary = record["run"]["parameters"], record["metrics"], record["summary"]
    sequences, batch = record["run"]["corpus"]["sequences"], settings["batch_size"]
    per_epoch = 1 if batch == "full" else sequences // batch
    found = []
    for line in lines:
        step = line["step"]
        if not math.isclose(line["sum_learning_rate"], step * settings["learning_rate"]):
            found.append(f"s eta at update {step}")
        if not math.isclose(line["epoch"], step / per_epoch):
            found.append(f"epoch at update {step}")
        for row in line["comparisons"]:
            if row["cosine"] is not None and not math.isclose(
                error_of_row(row), row["relative_error"], rel_tol=1e-3, abs_tol=1e-5
            ):
                found.append(f"error of {row['parameter']} {row['layer']} at update {step}")
    steps = [line["step"] for line in lines]
    if steps != sorted(set(steps)):
        found.append("order of the lines")
    if summary:
        if steps[-1:] != [settings["steps"] or settings["epochs"] * per_epoch]:
            found.append("last update")
        if any(
            summary[key] != lines[-1][key]
            for key in lines[-1].keys() & summary.keys() - {"seconds"}
        ):
            found.append("summary and last line")
    return found


def row_normalised_cosine(a: Tensor, b: Tensor) -> float:
    """Mean cosine of corresponding rows, over the rows that are zero in neither; NaN if none is.

    Frequent tokens no longer outweigh the rest. Raises ValueError when the shapes differ.
    """
    a, b = _float64(a, b)
    norms = a.norm(dim=1) * b.norm(dim=1)
    rows = norms > 0
    return ((a * b).sum(dim=1)[rows] / norms[rows]).mean().item() if rows.any() else math.nan


class Deflation:
    """Removes the top `k` singular directions of `term` [V, V], on both sides, from any matrix."""

    def __init__(self, term: Tensor, k: int):
        left, values, right = svds(term.cpu().numpy(), k=k, v0=np.ones(len(term)))
        self.left, self.right = (
            torch.from_numpy(m.copy()).to(term.device) for m in (left, right.T)
        )
        self.share = float((values**2).sum() / (term**2).sum())  # of the term's squared norm

    def __call__(self, matrix: Tensor) -> Tensor:
        matrix = matrix - self.left @ (self.left.T @ matrix)
        return matrix - (matrix @ self.right) @ self.right.T


def shuffle_tokens(inputs: Tensor, targets: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The same tokens in an order that means nothing: one permutation over the whole corpus.

    `inputs`, `targets` [N, T] where a row continues by one; returns two such tensors.
    """
    tokens = torch.cat([inputs, targets[:, -1:]], dim=1)
    order = torch.randperm(tokens.numel(), generator=torch.Generator().manual_seed(seed))
    tokens = tokens.flatten()[order.to(tokens.device)].view_as(tokens)
    return tokens[:, :-1], tokens[:, 1:]


@dataclass(frozen=True)
class Reference:
    """What learned weights are held against: the corpus, its shuffled self, and frequencies alone."""

    statistics: CorpusStatistics
    shuffled: CorpusStatistics
    unigram: CorpusStatistics
    deflations: dict[str, dict[int, Deflation]]

    @classmethod
    def from_tokens(
        cls,
        inputs: Tensor,
        targets: Tensor,
        vocab_size: int,
        *,
        seed=0,
        device="auto",
        statistics_of=corpus_statistics,
    ) -> "Reference":
        """Statistics and nulls of `inputs`, `targets` [N, T]; `seed` orders the shuffled corpus.

        `statistics_of` counts: lib.statistics.corpus_statistics, or what shares it among processes.
        """
        statistics = statistics_of(inputs, targets, vocab_size, device=device)
        shuffled = statistics_of(*shuffle_tokens(inputs, targets, seed), vocab_size, device=device)
        deflations = {
            name: {k: Deflation(term, k) for k in DEFLATIONS if k < len(term)}
            for name, term in leading_terms(statistics).items()
            if term.ndim == 2
        }
        return cls(
            statistics,
            shuffled,
            unigram_statistics(statistics.unigram, statistics.seq_len),
            deflations,
        )

    def shares(self) -> dict[str, dict[int, float]]:
        """For each matrix term, how much of its squared norm its top k singular directions hold."""
        return {
            name: {k: d.share for k, d in found.items()} for name, found in self.deflations.items()
        }

    def compare(self, model, step: int, learning_rate: float) -> list[dict]:
        """One row per parameter and layer (layer 1..L; 0 for the output matrix) after `step` updates.

        cosine to the leading term; relative_error and magnitude_ratio to coefficient times term;
        null_shuffled and null_unigram, the same weights against the null's term; deflated_k, the
        cosine without the term's top k directions; row_normalised. A vector has no deflated form.
        """
        weights = [("output", 0, model.output)]
        for number, layer in enumerate(model.layers, start=1):
            weights += [(name, number, getattr(layer, name)) for name in PARAMETERS[1:]]
        return [
            self._row(name, number, weight, step, learning_rate) for name, number, weight in weights
        ]

    def _row(self, name, layer, weight, step, learning_rate) -> dict:
        term, shuffled, unigram = (
            leading_terms(s)[name] for s in (self.statistics, self.shuffled, self.unigram)
        )
        weight = weight.detach().to(term)
        predicted = leading_coefficients(step, learning_rate)[name] * term
        row = {
            "parameter": name,
            "layer": layer,
            "cosine": frobenius_cosine(weight, term),
            "relative_error": relative_error(weight, predicted),
            "magnitude_ratio": (weight.norm() / predicted.norm()).item()
            if predicted.any()
            else math.nan,
            "null_shuffled": frobenius_cosine(weight, shuffled),
            "null_unigram": frobenius_cosine(weight, unigram),
        }
        for k in DEFLATIONS:
            deflate = self.deflations.get(name, {}).get(k)
            row[f"deflated_{k}"] = (
                frobenius_cosine(deflate(weight), deflate(term)) if deflate else math.nan
            )
        row["row_normalised"] = row_normalised_cosine(weight, term) if term.ndim == 2 else math.nan
        return row
