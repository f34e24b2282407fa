# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Which releases of DeepSpeed and transformers ds_fp4 has been tested with, and the check that says so.

ds_fp4 hooks into parts of DeepSpeed that are not a public interface. A release outside the tested range may have moved
them, and a moved seam can train silently wrong, so it is refused by name; `DS_FP4_SKIP_VERSION_CHECK=1` takes the
risk.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

SKIP_VARIABLE = "DS_FP4_SKIP_VERSION_CHECK"

# First and last release whose seams the contract tests passed with.
DEEPSPEED_TESTED = ("0.19.2", "0.19.8")
# AutoEP replaces blocks of transformers' models. 5.23 and 5.24 break Mixtral and Qwen3-MoE in the router recorder.
TRANSFORMERS_TESTED = ("5.12", "5.22")


def _release(text: str) -> Version:
    return Version(Version(text).base_version)


def _check(package: str, found: str, tested: tuple[str, str], why: str) -> None:
    first, last = Version(tested[0]), Version(tested[1])
    release = _release(found)
    # "5.22" as the last tested release covers its patch releases.
    last_covers = release.release[: len(last.release)] <= last.release
    if (release >= first and last_covers) or os.environ.get(SKIP_VARIABLE) == "1":
        return
    raise RuntimeError(
        f"ds_fp4 {why} and was tested with {package} {tested[0]} to {tested[1]}, but {package} {found} is "
        f"installed. Install a tested release (pip install '{package}>={tested[0]},<={tested[1]}.999'), "
        f"or set {SKIP_VARIABLE}=1 to try this one at your own risk."
    )


def check_deepspeed() -> None:
    """Raise RuntimeError if the installed DeepSpeed is outside the tested range."""
    import deepspeed

    _check("deepspeed", deepspeed.__version__, DEEPSPEED_TESTED, "hooks into DeepSpeed's MoE layers")


def check_transformers() -> None:
    """Raise RuntimeError if transformers, whose blocks AutoEP replaced, is outside the tested range."""
    try:
        found = version("transformers")
    except PackageNotFoundError:
        return
    _check(
        "transformers", found, TRANSFORMERS_TESTED, "is used on AutoEP layers, which replace transformers' MoE blocks,"
    )
