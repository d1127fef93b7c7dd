"""The code of docs/gallery: its cards, and the lines of its tables."""

import functools
import re
import types
from typing import Any

import jax.numpy as jnp
import optax

import ppo_parts as pp

from ._records import ROOT


def load_card(page: str, heading: str, number: int | None = None) -> Any:
    """Return a module with the definitions of a gallery page's top and of one card (of its first `number` blocks)."""
    top, *cards = re.split(r"^## ", (ROOT / f"docs/gallery/{page}.md").read_text(), flags=re.MULTILINE)
    [own] = [text for text in cards if text.startswith(f"{heading}\n")]
    module = types.ModuleType(page)
    module.pp = pp  # some pages import it in an earlier card
    first, blocks = (re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) for text in (top, own))
    for source in first + blocks[:number]:
        exec(source, vars(module))
    return module


@functools.cache
def evaluate_line(name: str) -> Any:
    """Return what the code in a row of the gallery's tables makes."""
    text = (ROOT / "docs/gallery/README.md").read_text()
    [row] = re.findall(rf"^\| \[?{re.escape(name)}[],: |].*", text, re.MULTILINE)
    [code] = [cell.strip("`") for cell in row.split(" | ") if cell.startswith(("`pp.", "`optax."))]
    mirrored = lambda x: x * jnp.array([1.0, -1.0, -1.0]) if x.shape[-1] == 3 else -x  # noqa: E731 - for Pendulum-v1
    given = {"pp": pp, "optax": optax, "F": pp.functional, "mirrored": mirrored}
    made = eval(code, given | {"targets": pp.gae(gamma=0.99, gae_lambda=1.0)})
    return pp.chain(*made) if isinstance(made, tuple) and not hasattr(made, "update") else made
