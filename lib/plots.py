"""One style for every figure, and the few kinds of figure that the book uses.

No titles: the finding stands in the caption. Figures have a white ground, so that they read in the dark
theme too. Signed matrices are on a diverging scale centred at 0, attention on a fixed scale from 0 to 1.
"""

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

# Okabe and Ito's palette, told apart by colour-blind readers.
COLOURS = {"output": "#0072B2", "value": "#D55E00", "query_key": "#009E73", "position": "#CC79A7"}
LAYER_STYLES = ("-", "--", ":", "-.")
STYLE = {
    "figure.figsize": (6.4, 3.6),
    "figure.dpi": 100,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "figure.constrained_layout.use": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "axes.prop_cycle": mpl.cycler(color=[*COLOURS.values(), "#E69F00", "#56B4E9", "#000000"]),
    "font.size": 10,
    "legend.frameon": False,
    "lines.linewidth": 2,
    "svg.hashsalt": "leading-terms",
}


def use_style() -> None:
    """Set the style of the book for this process."""
    mpl.rcParams.update(STYLE)


def _array(values, ndim: int) -> np.ndarray:
    array = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values, dtype=float)
    if array.ndim != ndim:
        raise ValueError(f"expected {ndim} dimension(s), got an array of shape {array.shape}")
    return array


def _axes(ax):
    return ax if ax is not None else plt.subplots()[1]


def _name_ticks(ax, matrix, rows, columns) -> None:
    for labels, size, place in (
        (rows, matrix.shape[0], ax.set_yticks),
        (columns, matrix.shape[1], ax.set_xticks),
    ):
        if labels is None:
            continue
        if len(labels) != size:
            raise ValueError(f"{len(labels)} labels for {size} rows or columns")
        place(range(size), labels)
    ax.tick_params(axis="x", rotation=90 if columns is not None else 0)
    ax.tick_params(length=0)


def signed_matrix(
    matrix, *, rows=None, columns=None, row_label="", column_label="", limit=None, ax=None
):
    """Draw `matrix` [row, column] with 0 in white; `limit` fixes the scale (default: largest entry).

    `rows`, `columns` are tick labels. Returns the Axes. ValueError for another shape or label count.
    """
    matrix, ax = _array(matrix, 2), _axes(ax)
    limit = limit or np.abs(matrix).max() or 1.0
    image = ax.imshow(
        matrix, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest"
    )
    ax.figure.colorbar(image, ax=ax, fraction=0.05)
    _name_ticks(ax, matrix, rows, columns)
    ax.set(ylabel=row_label, xlabel=column_label)
    return ax


def matrix_pair(
    left, right, *, labels=None, row_label="", column_label="", names=("learned", "counted")
):
    """Two matrices [row, column] of one shape side by side, on one colour scale. Returns both Axes."""
    left, right = _array(left, 2), _array(right, 2)
    if left.shape != right.shape:
        raise ValueError(f"shapes differ: {left.shape} and {right.shape}")
    limit = max(np.abs(left).max(), np.abs(right).max()) or 1.0
    _, axes = plt.subplots(1, 2, figsize=(9, 4), sharey=True)
    for ax, matrix, name in zip(axes, (left, right), names, strict=True):
        image = ax.imshow(
            matrix, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="equal", interpolation="nearest"
        )
        _name_ticks(ax, matrix, labels, labels)
        ax.set_xlabel(f"{column_label} ({name})")
    axes[0].set_ylabel(row_label)
    axes[0].figure.colorbar(image, ax=axes, fraction=0.03)
    return axes


def attention_map(matrix, *, tokens=None, ax=None):
    """Attention [query, key] on the fixed scale 0 to 1; the future, above the diagonal, stays grey."""
    matrix, ax = _array(matrix, 2), _axes(ax)
    hidden = np.triu(np.ones(matrix.shape, dtype=bool), 1)
    colours = mpl.colormaps["viridis"].with_extremes(bad="#e6e6e6")
    image = ax.imshow(
        np.ma.array(matrix, mask=hidden), cmap=colours, vmin=0, vmax=1, interpolation="nearest"
    )
    ax.figure.colorbar(image, ax=ax, fraction=0.05)
    _name_ticks(ax, matrix, tokens, tokens)
    ax.set(ylabel="query", xlabel="key")
    return ax


def cosine_curves(metrics, *, distance=False, ax=None):
    """Cosines over updates from the lines of a metrics.jsonl (lib.train): one colour per parameter,
    one line style per layer, thin and dashed the null of the shuffled corpus (layer 1).

    With `distance`, 1 - cosine on a logarithmic scale instead, and no null. Returns the Axes.
    """
    ax, drawn = _axes(ax), {}
    for line in metrics:
        for row in line["comparisons"]:
            drawn.setdefault((row["parameter"], row["layer"]), []).append(
                (
                    line["step"],
                    *(
                        np.nan if row[key] is None else row[key]
                        for key in ("cosine", "null_shuffled")
                    ),
                )
            )
    for (parameter, layer), points in drawn.items():
        steps, cosines, nulls = zip(*points, strict=True)
        style = LAYER_STYLES[max(layer - 1, 0) % len(LAYER_STYLES)]
        label = parameter.replace("_", "-") if layer <= 1 else None
        if distance:
            cosines = 1 - np.array(cosines)
        ax.plot(steps, cosines, style, color=COLOURS[parameter], label=label)
        if layer <= 1 and not distance:
            ax.plot(steps, nulls, "--", color=COLOURS[parameter], linewidth=0.8)
    ax.set(
        xscale="log",
        xlabel="update",
        ylabel="1 - cosine" if distance else "cosine with the leading term",
    )
    if distance:
        ax.set_yscale("log")
    else:
        ax.axhline(1, color="0.7", linewidth=0.8, zorder=0)
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return ax


def loglog_slopes(x, series: dict, *, ax=None, xlabel="", ylabel=""):
    """Points of `series` {name: values} over `x`, both axes logarithmic, with the fitted slope named."""
    x, ax = _array(x, 1), _axes(ax)
    for name, values in series.items():
        slope = np.polyfit(np.log(x), np.log(_array(values, 1)), 1)[0]
        ax.loglog(
            x,
            values,
            "o-",
            color=COLOURS.get(name),
            label=f"{name.replace('_', '-')}, slope {slope:.2f}",
        )
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.legend()
    return ax


def zipf(counts, *, ax=None):
    """Sorted word counts over rank, both axes logarithmic."""
    ax, counts = _axes(ax), np.sort(_array(counts, 1))[::-1]
    counts = counts[counts > 0]
    ax.loglog(np.arange(1, len(counts) + 1), counts)
    ax.set(xlabel="rank", ylabel="count")
    return ax


def sorted_bars(labels, values, *, xlabel="", ax=None, colour=COLOURS["output"]):
    """Horizontal bars, the first label on top."""
    values, ax = _array(values, 1), _axes(ax)
    if len(labels) != len(values):
        raise ValueError(f"{len(labels)} labels for {len(values)} values")
    ax.barh(range(len(values)), values, color=colour)
    ax.set_yticks(range(len(values)), labels)
    ax.invert_yaxis()
    ax.set_xlabel(xlabel)
    return ax


def lag_curve(position, *, ax=None, label=None, style="-", colour=None):
    """Position weights or terms [lag] over the lag; 0 is the current token."""
    position, ax = _array(position, 1), _axes(ax)
    ax.plot(np.arange(len(position)), position, style, label=label, color=colour)
    ax.axhline(0, color="0.7", linewidth=0.8, zorder=0)
    ax.set(xlabel="lag (0: the current token)", ylabel="position weight")
    return ax


def overview_figure(learned, counted, labels):
    """The first picture of the book: what is learned in which order, and weights beside their statistic.

    `learned` [current, next]: output weights of a trained model over their coefficient; `counted`
    [current, next]: the bigram statistic; both for the words `labels`. Returns the figure, 1000 by
    380 pixels. ValueError for shapes that differ or another number of labels.

    book/_static/overview.png is `lib.train.train(TrainConfig(steps=30), ...)` on the embedded corpus,
    for the words "one day , once upon a time there was in the pond".
    """
    learned, counted = _array(learned, 2), _array(counted, 2)
    if learned.shape != counted.shape:
        raise ValueError(f"shapes differ: {learned.shape} and {counted.shape}")
    figure = plt.figure(figsize=(10, 3.8))
    left, right = figure.subfigures(1, 2, width_ratios=(1.1, 1), wspace=0.04)
    path, pair = left.subplots(), right.subplots(1, 2)
    path.set(xlim=(0, 100), ylim=(0, 60))
    path.axis("off")
    places = {  # x, y and text of the parts; the coloured ones are learned
        "history": (5, 30, "history\ntoken"),
        "value": (27, 30, "value\n$\\eta^2\\ \\bar\\Phi^\\top\\bar B^\\top$\nwhat it says"),
        "attention": (51, 30, "attention\nmixes"),
        "output": (75, 30, "output\n$\\eta\\ \\bar B$\nwhat follows"),
        "next": (96, 30, "next\ntoken"),
        "query_key": (51, 53, "query-key\n$\\eta^4\\ \\bar Q$\nwhich to read"),
        "position": (51, 7, "position\n$\\eta^4\\ \\Delta$\nhow far back"),
        "current": (75, 7, "current\ntoken"),
    }
    drawn = {}
    for name, (x, y, text) in places.items():
        box = {
            "boxstyle": "round,pad=0.4",
            "facecolor": "white",
            "edgecolor": COLOURS.get(name, "0.7" if name == "attention" else "none"),
            "linewidth": 2,
        }
        drawn[name] = path.text(x, y, text, ha="center", va="center", bbox=box)
    for start, end in (
        ("history", "value"),
        ("value", "attention"),
        ("attention", "output"),
        ("output", "next"),
        ("query_key", "attention"),
        ("position", "attention"),
        ("current", "output"),
    ):
        patches = {"patchA": drawn[start].get_bbox_patch(), "patchB": drawn[end].get_bbox_patch()}
        arrow = {"arrowstyle": "-|>", "color": "0.3", "linewidth": 1.5, "shrinkA": 0, "shrinkB": 1}
        path.annotate(
            "", xy=places[end][:2], xytext=places[start][:2], arrowprops=arrow | patches, zorder=0
        )
    limit = max(np.abs(learned).max(), np.abs(counted).max()) or 1.0
    for ax, matrix, name in zip(pair, (learned, counted), ("trained", "counted"), strict=True):
        ax.imshow(matrix, cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
        _name_ticks(ax, matrix, labels, labels)
        ax.set_xlabel(f"next word ({name})")
    pair[0].set_ylabel("current word")
    pair[1].set_yticks([])
    right.colorbar(ax.images[0], ax=pair, orientation="horizontal", fraction=0.05, aspect=40)
    return figure
