"""Run a notebook headless and write it with its outputs: python notebooks/execute.py NOTEBOOK [OUT].

Outputs hold no times and no paths of a machine, so that a second run changes only what it measured differently.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
TIMEOUT_S = 3600  # of a cell: the ladder trains in one


def execute(source: Path, out: Path, cwd: Path) -> nbformat.NotebookNode:
    """An error in a cell is raised, and nothing is written."""
    notebook = nbformat.read(source, as_version=4)
    client = NotebookClient(
        notebook, timeout=TIMEOUT_S, record_timing=False, resources={"metadata": {"path": str(cwd)}}
    )
    client.execute()
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata = {}
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    nbformat.write(notebook, out)
    return notebook


if __name__ == "__main__":
    path = Path(sys.argv[1])
    execute(path, Path(sys.argv[2]) if len(sys.argv) > 2 else path, Path.cwd())
