"""References to code, `package.module:name`, as a config names a scorer or a plugin."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from sampling.errors import ConfigError


def referenced(reference: str, where: str) -> Any:
    """What a reference names. Modules are looked for where Python looks, and then in the current folder.

    Args:
        where: begins the message.
    Raises:
        ConfigError: the module cannot be imported, or has no such name.
    """
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)  # last, so that a file there hides no package
    module_name, _, path = reference.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # foreign code, which raises what it likes
        raise ConfigError(
            f"{where}: module {module_name} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{where}: {module_name} has no {path}; check the name after the colon")
        found = getattr(found, part)
    return found
