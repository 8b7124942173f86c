"""Files that are not a saved posterior of this network are refused, with the rule, what came, and a remedy; writing is atomic."""

import json
import random
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import cases
import linlap as ll
from fitted import fit, fit_case
from linlap import store
from linlap.errors import CorruptFileError, FileError, InputError, LinlapError, SchemaError, WeightsMismatchError

fitted = lru_cache(fit_case)


@pytest.fixture(scope="module")
def small() -> tuple[ll.Posterior, nn.Module]:
    torch.manual_seed(0)
    net, X = nn.Linear(2, 1), torch.randn(9, 2)
    return fit(net, (X, X.sum(1, keepdim=True).sin()), "gaussian", curvature="dense"), net


@pytest.fixture
def saved(small, tmp_path) -> Path:
    ll.save(small[0], tmp_path / "post.safetensors")
    return tmp_path / "post.safetensors"


def parts(raw: bytes) -> tuple[int, dict[str, tuple[int, int]]]:
    """Where the header ends, and where each tensor lies."""
    end = 8 + int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8:end])
    return end, {n: tuple(end + o for o in e["data_offsets"]) for n, e in entries.items() if n != "__metadata__"}


def test_a_file_truncated_anywhere_is_refused(small, saved):
    """In the size, the header, at its end, at and inside every tensor, and one byte short."""
    raw = saved.read_bytes()
    end, tensors = parts(raw)
    lengths = {0, 1, 7, 8, 9, end // 2, end - 1, end, end + 1, len(raw) - 1}
    for start, stop in tensors.values():
        lengths |= {start, (start + stop) // 2, stop - 1}
    for length in sorted(lengths - {len(raw)}):
        saved.write_bytes(raw[:length])
        with pytest.raises(
            CorruptFileError, match=r"must be whole, but post.safetensors cannot be read \(.*\): it is trunc"
        ):
            ll.load(saved, small[1])


def test_a_byte_changed_anywhere_is_refused(small, saved):
    """In the size, all over the header with the spaces after it, at and inside every tensor; every bit in turn."""
    raw = saved.read_bytes()
    end, tensors = parts(raw)
    header = {*range(8), *range(8, end, 7), *range(end - 12, end)}
    places = header | {i for start, stop in tensors.values() for i in (start, (start + stop) // 2, stop - 1)}
    for number, place in enumerate(sorted(places)):
        altered = bytearray(raw)
        altered[place] ^= 1 << number % 8
        saved.write_bytes(altered)
        with pytest.raises(
            (CorruptFileError, SchemaError), match=r"a saved posterior (must be|has)|reads posteriors up to"
        ):
            ll.load(saved, small[1])


@pytest.mark.parametrize("blank", [b"\t", b"\n", b"\r"])
def test_other_blanks_than_spaces_after_the_header_are_refused(small, saved, blank):
    raw = saved.read_bytes()
    end, _ = parts(raw)
    for last, refused in ((b" ", False), (blank, True)):
        saved.write_bytes(end.to_bytes(8, "little") + raw[8:end] + 7 * b" " + last + raw[end:])
        if refused:
            with pytest.raises(
                CorruptFileError, match=r"must be unaltered, but the digest of post.safetensors does not fit"
            ):
                ll.load(saved, small[1])
        else:
            assert ll.load(saved, small[1]).log_evidence == small[0].log_evidence


def test_bytes_behind_the_end_are_refused(small, saved):
    saved.write_bytes(saved.read_bytes() + b"\0")
    with pytest.raises(CorruptFileError, match="must be whole"):
        ll.load(saved, small[1])


def test_exchanged_tensors_and_headers_are_refused(small, saved):
    """A well-formed file with another value, another name or another header has another digest."""
    with safe_open(saved, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    header = json.loads(metadata["linlap"])
    renamed = {("tie" if n == "membership" else "membership" if n == "tie" else n): t for n, t in tensors.items()}
    forged = [
        ({**tensors, "optimum": tensors["optimum"] + 1}, metadata),
        (renamed, metadata),
        (tensors, {**metadata, "linlap": json.dumps({**header, "log_evidence": 0.0})}),
        (tensors, {**metadata, "linlap": "[]"}),
        (tensors, {k: v for k, v in metadata.items() if k != "digest"}),
    ]
    for held, said in forged:
        save_file(held, saved, said)
        with pytest.raises(
            CorruptFileError, match=r"the digest of post.safetensors does not fit its content: save it again"
        ):
            ll.load(saved, small[1])


def test_a_header_without_what_it_needs_is_refused(small, saved, monkeypatch):
    """Such as one of another program that uses the same format and the same digest."""
    monkeypatch.setattr(store, "PLAIN", store.PLAIN[1:])
    ll.save(small[0], saved)
    monkeypatch.undo()
    with pytest.raises(
        CorruptFileError, match=r"must be complete, but post.safetensors is not \('model'\): save it again"
    ):
        ll.load(saved, small[1])


def test_another_network_is_refused(small, saved):
    other = nn.Linear(2, 1)
    other.load_state_dict(small[1].state_dict())
    assert ll.load(saved, other).log_evidence == small[0].log_evidence
    with torch.no_grad():
        other.bias.copy_(torch.nextafter(other.bias, other.bias + 1))
    for net in (other, nn.Linear(3, 1), nn.Sequential(small[1]), small[1].__class__(2, 1).double()):
        with pytest.raises(
            WeightsMismatchError, match=r"but post.safetensors was saved for other weights .* or fit again"
        ):
            ll.load(saved, net)


def test_the_same_weights_in_another_network_are_refused(tmp_path):
    """What a tanh has learnt is not what a ReLU says."""
    net, *_ = cases.CASES["mlp"].make()
    ll.save(fitted(cases.CASES["mlp"]), tmp_path / "post")
    place = next(i for i, layer in enumerate(net) if isinstance(layer, nn.Tanh))
    net[place] = nn.ReLU()
    with pytest.raises(
        WeightsMismatchError,
        match=rf"one network, but post was saved for one with Tanh where this has ReLU \({place}\): load it",
    ):
        ll.load(tmp_path / "post", net)


def test_other_running_statistics_are_another_network(tmp_path):
    net, *_ = cases.CASES["batch-norm"].make()
    ll.save(fitted(cases.CASES["batch-norm"]), tmp_path / "post")
    net[1].running_mean[0] += 1e-9
    with pytest.raises(WeightsMismatchError):
        ll.load(tmp_path / "post", net)


def test_a_newer_schema_is_refused(small, saved, monkeypatch):
    monkeypatch.setattr(store, "SCHEMA", 2)
    ll.save(small[0], saved)
    monkeypatch.undo()
    with pytest.raises(
        SchemaError, match=r"posteriors up to schema 1, but post.safetensors has schema 2: upgrade linlap"
    ):
        ll.load(saved, small[1])


def test_random_bytes_are_refused(small, saved):
    generator = random.Random(0)
    for size in (1, 8, 9, 100, 5000):
        saved.write_bytes(generator.randbytes(size))
        with pytest.raises(CorruptFileError, match="truncated or not a posterior"):
            ll.load(saved, small[1])


def test_what_is_not_ours_is_refused(small, saved):
    save_file({"weight": torch.zeros(3)}, saved)
    with pytest.raises(
        CorruptFileError, match=r"has linlap's header, but post.safetensors has none: pass a file that ll.save"
    ):
        ll.load(saved, small[1])
    torch.save(small[1].state_dict(), saved)
    with pytest.raises(CorruptFileError, match="truncated or not a posterior; save it again"):
        ll.load(saved, small[1])


def test_a_missing_file_a_folder_and_a_missing_folder_are_refused(small, tmp_path):
    with pytest.raises(FileError, match=r"must exist, but .*nowhere does not: check the path"):
        ll.load(tmp_path / "nowhere", small[1])
    with pytest.raises(
        FileError, match=r"must be readable, but .* is not .*: check that it is a file, and its permissions"
    ):
        ll.load(tmp_path, small[1])
    with pytest.raises(FileError, match=r"saved in a folder that exists, but .*nowhere does not: make it first"):
        ll.save(small[0], tmp_path / "nowhere" / "post")


def test_the_network_is_needed(saved):
    with pytest.raises(
        InputError, match=r"net must be the torch.nn.Module .*, but it is a str: call load\(path, net\)"
    ):
        ll.load(saved, "post.safetensors")


def test_every_refusal_is_an_error_of_ours():
    assert issubclass(FileError, LinlapError)
    assert all(issubclass(e, FileError) for e in (CorruptFileError, SchemaError, WeightsMismatchError))


# --- writing is all or nothing


@pytest.mark.parametrize("failure", [OSError("no space left"), KeyboardInterrupt()])
@pytest.mark.parametrize("where", ["save_file", "os.fsync", "os.replace"])
def test_an_exception_while_writing_leaves_the_old_file_and_nothing_else(small, saved, monkeypatch, where, failure):
    before = saved.read_bytes()

    def fails(*arguments: object) -> None:
        if where == "save_file":
            Path(arguments[1]).write_bytes(b"half a posterior")
        raise failure

    monkeypatch.setattr(f"linlap.store.{where}", fails)
    with pytest.raises(type(failure)):
        ll.save(small[0], saved)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def test_a_posterior_replaces_another(small, saved):
    ll.save(fitted(cases.CASES["mlp"]), saved)
    assert ll.load(saved, cases.CASES["mlp"].make()[0]).examples == 40
    ll.save(small[0], str(saved))
    assert ll.load(str(saved), small[1]).examples == 9
    assert list(saved.parent.iterdir()) == [saved]
