"""Gradient descent from zero with weights that are polynomials in the learning rate, term by term.

A `Series` holds the coefficients of 1, eta, …, eta^K of an array. Run on `fractions.Fraction` entries
the expansion of the weights after s steps is exact: a coefficient equals its prediction or it does not.
Run on float64 the same code gives the coefficients numerically at larger sizes. The model is that of
lib.model, with its gradient written out by hand (the chapter `gradient-map` derives each line).
"""

from fractions import Fraction

import numpy as np

from lib.statistics import CorpusStatistics


class Series:
    """Truncated power series in eta: `terms[k]` is the coefficient array of eta^k, k = 0 … K."""

    def __init__(self, terms):
        self.terms = list(terms)

    @property
    def order(self) -> int:
        return len(self.terms) - 1

    def __add__(self, other):
        return Series(a + b for a, b in zip(self.terms, other.terms, strict=True))

    def __sub__(self, other):
        return Series(a - b for a, b in zip(self.terms, other.terms, strict=True))

    def __matmul__(self, other):
        return self._product(other, np.matmul)

    def __mul__(self, other):
        return self._product(other, np.multiply)

    def _product(self, other, multiply):
        """Coefficient k of a product is the sum of all a_i b_(k-i); zero factors are passed over."""
        zero = multiply(self.terms[0] * 0, other.terms[0] * 0)
        left = [(i, a) for i, a in enumerate(self.terms) if np.any(a)]
        right = [(j, b) for j, b in enumerate(other.terms) if np.any(b)]
        terms = [zero] * (self.order + 1)
        for i, a in left:
            for j, b in right:
                if i + j <= self.order:
                    terms[i + j] = terms[i + j] + multiply(a, b)
        return Series(terms)

    def map(self, function):
        """Apply a linear `function` of arrays to every coefficient."""
        return Series(map(function, self.terms))

    @property
    def mT(self):  # noqa: N802 (the name that NumPy and torch use)
        return self.map(lambda a: np.swapaxes(a, -1, -2))

    def times_eta(self):
        """The series multiplied by eta, which moves every coefficient up by one."""
        return Series([self.terms[0] * 0, *self.terms[:-1]])

    def exp(self):
        """exp of a series without constant term: e_k = (1/k) sum_i i a_i e_(k-i)."""
        if np.any(self.terms[0]):
            raise ValueError("exp of a series is rational only if its constant term is zero.")
        terms = [self.terms[0] * 0 + 1]
        for k in range(1, self.order + 1):
            parts = [self.terms[i] * i * terms[k - i] for i in range(1, k + 1)]
            terms.append(sum(parts) / _like(k, parts[0]))
        return Series(terms)

    def reciprocal(self):
        """1 over a series whose constant term has no zero entry."""
        terms = [1 / self.terms[0]]
        for k in range(1, self.order + 1):
            terms.append(-terms[0] * sum(self.terms[i] * terms[k - i] for i in range(1, k + 1)))
        return Series(terms)


def _like(number: int, array):
    return Fraction(number) if np.asarray(array).dtype == object else float(number)


def _softmax(scores: Series, visible) -> Series:
    """Row softmax over the entries where the 0/1 array `visible` [.., T, T] or [.., V] is 1."""
    weights = scores.exp().map(lambda a: a * visible)
    total = weights.map(lambda a: a.sum(axis=-1, keepdims=True))
    return weights * total.reciprocal()


def _constant(array, order: int) -> Series:
    return Series([array] + [array * 0] * order)


def _by_lag(matrix):
    """Sums [T] of the diagonals t - k = lag of `matrix` [N, T, T]."""
    length = matrix.shape[-1]
    return np.array(
        [matrix.diagonal(-lag, 1, 2).sum() for lag in range(length)], dtype=matrix.dtype
    )


def expand(
    inputs, targets, vocab_size: int, num_layers: int, steps: int, order: int, *, exact=True
):
    """Coefficients of every weight after 1 … `steps` full-batch steps from zero, up to eta^`order`.

    `inputs`, `targets` [N, T] integers. Returns one dict a step, keyed like the model's parameters
    ("output", "layers.0.value", …), of Series with `order` + 1 coefficient arrays; entries are
    Fractions if `exact`, else float64. Raises ValueError for sizes or orders below 1.
    """
    if min(vocab_size, num_layers, steps, order) < 1:
        raise ValueError("vocab_size, num_layers, steps and order must all be at least 1.")
    x, y = (np.asarray(tokens) for tokens in (inputs, targets))
    if x.shape != y.shape or x.ndim != 2 or x.size == 0:
        raise ValueError(
            f"inputs and targets must be alike, [sequences, T], got {x.shape} and {y.shape}."
        )
    number = np.vectorize(Fraction, otypes=[object]) if exact else np.float64
    one_hot = number(np.eye(vocab_size, dtype=int))
    length = x.shape[1]
    lags = np.arange(length)[:, None] - np.arange(length)[None, :]
    visible, share = number((lags >= 0).astype(int)), _like(1, one_hot) / x.size
    embedded, labels = _constant(one_hot[x], order), _constant(one_hot[y], order)

    zeros = {"output": one_hot * 0}
    for layer in range(num_layers):
        zeros |= {f"layers.{layer}.{name}": one_hot * 0 for name in ("query_key", "value")}
        zeros[f"layers.{layer}.position"] = number(np.zeros(length, dtype=int))
    weights = {name: _constant(array, order) for name, array in zeros.items()}

    history = []
    for _ in range(steps):
        descent = _descent(weights, embedded, labels, num_layers, lags, visible)
        weights = {
            name: weight + descent[name].map(lambda a: a * share).times_eta()
            for name, weight in weights.items()
        }
        history.append(weights)
    return history


def _descent(weights, embedded, labels, num_layers, lags, visible) -> dict[str, Series]:
    """Minus the gradient of the summed loss for every weight; forward, then backward, line by line."""
    hidden, saved = embedded, []
    for layer in range(num_layers):
        query_key, value, position = (
            weights[f"layers.{layer}.{n}"] for n in ("query_key", "value", "position")
        )
        scores = hidden @ query_key @ hidden.mT + position.map(lambda a: a[np.maximum(lags, 0)])
        attention = _softmax(scores, visible)
        saved.append((hidden, attention))
        hidden = hidden + attention @ hidden @ value
    logits = hidden @ weights["output"]
    residual = labels - _softmax(logits, visible[0, 0])

    total = lambda series: series.map(lambda a: a.sum(axis=0))  # noqa: E731 (sum over sequences)
    descent = {"output": total(hidden.mT @ residual)}
    owed = residual @ weights["output"].mT  # what each hidden state should gain
    for layer in reversed(range(num_layers)):
        query_key, value = (weights[f"layers.{layer}.{n}"] for n in ("query_key", "value"))
        hidden, attention = saved[layer]
        descent[f"layers.{layer}.value"] = total((attention @ hidden).mT @ owed)
        message = owed @ value.mT
        useful = message @ hidden.mT  # [N, T, T]: gain of query t from more attention to key k
        mean = (attention * useful).map(lambda a: a.sum(axis=-1, keepdims=True))
        centred = attention * (useful - mean)
        descent[f"layers.{layer}.query_key"] = total(hidden.mT @ centred @ hidden)
        descent[f"layers.{layer}.position"] = centred.map(_by_lag)
        owed = (
            owed
            + attention.mT @ message
            + centred @ hidden @ query_key.mT
            + centred.mT @ hidden @ query_key
        )
    return descent


def exact_statistics(inputs, targets, vocab_size: int) -> CorpusStatistics:
    """The corpus statistics as arrays of Fractions, by their one-hot definitions (small sizes only).

    A CorpusStatistics whose fields are NumPy object arrays with the axes that lib.statistics gives.
    """
    x, y = (np.asarray(tokens) for tokens in (inputs, targets))
    number = np.vectorize(Fraction, otypes=[object])
    one_hot, count = number(np.eye(vocab_size, dtype=int)), Fraction(x.size)
    embedded, residual = one_hot[x], one_hot[y] - Fraction(1, vocab_size)
    length = x.shape[1]
    steps = number(np.arange(1, length + 1))[:, None]
    mean = number(np.tril(np.ones((length, length), dtype=int))) / steps
    transposed = lambda a: np.swapaxes(a, -1, -2)  # noqa: E731
    bigram = (transposed(embedded) @ residual).sum(axis=0) / count
    context = (transposed(residual) @ mean @ embedded).sum(axis=0) / count
    scores = residual @ bigram.T @ bigram @ context @ transposed(embedded)
    centred = mean * (scores - (mean * scores).sum(axis=-1, keepdims=True))
    query_key = (transposed(embedded) @ centred @ embedded).sum(axis=0) / count
    return CorpusStatistics(
        embedded.sum(axis=(0, 1)) / count, bigram, context, query_key, _by_lag(centred) / count
    )
