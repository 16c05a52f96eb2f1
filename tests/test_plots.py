"""lib.plots: honest scales, no titles, colours that stay apart, and the same bytes each time."""

import io
import itertools
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb

from lib import plots

MATRIX = torch.tensor([[0.5, -3.0, 0.0], [1.0, 2.0, -0.25]], dtype=torch.float64)
ATTENTION = np.array([[1.0, 0.0, 0.0], [0.3, 0.7, 0.0], [0.2, 0.3, 0.5]])
PARAMETERS = [("output", 0)] + [
    (name, layer) for name in ("value", "query_key", "position") for layer in (1, 2, 3)
]


def metrics(steps=(1, 2, 4)):
    return [
        {
            "step": step,
            "comparisons": [
                {
                    "parameter": name,
                    "layer": layer,
                    "cosine": None if step == 1 and name == "position" else 1 - 0.01 * step,
                    "null_shuffled": None if layer == 2 else 0.1,
                }
                for name, layer in PARAMETERS
            ],
        }
        for step in steps
    ]


FIGURES = {
    "signed_matrix": lambda: plots.signed_matrix(MATRIX, rows=["a", "b"], columns=["c", "d", "e"]),
    "matrix_pair": lambda: plots.matrix_pair(ATTENTION, -ATTENTION, labels=["a", "b", "c"])[0],
    "attention_map": lambda: plots.attention_map(ATTENTION, tokens=["a", "b", "c"]),
    "cosine_curves": lambda: plots.cosine_curves(metrics()),
    "distance": lambda: plots.cosine_curves(metrics(), distance=True),
    "loglog_slopes": lambda: plots.loglog_slopes([1, 2, 4], {"value": [1, 4, 16]}),
    "zipf": lambda: plots.zipf([3, 0, 9, 1]),
    "sorted_bars": lambda: plots.sorted_bars(["a", "b"], [2.0, 1.0]),
    "lag_curve": lambda: plots.lag_curve(torch.tensor([0.2, -0.1, 0.0])),
    "overview": lambda: plots.overview_figure(ATTENTION, -ATTENTION, ["a", "b", "c"]),
}


@pytest.fixture(autouse=True)
def style():
    with matplotlib.rc_context():
        plots.use_style()
        yield
        plt.close("all")


@pytest.mark.parametrize("name", ["signed_matrix", "attention_map", "cosine_curves", "overview"])
def test_saved_twice_the_bytes_agree(name):
    saved = []
    for _ in range(2):
        file = io.BytesIO()
        FIGURES[name]().figure.savefig(file, format="png")
        saved.append(file.getvalue())
    assert saved[0] == saved[1]
    assert 1000 < len(saved[0]) < 100_000


@pytest.mark.parametrize("name", FIGURES)
def test_no_title(name):
    figure = FIGURES[name]().figure
    assert figure.get_suptitle() == ""
    for ax in figure.axes:
        assert [ax.get_title(place) for place in ("left", "center", "right")] == ["", "", ""]
        assert ax.get_legend() is None or ax.get_legend().get_title().get_text() == ""


def test_style_has_a_white_ground():
    figure = plt.figure()
    assert to_rgb(figure.get_facecolor()) == (1, 1, 1)
    assert to_rgb(plt.rcParams["savefig.facecolor"]) == (1, 1, 1)


@pytest.mark.parametrize(
    "matrix, limit, expected", [(MATRIX, None, 3), (MATRIX, 5, 5), (0 * MATRIX, None, 1)]
)
def test_signed_scale_is_centred_at_zero(matrix, limit, expected):
    image = plots.signed_matrix(matrix, limit=limit).images[0]
    assert image.get_clim() == (-expected, expected)
    assert np.allclose(image.cmap(image.norm(0.0))[:3], 1, atol=0.05)  # 0 is white
    assert np.array_equal(image.get_array(), matrix.numpy())


def test_pair_shares_one_scale_centred_at_zero():
    for left, right in ((MATRIX, 4 * MATRIX), (4 * MATRIX, MATRIX)):
        axes = plots.matrix_pair(left, right)
        assert [ax.images[0].get_clim() for ax in axes] == [(-12, 12)] * 2
        assert np.array_equal(axes[1].images[0].get_array(), right.numpy())


def test_attention_scale_is_fixed_and_the_future_masked():
    for scale in (1, 0.1):
        image = plots.attention_map(scale * ATTENTION).images[0]
        assert image.get_clim() == (0, 1)
        drawn = image.get_array()
        assert np.array_equal(drawn.mask, np.triu(np.ones((3, 3), bool), 1))
        assert np.array_equal(drawn.filled(0), scale * ATTENTION)
        grey = image.cmap(np.ma.masked)[:3]
        assert np.ptp(grey) == 0 and grey[0] > 0.8


def deuteranope_lab(colour):
    """CIELAB [L*, a*, b*] (D65) of `colour` as seen without green cones (Machado et al. 2009)."""
    seen = [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.01182, 0.04294, 0.968881],
    ]
    xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    srgb = np.array(to_rgb(colour))
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    ratio = np.array(xyz) @ np.clip(np.array(seen) @ linear, 0, 1) / [0.9505, 1.0, 1.089]
    x, y, z = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_palette_stays_apart_for_deuteranopes():
    def distance(one, other):
        return np.linalg.norm(deuteranope_lab(one) - deuteranope_lab(other))

    assert distance("#d62728", "#2ca02c") < 10  # a common red and green do not
    assert len(plots.COLOURS) == 4
    assert min(itertools.starmap(distance, itertools.combinations(plots.COLOURS.values(), 2))) > 15


@pytest.mark.parametrize(
    "draw",
    [
        lambda: plots.signed_matrix(MATRIX, rows=["a"]),
        lambda: plots.signed_matrix(MATRIX, columns=["a", "b"]),
        lambda: plots.matrix_pair(ATTENTION, ATTENTION, labels=["a", "b"]),
        lambda: plots.attention_map(ATTENTION, tokens=["a", "b", "c", "d"]),
        lambda: plots.sorted_bars(["a"], [1.0, 2.0]),
        lambda: plots.overview_figure(ATTENTION, ATTENTION, ["a", "b"]),
        lambda: plots.signed_matrix(MATRIX, rows=[]),
    ],
)
def test_label_count_must_match(draw):
    with pytest.raises(ValueError, match=r"^\d labels for \d"):
        draw()


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="shapes differ"):
        plots.matrix_pair(MATRIX, ATTENTION)
    with pytest.raises(ValueError, match="shapes differ"):
        plots.overview_figure(MATRIX, ATTENTION, ["a", "b", "c"])
    with pytest.raises(ValueError, match="expected 2 dimension"):
        plots.signed_matrix([1.0, 2.0])


def test_labels_are_drawn_where_they_belong():
    ax = plots.signed_matrix(MATRIX, rows=["a", "b"], columns=["c", "d", "e"])
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["c", "d", "e"]


def curves(ax):
    """The cosine curves of `ax` in the order of PARAMETERS: neither thin null nor line at 1."""
    return [line for line in ax.lines if line.get_linewidth() > 1]


def test_cosine_curves_have_a_colour_per_parameter_and_a_style_per_layer():
    ax = plots.cosine_curves(metrics())
    drawn = dict(zip(PARAMETERS, curves(ax), strict=True))
    for (name, layer), line in drawn.items():
        assert line.get_color() == plots.COLOURS[name]
        assert line.get_linestyle() == drawn["value", max(layer, 1)].get_linestyle()
        assert list(line.get_xdata()) == [1, 2, 4]
        assert np.allclose(line.get_ydata()[1:], [0.98, 0.96])
    assert len({drawn["value", layer].get_linestyle() for layer in (1, 2, 3)}) == 3
    assert len({line.get_color() for line in drawn.values()}) == 4
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["output", "value", "query-key", "position"]


def test_cosine_curves_leave_a_gap_for_none():
    for distance in (False, True):
        ax = plots.cosine_curves(metrics(), distance=distance)
        drawn = dict(zip(PARAMETERS, curves(ax), strict=True))
        assert np.isnan(drawn["position", 1].get_ydata()[0])
        assert np.isfinite(drawn["value", 1].get_ydata()).all()


def test_cosine_nulls_are_thin_and_only_beside_cosines():
    thin = [line for line in plots.cosine_curves(metrics()).lines if line.get_linewidth() < 1]
    nulls = [line for line in thin if line.get_linestyle() == "--"]
    assert [line.get_color() for line in nulls] == list(plots.COLOURS.values())
    assert all(np.allclose(line.get_ydata(), 0.1) for line in nulls)
    ax = plots.cosine_curves(metrics(), distance=True)
    assert len(ax.lines) == len(PARAMETERS) and ax.get_yscale() == "log"
    assert np.allclose(curves(ax)[0].get_ydata(), [0.01, 0.02, 0.04])


def test_loglog_slope_is_fitted():
    ax = plots.loglog_slopes([1, 2, 4], {"query_key": [1.0, 16.0, 256.0]})
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["query-key, slope 4.00"]


def test_overview_shows_both_matrices_on_one_scale():
    figure = plots.overview_figure(ATTENTION, -2 * ATTENTION, ["a", "b", "c"])
    trained, counted = [ax.images[0] for ax in figure.axes if ax.images]
    assert trained.get_clim() == counted.get_clim() == (-2, 2)
    assert np.array_equal(trained.get_array(), ATTENTION)
    assert np.array_equal(counted.get_array(), -2 * ATTENTION)


def test_overview_picture_is_small():
    picture = Path(__file__).parents[1] / "book" / "_static" / "overview.png"
    height, width, _ = plt.imread(picture).shape
    assert width <= 1000 and height <= 420
    assert picture.stat().st_size < 120_000
