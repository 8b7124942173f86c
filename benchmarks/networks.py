"""The classifiers of the benchmarks, trained on the first ten thousand images of MNIST, with these images or fewer."""

from dataclasses import dataclass, replace

import torch
from torch import nn

import linlap as ll
from experiments import batching, datasets
from experiments.batching import Chunks
from experiments.training import RECIPES, trained
from linlap import prior
from linlap.curvature.dense import DenseCurvature
from linlap.problem import Problem, pose

IMAGES, BATCH = 10_000, 500
EPOCHS = {"cnn": 90, "fixup_resnet": 90, "transformer": 30, "resnet": 90}
GIVEN = {"transformer": 2_000, "resnet": 5_000}
"""Images of the posterior where a pass over all that a network was trained on takes a minute."""


@dataclass(frozen=True)
class Classifier:
    """A trained network of some fifteen thousand weights and its images."""

    name: str
    net: nn.Module
    batches: Chunks

    @staticmethod
    def named(name: str, data: datasets.Folder) -> "Classifier":
        """Trained unless it is in the cache."""
        net = trained(name, "small", n_train=IMAGES, epochs=EPOCHS[name], data=data)
        examples = RECIPES[name].load("train", n=GIVEN.get(name, IMAGES), data=data)
        return Classifier(name, net, list(batching.in_order(examples, BATCH)))

    def double(self) -> "Classifier":
        """In float64."""
        return replace(self, net=self.net.double(), batches=[(_double(x), y) for x, y in self.batches])

    def posed(self, memory: int = 2**31) -> Problem:
        """Its linear model."""
        return pose(ll.linearise(self.net), self.batches, ll.Categorical(), "linear", memory)


def first_prior(problem: Problem, curvature: DenseCurvature, structure: str) -> prior.Prior:
    """Where `ll.fit` starts."""
    f, layout = problem.network_outputs, problem.linearised.network.layout
    energy = float((f * problem.likelihood.curve(f, problem.targets, f)).sum())
    return prior.build(structure, layout, [], curvature.diagonal().sum(0), problem.trained, energy)


def _double(inputs: object) -> object:
    """Floating numbers in float64, masks as they are."""
    if isinstance(inputs, tuple):
        return tuple(map(_double, inputs))
    assert isinstance(inputs, torch.Tensor)
    return inputs.double() if inputs.is_floating_point() else inputs
