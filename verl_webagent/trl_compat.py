"""verl 0.9.1 beside a trl that no longer has the class verl wants from it.

Wherever trl is merely installed, verl's FSDP engines import trl's `AutoModelForCausalLMWithValueHead`. trl 1.13 removed
it, and with it every engine fails, on GPU too. verl asks `is_trl_available()` first and uses trl for that class only,
so the answer "no" is all it takes: verl then builds critics as token classifiers.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

LACKS_VALUE_HEAD = (1, 13)
COPY_THE_NAME = ("verl.utils.model", "verl.models.transformers.monkey_patch")


def trl_lacks_value_head() -> bool:
    try:
        installed = version("trl")
    except PackageNotFoundError:
        return False
    return tuple(int(part) for part in installed.split(".")[:2]) >= LACKS_VALUE_HEAD


def answer_no() -> bool:
    return False


def hide_trl_from_verl() -> None:
    """Make verl's `is_trl_available()` answer no, if the installed trl is one that verl cannot use.

    Raises RuntimeError if a module that copies that function was imported before: it would keep the old answer.
    """
    if not trl_lacks_value_head():
        return
    import verl.utils.import_utils

    late = [
        name for name in COPY_THE_NAME if getattr(sys.modules.get(name), "is_trl_available", answer_no) is not answer_no
    ]
    if late:
        raise RuntimeError(
            f"{', '.join(late)} was imported before verl_webagent.plugin, so verl still looks for trl's value head, "
            f"which trl {version('trl')} does not have: let verl load its plugins first (VERL_USE_EXTERNAL_PLUGINS "
            "unset, or naming webagent), or install trl<1.13"
        )
    verl.utils.import_utils.is_trl_available = answer_no


hide_trl_from_verl()
