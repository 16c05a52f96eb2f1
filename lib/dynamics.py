"""Predictions that reach further than the leading terms: the loop between output and value, solved.

Both levels hold attention at the running mean and the residual at its first value, Y - 1/V. Then the
output matrix makes value grow, and value makes the output matrix grow, and the whole course follows from
corpus statistics. `Feedback` keeps messages of one hop and has a closed form; `frozen_residual` keeps
every hop of L layers and iterates V x V matrices. Neither is in the paper; the chapter
`how-long-it-holds` derives them and says how far they reach.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lib.statistics import CorpusStatistics, QueryKeyCounts

CHUNK_ELEMENTS = 2**24  # position pairs that are counted at once


@dataclass(frozen=True)
class Feedback:
    """One-hop messages, frozen residual: with S^2 = L Phi Phi^T [next, next], after s steps

        output = B odd / S,   value = Phi^T (even - 1) / S^2 B^T,

    where even and odd are the even and odd parts of (1 + eta S)^s, so that only S^2 enters. The leading
    terms are what remains as eta S goes to zero. Fields: the statistics, the eigenvalues [V] of S^2
    and its eigenvectors `modes` [next, mode].
    """

    statistics: CorpusStatistics
    strengths: Tensor
    modes: Tensor

    @classmethod
    def from_statistics(cls, statistics: CorpusStatistics, num_layers: int) -> "Feedback":
        """Diagonalises S^2; the cost is that of one eigendecomposition, whatever the steps."""
        context = statistics.context
        strengths, modes = torch.linalg.eigh(num_layers * context @ context.T)
        return cls(statistics, strengths.clamp(min=0), modes)

    def _gains(self, steps: int, learning_rate: float) -> tuple[Tensor, Tensor]:
        """What multiplies each mode in output and in value after 0 … `steps` updates, both [steps + 1, V]."""
        output, value = [torch.zeros_like(self.strengths)], [torch.zeros_like(self.strengths)]
        for _ in range(steps):
            output.append(output[-1] + learning_rate * (1 + self.strengths * value[-1]))
            value.append(value[-1] + learning_rate * output[-2])
        return torch.stack(output), torch.stack(value)

    def predict(self, step: int, learning_rate: float) -> dict[str, Tensor]:
        """ "output" [hidden, next], "value" [history, hidden] and "usefulness" [next, history].

        QueryKeyCounts(usefulness, T) over the corpus gives query-key and position.
        """
        output, value = self._gains(step, learning_rate)
        bigram, modes = self.statistics.bigram @ self.modes, self.modes.T @ self.statistics.context
        # sum over r < step of eta W_r^T V_r^T, mode by mode
        pairs = learning_rate * (output[:-1].T @ value[:-1]) * (bigram.T @ bigram)
        return {
            "output": bigram * output[-1] @ self.modes.T,
            "value": modes.T * value[-1] @ bigram.T,
            "usefulness": self.modes @ pairs @ modes,
        }


def context_powers(inputs: Tensor, targets: Tensor, vocab_size: int, powers: int) -> list[Tensor]:
    """Phi_m = mean of R^T A_0^m X [next, history] for m = 0 … `powers`; R = Y - 1/V, A_0 the running mean.

    m = 0 is the bigram matrix transposed, m = 1 the context matrix; m = 2 is what is heard at second hand.
    `inputs`, `targets` [N, T]. Raises ValueError for tokens of other shapes.
    """
    if inputs.shape != targets.shape or inputs.ndim != 2 or inputs.numel() == 0:
        raise ValueError(
            f"inputs and targets must be alike, [sequences, T], got {tuple(inputs.shape)} "
            f"and {tuple(targets.shape)}."
        )
    length = inputs.shape[1]
    chunk = max(1, CHUNK_ELEMENTS // length**2)
    mean = torch.ones(length, length, dtype=torch.float64, device=inputs.device).tril()
    mean = mean / mean.sum(dim=1, keepdim=True)
    found, weight = [], torch.eye(length, dtype=torch.float64, device=inputs.device)
    for _ in range(powers + 1):
        counts = weight.new_zeros(vocab_size * vocab_size)
        for x, y in zip(inputs.split(chunk), targets.split(chunk), strict=True):
            pairs = y[:, :, None] * vocab_size + x[:, None, :]
            counts.index_add_(0, pairs.flatten(), weight.expand(len(x), -1, -1).flatten())
        counts = counts.view(vocab_size, vocab_size) / inputs.numel()
        found.append(counts - counts.mean(dim=0))
        weight = mean @ weight
    return found


def frozen_residual(
    contexts: list[Tensor], num_layers: int, learning_rate: float, steps: int
) -> Iterator[dict[str, Tensor]]:
    """The weights after 1, 2, … `steps` updates, from `contexts` = context_powers(…, powers=num_layers).

    Yields "output" [hidden, next], and for layer l "layers.l.value" [history, hidden] and
    "layers.l.usefulness" [next, history] as in Feedback. Raises ValueError for too few contexts.
    """
    if len(contexts) <= num_layers:
        raise ValueError(
            f"{num_layers} layers need {num_layers + 1} contexts, got {len(contexts)}."
        )
    output = torch.zeros_like(contexts[0])
    values, useful = ([torch.zeros_like(output) for _ in range(num_layers)] for _ in range(2))
    for _ in range(steps):
        # hidden states are sum_m A_0^m X hidden[m]; what they are owed is sum_m (A_0^T)^m R owed[m]
        hidden, owed = [[torch.eye(len(output)).to(output)]], [[output.T]]
        for value in values:
            hidden.append(_through_layer(hidden[-1], value))
        for value in reversed(values):
            owed.insert(0, _through_layer(owed[0], value.T))
        descents = [
            sum(
                h.T @ contexts[i + j + 1].T @ d
                for i, h in enumerate(hidden[layer])
                for j, d in enumerate(owed[layer + 1])
            )
            for layer in range(num_layers)
        ]
        useful = [u + learning_rate * output.T @ v.T for u, v in zip(useful, values, strict=True)]
        output = output + learning_rate * sum(
            h.T @ c.T for h, c in zip(hidden[-1], contexts, strict=False)
        )
        values = [v + learning_rate * d for v, d in zip(values, descents, strict=True)]
        yield {"output": output} | {
            f"layers.{i}.{name}": matrix
            for i in range(num_layers)
            for name, matrix in (("value", values[i]), ("usefulness", useful[i]))
        }


def _through_layer(terms: list[Tensor], value: Tensor) -> list[Tensor]:
    """`terms` [m] multiply A_0^m; a layer adds each of them once more, one hop further, times `value`."""
    passed = [term @ value for term in terms]
    return [terms[0], *(a + b for a, b in zip(terms[1:], passed, strict=False)), passed[-1]]


def attention_terms(usefulness: Tensor, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """ "query_key" [query, key] and "position" [lag] that `usefulness` [next, history] adds up to."""
    counts = QueryKeyCounts(usefulness, inputs.shape[1]).add(inputs, targets)
    return {
        "query_key": counts.query_key / counts.positions,
        "position": counts.position / counts.positions,
    }
