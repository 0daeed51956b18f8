"""The environment that peers' packages are installed into: made once, thrown away at will, unknown to omnibal."""

import hashlib
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
FILES = (HERE / "requirements.txt", HERE / "requirements-bare.txt")


def peers_python(folder: Path = HERE / ".venv") -> Path:
    """The interpreter of an environment with all peers in it; some minutes the first time.

    Args:
        folder: Where the environment is, or is made.
    """
    python, stamp = folder / "bin" / "python", folder / ".installed"
    wanted = hashlib.sha256(b"".join(file.read_bytes() for file in FILES)).hexdigest()
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    print(f"installing the peers into {folder}", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, "--requirement", FILES[0]], check=True)
    subprocess.run([*install, "--no-deps", "--requirement", FILES[1]], check=True)
    stamp.write_text(wanted)
    return python
