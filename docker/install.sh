#!/bin/sh
# Installs headrace into /opt/headrace: a virtual environment over the base image's own Python. Run in a builder stage.
#
#   install.sh torch [INDEX] [PACKAGE...]   the environment, and torch where the base has none (PACKAGE: what goes with it)
#   install.sh headrace FOLDER              headrace from its source, native kernels compiled
#
# What the base carries is seen, never replaced: its torch knows its device, and the one of the package index does not.
# INDEX "": as pip is set up.
set -eu
place=/opt/headrace
constraints=$(mktemp)
say() { printf 'install: %s\n' "$*" >&2; }

torch_of() { "$1" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null || true; }

# constraints.txt, but for a torch that is there already: that one is kept whatever its version
constrain() {
    found=$(torch_of "$place/bin/python")
    if [ -n "$found" ]; then
        { sed '/^torch==/d' "$1"; echo "torch==$found"; } > "$constraints"
    else
        cp "$1" "$constraints"
    fi
}

# Names the base's packages to the environment's Python: they come last on its path. A plain --system-site-packages
# would miss them where the base's Python is itself a virtual environment.
see_base() {
    python3 -c '
import sys
for path in sys.path:
    if path.endswith(("site-packages", "dist-packages")):
        print(f"import site; site.addsitedir({path!r})")
' > "$(packages)/base-image.pth"
}

packages() { "$place/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

environment() {
    if python3 -c 'import ensurepip' 2>/dev/null; then
        python3 -m venv "$place"
    elif python3 -m pip --version >/dev/null; then
        python3 -m venv --without-pip "$place"
        python3 -m pip --python "$place/bin/python" install pip
    else
        say "$(python3 --version) of the base image has neither ensurepip nor pip: install python3-venv there"
        exit 1
    fi
    see_base
}

case "$1" in
torch)
    shift
    index=${1-}
    [ $# -eq 0 ] || shift
    environment
    found=$(torch_of "$place/bin/python")
    constrain constraints.txt
    if [ -n "$found" ]; then
        say "torch $found of the base image stays"
    elif [ -n "$index" ]; then
        "$place/bin/python" -m pip install -c "$constraints" --index-url "$index" torch
    else
        "$place/bin/python" -m pip install -c "$constraints" torch
    fi
    if [ $# -gt 0 ]; then
        constrain constraints.txt
        "$place/bin/python" -m pip install -c "$constraints" "$@"
    fi
    ;;
headrace)
    constrain "$2/constraints.txt"
    before=$(torch_of "$place/bin/python")
    # -g0: without the debugging symbols that Python's own flags ask for. Built while the base is out of sight: its
    # setuptools may be too old and would be found before the one that pip fetches for the build.
    rm "$(packages)/base-image.pth"
    CFLAGS="${CFLAGS-} -g0" "$place/bin/python" -m pip wheel --no-deps --wheel-dir wheels "$2"
    see_base
    "$place/bin/python" -m pip install -c "$constraints" wheels/headrace-*.whl
    after=$(torch_of "$place/bin/python")
    if [ "$before" != "$after" ]; then
        say "torch $before became $after; it must stay"
        exit 1
    fi
    say "torch $after, $("$place/bin/headrace" --version)"
    ;;
*)
    say "torch [INDEX] [PACKAGE...] | headrace FOLDER"
    exit 2
    ;;
esac
