# Sourced by the other scripts: makes .venv once and brings it up to date with pyproject.toml. Sets PYTHON.
#   install [EXTRA]    install this project, editable, with the packages of an extra
#   install_clients    install LiteLLM, which wants an older openai, into an environment inside the other

cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV=${MINISGL_VENV:-.venv}
PYTHON="$VENV/bin/python"

fail() { echo "minisgl: $*" >&2; exit 1; }

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

# A machine without a GPU gets torch's CPU build: a local one if pip knows one, else PyTorch's own index. Plain
# "torch" from the package index brings gigabytes of CUDA libraries, which is right only with a GPU.
install_torch() {
    "$PYTHON" -c 'import torch' 2>/dev/null && return
    echo "Installing torch ..."
    if nvidia-smi -L >/dev/null 2>&1; then
        "$PYTHON" -m pip install --quiet 'torch>=2.9'
    else
        "$PYTHON" -m pip install --quiet 'torch==2.13.0+cpu' 2>/dev/null ||
            "$PYTHON" -m pip install --quiet 'torch>=2.9' --index-url https://download.pytorch.org/whl/cpu
    fi
}

install() {
    make_venv
    local stamp="$VENV/.installed-${1:-run}"
    [ "$stamp" -nt pyproject.toml ] && return
    install_torch || fail "torch could not be installed"
    echo "Installing minisgl and what it needs ..."
    local extras="${1:-}"
    nvidia-smi -L >/dev/null 2>&1 && extras="${extras:+$extras,}cuda"
    "$PYTHON" -m pip install --quiet --editable ".${extras:+[$extras]}" || fail "the installation failed"
    touch "$stamp"
}

install_clients() {
    local clients="$VENV/clients"
    [ -e "$clients/.installed" ] && return
    echo "Installing LiteLLM for the tests ..."
    "$PYTHON" -m venv "$clients" && "$clients/bin/python" -m pip install --quiet litellm mcp ||
        fail "LiteLLM could not be installed"
    touch "$clients/.installed"
}
