# Sourced, not run: makes and activates the virtual environment .venv with omnibal and the given extra in it.
# A second call installs nothing unless setup.cfg or constraints.txt have changed.
#
#   source launch/environment.sh train
#
# OMNIBAL_PYTHON chooses the interpreter (default: python3), OMNIBAL_VENV another folder for the environment.

extra=${1:?"say which extra of setup.cfg to install"}
venv=${OMNIBAL_VENV:-.venv}
python=${OMNIBAL_PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "python must be 3.11 or newer, got $("$python" --version); set OMNIBAL_PYTHON" >&2
    exit 1
}
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
source "$venv/bin/activate"

# One stamp an extra: "test" contains "train".
wanted=$(cat setup.cfg constraints.txt pyproject.toml | sha256sum)
stamp=$venv/.omnibal-$extra
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "installing omnibal[$extra] into $venv (some minutes the first time)"
    python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[$extra]"
    echo "$wanted" > "$stamp"
fi

# One thread a process: the processes of a pipeline share the cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
