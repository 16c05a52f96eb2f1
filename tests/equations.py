"""The equation gate: every displayed equation has one function and a check that a wrong sign fails.

For a label `eq-…` that a chapter displays there must be exactly one function, in the chapter's
code cells or in lib, whose docstring holds the label, and a check that names it
(equation="eq-…"). Then a sign is flipped in the source of that function, the chapter's cells run
on the flipped copy, and that very check must fail.

    python tests/equations.py [LABEL ...]

runs every flip of every labelled function and prints which were noticed (make mutants).
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
RUNNER = Path(__file__).with_name("run_chapter.py")
SECONDS = 600  # for one run of a chapter's cells

DISPLAYED = (
    re.compile(r"\$\$[ \t]*\(([\w-]+)\)[ \t]*$", re.MULTILINE),  # $$ … $$ (label)
    re.compile(r"\{math\}[^\n]*\n(?:[ \t]*:\w[^\n]*\n)*?[ \t]*:label:[ \t]*([\w-]+)"),
    re.compile(r"\\label\{([\w-]+)\}"),
)


class GateError(AssertionError):
    """An equation that nothing guards; the message says what is missing."""


@dataclass(frozen=True)
class Chapter:
    """A page: its file, its Markdown, and its code cells by their index in the notebook."""

    path: Path
    text: str
    code: dict[int, str]
    may_raise: frozenset[int]

    @property
    def labels(self) -> list[str]:
        """Labels of the displayed equations in the order of DISPLAYED, repeated ones included."""
        return [label for pattern in DISPLAYED for label in pattern.findall(self.text)]


@dataclass(frozen=True)
class Carrier:
    """The function that carries a label: `file` is None for a code cell of the chapter."""

    file: Path | None
    cell: int | None
    name: str
    line: int
    source: str  # of the whole file or cell

    def __str__(self):
        return f"{self.file.name if self.file else f'cell {self.cell}'}:{self.name}"


@dataclass(frozen=True)
class Flip:
    """A mutant: what was flipped, the whole mutated source, and whether it is the plain answer."""

    what: str
    source: str
    whole_answer: bool


def toc_files(root: Path) -> list[Path]:
    """The pages that _toc.yml names, in order, as existing files (.ipynb before .md)."""

    def walk(entry):
        for key in ("root", "file"):
            if key in entry:
                yield entry[key]
        for key in ("parts", "chapters", "sections"):
            for child in entry.get(key, []):
                yield from walk(child)

    toc = yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))
    files = []
    for name in walk(toc):
        found = [root / f"{name}{end}" for end in (".ipynb", ".md", "")]
        found = [path for path in found if path.is_file()]
        if not found:
            raise FileNotFoundError(f"_toc.yml names {name}, which does not exist.")
        files.append(found[0])
    return files


@cache
def read_chapter(path: Path) -> Chapter:
    """Parse a notebook or a Markdown page."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return Chapter(path, text, {}, frozenset())
    cells = list(enumerate(json.loads(text)["cells"]))
    source = {number: "".join(cell["source"]) for number, cell in cells}
    markdown = [source[n] for n, cell in cells if cell["cell_type"] == "markdown"]
    code = {n: source[n] for n, cell in cells if cell["cell_type"] == "code"}
    raising = {n for n, cell in cells if "raises-exception" in cell["metadata"].get("tags", [])}
    return Chapter(path, "\n\n".join(markdown), code, frozenset(raising))


def carriers(label: str, chapter: Chapter, root: Path) -> list[Carrier]:
    """All functions of the chapter and of lib whose docstring holds exactly this label."""
    token = re.compile(rf"(?<![\w-]){re.escape(label)}(?![\w-])")
    sources = [(None, cell, source) for cell, source in chapter.code.items()]
    modules = sorted((root / "lib").glob("*.py"))
    sources += [(path, None, path.read_text(encoding="utf-8")) for path in modules]
    return [
        Carrier(file, cell, node.name, node.lineno, source)
        for file, cell, source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and token.search(ast.get_docstring(node) or "")
    ]


def flips(source: str, line: int) -> Iterator[Flip]:
    """Every mutant of the function at `line` with one sign flipped, the returned values first."""
    for number in range(len(_sites(ast.parse(source), line))):
        tree = ast.parse(source)
        what, whole_answer, flip = _sites(tree, line)[number]
        flip()
        yield Flip(what, ast.unparse(ast.fix_missing_locations(tree)), whole_answer)


def _sites(tree: ast.AST, line: int) -> list[tuple[str, bool, Callable[[], None]]]:
    """(description, whether it negates the function's one plain answer, the edit) of each sign."""
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    function = next(node for node in functions if node.lineno == line)
    returns = [node for node in _own_nodes(function) if isinstance(node, ast.Return) and node.value]
    sites = []
    for node in returns:
        values = _values(node)
        plain = len(returns) == 1 and values == [(vars(node), "value")]
        for holder, key in values:
            what = f"return -({_short(holder[key])})"
            sites.append((what, plain, lambda h=holder, k=key: h.__setitem__(k, _negative(h[k]))))
    for node in (sign for statement in function.body for sign in _signs(statement)):
        sites.append((f"flip in {_short(node)}", False, lambda n=node: setattr(n, "op", _other(n))))
    return sites


def _own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes of a function's body, those of nested functions left out."""
    pending = list(function.body)
    while pending:
        node = pending.pop(0)
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            pending = [*ast.iter_child_nodes(node), *pending]


def _values(node: ast.Return) -> list[tuple[dict | list, str | int]]:
    """(holder, key) of each returned value: several for a tuple, a list or a dictionary."""
    value = node.value
    if isinstance(value, (ast.Tuple, ast.List)):
        return [(value.elts, i) for i in range(len(value.elts))]
    if isinstance(value, ast.Dict):
        return [(value.values, i) for i in range(len(value.values))]
    if isinstance(value, ast.DictComp):
        return [(vars(value), "value")]
    if isinstance(value, (ast.ListComp, ast.GeneratorExp)):
        return [(vars(value), "elt")]
    return [(vars(node), "value")]


def _signs(node: ast.AST) -> Iterator[ast.AST]:
    """Each + and - below `node` that belongs to no index, no range and no axis number."""
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, (ast.Add, ast.Sub)):
        yield node
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield node
    for child in ast.iter_child_nodes(node):
        is_index = isinstance(node, ast.Subscript) and child is node.slice
        in_range = isinstance(node, ast.Call) and getattr(node.func, "id", None) == "range"
        is_axis = isinstance(node, (ast.Call, ast.keyword, ast.Tuple)) and _is_negative_integer(
            child
        )
        if not (is_index or in_range or is_axis):
            yield from _signs(child)


def _is_negative_integer(node: ast.AST) -> bool:
    if not (isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant)):
        return False
    return isinstance(node.operand.value, int)


def _other(node: ast.AST) -> ast.AST:
    if isinstance(node, ast.UnaryOp):
        return ast.UAdd()
    return ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()


def _negative(value: ast.expr) -> ast.expr:
    return ast.UnaryOp(ast.USub(), value)


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 60 else text[:57] + "..."


def run_cells(
    chapter: Chapter,
    root: Path,
    carrier: Carrier | None = None,
    mutant: str = "",
    last_cell: int | None = None,
    stop_when_failed: str | None = None,
) -> dict:
    """Run the chapter's cells on a copy of lib and data, with the carrier's source replaced.

    Nothing is written to `root`. Returns the report of run_chapter.py; a run that takes longer than
    SECONDS or dies has no cells and no checks. Raises GateError when another lib was imported.
    """
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder).resolve()
        ignored = shutil.ignore_patterns("__pycache__", "cache")
        for name in ("lib", "data"):
            if (root / name).is_dir():
                shutil.copytree(root / name, scratch / name, ignore=ignored)
        (scratch / "book").mkdir()
        for path in chapter.path.parent.iterdir():
            (scratch / "book" / path.name).symlink_to(path)
        notebook = scratch / "book" / chapter.path.name
        if carrier and carrier.file:
            (scratch / "lib" / carrier.file.name).write_text(mutant, encoding="utf-8")
        elif carrier:
            content = json.loads(notebook.read_text(encoding="utf-8"))
            content["cells"][carrier.cell]["source"] = mutant
            notebook.unlink()
            notebook.write_text(json.dumps(content), encoding="utf-8")
        environment = {  # a chapter reads the records of data/results, whatever the caller has set
            **os.environ,
            "PYTHONPATH": str(scratch),
            "MPLBACKEND": "Agg",
            "LEADING_TERMS_CACHE": str(scratch / "cache"),
            "HF_HUB_OFFLINE": "1",
            "TQDM_DISABLE": "1",
        }
        environment.pop("LEADING_TERMS_RESULTS", None)
        command = [sys.executable, "-P", str(RUNNER), notebook.name, str(scratch / "report.json")]
        command += ["--last-cell", str(last_cell)] if last_cell is not None else []
        command += ["--stop-when-failed", stop_when_failed] if stop_when_failed else []
        try:
            subprocess.run(
                command,
                cwd=scratch / "book",
                env=environment,
                timeout=SECONDS,
                check=True,
                stdin=subprocess.DEVNULL,
                capture_output=True,
            )
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
            return {"lib": None, "cells": [], "checks": []}
        report = json.loads((scratch / "report.json").read_text(encoding="utf-8"))
        if report["lib"] and not Path(report["lib"]).resolve().is_relative_to(scratch):
            raise GateError(f"{chapter.path.name} imported {report['lib']} instead of the copy")
        return report


@cache
def baseline(chapter_path: Path, root: Path) -> dict:
    """The report of the untouched chapter; raises GateError when it doesn't run clean."""
    chapter = read_chapter(chapter_path)
    report = run_cells(chapter, root)
    if chapter.code and not report["cells"]:
        raise GateError(f"{chapter.path.name}: its cells did not run to the end in {SECONDS} s")
    for cell in report["cells"]:
        if cell["error"] and cell["cell"] not in chapter.may_raise:
            raise GateError(f"{chapter.path.name}, cell {cell['cell']}: {cell['error']}")
    for check in report["checks"]:
        if not check["passed"]:
            raise GateError(f"{chapter.path.name}: {check['kind']} '{check['name']}' fails")
    return report


def named_checks(report: dict, label: str) -> list[dict]:
    """The checks, controls left out, that name the equation `label`."""
    return [c for c in report["checks"] if c["kind"] == "check" and c["equation"] == label]


def the_carrier(label: str, chapter: Chapter, root: Path) -> Carrier:
    """The one function that carries `label`; raises GateError when there is not exactly one."""
    found = carriers(label, chapter, root)
    if len(found) != 1:
        which = ", ".join(map(str, found)) or "none"
        raise GateError(f"{label}: one function must carry it in its docstring; found {which}")
    return found[0]


def outcome(label: str, chapter: Chapter, root: Path, carrier: Carrier, flip: Flip) -> str:
    """ "caught" if a check naming `label` fails on the mutant, else "survived" or "not reached"."""
    last_cell = max(check["cell"] for check in named_checks(baseline(chapter.path, root), label))
    report = run_cells(chapter, root, carrier, flip.source, last_cell, label)
    ran = named_checks(report, label)
    if any(not check["passed"] for check in ran):
        return "caught"
    return "survived" if ran else "not reached"


def prove(label: str, chapter: Chapter, root: Path) -> str:
    """Prove that the check of `label` notices a wrong sign; returns the flip it noticed.

    Raises GateError when the function or the check is missing, when the check passes although the
    function's one returned value is negated, or when it notices no flip at all.
    """
    carrier = the_carrier(label, chapter, root)
    if not named_checks(baseline(chapter.path, root), label):
        raise GateError(f'{label}: no check of {chapter.path.name} names it (equation="{label}")')
    tried = []
    for flip in flips(carrier.source, carrier.line):
        result = outcome(label, chapter, root, carrier, flip)
        if result == "caught":
            return flip.what
        if result == "survived" and flip.whole_answer:
            raise GateError(f"{label}: its check passes although {carrier} returns the negative")
        tried.append(f"{flip.what}: {result}")
    raise GateError(f"{label}: its check notices no flipped sign in {carrier} ({'; '.join(tried)})")


def labelled(root: Path) -> list[tuple[Path, str]]:
    """(page, label) of every displayed equation, in the order of the table of contents."""
    return [(path, label) for path in toc_files(root) for label in read_chapter(path).labels]


def main(wanted: list[str]) -> None:
    """Run every flip of every labelled function; print one line each and the totals."""

    def row(job):
        path, label, carrier, flip = job
        result = outcome(label, read_chapter(path), ROOT, carrier, flip)
        return result, label, str(carrier), flip.what

    jobs = []
    for path, label in labelled(ROOT):
        if not wanted or label in wanted:
            carrier = the_carrier(label, read_chapter(path), ROOT)
            baseline(path, ROOT)
            jobs += [(path, label, carrier, flip) for flip in flips(carrier.source, carrier.line)]
    totals = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for result, label, where, what in pool.map(row, jobs):
            totals[result] = totals.get(result, 0) + 1
            print(f"{result:12} {label:28} {where:36} {what}", flush=True)
    print(", ".join(f"{n} {result}" for result, n in sorted(totals.items())) or "no equations")


if __name__ == "__main__":
    main(sys.argv[1:])
