"""Every number that the article and the paper publish, and ours beside it, read from the run records.

`data/published.toml` lists them; the verdict on each is one of VERDICTS. A run counts for a published
setting only if it has that setting; smaller ones stand beside it. `python -m lib.scoreboard` prints all.
"""

import html
import math
import re
import sys
import tomllib
from dataclasses import asdict
from functools import cache
from pathlib import Path

import numpy as np
import torch

from lib.presets import cost_in_words, duration, estimate, preset
from lib.results import (
    REPOSITORY,
    USUAL_VALUES,
    OneSentenceParser,
    load_run,
    read_record,
    results_root,
    run_name,
)
from lib.series import expand
from lib.statistics import corpus_statistics
from lib.theory import leading_coefficients, leading_terms, theorem_steps

PUBLISHED = REPOSITORY / "data" / "published.toml"
EXPECT = {"value", "tolerance", "low", "high", "at_least", "at_most", "words"}
VERDICTS = ("agrees", "differs", "not yet run", "not in our copy")
MISSING = "not in our copy"
# Settings that a machine decides, the seed, and how many documents an intervention is measured on: with
# others it is still the same experiment.
IMMATERIAL = ("seed", "micro_batch_size", "device", "dtype", "deterministic", "samples")
TAKE = {
    "min": min,
    "max": max,
    "mean": lambda values: sum(values) / len(values),
    "spread": lambda values: max(values) - min(values),
    "ratio": lambda values: max(values) / min(values),
    "most and least": lambda rows: [_most_and_least(rows)],
}


def _most_and_least(rows: list[dict]) -> str:
    """The parameters of the rows with the largest and the smallest mean, in words."""
    ends = [choose(rows, key=lambda row: row["mean"])["parameter"] for choose in (max, min)]
    return "{} most, {} least".format(*ends).replace("_", "-")


def published(path=PUBLISHED) -> dict:
    """The file's content: `topic` (a list of titles with `key`), `entry` (the numbers), `work`.

    Raises ValueError (one sentence) if an entry lacks a field, has an unknown one or an unknown word in it,
    or repeats an id.
    """
    try:
        found = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid TOML ({error}).") from error
    shapes = {"topic": list, "entry": list, "work": dict}
    if missing := [key for key, shape in shapes.items() if not isinstance(found.get(key), shape)]:
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}.")
    needed = {"id", "topic", "source", "where", "quantity", "published", "setting", "chapter"}
    optional = {"expect", "needs", "kind", "cost", "run", "read", "take", "computed", "beside"}
    topics, seen = {topic.get("key") for topic in found["topic"]}, set()
    words = {
        "computed": COMPUTED.keys(),
        "take": TAKE.keys(),
        "kind": {"intervene"},
        "cost": {"training", "statistics", *found["work"]},
    }
    for entry in found["entry"]:
        name = entry.get("id", "without id")
        wrong = (needed - entry.keys()) | (entry.keys() - needed - optional - {"why", "note"})
        kinds = {"published": str, "beside": list, "expect": dict}
        shapeless = {k for k, kind in kinds.items() if not isinstance(entry.get(k, kind()), kind)}
        if shapeless:
            raise ValueError(f"Entry {name}: of a wrong kind: {sorted(shapeless)}.")
        for place in entry.get("beside", []):
            wrong |= place.keys() - {"preset", "run", "scale", "kind", "read", "take"}
            wrong |= {"preset or run"} if not place.keys() & {"preset", "run"} else set()
        for place in (entry, *entry.get("beside", [])):
            for key, known in words.items():
                wrong |= {str(place[key])} - known if key in place else set()
        expect = entry.get("expect", {}).keys()
        wrong |= (expect - EXPECT) | (
            {"low", "high"} - expect if expect & {"low", "high"} else set()
        )
        if wrong or name in seen or entry["topic"] not in topics:
            raise ValueError(
                f"Entry {name}: missing, unknown or repeated: {sorted(wrong) or name}."
            )
        seen.add(name)
    return found


# What is read ------------------------------------------------------------------------------------


def _matches(value, wanted: str) -> bool:
    if wanted == "whole":
        return isinstance(value, int | float) and float(value).is_integer()
    try:
        return float(wanted) == value
    except ValueError:
        return str(value) in wanted.split("|")


def read(record: dict, path: str) -> list:
    """All values at `path` in a record of load_run; nulls are left out.

    Steps are keys between dots; a list stands for each of its items; `[key=value]` keeps those items
    whose key is that number, one of `a|b`, or `whole`: "metrics[epoch=10].comparisons[layer=2].cosine".
    """
    found = [record]
    for key, filters in re.findall(r"(\w+)((?:\[[^\]]*\])*)", path):
        found = [i[key] for i in found if isinstance(i, dict) and i.get(key) is not None]
        found = [each for item in found for each in (item if isinstance(item, list) else [item])]
        for name, wanted in re.findall(r"\[(\w+)=([^\]]*)\]", filters):
            found = [i for i in found if isinstance(i, dict) and _matches(i.get(name), wanted)]
    return found


def runs_of(name: str, kind: str = "", root=None) -> list[str]:
    """Names of the finished runs of a preset's experiment, whatever their seeds (see IMMATERIAL).

    `kind` is "" for training, or what stands before the name of a run that goes on from it: "intervene".
    """

    def experiment(parameters):
        given = USUAL_VALUES | parameters
        return {key: value for key, value in given.items() if key not in IMMATERIAL}

    wanted, found = experiment(asdict(preset(name).settings[0])), []
    for summary in sorted(results_root(root).glob("*/summary.json")):
        if not summary.with_name("run.json").exists():
            continue
        parameters = read_record(summary.with_name("run.json"), parameters=dict)["parameters"]
        own_name = "-".join(part for part in (kind, run_name(parameters)) if part)
        if summary.parent.name == own_name and experiment(parameters) == wanted:
            read_record(summary, finished=True)
            found.append(summary.parent.name)
    return found


def _values(place: dict, default: dict, root) -> tuple[list, list[str]]:
    """(one value a run, names of the runs) for a `preset`/`needs` or a `run` pattern."""
    if "run" in place:
        pattern = re.escape(place["run"]).replace(r"\*", ".*")
        folders = sorted(path.parent.name for path in results_root(root).glob("*/summary.json"))
        runs = [name for name in folders if re.fullmatch(pattern, name)]
    else:
        kind = place.get("kind", default.get("kind", ""))
        runs = runs_of(place.get("preset") or place["needs"], kind, root)
    path, take = (place.get(key, default.get(key)) for key in ("read", "take"))
    if path is None:
        return [], []
    values = []
    for run in runs:
        found = read(load_run(run, root), path)
        if not found:
            raise ValueError(f"Entry {default['id']} finds nothing at {path} in the run {run}.")
        is_text = any(isinstance(value, str) for value in found)
        values.append(found if is_text else TAKE[take or "min"](found))
    return values, runs


# What is computed: no run is needed --------------------------------------------------------------


_TOKENS = torch.randint(5, (4, 5), generator=torch.Generator().manual_seed(0))
SMALL = _TOKENS[:, :-1], _TOKENS[:, 1:], 5  # inputs, targets, vocabulary


@cache
def _expansion() -> list[dict]:
    """The expansion of a small model after 1, 2, 3, 4 updates: name of the weight, and its terms by order."""
    steps = expand(*SMALL, 1, 4, 4, exact=False)
    return [
        {name.split(".")[-1]: series.terms for name, series in weights.items()} for weights in steps
    ]


@cache
def _orders() -> dict[str, int]:
    """The power of eta with which each kind of weight begins."""
    return {
        name: next(k for k, term in enumerate(terms) if (term != 0).any())
        for name, terms in _expansion()[2].items()
    }


def _counts(name: str) -> list[str]:
    """How often the leading term of a weight is in it after each of four updates."""
    term = leading_terms(corpus_statistics(*SMALL, device="cpu"))[name].numpy()
    found = [
        (step[name][_orders()[name]] * term).sum() / (term * term).sum() for step in _expansion()
    ]
    return [", ".join(f"{count:.4g}" for count in found) + " for s = 1 to 4"]


def _first_update() -> list[str]:
    bigram = corpus_statistics(*SMALL, device="cpu").bigram.numpy()
    weights = _expansion()[0]
    others = [term for name, terms in weights.items() if name != "output" for term in terms]
    zeroth, first, *higher = weights["output"]
    output = abs(first - bigram).max() < 1e-15 and not any(map(np.any, (zeroth, *higher)))
    return [
        "output η B" if output else "output",
        "others 0" if not any(map(np.any, others)) else "",
    ]


def _covered() -> list[str]:
    size = preset("article").settings[0]
    return [
        f"{theorem_steps(rate, size.num_layers, size.seq_len)} at {rate}" for rate in (0.005, 0.05)
    ]


def _article_rate_times_updates() -> float:
    (article,) = preset("article").settings
    updates = article.epochs * (article.max_sequences // article.batch_size)
    return leading_coefficients(updates, article.learning_rate)["output"]


COMPUTED = {
    "order of output": lambda: _orders()["output"],
    "order of value": lambda: _orders()["value"],
    "order of query_key": lambda: _orders()["query_key"],
    # Removing a weight costs its inner product with its gradient, which is one order lower.
    "order of removing output": lambda: 2 * _orders()["output"] - 1,
    "order of removing value": lambda: 2 * _orders()["value"] - 1,
    "order of removing query_key": lambda: 2 * _orders()["query_key"] - 1,
    "counts of value": lambda: _counts("value"),
    "counts of query_key": lambda: _counts("query_key"),
    "weights after one update": _first_update,
    "updates that the theorem covers": _covered,
    "coefficient of three steps": lambda: leading_coefficients(3, 1.0)["query_key"],
    "propagated support": lambda: 0.7 * 0.95 * 0.9 * 0.8,
    "loss at zero": lambda: math.log(preset("paper-large-lr").settings[0].vocab_size),
    "article's s eta": _article_rate_times_updates,
}


# The verdict -------------------------------------------------------------------------------------


def agrees(entry: dict, values: list) -> bool:
    """Whether the values, one a run, agree with what is published.

    `expect` holds `value` (default: the published number) with `tolerance`, or `low` and `high` with
    `tolerance`, or `at_least`, or `at_most`, or `words` that all must be among those found. Several
    runs agree if their range, widened by the tolerance, holds the published value.
    """
    expect = entry.get("expect", {})
    if "words" in expect:
        return all(set(expect["words"]) <= set(found) for found in values)
    least, most, tolerance = min(values), max(values), expect.get("tolerance", 0.0)
    if "at_least" in expect:
        return least >= expect["at_least"]
    if "at_most" in expect:
        return most <= expect["at_most"]
    if "low" in expect:
        return least >= expect["low"] - tolerance and most <= expect["high"] + tolerance
    value = expect["value"] if "value" in expect else float(entry["published"])
    return least - tolerance <= value <= most + tolerance


def _number(value: float) -> str:
    """Six digits, as cosines near 1 need them, or the distance from 1; three where a number is small."""
    text = f"{value:.6g}" if abs(value) > 0.1 else f"{value:.3g}"
    return f"1 − {1 - value:.1e}" if text == "1" and value < 1 else text


def _in_words(values: list, runs=(), root=None) -> str:
    if any(isinstance(value, list) for value in values):
        return "; ".join(", ".join(map(str, value)) for value in values)
    text = _number(sum(values) / len(values))
    if len(values) > 1:
        seeds = {load_run(run, root)["run"]["parameters"]["seed"] for run in runs}
        kind = "seeds" if len(seeds) == len(values) else "runs"
        text += f" ({_number(min(values))} to {_number(max(values))}, {len(values)} {kind})"
    return text


def cost_of(entry: dict, work: dict, root=None) -> str:
    """What it would cost to run an entry's setting, from the records of dry runs; "" if there is none.

    `cost` is "training" (default), "statistics" (counting alone), or a key of `work`, which gives a
    number of `multiplications` and what they are for; they are divided by the machine's measured speed.
    """
    kind = entry.get("cost", "training")
    if kind in work:
        found = estimate(work[kind]["speed"], root)
        if not found or found["refused"]:
            return ""
        seconds = work[kind]["multiplications"] / found["multiplications_per_second"]
        return f"{duration(seconds)} {work[kind]['each']}"
    found = estimate(entry["needs"], root) if "needs" in entry else None
    if found is None:
        return ""
    if kind == "training" or found["refused"]:
        return cost_in_words(found)
    return f"{duration(found['statistics_seconds'])} of counting, once the corpus is fetched"


def rows(path=PUBLISHED, root=None) -> list[dict]:
    """One dict an entry: its fields, and `ours`, `runs`, `smaller`, `verdict`, `cost`.

    `ours` is a text (empty where there is nothing), `smaller` a list of (scale, text, runs). Raises ValueError
    (one sentence) for an entry without a verdict: one that differs without `why`, or that has not
    been run and has no estimate of the cost.
    """
    board = published(path)
    made = []
    for entry in board["entry"]:
        values, runs = [], []
        if "computed" in entry:
            values, runs = [COMPUTED[entry["computed"]]()], ["computed"]
        elif "read" in entry and ("needs" in entry or "run" in entry):
            values, runs = _values(entry, entry, root)
        smaller = []
        for place in entry.get("beside", []):
            beside, behind = _values(place, entry, root)
            if beside:
                scale = place.get("scale") or place["preset"]
                smaller.append((scale, _in_words(beside, behind, root), behind))
        cost = ""
        if entry["published"] == MISSING:
            verdict = MISSING
        elif values:
            verdict = "agrees" if agrees(entry, values) else "differs"
            if verdict == "differs" and not entry.get("why"):
                raise ValueError(
                    f"Entry {entry['id']} differs: {_in_words(values)} and not {entry['published']}; "
                    "say why in data/published.toml."
                )
        else:
            verdict, cost = "not yet run", cost_of(entry, board["work"], root)
            if not cost:
                raise ValueError(
                    f"Entry {entry['id']} has no run and no estimate of its cost: name the preset it "
                    "needs in data/published.toml, and try python -m lib.presets NAME --dry-run 1."
                )
        ours = _in_words(values, runs if "computed" not in entry else (), root) if values else ""
        made.append(
            entry
            | {"ours": ours, "runs": runs, "smaller": smaller, "verdict": verdict, "cost": cost}
        )
    return made


# As a table --------------------------------------------------------------------------------------

COLUMNS = ("what, and in which setting", "published", "ours", "at smaller scale", "verdict")


def cells(row: dict) -> list[tuple[str, str]]:
    """A row of `rows` in the order of COLUMNS, each cell as (text, small print)."""
    runs = row["runs"]
    made_by = "computed" if runs == ["computed"] else f"{len(runs)} run" + "s" * (len(runs) > 1)
    written = any((REPOSITORY / "book").glob(f"{row['chapter']}.*"))
    chapter = f"{'chapter' if written else 'planned chapter'} {row['chapter']}"
    verdict = row["verdict"] + {
        "not yet run": f": {row['cost']}",
        "differs": f": {row.get('why')}",
    }.get(row["verdict"], "")
    return [
        (row["quantity"], f"{row['setting']} ({chapter})"),
        (row["published"], f"{row['source']}, {row['where']}"),
        (row["ours"] or "–", made_by if row["ours"] else ""),
        ("; ".join(f"{scale}: {text}" for scale, text, _ in row["smaller"]) or "–", ""),
        (verdict, row.get("note", "")),
    ]


def as_html(found: list[dict]) -> str:
    """The rows as an HTML table for a page."""
    lines = ["<table class='table scoreboard'><thead><tr>"]
    lines += [f"<th>{name}</th>" for name in COLUMNS] + ["</tr></thead><tbody>"]
    for row in found:
        lines.append(f"<tr id='{row['id']}'>")
        for text, small in cells(row):
            small = f"<small>{html.escape(small)}</small>" if small else ""
            lines.append(f"<td>{html.escape(text)}{small}</td>")
        lines.append("</tr>")
    return "".join([*lines, "</tbody></table>"])


def as_text(found: list[dict]) -> str:
    """The rows as text, one line a cell."""
    lines = []
    for row in found:
        lines.append(f"\n[{row['id']}]")
        for column, (text, small) in zip(COLUMNS, cells(row), strict=True):
            if text != "–":
                lines.append(f"  {column.split(',')[0]}: {text}" + (f" ({small})" if small else ""))
    return "\n".join(lines)


def runs_behind(found: list[dict], root=None) -> list[dict]:
    """One dict a run that a row or its smaller scale is read from: its name, scale and cost."""
    names = {
        name
        for row in found
        for runs in [row["runs"], *(runs for _, _, runs in row["smaller"])]
        for name in runs
    }
    made = []
    for name in sorted(names - {"computed"}):
        run = load_run(name, root)["run"]
        made.append(
            {
                "run": name,
                "sequences": run["corpus"]["sequences"],
                "minutes": run["seconds"] / 60,
                "MiB": run["peak_memory_mib"],
                "device": f"{run['device_name']}, {run['threads']} threads",
                "commit": (run["commit"] or "")[:7],
            }
        )
    return made


def counts(found: list[dict]) -> dict[str, int]:
    """How many rows have each of VERDICTS."""
    return {name: sum(row["verdict"] == name for row in found) for name in VERDICTS}


def main(arguments=None) -> int:
    """Print the scoreboard as text; 2 and one sentence if an entry has no verdict."""
    parser = OneSentenceParser(prog="python -m lib.scoreboard", description=__doc__.split("\n")[0])
    try:
        parser.parse_args(arguments)
        found = rows()
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(as_text(found))
    print("\n" + ", ".join(f"{count} {name}" for name, count in counts(found).items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
