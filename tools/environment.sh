#!/usr/bin/env bash
# Make the environment in .venv, or complete the one that is there. What it has already is kept, torch above all.
set -euo pipefail
cd "$(dirname "$0")/.."

torch="torch>=2.4"
usable_torch='import sys, torch # a new environment can see it only where it is not itself in one
assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 4) and sys.prefix == sys.base_prefix'
python=.venv/bin/python

install() { "$python" -m pip install -qq --disable-pip-version-check "$@"; }
can() { "$1" -c "$2" >/dev/null 2>&1; }
version_of_torch() { "$python" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null; }

if ! can "$python" "import pip"; then
    for base in ${PYTHON:-python3 python python3.14 python3.13 python3.12 python3.11 python3.10} none; do
        can "$base" 'import sys, ensurepip; assert sys.version_info >= (3, 10)' && break
    done
    [[ $base != none ]] || { echo "linlap needs Python 3.10 or newer with venv; name one: PYTHON=..." >&2; exit 1; }
    echo "making .venv with $("$base" --version)"
    site=""
    can "$base" "$usable_torch" && site=--system-site-packages
    "$base" -m venv $site .venv
fi

echo "installing what is missing in .venv"
install 'pip>=25.1'
if ! version_of_torch >/dev/null; then # a wheel kept on this machine first, its dependencies come with the rest
    install --no-index --no-deps "$torch" 2>/dev/null || { echo "downloading torch" && install "$torch"; }
fi
echo "torch==$(version_of_torch)" >.venv/torch.txt
install --constraint .venv/torch.txt --editable '.[demo,dev]'
