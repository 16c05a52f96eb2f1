"""Leading terms of the weights, their coefficients after s steps, and the next order of the output.

All formulas hold for full-batch gradient descent from zero weights. Source: the paper's Theorem 4.1
and section 4.2 (the article restates the coefficients); the next order is derived in `output-step`.
"""

import math

from torch import Tensor

from lib.statistics import CorpusStatistics

PARAMETERS = ("output", "value", "query_key", "position")


def leading_coefficients(step: int, learning_rate: float) -> dict[str, float]:
    """What multiplies each leading term after `step` updates, step = s and learning_rate = eta.

    output s eta; value C(s,2) eta^2; query_key and position (3 C(s,4) + 2 C(s,3)) eta^4.
    Raises ValueError for a negative step or a learning rate that is not a positive number.
    """
    if step < 0 or not (math.isfinite(learning_rate) and learning_rate > 0):
        raise ValueError(f"step must be at least 0 and learning_rate above 0, got {step} and {learning_rate}.")
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


def theorem_steps(learning_rate: float, num_layers: int, seq_len: int) -> int:
    """Largest s that the theorem covers: (s + 1) eta <= min(1 / (12 L), 5 / (8 sqrt T)); 0 if none."""
    bound = min(1 / (12 * num_layers), 5 / (8 * math.sqrt(seq_len)))
    return max(0, math.floor(bound / learning_rate + 1e-9) - 1)
