"""Where commands write: refused at once if that is impossible, not after the work is done."""

import os
from pathlib import Path

from omnibal.errors import ConfigError


def check_folder(name: str, folder: Path | None) -> None:
    """Refuse a folder that cannot be made or written into; makes nothing.

    Raises:
        ConfigError: Names what is in the way.
    """
    if folder is None:
        return
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ConfigError(f"{name} must be a folder, got {folder}: {there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{name} must be a folder that can be written to, got {folder}: {there} is read-only")


def check_file(name: str, path: Path | None) -> None:
    """Refuse a file that cannot be written; makes nothing.

    Raises:
        ConfigError: Names what is in the way.
    """
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{name} must be a file, got the folder {path}")
    check_folder(f"the folder of {name}", path.parent)


def check_new_folder(name: str, folder: Path) -> None:
    """Refuse a folder that cannot be made, or that holds something already.

    Raises:
        ConfigError: Names what is in the way.
    """
    check_folder(name, folder)
    held = next(folder.iterdir(), None) if folder.exists() else None
    if held is not None:
        raise ConfigError(f"{name} must be empty or not exist yet, got {folder} with {held.name} in it")


def check_picture(name: str, path: Path | None) -> None:
    """Refuse a file that no picture can be written to; makes nothing.

    Raises:
        ConfigError: Names what is in the way, or the ending that it must have.
    """
    check_file(name, path)
    if path is not None and path.suffix.lower() != ".png":
        raise ConfigError(f"{name} must be a PNG, whose name ends in .png, got {path}")
