"""Posteriors in files: safetensors with one JSON header. Nothing in a file is ever executed.

The header carries a schema version, a fingerprint of the network's weights and a digest of everything else, so that
another network, a newer linlap, a truncated or an altered file is refused. Files are replaced atomically.
"""

import hashlib
import json
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from linlap import likelihood as likelihoods
from linlap.curvature.base import Restored, Structure
from linlap.errors import CorruptFileError, FileError, InputError, SchemaError, WeightsMismatchError
from linlap.evidence import Setting
from linlap.features import linearise
from linlap.groups import Groups
from linlap.likelihood import Likelihood
from linlap.planning import STRUCTURES
from linlap.posterior import Calibration, Noise, Posterior, Status
from linlap.prior import Prior

SCHEMA = 1
KEY = "linlap"
LIKELIHOODS: dict[str, Callable[..., Likelihood]] = {
    k().name: k for k in (likelihoods.Gaussian, likelihoods.Categorical, likelihoods.Bernoulli, likelihoods.Poisson)
}


def save(post: Posterior, path: str | Path) -> str:
    """Write a posterior to a file, atomically; return a line that says what was kept and its size.

    Example:
        >>> import linlap as ll, tempfile, torch
        >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
        >>> net = torch.nn.Linear(1, 1)
        >>> post = ll.fit(net, (x, x), "regression", progress=False)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = ll.save(post, folder + "/post.safetensors")
        ...     again = ll.load(folder + "/post.safetensors", net)
        >>> bool((again.predict(x).std == post.predict(x).std).all())
        True
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileError(f"a posterior is saved in a folder that exists, but {path.parent} does not: make it first")
    tensors = {name: tensor.contiguous().cpu() for name, tensor in _tensors(post).items()}
    header = json.dumps(_header(post))
    scratch = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        save_file(tensors, scratch, {KEY: header, "digest": _digest(header, tensors)})
        with open(scratch, "rb+") as written:
            os.fsync(written.fileno())
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    kept = "the features of the training data" if "factor.jacobian" in tensors else "the training inputs"
    what = kept if post.curvature == "dual" else f"the {post.curvature} curvature"
    return f"saved {what} and θ⋆: {path.stat().st_size / 2**20:.1f} MiB in {path.name}"


def load(path: str | Path, net: nn.Module, curvature: Structure | None = None) -> Posterior:
    """Read a posterior saved by `save` for the same network.

    Args:
        path: the file.
        net: the network it was fitted for, with the same weights.
        curvature: the structure, where it is one of your own.

    Example:
        >>> import linlap as ll, tempfile, torch
        >>> x, net = torch.linspace(-1, 1, 20).unsqueeze(1), torch.nn.Linear(1, 1)
        >>> post = ll.fit(net, (x, x), "regression", progress=False)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = ll.save(post, folder + "/post.safetensors")
        ...     ll.load(folder + "/post.safetensors", torch.nn.Linear(1, 1))
        Traceback (most recent call last):
        linlap.errors.WeightsMismatchError: ...
    """
    if not isinstance(net, nn.Module):
        raise InputError(
            f"net must be the torch.nn.Module that the posterior belongs to, but it is a {type(net).__name__}: call "
            "load(path, net)"
        )
    header, tensors = _read(Path(path))
    if header.get("fingerprint") != fingerprint(dict([*net.named_parameters(), *net.named_buffers()])):
        raise WeightsMismatchError(
            f"a posterior belongs to one network and its weights, but {Path(path).name} was saved for other weights than "
            "these: load the network's weights of that time, or fit again"
        )
    known, own = dict(header.get("layers", layers(net))), dict(layers(net))
    if known != own:
        other = next(path for path in [*known, *own] if known.get(path) != own.get(path))
        raise WeightsMismatchError(
            f"a posterior belongs to one network, but {Path(path).name} was saved for one with {known.get(other, 'nothing')} "
            f"where this has {own.get(other, 'nothing')} ({other or 'the network itself'}): load it with its own network"
        )
    structure = curvature or STRUCTURES.get(header["curvature"])
    if structure is None or structure.name != header["curvature"]:
        given = "it is not known" if structure is None else f"{structure.name!r} was given"
        raise InputError(
            f"the file's own structure of the curvature is {header['curvature']!r}, but {given}: pass that one as curvature="
        )
    try:
        return _posterior(header, tensors, net, structure)
    except (KeyError, TypeError, ValueError, RuntimeError) as broken:
        raise CorruptFileError(
            f"a saved posterior must be complete, but {Path(path).name} is not ({broken}): save it again"
        ) from broken


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """A digest of the names and values of all weights and buffers."""
    return _digest("", {name: tensor.detach().cpu() for name, tensor in weights.items()})


def layers(net: nn.Module) -> list[list[str]]:
    """The path and the kind of every module: weights alone do not tell a tanh from a ReLU."""
    return [[path, type(module).__name__] for path, module in net.named_modules()]


def _digest(header: str, tensors: Mapping[str, Tensor]) -> str:
    total = hashlib.sha256(header.encode())
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        total.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _tensors(post: Posterior) -> dict[str, Tensor]:
    prior = post.setting.prior
    tensors = {f"factor.{name}": tensor for name, tensor in post.factor.tensors().items()}
    tensors |= {"optimum": post.optimum, "reference": post.reference, "log_precision": prior.log_precision}
    tensors |= {"membership": prior.groups.membership, "scale": prior.scale, "tie": prior.tie}
    if post.setting.noise is not None and post.noises is not None:
        tensors |= {"noise": post.setting.noise}
        tensors |= {f"noise.{name}": value for name, value in asdict(post.noises).items()}
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _header(post: Posterior) -> dict[str, Any]:
    prior = post.setting.prior
    return {
        "schema": SCHEMA,
        "fingerprint": fingerprint(post.network.as_stored),
        "layers": layers(post.network.module),
        "params": list(post.network.layout.shapes),
        "likelihood": _described(post.likelihood),
        "prior": {
            "structure": prior.structure,
            "names": prior.groups.names,
            "parameters": prior.groups.parameters,
            "pull": prior.pull,
        },
        "learns_noise": post.setting.learns_noise,
        "output_shape": list(post.output_shape),
        "status": asdict(post.status),
        "calibration": asdict(post.calibration),
        "notes": list(post.notes),
    } | {name: getattr(post, name) for name in PLAIN}


PLAIN = (
    "model",
    "evidence_at",
    "curvature",
    "examples",
    "log_evidence",
    "log_evidence_error",
    "history",
    "memory",
    "seed",
)
"""Fields of a posterior that JSON holds as they are."""


def _described(likelihood: Likelihood) -> dict[str, Any]:
    fields = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in asdict(likelihood).items()}  # tensors, arrays
    return {"name": likelihood.name, **fields}


def _likelihood(described: Mapping[str, Any]) -> Likelihood:
    fields = {k: tuple(v) if k == "shape" else v for k, v in described.items() if k != "name"}
    if isinstance(fields.get("noise"), list):
        fields["noise"] = torch.tensor(fields["noise"], dtype=torch.float64)
    return LIKELIHOODS[described["name"]](**fields)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if KEY not in metadata:
                raise CorruptFileError(
                    f"a saved posterior has linlap's header, but {path.name} has none: pass a file that ll.save wrote"
                )
            text = metadata[KEY]
            header = json.loads(text)
            schema = header.get("schema") if isinstance(header, dict) else None
            if isinstance(schema, int) and schema > SCHEMA:
                raise SchemaError(
                    f"this linlap reads posteriors up to schema {SCHEMA}, but {path.name} has schema {schema}: upgrade linlap"
                )
            # Copies: views of the file would lie in memory as the file has them, and kernels round by how numbers lie.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a dict)
        altered = not isinstance(header, dict) or metadata.get("digest") != _digest(text, tensors) or _repadded(path)
    except FileNotFoundError as missing:
        raise FileError(f"the posterior's file must exist, but {path} does not: check the path") from missing
    except FileError:
        raise
    except OSError as unreadable:
        raise FileError(
            f"the posterior's file must be readable, but {path} is not ({unreadable}): check that it is a file, and its "
            "permissions"
        ) from unreadable
    except (SafetensorError, ValueError, RecursionError) as broken:
        raise CorruptFileError(
            f"a saved posterior must be whole, but {path.name} cannot be read ({broken}): it is truncated or not a posterior; "
            "save it again"
        ) from broken
    if altered:
        raise CorruptFileError(
            f"a saved posterior must be unaltered, but the digest of {path.name} does not fit its content: save it again"
        )
    return header, tensors


def _repadded(path: Path) -> bool:
    """Is anything but spaces after the file's own header? No other byte could change without changing what is read."""
    with open(path, "rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
    return not header.rstrip(b" ").endswith(b"}")


def _posterior(header: dict[str, Any], tensors: dict[str, Tensor], net: nn.Module, structure: Structure) -> Posterior:
    kept = set(header["params"])
    linearised = linearise(net, lambda name, _: name in kept)
    tensors = {name: tensor.to(linearised.network.device) for name, tensor in tensors.items()}
    described = header["prior"]
    groups = Groups(tuple(described["names"]), tensors["membership"], described["parameters"])
    prior = Prior(
        described["structure"], groups, tensors["scale"], tensors["tie"], tensors["log_precision"], described["pull"]
    )
    noise = tensors.get("noise")
    setting = Setting(prior, noise, header["learns_noise"])
    likelihood = _likelihood(header["likelihood"])
    held = {name.removeprefix("factor."): t for name, t in tensors.items() if name.startswith("factor.")}
    belongs = Restored(likelihood, prior, setting.noise_precision, header["memory"])
    noises = None if noise is None else Noise(*(tensors[f"noise.{n}"] for n in ("linear", "network", "plain")))
    return Posterior(
        linearised=linearised,
        likelihood=likelihood,
        setting=setting,
        factor=structure.restored(held, linearised, belongs),
        optimum=tensors["optimum"],
        output_shape=torch.Size(header["output_shape"]),
        status=Status(**header["status"]),
        noises=noises,
        reference=tensors["reference"],
        calibration=Calibration(**header["calibration"]),
        notes=tuple(header["notes"]),
        **{name: header[name] for name in PLAIN},
    )
