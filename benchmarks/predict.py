"""What a prediction by Kronecker factors costs beside the backward passes that it cannot do without.

The variance of ten outputs needs the gradients of ten outputs at every layer; the floor is one forward and ten backward passes to
the outputs of all layers, on the same images in the same run.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

import linlap as ll
from benchmarks.networks import Classifier
from linlap.tree import map_leaves
from linlap.uses.recorder import Watched

CASES = ("cnn", "fixup_resnet", "transformer")
FITTED, PREDICTED, REPEATS = 500, 256, 7


def measure(case: str, data: Any) -> dict[str, Any]:
    """Seconds of both, and their ratio, the median of some repeats in turn."""
    classifier = Classifier.named(case, data)
    batches = classifier.batches[: FITTED // len(classifier.batches[0][1])]
    post = ll.fit(classifier.net, batches, "classification", curvature="kron", progress=False)
    inputs = map_leaves(lambda t: t[:PREDICTED], classifier.batches[0][0])

    def passes() -> None:
        watched = Watched(post.linearised, inputs)
        known = [use for use in watched.uses if use.name in post.factor.coverage.weights]
        for column in torch.eye(watched.outputs.shape[1]):
            watched.gradients(column.expand_as(watched.outputs), known)

    floors, own = zip(
        *((seconds(passes), seconds(lambda: post.predict(inputs).variance)) for _ in range(REPEATS)), strict=True
    )
    return {
        "examples": PREDICTED,
        "floor": median(floors),
        "predict": median(own),
        "ratio": median(own) / median(floors),
    }


def seconds(function: Callable[[], object]) -> float:
    """Of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
