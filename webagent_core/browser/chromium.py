"""Which Chromium is driven, and with which switches.

`python -m webagent_core.browser.chromium` prints the path that would be used, or one line of what to install.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

# The shell build starts a fresh context with a quarter of the CPU of the full browser and draws the same pixels, so
# it is preferred wherever both are installed. Debian's wrapper script of that name forks instead of exec'ing, which
# would leave the browser running when the pid we know is killed: hence the real binary first.
SYSTEM_BROWSERS = (
    "/usr/lib/chromium/chromium-headless-shell",
    "chrome-headless-shell",
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
)

# Chromium takes the last --disable-features of its command line and Playwright has one of its own, so ours repeats
# what of it bears on pages. The first four are ours: each makes a renderer process anew, or keeps one in reserve, at
# every navigation, which is a fifth of the CPU of an episode of a few steps.
DISABLED_FEATURES = (
    "ProactivelySwapBrowsingInstance",
    "RenderDocument",
    "SpareRendererForSitePerProcess",
    "BackForwardCache",
    "AvoidCorsURLLoaderRestartOnRedirect",
    "AvoidUnnecessaryBeforeUnloadCheckSync",
    "DestroyProfileOnBrowserClose",
    "HttpsFirstBalancedModeAutoEnable",
    "HttpsUpgrades",
    "MediaRouter",
    "NetworkTimeServiceQuerying",
    "OptimizationHints",
    "PaintHolding",
    "PreconnectToSearch",
    "ThirdPartyStoragePartitioning",
)

LAUNCH_ARGS = (
    "--disable-features=" + ",".join(DISABLED_FEATURES),
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
    "--disable-gpu",
    # WebRTC would otherwise send UDP past the proxy that is our host allow-list.
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
)


class ChromiumNotFound(RuntimeError):
    """No Chromium on this machine; the message says how to get one."""


def find_chromium() -> str:
    """Return the path of the Chromium to drive.

    In this order: the file that WEBAGENT_CHROMIUM names, Playwright's own download, the system's.

    Raises:
        ChromiumNotFound: nothing usable was found; the message is one line with the remedy.
    """
    named = os.environ.get("WEBAGENT_CHROMIUM")
    if named:
        if os.access(named, os.X_OK) and os.path.isfile(named):
            return named
        raise ChromiumNotFound(f"WEBAGENT_CHROMIUM={named!r} is not an executable file")
    own = _playwrights_own()
    if own:
        return own
    for candidate in SYSTEM_BROWSERS:
        path = shutil.which(candidate)
        if path:
            return path
    raise ChromiumNotFound(
        "no Chromium found: install one with `apt-get install chromium-headless-shell` or `playwright install "
        "chromium-headless-shell`, or name yours in WEBAGENT_CHROMIUM"
    )


def _playwrights_own() -> str | None:
    """Path of the newest browser that `playwright install` put on this machine, or None."""
    home = os.environ.get("PLAYWRIGHT_BROWSERS_PATH")
    folders = [Path(home)] if home and home != "0" else []
    folders += [Path.home() / ".cache/ms-playwright", Path.home() / "Library/Caches/ms-playwright"]
    names = ("chrome-headless-shell", "headless_shell", "chrome", "Chromium")
    for folder in folders:
        for build in _newest_first(folder, "chromium_headless_shell-") + _newest_first(folder, "chromium-"):
            for name in names:
                for path in build.glob(f"**/{name}"):
                    if path.is_file() and os.access(path, os.X_OK):
                        return str(path)
    return None


def _newest_first(folder: Path, prefix: str) -> list[Path]:
    builds = [build for build in folder.glob(prefix + "*") if build.name.removeprefix(prefix).isdecimal()]
    return sorted(builds, key=lambda build: -int(build.name.removeprefix(prefix)))


if __name__ == "__main__":
    try:
        print(find_chromium())
    except ChromiumNotFound as error:
        sys.exit(str(error))
