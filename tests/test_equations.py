"""The equation gate over the book, and the gate itself on a small book that is wrong on purpose."""

import ast
import json
from collections import Counter
from pathlib import Path

import pytest

from tests import equations
from tests.equations import GateError, baseline, flips, labelled, prove, read_chapter, toc_files

ROOT = Path(__file__).parents[1]


def by_chapter(path, *values):
    """A parameter set that make test keeps on one process with the others of its chapter."""
    name = "-".join([path.stem, *values])
    return pytest.param(path, *values, id=name, marks=pytest.mark.xdist_group(f"book-{path.stem}"))


NOTEBOOKS = [path for path in toc_files(ROOT) if path.suffix == ".ipynb"]


@pytest.mark.slow
@pytest.mark.parametrize("path", [by_chapter(path) for path in NOTEBOOKS])
def test_chapter_runs_and_its_checks_pass(path):
    ran = baseline(path, ROOT)["checks"]
    # A page that only shows records, such as scoreboard, imports no check.
    assert ran or "lib.checks" not in path.read_text(), f"{path.name} ran no check"


@pytest.mark.slow
@pytest.mark.parametrize(("path", "label"), [by_chapter(*page) for page in labelled(ROOT)])
def test_flipped_sign_fails_the_check_that_names_the_equation(path, label):
    prove(label, read_chapter(path), ROOT)


def test_labels_begin_with_eq_and_are_unique():
    labels = [label for _, label in labelled(ROOT)]
    assert [label for label in labels if not label.startswith("eq-")] == []
    assert [label for label, count in Counter(labels).items() if count > 1] == []


# The gate on a book of one chapter ---------------------------------------------------------------

GOOD = '''def gain(a, b):
    """Equation eq-gain."""
    return a - b
'''
CHECK = 'from lib.checks import check\ncheck("gain", abs(gain(5, 3) - 2), 1e-9, equation="eq-gain")'


@pytest.fixture
def book(tmp_path):
    """A function (code cells, lib modules) -> the chapter of a scratch book that holds them."""
    checks = (ROOT / "lib" / "checks.py").read_text()
    for folder in ("lib", "book"):
        (tmp_path / folder).mkdir()
    (tmp_path / "lib" / "__init__.py").touch()
    # The import of torch, which these chapters do without, would take most of the time.
    (tmp_path / "lib" / "checks.py").write_text(checks.replace("import torch\n", ""))
    (tmp_path / "_toc.yml").write_text("format: jb-book\nroot: book/tiny\n")

    def write(*cells, text="$$\na - b\n$$ (eq-gain)\n", **modules):
        for name, source in modules.items():
            (tmp_path / "lib" / f"{name}.py").write_text(source)
        content = [{"cell_type": "markdown", "metadata": {}, "source": text}]
        content += [{"cell_type": "code", "metadata": {}, "source": cell} for cell in cells]
        path = tmp_path / "book" / "tiny.ipynb"
        path.write_text(json.dumps({"cells": content}))
        read_chapter.cache_clear()
        baseline.cache_clear()
        return read_chapter(path)

    return write


def test_a_good_chapter_passes(book, tmp_path):
    assert prove("eq-gain", book(GOOD, CHECK), tmp_path) == "return -(a - b)"


def test_a_function_of_lib_is_flipped_in_the_copy_that_the_chapter_imports(book, tmp_path):
    chapter = book("from lib.gains import gain\n" + CHECK, gains=GOOD)
    assert prove("eq-gain", chapter, tmp_path) == "return -(a - b)"
    assert (tmp_path / "lib" / "gains.py").read_text() == GOOD
    # The copy wins over this repository's own lib, which pip install -e . put on the path.
    assert not Path(baseline(chapter.path, tmp_path)["lib"]).is_relative_to(ROOT)


BLIND = CHECK.replace("gain(5, 3) - 2", "gain(5, 3) ** 2 - 4")


def test_a_check_that_does_not_see_the_sign_fails_the_gate(book, tmp_path):
    with pytest.raises(GateError, match="returns the negative"):
        prove("eq-gain", book(GOOD, BLIND), tmp_path)


def test_a_check_of_one_part_does_not_vouch_for_the_other(book, tmp_path):
    both = 'def pair(a, b):\n    """Equation eq-gain."""\n    return {"d": a - b, "s": a + b}\n'
    sees = CHECK.replace("gain(5, 3)", 'pair(5, 3)["d"]')
    assert prove("eq-gain", book(both, sees), tmp_path) == "return -(a - b)"
    with pytest.raises(GateError, match="notices no flipped sign"):
        prove(
            "eq-gain", book(both, BLIND.replace("gain(5, 3)", "0 * pair(5, 3)['d'] + 2")), tmp_path
        )


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ([GOOD.replace("eq-gain", "eq-gains"), CHECK], "found none"),
        ([GOOD, GOOD.replace("gain(", "again("), CHECK], "found cell 1:gain, cell 2:again"),
        ([GOOD, CHECK.replace("eq-gain", "eq-other")], "no check .* names it"),
        ([GOOD, CHECK.replace("check(", "control(").replace("check\n", "control\n")], "fails"),
        ([GOOD, CHECK.replace("- 2", "- 3")], "check 'gain' fails"),
        ([GOOD, "1 / 0", CHECK], "cell 2: ZeroDivisionError"),
        ([GOOD, "import os; os._exit(3)", CHECK], "did not run to the end"),
    ],
    ids=["no function", "two functions", "no check", "control", "false", "raises", "dies"],
)
def test_what_is_missing_is_named(book, tmp_path, cells, message):
    with pytest.raises(GateError, match=message):
        prove("eq-gain", book(*cells), tmp_path)


def test_a_flip_that_stops_the_chapter_before_the_check_proves_nothing(book, tmp_path):
    guarded = GOOD + "if gain(5, 3) != 2: raise SystemExit(1)\n"
    chapter = book(guarded + CHECK)
    with pytest.raises(GateError, match="not reached"):
        prove("eq-gain", chapter, tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "$$\na\n$$ (eq-gain)",
        "> $$ a $$ (eq-gain)  ",
        "```{math}\n:label: eq-gain\na\n```",
        ":::{math}\n:nowrap:\n:label: eq-gain\n\na\n:::",
        "\\begin{equation}\\label{eq-gain}a\\end{equation}",
    ],
)
def test_every_way_to_label_an_equation_is_seen(book, text):
    assert book(text=text).labels == ["eq-gain"]


def test_text_after_an_equation_is_no_label(book):
    assert book(text="$$\na\n$$\n\n(see below)\n\n$$ b $$ (as above) we write").labels == []


def mutants(body):
    source = f"def f(x, y):\n    '''Equation eq-f.'''\n    {body}"
    for flip in flips(source, 1):
        yield flip.whole_answer, ast.unparse(ast.parse(flip.source).body[0].body[1:])


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return x", ["return -x"]),
        ("return x - y", ["return -(x - y)", "return x + y"]),
        ("return (x, -y)", ["return (-x, -y)", "return (x, --y)", "return (x, +y)"]),
        ("return {'a': x}", ["return {'a': -x}"]),
        ("x += y; return x", ["x += y\nreturn -x", "x -= y\nreturn x"]),
        ("return x[-1] * y[x + 1].sum(-1)", ["return -(x[-1] * y[x + 1].sum(-1))"]),
    ],
)
def test_flips_are_signs_of_the_formula_and_nothing_else(body, expected):
    assert [source for _, source in mutants(body)] == expected


def test_only_the_one_plain_returned_value_must_be_noticed():
    assert [plain for plain, _ in mutants("return x - y")] == [True, False]
    assert [plain for plain, _ in mutants("return x, y")] == [False, False]
    assert [plain for plain, _ in mutants("if x: return y\n    return x")] == [False, False]


def test_the_table_of_mutants_names_what_was_noticed(book, tmp_path, monkeypatch, capsys):
    book(GOOD, CHECK)
    monkeypatch.setattr(equations, "ROOT", tmp_path)
    equations.main([])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all(line.startswith("caught") for line in lines[:2])
    assert lines[2] == "2 caught"
