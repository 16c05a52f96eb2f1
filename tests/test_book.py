"""The book as it is stored, and the commands that build and test it, on a book that is broken."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.equations import toc_files
from tests.offline import remote_loads

ROOT = Path(__file__).parents[1]
TOC = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
PAGES = toc_files(ROOT)
NOTEBOOKS = [path for path in PAGES if path.suffix == ".ipynb"]
RUNS = sorted((ROOT / "book" / "runs").glob("*.ipynb"))
# The contract of a chapter holds for every notebook outside the back matter.
BACK = {
    entry["file"]
    for part in TOC.get("parts", [])
    if part.get("caption") == "Back matter"
    for entry in part["chapters"]
}
CHAPTERS = [path for path in NOTEBOOKS if f"book/{path.stem}" not in BACK]


TITLE = re.compile(r"set_title\(|suptitle\(|plt\.title\(")


def each(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.stem)


def cells(path, kind):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def source(cell):
    return "".join(cell["source"])


def tags(cell):
    return cell["metadata"].get("tags", [])


def markdown(path):
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    return "\n\n".join(source(cell) for cell in cells(path, "markdown"))


def all_code(path):
    return "\n".join(source(cell) for cell in cells(path, "code"))


# How notebooks are stored ------------------------------------------------------------------------


@each(NOTEBOOKS + RUNS)
def test_stored_as_executed_from_top_to_bottom(path):
    code = cells(path, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        kinds = {output["output_type"] for output in cell["outputs"]}
        assert "error" not in kinds or "raises-exception" in tags(cell), source(cell)
        streams = {output.get("name") for output in cell["outputs"]}
        assert "stderr" not in streams, f"a cell wrote to stderr: {source(cell)}"


@each(NOTEBOOKS + RUNS)
def test_at_most_500_kilobytes(path):
    assert path.stat().st_size <= 500_000


@each(NOTEBOOKS + RUNS)
def test_stored_output_names_no_folder_of_one_machine(path):
    outputs = json.dumps([cell["outputs"] for cell in cells(path, "code")])
    assert str(ROOT) not in outputs
    assert "site-packages" not in outputs


@each(NOTEBOOKS + RUNS)
def test_kernel_is_the_plain_one(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"


@each(PAGES + RUNS)
def test_slug_is_kebab_case_without_digits(path):
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", path.stem)


@pytest.mark.skipif(not NOTEBOOKS + RUNS, reason="no notebook yet")
def test_notebooks_are_normalised():
    verify = [sys.executable, "-m", "nbstripout", "--verify", "--keep-output", "--keep-count"]
    done = subprocess.run([*verify, *NOTEBOOKS, *RUNS], capture_output=True, text=True)
    assert done.returncode == 0, f"make refresh stores them anew: {done.stdout}{done.stderr}"


def test_every_notebook_is_in_the_table_of_contents():
    assert sorted((ROOT / "book").glob("*.ipynb")) == sorted(NOTEBOOKS)


@each(RUNS)
def test_run_notebook_has_one_parameters_cell(path):
    assert [tags(cell).count("parameters") for cell in cells(path, "code")].count(1) == 1


# What a chapter holds ----------------------------------------------------------------------------


@each(CHAPTERS)
def test_chapter_keeps_the_contract(path):
    text = markdown(path)
    parts = [
        r"you will be able to",
        r"prerequisites",
        r"^#+ .*what was checked",
        r"^#+ .*summary",
        r"^#+ .*exercises",
        r"^#+ .*further reading",
    ]
    places = [re.search(part, text, re.IGNORECASE | re.MULTILINE) for part in parts]
    missing = [part for part, place in zip(parts, places, strict=True) if place is None]
    assert not missing
    assert [place.start() for place in places] == sorted(place.start() for place in places)
    assert re.search(r"\d\s*min", text) and re.search(r"\d\s*s(econds?)?\b", text), (
        "it says neither how many minutes it takes to read nor how many seconds to run"
    )


@each(CHAPTERS)
def test_chapter_has_a_control_and_compares_an_output(path):
    assert re.search(r"\bcontrol\(", all_code(path)), "no broken version is shown to fail"
    assert any("nbval-check-output" in tags(cell) for cell in cells(path, "code"))


@each(CHAPTERS)
def test_each_exercise_has_minutes_a_solution_and_there_is_an_answer_check(path):
    text = markdown(path)
    exercises = re.findall(r"\{exercise-start\}(.*?)\{exercise-end\}", text, re.DOTALL)
    assert exercises
    assert all(re.search(r"\d+ minute", exercise) for exercise in exercises)
    labels = re.findall(r"\{exercise-start\}[^{]*?:label: (\S+)", text)
    assert labels == re.findall(r"\{solution-start\} (\S+)", text)
    assert re.search(r"\bcheck_\w+\(", all_code(path))


@each(NOTEBOOKS)
def test_figures_have_no_title_but_a_caption_alt_text_and_a_reference(path):
    assert not TITLE.search(all_code(path))
    text = markdown(path)
    for cell in cells(path, "code"):
        images = [
            kind
            for output in cell["outputs"]
            for kind in output.get("data", {})
            if kind.startswith("image/")
        ]
        if not images:
            continue
        myst = cell["metadata"].get("mystnb", {})
        figure = myst.get("figure", {})
        assert len(images) == 1, f"more than one figure in a cell: {source(cell)}"
        assert figure.get("caption", "").strip(), f"no caption: {source(cell)}"
        assert myst.get("image", {}).get("alt", "").strip(), f"no alt text: {source(cell)}"
        name = figure.get("name", "")
        assert name.startswith("fig-")
        assert re.search(rf"\{{numref\}}`[^`]*\b{name}\b", text), f"nothing refers to {name}"


@each(sorted((ROOT / "lib").glob("*.py")))
def test_no_module_draws_a_title(path):
    assert not TITLE.search(path.read_text(encoding="utf-8"))


@each(PAGES)
def test_pictures_in_text_have_alt_text(path):
    text = markdown(path)
    assert "![](" not in text
    for directive in re.findall(r"\{(?:figure|image)\}.*?(?:```|:::)", text, re.DOTALL):
        assert re.search(r":alt: *\S", directive), directive


# The commands, on a scratch book -----------------------------------------------------------------

TEXT = """# A tiny chapter

$$
a = b
$$ (eq-tiny)

Equation {eq}`eq-tiny` is in {cite}`tiny2026`.
"""


def stored_notebook(*sources, text=TEXT, output="1\n"):
    """A notebook as if executed; its first cell compares its output."""
    content = [{"cell_type": "markdown", "metadata": {}, "source": text, "id": "text"}]
    for number, code in enumerate(sources):
        stream = {"output_type": "stream", "name": "stdout", "text": output}
        content.append(
            {
                "cell_type": "code",
                "id": f"code-{number}",
                "metadata": {} if number else {"tags": ["nbval-check-output"]},
                "source": code,
                "execution_count": number + 1,
                "outputs": [] if number else [stream],
            }
        )
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    head = {"metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps({"cells": content, **head})


@pytest.fixture
def scratch(tmp_path):
    """This repository without its chapters and tests: one tiny chapter, one tiny test."""
    root = tmp_path / "scratch copy"
    for name in ("book/_static", "book/_vendor"):
        shutil.copytree(ROOT / name, root / name)
    (root / "tests").mkdir()
    files = ["Makefile", "_config.yml", "requirements.txt", "pyproject.toml", "tests/offline.py"]
    for name in [*files, "book/bibliography.md"]:
        shutil.copy2(ROOT / name, root / name)
    (root / "book" / "references.bib").write_text("@misc{tiny2026, title={Tiny}, year={2026}}\n")
    (root / "tests" / "test_tiny.py").write_text("def test_tiny():\n    pass\n")
    chapters = [{"file": "book/tiny"}, {"file": "book/bibliography"}]
    toc = {"format": "jb-book", "root": "book/index", "chapters": chapters}
    (root / "_toc.yml").write_text(yaml.safe_dump(toc, sort_keys=False))
    (root / "book" / "index.md").write_text("# Tiny\n")
    (root / "book" / "tiny.ipynb").write_text(stored_notebook("print(1)"))
    return root


def make(target, root):
    """The Makefile's own command in `root`, with this environment and without the set-up."""
    outer = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES", "LEADING_TERMS_RESULTS")
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    command = ["make", "-C", root, target, f"VENV={sys.prefix}", "-o", f"{sys.prefix}/.stamp"]
    command.append("WORKERS=0")
    done = subprocess.run(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return done.returncode, re.sub(r"\x1b\[[\d;]*m", "", done.stdout)


@pytest.mark.slow
@pytest.mark.xdist_group("builds")
def test_make_book_builds_a_sound_book(scratch):
    status, log = make("book", scratch)
    assert status == 0, log
    assert f"The book: {scratch}/_build/html/index.html" in log
    site = scratch / "_build" / "html"
    page = (site / "book" / "tiny.html").read_text(encoding="utf-8")
    (mathjax,) = re.findall(r'<script[^>]* src="([^"]*tex-mml-chtml.js)', page)
    assert (site / "book" / mathjax).resolve() == site / "mathjax" / "tex-mml-chtml.js"
    assert (site / "mathjax" / "tex-mml-chtml.js").is_file()
    assert remote_loads(site) == {}


UNKNOWN = "\n{eq}`eq-missing` {ref}`sec-missing` {numref}`fig-missing` {cite}`nobody1900`\n"
REMOTE = '\n<script src="https://example.org/a.js"></script>\n'


@pytest.mark.slow
@pytest.mark.xdist_group("builds")
@pytest.mark.parametrize(
    ("code", "text", "messages"),
    [
        ("assert 1 == 2", "", ["AssertionError", "Executing notebook failed"]),
        ("import sys; print('beware', file=sys.stderr)", "", ["stderr was found"]),
        ("print(1)", UNKNOWN, ["eq-missing", "sec-missing", "fig-missing", "nobody1900"]),
        ("print(1)", REMOTE, ["book/tiny.html loads from another host"]),
    ],
    ids=["cell", "stderr", "reference", "remote"],
)
def test_make_book_fails(scratch, code, text, messages):
    (scratch / "book" / "tiny.ipynb").write_text(stored_notebook(code, text=TEXT + text))
    status, log = make("book", scratch)
    assert status != 0
    warnings = [line for line in log.splitlines() if "WARNING" in line or "Error" in line]
    warnings += log.splitlines()[-3:]
    for message in messages:
        assert any(message in line for line in warnings), log


@pytest.mark.slow
@pytest.mark.xdist_group("builds")
def test_make_test_runs_chapters_and_run_notebooks(scratch):
    runs = scratch / "book" / "runs"
    runs.mkdir()
    where = "import os; print(int('LEADING_TERMS_RESULTS' in os.environ))"
    (runs / "tiny-run.ipynb").write_text(stored_notebook(where))
    (scratch / "book" / "tiny.ipynb").write_text(stored_notebook(where, output="0\n"))
    status, log = make("test", scratch)
    assert status == 0, log
    assert log.count("1 passed") == 3


@pytest.mark.slow
@pytest.mark.xdist_group("builds")
def test_make_test_fails_on_a_changed_output_and_on_a_failing_cell(scratch):
    broken = stored_notebook("print(2)", "assert 1 == 2", "print(3)")
    (scratch / "book" / "tiny.ipynb").write_text(broken)
    status, log = make("test", scratch)
    assert status != 0
    assert "2 failed, 1 passed" in log


@pytest.mark.parametrize(
    "markup",
    [
        '<script src="https://example.org/a.js"></script>',
        '<script src="//example.org/a.js"></script>',
        '<link rel="stylesheet" href="https://example.org/a.css">',
        '<link rel="preload" as="font" href="https://example.org/a.woff">',
        '<img alt="a" src="http://example.org/a.png">',
        '<img alt="a" src="a.png" srcset="a.png 1x, https://example.org/b.png 2x">',
        '<iframe src="https://example.org"></iframe>',
        '<div style="background: url(https://example.org/a.png)"></div>',
        '<style>@import "https://example.org/a.css";</style>',
        '<script>import("https://example.org/a.js")</script>',
        '<script>s.src = "https://example.org/a.js"</script>',
    ],
)
def test_what_a_page_would_load_from_elsewhere_is_seen(tmp_path, markup):
    (tmp_path / "page.html").write_text(f"<html><body>{markup}</body></html>")
    assert list(remote_loads(tmp_path)) == ["page.html"]


def test_links_to_click_and_own_files_are_no_loads(tmp_path):
    (tmp_path / "page.html").write_text(
        '<link rel="canonical" href="https://example.org/"><a href="https://example.org">a</a>'
        '<script src="_static/a.js">const home = "https://example.org";</script><img src="a.png">'
    )
    (tmp_path / "own.css").write_text("@font-face { src: url(a.woff) }")
    assert remote_loads(tmp_path) == {}
    (tmp_path / "own.css").write_text("@font-face { src: url('https://example.org/a.woff') }")
    assert list(remote_loads(tmp_path)) == ["own.css"]


def test_a_folder_without_pages_is_no_clean_site(tmp_path):
    with pytest.raises(FileNotFoundError, match="make book"):
        remote_loads(tmp_path)
