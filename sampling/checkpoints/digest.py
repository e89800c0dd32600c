"""weights_digest: one name for the exact bits of a set of parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np


def weights_digest(params: Mapping[str, Any]) -> str:
    """Hexadecimal SHA-256 over every leaf's path, dtype, shape and bytes, in the order of the
    paths.

    Equal for equal bits, whatever the order of the dicts and wherever the arrays live. Leaves are
    fetched to the host one at a time.
    """
    digest = hashlib.sha256()
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    named = {"/".join(str(key.key) for key in path): leaf for path, leaf in leaves}
    for name in sorted(named):
        array = np.ascontiguousarray(named[name])
        digest.update(f"{name} {array.dtype.name} {array.shape}\n".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
