"""Models whose activation has exact zeros (relu²): the dense level does not read these channels, and stays dense."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bundle_maker import cpu_decoder
from family_cases import converted, hugging_face, make_source
from safetensors.torch import load_file, save_file

import wisparse
from wisparse.converter.experts import find_experts
from wisparse.converter.masking import sparsify
from wisparse.formats.bundle import LEAST_ZEROS, Bundle

pytestmark = pytest.mark.usefixtures("quick_conversion")
PROMPT = torch.arange(40, 70)


def shifted(folder: Path, bias: float, name: str = "arcee") -> Path:
    """A tiny model of which ``bias``, added before the activation, decides the share of zeros."""
    file = make_source(name, folder) / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if name.endswith("up_proj.bias"):
            tensors[name] += bias
    save_file(tensors, file, {"format": "pt"})
    return folder


@pytest.fixture(scope="module", params=["arcee -1", "arcee 2", "nemotron-h -1", "nemotron-h-moe 0"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder, (name, bias) = tmp_path_factory.mktemp("zeros"), request.param.split()
    return Bundle.open(converted(shifted(folder / "source", float(bias), name), folder / "bundle", "uniform"))


def test_the_share_of_zeros_is_measured_and_decides(bundle: Bundle) -> None:
    model, zeros = hugging_face(bundle.folder), dict[str, float]()
    for name, module in (dict(model.named_modules()) | find_experts(model, bundle.config)).items():
        if name.endswith("down_proj"):
            module.register_forward_pre_hook(
                lambda _, inputs, name=name: zeros.__setitem__(name, float((inputs[0] == 0).float().mean()))
            )
    with torch.inference_mode():
        model(PROMPT[None])
    dense = bundle.at(0)
    for entry in bundle.recipe.projections:
        assert entry.zeros == pytest.approx(zeros.get(entry.name, 0.0), abs=0.15), entry.name
        mask = dense.masks[entry.name]
        assert (mask.threshold > 0) == (mask.sparsity > 0) == (entry.zeros >= LEAST_ZEROS)
    many = {name for name, mask in dense.masks.items() if mask.sparsity}
    assert many in (set(zeros), set())


@torch.inference_mode()
@pytest.mark.parametrize(
    ("backend", "weights"), [("torch", "native"), ("numba", "native"), ("numba", "int8"), ("numba", "int4")]
)
def test_the_dense_level_skips_zeros_without_loss(bundle: Bundle, backend: str, weights: str) -> None:
    dense = bundle.at(0)
    settings = {"weights": weights, "max_seq_len": 64, "max_batch": 2}
    decoder, plain = (cpu_decoder(dense, backend, **settings) for _ in range(2))
    plain.set_masks({name: type(mask)(mask.scale, 0.0, 0.0) for name, mask in dense.masks.items()})
    decoder.measure_sparsity(True)
    found = [[one.prefill(slot, PROMPT + slot, len(PROMPT)).clone() for slot in range(2)] for one in (decoder, plain)]
    found = [
        torch.stack([*rows, *(one.decode(torch.tensor([token, token + 1]))[0].clone() for token in (7, 90, 33))])
        for rows, one in zip(found, (decoder, plain), strict=True)
    ]
    assert torch.equal(*found)  # a CPU step adds channels in their order, and products of zeros change no sum
    size = {p.name: p.num_parameters for p in bundle.config.projections()}
    unread = sum(size[name] * mask.sparsity for name, mask in dense.masks.items()) / sum(size.values())
    assert decoder.realised_sparsity() == pytest.approx(unread, abs=0.05)


def test_inspect_tells(bundle: Bundle, run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = run("inspect", bundle.folder)
    assert code == 0
    said = re.search(r"^exact zeros +(\S+)% of the weights are not read at sparsity 0 either$", out, re.MULTILINE)
    assert (said is not None) == any(mask.sparsity for mask in bundle.at(0).masks.values())


def test_prompts_of_the_dense_level_and_other_tools_have_no_masks(bundle: Bundle) -> None:
    model = wisparse.load(bundle, device="cpu", dtype="float32", sparsity=0, max_seq_len=64)
    answers = {one: model.generate(PROMPT.tolist(), prefill=one, max_new_tokens=8) for one in ("dense", "all")}
    assert answers["all"].token_ids == answers["dense"].token_ids
    theirs = sparsify(hugging_face(bundle.folder), bundle.at(0))
    assert not any(one._forward_pre_hooks for one in theirs.modules() if isinstance(one, torch.nn.Linear))


def test_a_level_drops_all_zeros_whatever_its_share(tmp_path: Path) -> None:
    source = shifted(tmp_path / "source", -1.0)
    settings = {"search": "uniform", "rotation": "none", "num_samples": 4, "seq_len": 24, "device": "cpu"}
    wisparse.convert(source, tmp_path / "out", sparsity=0.1, **settings)
    for entry in Bundle.open(tmp_path / "out").recipe.projections:
        if entry.name.endswith("down_proj"):
            assert entry.threshold > 0
            assert entry.realised_sparsity >= entry.zeros > 0.6
