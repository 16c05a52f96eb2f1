"""Which module of lib may import which: the table, held against the imports themselves."""

import ast
from pathlib import Path

import pytest

LIB = Path(__file__).parents[1] / "lib"

MAY_IMPORT = {
    "__init__": set(),
    "checks": set(),
    "compare": {"statistics", "theory", "model"},
    "corpus": {"sources", "storyworld", "tokenizers"},
    "cost": {"threads"},
    "distributed": {"statistics"},
    "gptneox": {"corpus", "statistics", "compare", "results"},
    "intervene": {"statistics", "theory", "model"},
    "model": set(),
    "paths": {"model", "threads"},
    "plots": set(),
    "presets": {"cost", "model", "results", "statistics", "train"},
    "probes": {"statistics", "theory", "model"},
    "results": set(),
    "dynamics": {"statistics"},
    "horizon": {"compare", "dynamics", "model", "statistics", "theory"},
    "scoreboard": {"presets", "results", "series", "statistics", "theory"},
    "series": {"statistics"},
    "sources": {"storyworld"},
    "statistics": {"threads"},
    "storyworld": set(),
    "theory": {"statistics"},
    "threads": set(),
    "tokenizers": set(),
    "train": {"model", "paths", "cost", "statistics", "theory", "compare", "results"}
    | {"distributed", "corpus"},  # command line
}


def imported_modules(source: str) -> set[str]:
    """Names of the modules of lib that `source` imports, in whichever form, at any depth."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "lib" if node.level else ""
            base = ".".join(part for part in (base, node.module) if part)
            names = [base] + [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("lib.")}
    return found


@pytest.mark.parametrize("path", sorted(LIB.glob("*.py")), ids=lambda path: path.stem)
def test_module_imports_only_what_the_table_allows(path):
    assert path.stem in MAY_IMPORT, f"lib/{path.name} is not in the import table"
    modules = {other.stem for other in LIB.glob("*.py")}
    extra = (imported_modules(path.read_text(encoding="utf-8")) & modules) - MAY_IMPORT[path.stem]
    assert not extra, f"lib/{path.name} must not import {', '.join(sorted(extra))}"


@pytest.mark.parametrize(
    "line",
    [
        "import lib.model",
        "import lib.model as m",
        "from lib import model",
        "from lib.model import AttentionOnlyTransformer",
        "from . import model",
        "from .model import AttentionOnlyTransformer",
        "def f():\n    from lib.model import AttentionOnlyTransformer",
    ],
)
def test_every_form_of_import_is_seen(line):
    assert "model" in imported_modules(line)


def test_other_packages_are_not_taken_for_ours():
    source = "import statistics\nfrom library import model\nimport torch.nn"
    assert imported_modules(source) == set()
