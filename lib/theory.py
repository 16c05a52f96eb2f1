"""Leading terms of the weights, their coefficients after s steps, and the next order of the output.

All formulas hold for full-batch gradient descent from zero weights. Source: the paper's Theorem 4.1
and section 4.2 (the article restates the coefficients). The next orders are not in the paper: the
output's is derived in the chapter `output-step`, and lib.series confirms all four exactly.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from lib.statistics import CorpusStatistics, PairCounts, QueryKeyCounts

PARAMETERS = ("output", "value", "query_key", "position")


def leading_coefficients(step: int, learning_rate: float) -> dict[str, float]:
    """What multiplies each leading term after `step` updates, step = s and learning_rate = eta.

    output s eta; value C(s,2) eta^2; query_key and position (3 C(s,4) + 2 C(s,3)) eta^4.
    Raises ValueError for a negative step or a learning rate that is not a positive number.
    """
    if step < 0 or not (math.isfinite(learning_rate) and learning_rate > 0):
        raise ValueError(
            f"step must be at least 0 and learning_rate above 0, got {step} and {learning_rate}."
        )
    attention = (3 * math.comb(step, 4) + 2 * math.comb(step, 3)) * learning_rate**4
    return {
        "output": step * learning_rate,
        "value": math.comb(step, 2) * learning_rate**2,
        "query_key": attention,
        "position": attention,
    }


def leading_terms(statistics: CorpusStatistics) -> dict[str, Tensor]:
    """The four leading terms: output [hidden, next], value [history, hidden], query_key [query, key],
    position [lag]."""
    return {
        "output": statistics.bigram,
        "value": statistics.value_term,
        "query_key": statistics.query_key_term,
        "position": statistics.position_term,
    }


def predict(statistics: CorpusStatistics, step: int, learning_rate: float) -> dict[str, Tensor]:
    """Coefficient times leading term for each parameter: the weights that theory expects."""
    coefficients = leading_coefficients(step, learning_rate)
    return {name: coefficients[name] * term for name, term in leading_terms(statistics).items()}


def output_next_order(statistics: CorpusStatistics, step: int, learning_rate: float) -> Tensor:
    """Output matrix [hidden, next] to second order in the learning rate.

    s eta B - C(s,2) (eta^2 / V) diag(p) B, with p the unigram frequencies; the rest is O(eta^3).
    """
    first = leading_coefficients(step, learning_rate)["output"]
    second = math.comb(step, 2) * learning_rate**2 / statistics.vocab_size
    return (first - second * statistics.unigram[:, None]) * statistics.bigram


@dataclass(frozen=True)
class NextOrder:
    """Leading terms with the order after them, for all four parameters; relative error is O(eta^2).

    To this order a prediction is no longer uniform: the residual has lost X W_O / V. That brings in one
    new count, how often history stands in the prefix of the *current* token, and three further
    query-key sums. Fields are what multiplies -eta^3 / V or -eta^5 / V, with D = diag(unigram):
    `value_output` Phi^T B^T D and `value_residual` K B B^T [history, hidden]; then pairs (query_key
    [query, key], position [lag]), by the factor that carries the correction.
    """

    statistics: CorpusStatistics
    value_output: Tensor
    value_residual: Tensor
    attention_output: tuple[Tensor, Tensor]
    attention_value: tuple[Tensor, Tensor]
    attention_residual: tuple[Tensor, Tensor]

    @classmethod
    def from_tokens(
        cls, inputs: Tensor, targets: Tensor, statistics: CorpusStatistics
    ) -> "NextOrder":
        """Three more passes over the sequences `inputs`, `targets` [N, T] that `statistics` counted."""
        bigram, context, length = statistics.bigram, statistics.context, statistics.seq_len

        def attention(usefulness, following):
            sums = QueryKeyCounts(usefulness, length).add(inputs, following)
            return sums.query_key / sums.positions, sums.position / sums.positions

        pairs = PairCounts(len(bigram), length, bigram.device).add(inputs, inputs)
        current = pairs.prefix / pairs.positions  # K^T [current, history], not centred
        scaled = statistics.unigram[:, None] * bigram
        return cls(
            statistics,
            value_output=context.T @ scaled.T,
            value_residual=current.T @ (bigram @ bigram.T),
            attention_output=attention(bigram.T @ (scaled @ context), targets),
            attention_value=attention(bigram.T @ (bigram @ (bigram.T @ current)), targets),
            attention_residual=attention(bigram @ (bigram.T @ (bigram @ context)), inputs),
        )

    def predict(self, step: int, learning_rate: float) -> dict[str, Tensor]:
        """The four weights after `step` updates, to one order beyond `predict`."""
        choose = math.comb
        value_residual = [2 * choose(r, 3) + choose(r, 2) for r in range(step + 1)]  # sums of r^2
        scale = -1 / self.statistics.vocab_size
        corrections = {
            "value": learning_rate**3
            * (choose(step, 3) * self.value_output + value_residual[step] * self.value_residual)
        }
        through_output = sum(r * choose(r, 3) + choose(r, 2) ** 2 for r in range(step))
        through_value = sum(r * value_residual[r] for r in range(step))
        through_residual = sum(r**2 * choose(r, 2) for r in range(step))
        for i, name in enumerate(("query_key", "position")):
            corrections[name] = learning_rate**5 * (
                through_output * self.attention_output[i]
                + through_value * self.attention_value[i]
                + through_residual * self.attention_residual[i]
            )
        first = predict(self.statistics, step, learning_rate)
        return {"output": output_next_order(self.statistics, step, learning_rate)} | {
            name: first[name] + scale * corrections[name] for name in PARAMETERS[1:]
        }


def theorem_steps(learning_rate: float, num_layers: int, seq_len: int) -> int:
    """Largest s that the theorem covers: (s + 1) eta <= min(1 / (12 L), 5 / (8 sqrt T)); 0 if none."""
    bound = min(1 / (12 * num_layers), 5 / (8 * math.sqrt(seq_len)))
    return max(0, math.floor(bound / learning_rate + 1e-9) - 1)
