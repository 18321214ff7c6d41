"""Writes the drop-in as one Python file, for a machine without frontier.

Takes    nothing but this package as it lies on disk, with its cases and evidence.
Gives    the text of a file that needs torch alone (and triton where there is one); the same text for the same source.
Knows nothing of what the package computes.
"""

import base64
import hashlib
import io
import keyword
import sys
import zipfile
from pathlib import Path

from frontier import __version__
from frontier.errors import DataError
from frontier.record import PACKAGE, commit, source_sha256

_WIDTH = 116

# What the file, or torch on its behalf, imports by name beside Python's own modules.
_NEEDED = ("frontier", "torch", "triton", "numpy", "packaging", "sympy", "mpmath", "networkx", "jinja2", "filelock",
           "fsspec", "typing_extensions", "setuptools", "psutil", "safetensors", "click", "tqdm")  # fmt: skip

_TEMPLATE = '''"""frontier {version} ({commit}, source {source}) as one file.

    from {module} import UserOptimizedTransformer, copy_model_weights

or, with the script unmodified:

    python {module}.py torch_transformer_benchmark.py --batch-size 64 --causal ...

It needs torch, and uses triton where there is one. The package's sources, cases and evidence lie below, compressed;
they are unpacked into a folder of their own until the process ends, since Triton reads its kernels' source from files.
A folder that a killed process left behind is removed by the next start.
"""

import atexit
import base64
import glob
import io
import os
import shutil
import sys
import tempfile
import zipfile

try:
    import fcntl
except ImportError:  # not a Unix: what a killed process left stays
    fcntl = None

DIGEST = "{digest}"


def _package():
    """The frontier that this file carries, imported once a process."""
    known = sys.modules.get("frontier")
    if known is not None and getattr(known, "EXPORTED_AS", None) != DIGEST:
        raise ImportError(f"another frontier is imported already, from {{known.__file__}}: import this file before it")
    if known is None:
        _sweep()
        folder, owner = _claimed(), os.getpid()
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


def _claimed():
    """A new folder with a lock in it that ends with this process, however that ends."""
    folder = tempfile.mkdtemp(prefix="frontier-")
    if fcntl is not None:
        lock = open(os.path.join(folder, "new"), "w")
        _LOCKS.append(lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.rename(lock.name, os.path.join(folder, "in-use"))  # a lock by this name was held from the first
        except OSError:  # a file system without locks: no other process will take the folder for left behind
            pass
    return folder


def _sweep():
    """Remove the folders of processes that are gone: nobody holds their locks."""
    for path in glob.glob(os.path.join(glob.escape(tempfile.gettempdir()), "frontier-*", "in-use")) if fcntl else ():
        try:
            with open(path) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(os.path.dirname(path), ignore_errors=True)
        except OSError:  # in use, another user's, or gone by now
            continue


_LOCKS = []
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

    Raises   DataError if the name cannot be imported from, hides what is needed, or cannot be written or replaced.
             What lies there stays whole until all of the new one is written.
    """
    name = output.stem
    if output.suffix != ".py" or not name.isidentifier() or keyword.iskeyword(name):
        raise DataError(f"`{output.name}` cannot be imported", hint="name it like frontier_drop_in.py")
    if name in (*sys.stdlib_module_names, *_NEEDED):
        raise DataError(f"`{output.name}` would hide a module that is needed", hint="name it like frontier_drop_in.py")
    if not output.parent.is_dir():
        raise DataError(f"no folder `{output.parent}`", hint="make it first")
    if output.is_dir():
        raise DataError(f"`{output}` is a folder", hint="name a file")
    if output.exists() and not overwrite:
        raise DataError(f"`{output}` is there already", hint="add --overwrite to replace it")
    text = exported(name)
    partial = output.with_name(f"{output.name}.partial")
    try:
        partial.write_text(text)
        partial.replace(output)
    except OSError as reason:
        partial.unlink(missing_ok=True)
        raise DataError(f"`{output}` cannot be written: {reason.strerror}", hint="name a file that can be") from None
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
