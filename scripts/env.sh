# Sourced by the other scripts: makes .venv once and brings it up to date with pyproject.toml. Sets PYTHON.
#   install [EXTRA]      install this project, editable, with the packages of an extra
#   install_for_tests    install the extra "dev" and, beside it, LiteLLM in an environment of its own
#   num_test_workers     print how many processes run the tests; 0 is pytest's own process

cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV=${MINISGL_VENV:-.venv}
PYTHON="$VENV/bin/python"

# pip would compile all modules of all packages, one after the other, which takes as long as the rest.
# Most are never imported; Python compiles the others when they are first imported, and keeps that.
export PYTHONDONTWRITEBYTECODE=

has_gpu() { nvidia-smi -L >/dev/null 2>&1; }
fail() { echo "minisgl: $*" >&2; exit 1; }

pip_install() { "$PYTHON" -m pip install --quiet --no-compile "$@"; }

make_venv() {
    [ -x "$PYTHON" ] && return
    local candidate
    for candidate in "${MINISGL_PYTHON:-python3}" python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            "$candidate" -m venv "$VENV" || fail "python's venv module is needed (Debian: apt install python3-venv)"
            return
        fi
    done
    fail "Python 3.11 or newer is needed; set MINISGL_PYTHON to one"
}

# A machine without a GPU gets torch's CPU build: a local one if pip knows one, else PyTorch's own.
# Plain "torch" from the package index brings gigabytes of CUDA libraries, which only a GPU needs.
install_torch() {
    "$PYTHON" -c 'import torch' 2>/dev/null && return
    echo "Installing torch ..."
    if has_gpu; then
        pip_install 'torch>=2.11,<2.15'
    else
        pip_install 'torch==2.13.0+cpu' 2>/dev/null ||
            pip_install 'torch>=2.11,<2.15' --index-url https://download.pytorch.org/whl/cpu
    fi
}

install() {
    make_venv
    local stamp="$VENV/.installed-${1:-run}"
    [ "$stamp" -nt pyproject.toml ] && return
    install_torch || fail "torch could not be installed"
    echo "Installing minisgl and what it needs ..."
    local extras="${1:-}"
    has_gpu && extras="${extras:+$extras,}cuda"
    pip_install --editable ".${extras:+[$extras]}" || fail "the installation failed"
    touch "$stamp"
}

install_for_tests() {
    make_venv
    install_clients &
    local clients=$!
    install dev
    wait "$clients" || fail "LiteLLM could not be installed"
}

# LiteLLM wants an older openai than the tests. The other environment's pip installs it.
install_clients() {
    local clients="$VENV/clients"
    [ -e "$clients/.installed" ] && return
    echo "Installing LiteLLM for the tests ..."
    "$PYTHON" -m venv --without-pip "$clients"
    "$PYTHON" -m pip --python "$clients/bin/python" install --quiet --no-compile litellm mcp
    touch "$clients/.installed"
}

# One worker more than cores, since tests wait for processes that start; at most 4. On a GPU one test
# after the other, because an engine measures its free memory.
num_test_workers() {
    local cores
    cores=$(nproc)
    if has_gpu; then
        echo 0
    else
        echo "$((cores < 4 ? cores + 1 : 4))"
    fi
}
