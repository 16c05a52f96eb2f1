"""Run a notebook's code cells in one plain Python process and report which checks ran where.

    python -P tests/run_chapter.py NOTEBOOK REPORT [--last-cell N] [--stop-when-failed LABEL]

Checks are recorded, not raised, and an exception ends only its own cell, so that a check after it
still runs. REPORT becomes JSON: {"lib": path of the package in use or null,
"cells": [{"cell", "error"}], "checks": [{"cell", "name", "equation", "kind", "passed", ...}]}.
"""

import argparse
import json
import linecache
import os
import sys
import types
from pathlib import Path


def run(notebook: Path, report: Path, last_cell: int | None, stop_when_failed: str | None) -> None:
    """Execute the cells up to index `last_cell`, or until a check naming the label has failed."""
    record = report.with_suffix(".jsonl")
    record.touch()
    os.environ["LEADING_TERMS_CHECKS"] = str(record)
    module = types.ModuleType("__main__")
    module.display = lambda *values, **options: None
    sys.modules["__main__"] = module
    cells, checks = [], []
    for number, cell in enumerate(json.loads(notebook.read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] != "code":
            continue
        source, name = "".join(cell["source"]), f"<cell {number}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        error = None
        try:
            exec(compile(source, name, "exec"), module.__dict__)
        except (Exception, SystemExit) as problem:
            error = f"{type(problem).__name__}: {problem}"
        cells.append({"cell": number, "error": error})
        lines = record.read_text(encoding="utf-8").splitlines()[len(checks) :]
        new = [{"cell": number, **json.loads(line)} for line in lines]
        checks += new
        if any(names(check, stop_when_failed) and not check["passed"] for check in new):
            break
        if number == last_cell:
            break
    lib = sys.modules.get("lib")
    where = lib.__file__ if lib else None
    report.write_text(json.dumps({"lib": where, "cells": cells, "checks": checks}))


def names(check: dict, label: str | None) -> bool:
    """Whether this record is a check (not a control) of the equation `label`."""
    return label is not None and check["kind"] == "check" and check["equation"] == label


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebook", type=Path)
    parser.add_argument("report", type=Path)
    parser.add_argument("--last-cell", type=int)
    parser.add_argument("--stop-when-failed", metavar="LABEL")
    options = parser.parse_args()
    run(options.notebook, options.report, options.last_cell, options.stop_when_failed)
