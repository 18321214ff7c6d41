"""Writes the drop-in as one Python file, for a machine without frontier.

Takes    nothing but this package as it lies on disk, with its cases and evidence.
Gives    the text of a file that needs torch alone (and triton where there is one); the same text for the same source.
Knows nothing of what the package computes.
"""

import base64
import hashlib
import io
import zipfile
from pathlib import Path

from frontier import __version__
from frontier.errors import DataError
from frontier.record import PACKAGE, commit, source_sha256

_WIDTH = 116

_TEMPLATE = '''"""frontier {version} ({commit}, source {source}) as one file.

    from {module} import UserOptimizedTransformer, copy_model_weights

or, with the script unmodified:

    python {module}.py torch_transformer_benchmark.py --batch-size 64 --causal ...

It needs torch, and uses triton where there is one. The package's sources, cases and evidence lie below, compressed;
they are unpacked into a folder of their own until the process ends, since Triton reads its kernels' source from files.
"""

import atexit
import base64
import io
import os
import shutil
import sys
import tempfile
import zipfile

DIGEST = "{digest}"


def _package():
    """The frontier that this file carries, imported once a process."""
    known = sys.modules.get("frontier")
    if known is not None and getattr(known, "EXPORTED_AS", None) != DIGEST:
        raise ImportError(f"another frontier is imported already, from {{known.__file__}}: import this file before it")
    if known is None:
        folder, owner = tempfile.mkdtemp(prefix="frontier-"), os.getpid()
        atexit.register(lambda: os.getpid() == owner and shutil.rmtree(folder, ignore_errors=True))
        with zipfile.ZipFile(io.BytesIO(base64.b85decode("".join(_BLOB)))) as archive:
            archive.extractall(folder)
        sys.path.insert(0, folder)
        try:
            import frontier
        finally:
            sys.path.remove(folder)
        frontier.EXPORTED_AS = DIGEST
    from frontier.adaptors import launch, organizer

    return launch, organizer


_BLOB = (
{blob}
)

_launch, _organizer = _package()
UserOptimizedTransformer = _organizer.UserOptimizedTransformer
copy_model_weights = _organizer.copy_model_weights

if __name__ == "__main__":
    raise SystemExit(_launch.main())
'''


def export(output: Path, *, overwrite: bool = False) -> int:
    """Write the file; gives its bytes.

    Raises   DataError if the name cannot be imported from, or something lies there already.
    """
    if output.suffix != ".py" or not output.stem.isidentifier():
        raise DataError(f"`{output.name}` cannot be imported", hint="name it like frontier_drop_in.py")
    if output.stem == "frontier":
        raise DataError("`frontier.py` would hide the package that it carries", hint="name it like frontier_drop_in.py")
    if output.exists() and not overwrite:
        raise DataError(f"`{output}` is there already", hint="add --overwrite to replace it")
    text = exported(output.stem)
    output.write_text(text)
    return len(text)


def exported(module: str) -> str:
    """The text of a file to be imported as `module`."""
    archive = _archive()
    letters = base64.b85encode(archive).decode()
    lines = (letters[start : start + _WIDTH] for start in range(0, len(letters), _WIDTH))
    return _TEMPLATE.format(
        version=__version__,
        commit=commit() or "no commit",
        source=source_sha256(),
        digest=hashlib.sha256(archive).hexdigest(),
        module=module,
        # The alphabet of base 85 has neither quotes nor backslashes.
        blob="\n".join(f'    "{line}"' for line in lines),
    )


def _archive() -> bytes:
    """The package, configs/cases and configs/evidence, without dates: the same files give the same bytes."""
    root = PACKAGE.parent
    paths = [*PACKAGE.rglob("*.py"), *(root / "configs" / "cases").glob("*.toml")]
    paths += (root / "configs" / "evidence").glob("*.jsonl")
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_LZMA) as archive:
        for path in sorted(paths):
            entry = zipfile.ZipInfo(path.relative_to(root).as_posix())
            entry.compress_type = zipfile.ZIP_LZMA
            archive.writestr(entry, path.read_bytes())
    return file.getvalue()
