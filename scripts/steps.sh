# Sourced by scripts that run pytest in steps: `step` runs one with the script's own arguments behind; `status` is what
# to exit with.
NONE_SELECTED=5 # pytest's exit code; with arguments such as "-k name" it is no failure of a step
arguments=("$@")
status=0

step() {
    local code=0
    .venv/bin/python -m pytest "$@" "${arguments[@]}" || code=$?
    if ((code == NONE_SELECTED && ${#arguments[@]} > 0)); then code=0; fi
    if ((code != 0)); then status=$code; fi
}
