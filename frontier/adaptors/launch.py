"""Runs the benchmark script, unmodified, with the drop-in where its own class stands.

Takes    the script, its options; another file that holds the two names instead of frontier's, a file for facts.
Gives    the script's own output and exit code; as facts, what the class ran and the card's peak of bytes.
Knows nothing of what the script prints. It is run by its path: of frontier it imports the drop-in, or nothing.
"""

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

NAMES = ("UserOptimizedTransformer", "copy_model_weights")


def main(arguments: list[str] | None = None) -> int:
    """Run a command line `[--drop-in FILE.py] [--facts FILE.json] SCRIPT.py [the script's options]`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drop-in", type=Path, help="a file with the two names, instead of frontier's own")
    parser.add_argument("--facts", type=Path, help="write here what the class ran, as JSON")
    parser.add_argument("script", type=Path)
    parser.add_argument("options", nargs=argparse.REMAINDER)
    given = parser.parse_args(arguments)
    if not given.script.is_file():
        parser.error(f"no file `{given.script}`: name the benchmark script")
    names = _names_of(given.drop_in)
    base: Any = names[NAMES[0]]
    made: list[Any] = []

    class Remembered(base):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            made.append(self)
            if not hasattr(self, "runs"):
                _count_first(self)

    Remembered.__name__ = Remembered.__qualname__ = NAMES[0]
    try:
        return _run(given.script, given.options, {**names, NAMES[0]: Remembered})
    finally:
        if given.facts:
            given.facts.write_text(json.dumps(_facts(made)))


def _names_of(drop_in: Path | None) -> dict[str, Any]:
    if drop_in is not None:
        source: ModuleType = _load("drop_in", drop_in)
    else:
        sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # of this package, wherever it is run from
        from frontier.adaptors import organizer as source

        del sys.path[0]
    return {name: getattr(source, name) for name in NAMES}


def _run(script: Path, options: list[str], names: dict[str, Any]) -> int:
    here = str(Path(__file__).resolve().parent)  # where this file was run from, no place to import from
    sys.path[:] = [str(script.resolve().parent), *(entry for entry in sys.path if entry != here)]
    sys.argv = [str(script), *options]
    module = _load(script.stem, script)
    for name, ours in names.items():
        if not hasattr(module, name):
            raise SystemExit(f"{script.name} has no `{name}` to replace")
        setattr(module, name, ours)
    code = module.main()
    return int(code or 0)


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _count_first(model: Any) -> None:
    """Of a class that counts nothing itself: its first call; the later ones, which are timed, are left alone."""
    runs: dict[str, int] = {}

    def first(*_: Any) -> None:
        runs["counted by its first call"] = 1
        handle.remove()

    model.runs, handle = runs, model.register_forward_pre_hook(first)


def _facts(made: list[Any]) -> dict[str, Any]:
    import torch

    peak_bytes = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None
    runs: dict[str, int] = {}
    for model in made:
        for name, count in getattr(model, "runs", {}).items():
            runs[name] = runs.get(name, 0) + count
    return {"runs": runs, "ran_last": getattr(made[-1], "ran_last", None) if made else None, "peak_bytes": peak_bytes}


if __name__ == "__main__":
    raise SystemExit(main())
