"""Validated reading of a Hugging Face checkpoint, and checkpoints derived from one."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from . import guard
from .architectures import WRAPPERS, text_name
from .config_fields import read_count
from .errors import BundleError, ResourceError, UnsupportedModelError, WisparseError
from .lazy import Tensor, torch
from .manifest import MANIFEST, SIDECAR
from .model_config import LM_HEAD, ModelConfig
from .packings import MXFP4, Packed, Packing, Part, Plain, Transposed, mxfp4_parts, widen_mxfp4
from .quantization import read_quantisation, state_zero_offset
from .tensor_file import DTYPES, INFINITY, STORED_DTYPES, Entry, TensorFile, code_of, is_finite, open_files, same_values
from .tensors import MTP, StackedExperts, TensorSpec, model_tensors, mtp_tensors, stacked_experts
from .weight_types import QuantizedMatrix

_OF_DECODERS = re.compile("ForCausalLM|ForConditionalGeneration|LMHead|None")  # classes of causal LMs, or no class
MAX_CONFIG_BYTES = 1 << 20
# Buffers that loaders compute anew.
_COMPUTED = re.compile(
    r"(.*\.)?(rotary(_pos)?_emb\.\w+|rope\.freqs|inv_freq|cos_cached|sin_cached|position_ids|masked_bias)", re.DOTALL
)
# Small tensors that describe others; `Checkpoint.open` validates them.
_READ_FIRST = ("weight_shape", "g_idx")
# Last parts of the names of quantised weights' tensors.
_OF_QUANTISED = (
    *("weight_packed", "weight_scale", "weight_scale_inv", "weight_shape", "weight_zero_point", "weight_g_idx"),
    *("qweight", "qzeros", "scales", "g_idx", "input_scale"),
)
_MODELOPT = "hf_quant_config.json"
# Small enough that copied bytes are still in the CPU's cache when they are checked.
_COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint, stored in ``file`` of its folder under the name ``stored``."""

    name: str
    file: str
    stored: str
    shape: tuple[int, ...]
    code: str  # the dtype, as safetensors names it
    offset: int = 0  # bytes within ``stored``, if that has the tensors of all experts

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * STORED_DTYPES[self.code][1]

    @property
    def dtype_name(self) -> str:
        return STORED_DTYPES[self.code][0]

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype_name)


@dataclass(frozen=True)
class StoredWeight:
    packing: Packing
    rows: int
    columns: int


@dataclass(frozen=True)
class Checkpoint:
    """A validated checkpoint; constructed by ``Checkpoint.open``."""

    folder: Path
    config_dict: Mapping[str, Any]  # ``config.json``; of a multimodal wrapper that of its text model
    config: ModelConfig
    # name in the text model -> info, in the order of execution: the expected tensors, those of an MTP head, and a tied
    # ``lm_head.weight`` if it is stored. A quantised weight is replaced by the tensors of its packing.
    tensors: Mapping[str, TensorInfo]
    quantised: Mapping[str, StoredWeight]  # name of a quantised weight -> its packing
    vision_tensors: int  # number of a wrapper's tensors outside the text model
    error: type[WisparseError]  # raised for a damaged file
    files: Mapping[str, TensorFile]  # by name; reads raise if one changed since it was opened
    rotation: Tensor | None = (
        None  # Q (hidden_size, hidden_size) float32: hidden states are x @ Q where the source's are x
    )
    # Name of a matrix -> its rows in the order in which `matrix`, `tensor` and `row_pieces` give them, if not as stored.
    orders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what of a source was ignored or read in another way than it says, as sentences
    # name -> function that computes a tensor, contiguous on the CPU, in place of the files
    _made: Mapping[str, Callable[[], Tensor]] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        *,
        error: type[WisparseError] = UnsupportedModelError,
        complete: Callable[..., dict[str, Any]] | None = None,
        weights: TensorFile | None = None,
    ) -> Checkpoint:
        """Read and validate ``config.json``, the index and the headers; no weight is read. ``error``: BundleError for a
        bundle, which has an index and no copy of tied embeddings. ``complete``: adds default fields to a source's
        ``config.json``, by its config and, once known, the names of its tensors. ``weights``: the file that has all of
        them, in place of the folder's."""
        folder = Path(folder)
        guard.require_folder(folder)
        is_bundle = issubclass(error, BundleError)
        stored_config = read_config(folder, error)
        wrapped = complete is not None and stored_config.get("model_type") in (*WRAPPERS,)
        try:
            config_dict = stored_config if complete is None else complete(stored_config)
            config = ModelConfig.from_dict(config_dict)
            packings = read_quantisation(config_dict, config)
        except UnsupportedModelError as reason:
            raise error(str(reason)) from None
        if weights is None:
            weight_map, files, notes = open_files(folder, is_bundle, error)
        else:
            weight_map, files, notes = dict.fromkeys(weights.entries, weights.name), {weights.name: weights}, []
        mlx = any(file.metadata.get("format") == "mlx" for file in files.values())
        written = "; MLX stores convolutions and experts in its own way: convert the model that it was made from"
        origin = written if mlx else ""
        # Name in the text model -> stored name.
        stored: dict[str, str] = {}
        for name in weight_map:
            plain = text_name(name) if wrapped else re.sub("^backbone[.]", "model.", name)  # Nemotron-H's
            if plain is not None and stored.setdefault(plain, name) != name:
                raise error(f"{name!r:.200} and {stored[plain]!r:.200} are the same tensor under two names")
        if wrapped and complete is not None:
            config_dict = complete(stored_config, stored)
            config = ModelConfig.from_dict(config_dict)
        embedding = config.embedding
        if config.tie_word_embeddings and LM_HEAD in stored and not is_bundle:
            if embedding not in stored:
                stored[embedding] = stored.pop(LM_HEAD)
            elif not same_values(*((files[weight_map[stored[name]]], stored[name]) for name in (embedding, LM_HEAD))):
                notes.append(
                    "config.json says tie_word_embeddings, but lm_head.weight differs from the embedding: both are kept, "
                    "and the bundle's config.json says false"
                )
                config_dict = {**config_dict, "tie_word_embeddings": False}
                config = replace(config, tie_word_embeddings=False)
                packings = read_quantisation(config_dict, config)
        if config.num_blocks > len(stored):
            raise error(f"config.json: num_hidden_layers is {config.num_blocks}, but there are {len(stored)} tensors")
        specs = list(model_tensors(config))
        shapes = {one.name: one.shape for one in specs}
        quantised = {name: StoredWeight(packing, *shapes[name]) for name, packing in packings.items()}
        if config.tie_word_embeddings and LM_HEAD in stored and not is_bundle:
            specs.append(TensorSpec(LM_HEAD, shapes[embedding]))
        head = mtp_tensors(config)
        held = {one.stacked.name if one.stacked and one.stacked.name in stored else one.name for one in head}
        if held == {name for name in stored if name.startswith(MTP)}:
            specs += head
        layout = config.architecture.experts
        stacked = layout is not None and layout.stacked is not None
        expected, fused = dict[str, tuple[int, ...]](), dict[str, StackedExperts]()
        for one in specs:
            place = one.stacked
            if stacked and place is not None and one.name not in quantised:  # one tensor of all experts
                expected[place.name] = place.shape
                continue
            expected[one.name] = one.shape
            if place is not None and not stacked and not is_bundle and place.name in stored:
                fused[one.name] = place
        # gpt-oss' MXFP4 weights, which are converted to bfloat16 when read.
        four_bits = {name for name in expected if not is_bundle and name + MXFP4[0] in stored} if stacked else set()
        # Name of each required or present optional tensor -> its allowed shapes and dtypes, in order.
        parts: dict[str, Part] = {}
        for name, shape in expected.items():
            if name in four_bits:
                parts |= {name + end: part for end, part in mxfp4_parts(shape).items()}
                continue
            if name not in quantised:
                parts[name] = Part((shape,), tuple(DTYPES))
                continue
            prefix = name.removesuffix("weight")
            try:
                weight_parts = quantised[name].packing.parts(*shape)
            except ValueError as reason:
                raise error(f"{name}: {reason}") from None
            parts |= {
                prefix + end: part for end, part in weight_parts.items() if part.required or prefix + end in stored
            }
        missing = [name for name in parts if name not in stored and name not in fused]
        wholes = {one.name for one in fused.values()}
        # Checkpoints also have key and value projections of blocks that use another block's keys and values.
        shared = {f"model.layers.{at}.self_attn" for at, block in enumerate(config.blocks) if block.kv_from is not None}
        unused = {f"{module}.{name}.weight" for module in shared for name in ("k_proj", "v_proj", "k_norm")}
        # MTP heads that are stored as further blocks: GLM-4.5's.
        heads = read_count(config_dict, "num_nextn_predict_layers")
        later = tuple(f"model.layers.{config.num_blocks + at}." for at in range(min(heads, 8)))
        extra, ignored = [name for name in stored if name not in parts and name not in wholes], dict[str, list[str]]()
        if not is_bundle:
            unknown, extra = [name for name in extra if name not in unused], []
            for name in unknown:
                why = "computed anew" if _COMPUTED.fullmatch(name) else "an MTP head of a kind that is not known here"
                known = _COMPUTED.fullmatch(name) or name.startswith(MTP) or name.startswith(later)
                (ignored.setdefault(why, []) if known else extra).append(name)
        for why, names in ignored.items():
            notes.append(f"ignored {len(names)} tensor{'s' * (len(names) > 1)} ({names[0]!r:.200}): {why}")
        if missing or extra:
            differs = [
                f"{what} {len(names)} tensor{'s' * (len(names) > 1)} ({names[0]!r:.200}{', …' * (len(names) > 1)})"
                for what, names in (("missing", missing), ("unexpected", extra))
                if names
            ]
            # A weight is quantised by the config but not in the files, or the reverse.
            mismatch = any(name.rpartition(".")[2] in _OF_QUANTISED for name in (*missing, *extra))
            hint = "; quantization_config does not say what the files hold" if mismatch else origin
            if "embed_tokens.weight" in stored or not _OF_DECODERS.search(str(stored_config.get("architectures"))):
                hint += "; an embedding, reward or classification model writes no text: give the causal LM"
            kind = config.architecture.class_name
            raise error(f"the weights do not fit config.json ({kind}): {'; '.join(differs)}{hint}")
        tensors = {}
        for name, part in parts.items():
            place = fused.get(name)
            whole = stored[name if place is None else place.name]
            file = weight_map[whole]
            entry = files[file].entries.get(whole)
            if entry is None:
                raise error(f"{file}: {whole} is missing, the index places it there")
            if place is not None:
                _require_shape(place.name, (place.shape,), entry, error)
                entry = Entry(entry.code, part.shapes[0])
            if entry.code not in part.codes and part.codes == tuple(DTYPES):
                raise error(
                    f"{name}: expected BF16, F16 or F32, found {entry.code}; quantised weights need a "
                    "quantization_config that says how they are stored: take a checkpoint that has one, or the "
                    "unquantised checkpoint"
                )
            if entry.code not in part.codes:
                raise error(f"{name}: expected {' or '.join(part.codes)}, found {entry.code}; see quantization_config")
            _require_shape(name, part.shapes, entry, error, origin)
            info = TensorInfo(name, file, whole, entry.shape, entry.code)
            first = 0 if place is None else place.each * place.expert + place.index
            tensors[name] = replace(info, offset=first * info.nbytes)
        outside = len(weight_map) - len(stored)
        opened = cls(folder, config_dict, config, tensors, quantised, outside, error, files, notes=tuple(notes))
        if four_bits:
            return opened._widened(four_bits, expected)
        opened = opened._with_zero_points()
        for name, weight in quantised.items():
            try:
                weight.packing.check(opened._parts_of(name, _READ_FIRST), weight.rows, weight.columns)
            except ValueError as reason:
                raise error(f"{name}: {reason}") from None
        return opened

    def _with_zero_points(self) -> Checkpoint:
        """This checkpoint; of symmetric GPTQ weights with the ``checkpoint_format`` that the zero points stored are of."""
        for name, weight in self.quantised.items():
            packing = weight.packing
            if not isinstance(packing, Transposed) or not packing.symmetric:
                continue
            try:
                fitted = packing.fitted(self._stored(name.removesuffix("weight") + "qzeros"))
            except ValueError as reason:
                raise self.error(f"{name}: {reason}") from None
            if fitted == packing:
                break
            given = self.config_dict["quantization_config"]
            key, said, form = state_zero_offset(given, fitted.zero_offset)
            note = f"{key} is {said!r}, but sym is true and the stored zero points are those of {form!r}: read so"
            return replace(
                self,
                config_dict={**self.config_dict, "quantization_config": {**given, key: form}},
                quantised={
                    other: replace(one, packing=replace(one.packing, zero_offset=fitted.zero_offset))
                    for other, one in self.quantised.items()
                    if isinstance(one.packing, Transposed)  # all are
                },
                notes=(*self.notes, note),
            )
        return self

    def _widened(self, names: Iterable[str], shapes: Mapping[str, tuple[int, ...]]) -> Checkpoint:
        """This checkpoint with the MXFP4 weights ``names`` converted to bfloat16 when read."""

        def make(name: str) -> Tensor:
            try:
                return widen_mxfp4(*(self._stored(name + end) for end in MXFP4))
            except ValueError as reason:
                raise self.error(f"{name}: {reason}") from None

        tensors: dict[str, TensorInfo] = {}
        for stored, info in self.tensors.items():
            name = stored.removesuffix(MXFP4[0])
            if name in names:
                tensors[name] = TensorInfo(name, info.file, name, shapes[name], "BF16")
            elif stored.removesuffix(MXFP4[1]) not in names:
                tensors[stored] = info
        return self.derive({name: partial(make, name) for name in names}, tensors=tensors)

    @property
    def is_made(self) -> bool:
        """Whether some tensors are computed, so not in the files."""
        return bool(self._made) or self.is_dequantised

    @property
    def is_dequantised(self) -> bool:
        """Whether the tensors are computed, in float32, from a file of another form: in a bundle they have `dtype`."""
        return any(file.dequantised for file in self.files.values())

    @cached_property
    def _places(self) -> dict[str, StackedExperts]:
        """By name of an expert's tensor, its position in the tensor of all experts; empty unless files have such tensors."""
        layout = self.config.architecture.experts
        return {} if layout is None or layout.stacked is None else stacked_experts(self.config)

    def derive(self, made: Mapping[str, Callable[[], Tensor]], **changes: Any) -> Checkpoint:
        """This checkpoint with other attributes (``tensors``, …) and the tensors ``made`` computed when read."""
        tensors = changes.get("tensors", self.tensors)
        every = {name: make for name, make in {**self._made, **made}.items() if name in tensors}
        return replace(self, _made=every, **changes)

    def quantize(self, matrices: Mapping[str, QuantizedMatrix], scale_dtype: torch.dtype) -> Checkpoint:
        """This unquantized checkpoint with weights replaced by codes in compressed-tensors' format. ``matrices``: by
        projection, all of one kind and group, without zero points. ``scale_dtype``: of the stored scales."""
        kind, grouping = next((matrix.kind, matrix.group) for matrix in matrices.values())
        packing: Packed | Plain = Plain("fp8") if kind == "fp8" else Packed(kind, grouping)
        tensors: dict[str, TensorInfo] = {}
        made: dict[str, Callable[[], Tensor]] = {}
        layouts: dict[tuple[int, int], dict[str, Tensor]] = {}
        quantised: dict[str, StoredWeight] = {}
        by_expert: dict[str, list[str]] = {}  # names of the experts' tensors, by that of all experts
        for name, place in self._places.items():
            by_expert.setdefault(place.name, []).append(name)
        for name in chain.from_iterable(by_expert.get(stored, [stored]) for stored in self.tensors):
            matrix = matrices.get(name.removesuffix(".weight"))
            if matrix is None:
                unchanged = self._places[name].name if name in self._places else name
                tensors[unchanged] = self.tensors[unchanged]
                continue
            quantised[name] = StoredWeight(packing, *matrix.shape)
            parts = packing.encode(matrix, scale_dtype)
            if matrix.shape not in layouts:  # equal shapes have equal layouts
                layouts[matrix.shape] = {part: make() for part, make in parts.items()}
            for part, make in parts.items():
                stored, like = name.removesuffix("weight") + part, layouts[matrix.shape][part]
                made[stored] = make
                tensors[stored] = TensorInfo(stored, "", stored, tuple(like.shape), code_of(like.dtype))
        number = {"num_bits": 4 if kind == "int4" else 8, "type": "float" if kind == "fp8" else "int"}
        spread = {"strategy": "channel" if grouping is None else "group", "group_size": grouping, "dynamic": False}
        weights = {**number, "symmetric": True, **spread}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        ignore = [LM_HEAD.removesuffix(".weight")]
        if self.config.has_experts:  # routers, and the gates of shared experts
            ignore.append(r"re:.*\.(gate|router|router\.proj|shared_expert_gate)$")
        if self.config.latent is not None:
            ignore.append(r"re:.*\.kv_b_proj$")
        if self.config.delta_net is not None:
            # Small linear layers that are no projections.
            ignore.append(r"re:.*\.linear_attn\.in_proj_(a|b|ba)$")
        if f"{MTP}fc.weight" in tensors:
            ignore.append(r"re:mtp\..*")
        if self.config.per_layer_size:
            ignore.append(r"re:.*\.per_layer_(input_gate|projection|model_projection)$")
        form = "float-quantized" if kind == "fp8" else "pack-quantized"
        how = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
        settings = {**how, "config_groups": {"group_0": group}, "ignore": ignore}
        config_dict = {**self.config_dict, "quantization_config": settings}
        return self.derive(made, config_dict=config_dict, tensors=tensors, quantised=quantised)

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the projections' weights; if they are, or were, quantised, that of the config."""
        first = next(self.config.projections()).parts[0] + ".weight"
        if first not in self.quantised and not self.is_dequantised:
            return self.tensors[first].dtype
        return getattr(torch, self.config.dtype) if self.config.dtype in INFINITY else torch.bfloat16

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self.quantised.get(name)
        if stored is not None:
            return stored.rows, stored.columns
        return self.tensors[name].shape if name in self.tensors else self._places[name].part

    def chunks(self, name: str, chunk_bytes: int = 32 << 20) -> Iterator[Tensor]:
        """A stored tensor, flattened and read-only, in chunks of at most ``chunk_bytes``."""
        if name in self._made:
            tensor = self._stored(name).flatten()
            yield from tensor.split(max(1, chunk_bytes // tensor.dtype.itemsize))
            return
        info = self.tensors[name]
        for start in range(info.offset, info.offset + info.nbytes, chunk_bytes):
            stop = min(start + chunk_bytes, info.offset + info.nbytes)
            chunk = self.files[info.file].read(info.stored, start, stop)
            self._require_finite(info, chunk)
            yield chunk.view(info.dtype)

    def read_part(self, name: str, offset: int, memory: Tensor) -> None:
        """Fill ``memory``, (n,) uint8 on the CPU, with a stored tensor's bytes from ``offset`` on; thread-safe."""
        info = self.tensors[name]
        start = info.offset + offset
        for piece in memory.split(_COPY_BYTES):
            data = self.files[info.file].read(info.stored, start, start := start + len(piece))
            np.copyto(piece.numpy(), data.numpy())  # unlike torch's copy it uses no threads
            self._require_finite(info, piece)

    def matrix(self, name: str, device: str | torch.device = "cpu") -> Tensor | QuantizedMatrix:
        """A weight as stored, copied to ``device``; a QuantizedMatrix if quantised."""
        if name in self.quantised:
            return self._decode(name, device)
        stored = self._stored(name).to(device)
        return stored[list(self.orders[name])] if name in self.orders else stored

    def tensor(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        """A copy of a tensor; a quantised weight is dequantised to float32."""
        weight = self.matrix(name)
        return (self._dequantised(name, weight) if isinstance(weight, QuantizedMatrix) else weight).to(device)

    def rows(self, name: str, index: Tensor) -> Tensor:
        """A copy of rows ``index`` (n,) of a stored matrix, which are not checked for NaN; other rows are not read."""
        info = self.tensors[name]
        source = self.files[info.file].read(info.stored)
        return source.view(info.dtype).view(info.shape)[index]

    def require_finite(self, name: str) -> None:
        """Raise ``error`` if a tensor, or a dequantised weight, has NaN or infinity."""
        for _ in self.row_pieces(name, 1024) if name in self.quantised else self.chunks(name):
            pass

    def row_pieces(self, name: str, rows: int) -> Iterator[Tensor]:
        """A tensor (N, ...) in blocks of at most ``rows`` rows; dequantised to float32 if quantised."""
        if name not in self.quantised:
            if name not in self.tensors or name in self.orders:
                yield from self.matrix(name).split(rows)  # type: ignore[union-attr]
                return
            info = self.tensors[name]
            for flat in self.chunks(name, rows * math.prod(info.shape[1:]) * info.dtype.itemsize):
                yield flat.view(-1, *info.shape[1:])
            return
        matrix = self._decode(name)
        for first in range(0, matrix.shape[0], rows):
            yield self._dequantised(name, matrix.rows(first, first + rows))

    def _dequantised(self, name: str, matrix: QuantizedMatrix) -> Tensor:
        # In float32, not the config's dtype, so that a cast to the decoder's dtype rounds only once.
        weight = matrix.dequantise(torch.float32)
        if not is_finite(weight):
            raise self.error(f"{name}: its codes and scales make infinite numbers; the model is damaged")
        return weight

    def _decode(self, name: str, device: str | torch.device = "cpu") -> QuantizedMatrix:
        weight = self.quantised[name]
        names = weight.packing.parts(weight.rows, weight.columns)
        parts = {part: tensor.to(device) for part, tensor in self._parts_of(name, names).items()}
        try:
            decoded = weight.packing.decode(parts, weight.rows, weight.columns)
        except ValueError as reason:
            raise self.error(f"{name}: {reason}") from None
        return decoded.reordered(self.orders[name]) if name in self.orders else decoded

    def _parts_of(self, name: str, parts: Iterable[str]) -> dict[str, Tensor]:
        prefix = name.removesuffix("weight")
        return {part: self._stored(prefix + part) for part in parts if prefix + part in self.tensors}

    def _stored(self, name: str) -> Tensor:
        if name in self._made:
            tensor = self._made[name]()
            if not is_finite(tensor):
                raise self.error(f"{name}: computed values are beyond {tensor.dtype}'s range")
            return tensor
        place = None if name in self.tensors else self._places.get(name)
        if place is not None and place.name in self._made:
            return place.of(self._stored(place.name)[place.expert]).contiguous()
        info = self.tensors.get(name if place is None else place.name)
        if info is None:
            raise self.error(f"{name}: not among the tensors of {self.folder.name}")
        size, offset = info.nbytes, 0
        if place is not None:  # the tensors of one expert
            size //= info.shape[0]
            offset = place.expert * size
        try:
            # numpy requests huge pages for large arrays, whose first write is several times faster than torch's.
            memory = torch.from_numpy(np.empty(size, np.uint8))
        except MemoryError:
            raise ResourceError(f"{name}: not enough memory for {size:,} bytes") from None
        self.read_part(info.name, offset, memory)
        if place is None:
            return memory.view(info.dtype).reshape(info.shape)
        return place.of(memory.view(info.dtype).reshape(info.shape[1:])).contiguous()

    def _require_finite(self, info: TensorInfo, data: Tensor) -> None:
        if not all(is_finite(part.view(info.dtype)) for part in data.split(_COPY_BYTES)):
            raise self.error(f"{info.name}: the weights hold NaN or infinity; the model is damaged")


def _require_shape(
    name: str, shapes: Iterable[tuple[int, ...]], entry: Entry, error: type[WisparseError], hint: str = ""
) -> None:
    if entry.shape not in shapes:
        known = " or ".join(map(str, shapes))
        raise error(f"{name}: expected shape {known}, found {entry.shape}; config.json and weights do not fit{hint}")


def read_config(folder: Path, error: type[WisparseError] = UnsupportedModelError) -> dict[str, Any]:
    """``config.json`` of a dense model, or of a bundle if ``error`` is BundleError; raises ``error`` for other folders."""
    is_bundle = issubclass(error, BundleError)
    if not is_bundle and (kind := guard.folder_kind(folder)) is not None:
        raise error(f"{guard.shown(folder)} is {kind}")
    # Infinity is in configurations of Mamba-2 models: the largest time step.
    config = guard.read_json(folder, "config.json", MAX_CONFIG_BYTES, error, infinite=not is_bundle)
    if isinstance(packed := config.get("quantization"), dict) and {"group_size", "bits"} <= packed.keys():
        raise error(
            f"{guard.shown(folder)}: an MLX checkpoint, whose packed weights only MLX reads; convert "
            f"{_base_model(folder) or 'the model that it was made from'} instead"
        )
    # Where NVIDIA ModelOpt wrote its settings before it wrote quantization_config.
    if not is_bundle and "quantization_config" not in config and (folder / _MODELOPT).is_file():
        settings = guard.read_json(folder, _MODELOPT, MAX_CONFIG_BYTES, error).get("quantization")
        if isinstance(settings, dict) and settings.get("quant_algo") is not None:
            config["quantization_config"] = {**settings, "quant_method": "modelopt"}
    # By files, not by config.json's entry, which transformers copies into a dense checkpoint saved from a bundle.
    if not is_bundle and any((folder / name).exists() for name in (MANIFEST, SIDECAR)):
        raise error(f"{guard.shown(folder)}: already a sparse bundle; expected a dense model: convert its base model")
    return config


def _base_model(folder: Path) -> str | None:
    """``base_model`` of the model card, if it names one."""
    if not (folder / "README.md").is_file():
        return None
    card = guard.read_bounded(folder, "README.md", MAX_CONFIG_BYTES, UnsupportedModelError).decode(errors="replace")
    found = re.search(r"^base_model:\s*(?:-\s*)?([\w.-]+/[\w.-]+)\s*$", card, re.MULTILINE)
    return None if found is None else found[1]
