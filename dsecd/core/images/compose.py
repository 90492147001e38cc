# SPDX-License-Identifier: Apache-2.0
"""An environment's layers: base + workspace + toolkits, in the order OverlayFS wants them.

What belongs here: that order and its limit.  What does not: mounting.
"""

from collections.abc import Sequence

from libdsec.errors import InvalidSpec

#: Each lower layer makes every look-up of a missing name slower; 64 of them double it.
MAX_LAYERS = 16


def compose(base: str, workspace: str | None, toolkits: Sequence[str]) -> tuple[str, ...]:
    """Digests of the layers, top first: toolkits (the last one given on top), workspace, base.

    A digest given twice counts once, in its highest place: OverlayFS refuses the same layer twice.
    Raises InvalidSpec for more than MAX_LAYERS.
    """
    stack = [*reversed(toolkits), *([workspace] if workspace is not None else []), base]
    layers = tuple(dict.fromkeys(stack))
    if len(layers) > MAX_LAYERS:
        raise InvalidSpec(
            f"environment of {len(layers)} images: at most {MAX_LAYERS} can be stacked",
            hint="merge toolkits into one image",
        )
    return layers
