"""Removes loralane's folders from the data directory: `python -m gateway.cli.clean_data`, or `make clean-data`.

This module and what it imports need only the standard library, so that it works without an installation.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from engine.process.files import LOCK, default_data_dir, take

CONTENTS = {
    "models": "folders made of GGUF files, and of folders without a tokenizer.json",
    "valkey": "the embedded Valkey: tenants, keys, limits, usage, names of adapters, records of files and batches, "
    "stored responses",
    "files": "files that tenants uploaded and batches wrote",
    "fetched": "adapters fetched from a hub or an object store",
    "adapters": "adapters that an operator put there",
    "engine": "what engines learned about this machine",
}
"""Folders that a gateway keeps in its data directory -> what they hold. All other entries are left alone."""
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def main(arguments: Sequence[str] | None = None) -> int:
    """Remove loralane's folders from the data directory, after confirmation. Returns the exit status: 0 if they are
    removed or there were none; 1 if a gateway uses them, or the operator declines or cannot be asked."""
    parser = argparse.ArgumentParser(prog="clean_data", description="Remove what loralane keeps in its data directory.")
    parser.add_argument("--data-dir", type=Path, help="the data directory; default: that of `loralane serve`")
    parser.add_argument("--yes", action="store_true", help="remove without asking for confirmation")
    options = parser.parse_args(arguments)
    data_dir = (options.data_dir or default_data_dir(os.environ)).expanduser()
    found = [data_dir / name for name in CONTENTS if os.path.lexists(data_dir / name)]
    if not found:
        print(f"{data_dir} holds nothing of loralane's")
        return 0
    with ExitStack() as locks:
        for folder in found:
            if (folder / LOCK).is_file() and not folder.is_symlink():
                held = take(folder)
                if held is None:
                    print(f"a gateway is using {data_dir}; stop it first", file=sys.stderr)
                    return 1
                locks.enter_context(held)
        show(data_dir, found)
        if not (options.yes or is_confirmed()):
            print("nothing was removed", file=sys.stderr)
            return 1
        for folder in found:
            remove(folder)
    if not any(data_dir.iterdir()):
        data_dir.rmdir()
    print("removed")
    return 0


def show(data_dir: Path, found: Sequence[Path]) -> None:
    """Print the folders `found` that would be removed, with their sizes, and the other entries of the data
    directory."""
    print(f"This removes from {data_dir}, for good:")
    for folder in found:
        print(f"  {shown(size(folder)):>9}  {folder.name + '/':10} {CONTENTS[folder.name]}")
    if others := sorted(entry.name for entry in data_dir.iterdir() if entry.name not in CONTENTS):
        print(f"It leaves alone: {', '.join(others)}")


def is_confirmed() -> bool:
    """Ask for confirmation on the terminal. Returns True for yes; False, after a message, without a terminal."""
    if not sys.stdin.isatty():
        print("there is no terminal to ask on; say YES=1 (or --yes) to remove it", file=sys.stderr)
        return False
    return input("Remove it? [y/N] ").strip().lower() in ("y", "yes")


def size(path: Path) -> int:
    """Return the total size in bytes of the files below a folder, or of a file. Symbolic links are not followed."""
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    return sum((Path(root) / name).lstat().st_size for root, _, names in os.walk(path) for name in names)


def shown(num_bytes: int) -> str:
    amount, unit = float(num_bytes), 0
    while amount >= 1024 and unit < len(UNITS) - 1:
        amount, unit = amount / 1024, unit + 1
    return f"{amount:.0f} {UNITS[unit]}" if unit == 0 else f"{amount:.1f} {UNITS[unit]}"


def remove(folder: Path) -> None:
    """Remove a folder with its content, or a file. Of a symbolic link only the link is removed."""
    if folder.is_symlink() or not folder.is_dir():
        folder.unlink()
    else:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
