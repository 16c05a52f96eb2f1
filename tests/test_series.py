"""The exact expansion: every leading term and next order as an equality of rational numbers."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from lib.checks import largest_error
from lib.series import Series, exact_statistics, expand
from lib.statistics import corpus_statistics
from lib.theory import NextOrder, predict
from tests import dense

V, T, N, L, STEPS, ORDER = 5, 4, 6, 3, 6, 6
COEFFICIENTS = {  # parameter: (power of eta, coefficient after s steps)
    "output": (1, lambda s: s),
    "value": (2, lambda s: math.comb(s, 2)),
    "query_key": (4, lambda s: 3 * math.comb(s, 4) + 2 * math.comb(s, 3)),
    "position": (4, lambda s: 3 * math.comb(s, 4) + 2 * math.comb(s, 3)),
}


@pytest.fixture(scope="module")
def tokens():
    return dense.split(dense.irregular_tokens(N, T, V, seed=2))


@pytest.fixture(scope="module")
def history(tokens):
    return expand(*tokens, V, L, STEPS, ORDER)


@pytest.fixture(scope="module")
def terms(tokens):
    statistics = exact_statistics(*tokens, V)
    return {
        "output": statistics.bigram,
        "value": statistics.value_term,
        "query_key": statistics.query_key_term,
        "position": statistics.position_term,
    }


def names_of(parameter):
    return ["output"] if parameter == "output" else [f"layers.{i}.{parameter}" for i in range(L)]


def floats(array):
    return torch.from_numpy(np.asarray(array).astype(float))


def test_exact_statistics_are_the_statistics(tokens, terms):
    counted = corpus_statistics(*tokens, V)
    for name, field in zip(
        terms, ("bigram", "value_term", "query_key_term", "position_term"), strict=True
    ):
        assert all(isinstance(entry, Fraction) for entry in terms[name].flat)
        assert largest_error(getattr(counted, field), floats(terms[name])) < 1e-13


@pytest.mark.parametrize("parameter", COEFFICIENTS)
def test_leading_terms_hold_exactly(history, terms, parameter):
    power, coefficient = COEFFICIENTS[parameter]
    for step, weights in enumerate(history, start=1):
        for name in names_of(parameter):
            found = weights[name].terms
            assert not any(np.any(lower) for lower in found[:power]), (step, name)
            assert np.array_equal(found[power], coefficient(step) * terms[parameter]), (step, name)
    assert not np.array_equal(
        history[-1][names_of(parameter)[0]].terms[power], terms[parameter] * 0
    )


@pytest.mark.parametrize(
    "parameter, power", [("output", 2), ("value", 3), ("query_key", 5), ("position", 5)]
)
def test_next_orders_hold(history, tokens, parameter, power):
    statistics = corpus_statistics(*tokens, V)
    following = NextOrder.from_tokens(*tokens, statistics)
    for step, weights in enumerate(history, start=1):
        found = following.predict(step, 1.0)[parameter] - predict(statistics, step, 1.0)[parameter]
        for name in names_of(parameter):
            assert largest_error(found, floats(weights[name].terms[power])) < 1e-12, (step, name)


def test_where_layers_first_part(history):
    """Value at eta^4, query-key and position at eta^6, and equally spaced in depth."""
    for parameter, first in (("value", 4), ("query_key", 6), ("position", 6)):
        one, two, three = (history[-1][name].terms for name in names_of(parameter))
        for power in range(first):
            assert np.array_equal(one[power], two[power]) and np.array_equal(
                two[power], three[power]
            )
        assert np.any(one[first] != two[first])
        assert np.array_equal(three[first] - two[first], two[first] - one[first])


def test_float_coefficients_equal_the_exact_ones(history, tokens):
    for exact, approximate in zip(
        history, expand(*tokens, V, L, STEPS, ORDER, exact=False), strict=True
    ):
        for name, series in exact.items():
            for power, array in enumerate(series.terms):
                assert (
                    np.abs(floats(array).numpy() - approximate[name].terms[power]).max() < 1e-12
                ), (name, power)


def test_the_series_is_the_trained_model(history, tokens):
    """Summed at a small eta, the polynomial equals weights from autograd up to the order left out."""
    errors = []
    for eta in (0.2, 0.1):
        model = dense.trained(tokens, V, L, eta, STEPS)
        value = sum(floats(a) * eta**k for k, a in enumerate(history[-1]["layers.1.value"].terms))
        errors.append((model.layers[1].value - value).abs().max().item())
    assert errors[0] / errors[1] == pytest.approx(2 ** (ORDER + 1), rel=0.3)


def test_series_arithmetic_by_hand():
    half = Series(
        [np.array([Fraction(0)]), np.array([Fraction(1, 2)]), np.array([Fraction(0)])]
    )  # eta / 2
    assert [t[0] for t in half.exp().terms] == [1, Fraction(1, 2), Fraction(1, 8)]
    one_plus = Series([np.array([Fraction(1)]), np.array([Fraction(1)]), np.array([Fraction(0)])])
    assert [t[0] for t in one_plus.reciprocal().terms] == [1, -1, 1]
    assert [t[0] for t in (one_plus * one_plus).terms] == [1, 2, 1]
    assert [t[0] for t in one_plus.times_eta().terms] == [0, 1, 1]
    with pytest.raises(ValueError, match="constant term"):
        one_plus.exp()


def test_bad_input_is_refused(tokens):
    with pytest.raises(ValueError, match="at least 1"):
        expand(*tokens, V, 0, STEPS, ORDER)
    with pytest.raises(ValueError, match="must be alike"):
        expand(tokens[0], tokens[1][:, 1:], V, L, STEPS, ORDER)
