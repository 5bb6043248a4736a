"""Draft heads: a single block that predicts several tokens, one after another, from the model's hidden states.

e is a token's embedding, h the hidden state before it, first the model's, then the head's; each n is an RMSNorm. A row
tells where the inputs come from, what the block gets, and what the next step reuses:

             h of the model            residual          block input    h of the head   logits
    EAGLE-3  fc of three blocks' h     h, or n(h)        [n(e), n(h)]   block output    own output layer of n(h)
    MTP      n of the last block's h   fc [n(e), n(h)]   n(residual)    n(block output) the model's output layer of h

An EAGLE-3 head has its own files; Qwen3.5's MTP head is part of the checkpoint. SGLang's ``qwen3_5_mtp.py`` computes the same.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from wisparse.formats.block_ops import block_ops
from wisparse.formats.bundle import Bundle
from wisparse.formats.checkpoint import MAX_CONFIG_BYTES
from wisparse.formats.config_fields import dimension
from wisparse.formats.errors import UnsupportedModelError, UsageError
from wisparse.formats.guard import read_json
from wisparse.formats.hub import fetch_source
from wisparse.formats.model_config import ModelConfig
from wisparse.formats.tensor_file import DTYPES, Entry, TensorFile, open_files
from wisparse.formats.tensors import MTP, mtp_config

from ..memory import bytes_per_position
from ..torch.block import LINEARS, SHARED, Block, Executor, Positions, read_spec, run_block
from ..torch.mixers import Norm
from .cache import KVCache
from .rotary import Rotary

_CHUNK = 128  # positions of a prefill chunk of the head
_PAIRS = 8  # fewest pairs of a captured draft
_CONTEXT = 512  # fewest context positions of a captured draft
_MAPS = ("d2t", "t2d")
# Configuration fields of EAGLE-3 variants that are not supported.
_UNKNOWN = ("norm_before_fc", "fc_norm", "norm_output", "attention_bias", "mlp_bias", "bias")
_DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 2048}


@dataclass(frozen=True)
class HeadWeights:
    """Configuration and tensors of a head; see the table above."""

    config: ModelConfig  # of a model with one block
    taps: tuple[int, ...]  # hidden states the head reads: i = input of block i; num_blocks = output of the last
    block: Block[Any]  # qkv and gate_up are one matrix each; experts are functions
    tensors: Mapping[str, Tensor]  # fc, norms outside the block, and output
    normed_residual: bool = False
    embedding: Tensor | None = None  # (V, H); None: the model's
    ids: Tensor | None = None  # (draft vocabulary,): the model's token ids; None: an MTP head


class FusedNorm(Norm):
    """One launch; its factors have the dtype of what it reads."""

    def __call__(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.factors, self.eps)


def llama_block(config: ModelConfig, norms: Mapping[str, Tensor], linears: Mapping[str, Any]) -> Block[Any]:
    """A block of fused projections, by fields of `Block`."""
    eps = config.rms_norm_eps
    normed: dict[str, Any] = {name: FusedNorm(weight, eps, offset=False) for name, weight in norms.items()}
    return Block(spec=config.blocks[0], ops=block_ops(config, 0), **linears, **normed)


@dataclass(frozen=True)
class MtpFiles:
    """An MTP head in a bundle."""

    bundle: Bundle

    @classmethod
    def open(cls, bundle: Bundle) -> MtpFiles:
        if f"{MTP}fc.weight" not in bundle.checkpoint.tensors:
            raise UsageError(
                f"speculative: mtp: expected a head for multi-token prediction in the bundle ({MTP}*), found none: "
                "convert a checkpoint of Qwen3.5 that has one, of one block and not quantised, with this version"
            )
        return cls(bundle)

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.bundle.config.num_blocks,)

    def memory(self, dtype: torch.dtype) -> tuple[int, int]:
        """Bytes of the weights, and of each position of a slot."""
        shapes = (info.shape for name, info in self.bundle.checkpoint.tensors.items() if name.startswith(MTP))
        return _memory(mtp_config(self.bundle.config), shapes, dtype)

    def weights(self, device: torch.device, dtype: torch.dtype) -> HeadWeights:
        tensor, config = self.bundle.checkpoint.tensor, mtp_config(self.bundle.config)
        offset, eps = config.architecture.norm_offset, config.rms_norm_eps

        def stored(name: str) -> Tensor:
            return tensor(MTP + name.removeprefix("model."), device)

        def read(name: str) -> Tensor:
            return stored(name).to(dtype)

        def norm(name: str) -> Tensor:
            return Norm(tensor(name, device), eps, offset).factors

        spec = read_spec(config, 0, stored, dtype)
        shared = ([read(f"{part}.weight") for one in group for part in one.parts] for group in config.shared_inputs(0))
        linears: dict[str, Any] = dict(zip((*LINEARS, *SHARED), shared, strict=False))
        for role, group in linears.items():
            routed = config.blocks[0].experts is not None and role not in ("qkv", "o")
            linears[role] = [partial(_dense, one) for one in group] if routed else torch.cat(group)
        norms = {name: one.factors.to(dtype) for name, one in spec.items() if isinstance(one, Norm)}
        block = Block[Any](**spec | {name: FusedNorm(one, eps, offset=False) for name, one in norms.items()}, **linears)
        tensors = {f"{part}_norm": norm(f"{MTP}pre_fc_norm_{part}.weight") for part in ("embedding", "hidden")}
        tensors |= {"model_norm": norm("model.norm.weight"), "norm": norm(f"{MTP}norm.weight"), "fc": read("fc.weight")}
        return HeadWeights(config, self.taps, block, tensors)


def _dense(weight: Tensor, x: Tensor, first_sparse: int) -> Tensor:
    return functional.linear(x, weight)


@dataclass(frozen=True)
class HeadFiles:
    """A validated EAGLE-3 head on disk, whose weights are not read yet."""

    name: str
    config: ModelConfig  # of a Llama with one block
    taps: tuple[int, ...]
    normed_residual: bool
    draft_vocab: int
    rotation: Tensor | None  # of the bundle
    _files: Mapping[str, TensorFile]
    _stored: Mapping[str, tuple[str, str]]  # tensor name -> file, name in the file

    @classmethod
    def open(cls, model: str | os.PathLike[str], bundle: Bundle) -> HeadFiles:
        """Read configuration and headers of a folder or Hub id; UnsupportedModelError unless they fit the bundle."""
        source, target, error = fetch_source(model), bundle.config, UnsupportedModelError
        name = source.name
        raw = read_json(source.folder, "config.json", MAX_CONFIG_BYTES, error)
        layer: Any = raw.get("transformer_layer_config", raw)
        fields = {**raw, **layer} if isinstance(layer, dict) else raw

        def require(valid: bool, what: str, expected: Any, found: Any, advice: str = "") -> None:
            if not valid:
                raise error(f"{name}: {what}: expected {expected}, found {found!r:.80}{advice}")

        for key in ("transformer_layer_config", "rope_parameters", "rope_scaling", "eagle_config"):
            require(isinstance(fields.get(key, {}), (dict, type(None))), key, "an object", fields.get(key))
        for key in _UNKNOWN:
            require(not fields.get(key), key, "false, the only value known here", fields.get(key))
        require(fields.get("num_hidden_layers", 1) == 1, "num_hidden_layers", 1, fields.get("num_hidden_layers"))
        require("draft_vocab_size" in fields, "config.json", "an EAGLE-3 head, with draft_vocab_size", sorted(raw))
        vocab, width = target.vocab_size, fields.get("target_hidden_size") or fields.get("hidden_size")
        require(fields.get("vocab_size") == vocab, "vocab_size", f"the model's, {vocab}", fields.get("vocab_size"))
        require(width == target.hidden_size, "hidden_size", f"the model's, {target.hidden_size}", width)
        scaled = fields.get("rope_scaling") or {}
        old = {"rope_theta": fields.get("rope_theta", 1e4), "rope_type": scaled.get("type", "default"), **scaled}
        full = _DEFAULTS | fields | {"model_type": "llama", "num_hidden_layers": 1, "tie_word_embeddings": False}
        try:
            config = ModelConfig.from_dict(full | {"rope_parameters": fields.get("rope_parameters") or old})
        except UnsupportedModelError as reason:
            raise error(f"{name}: {reason}") from None
        draft_vocab = dimension(fields, "draft_vocab_size") if fields["draft_vocab_size"] is not None else vocab
        # ``eagle_config`` names the blocks whose outputs the head reads, the top level those whose inputs it reads.
        blocks, outputs = target.num_blocks, (fields.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        taps: Any = fields.get("eagle_aux_hidden_state_layer_ids") or [2, blocks // 2, blocks - 3]
        if isinstance(outputs, list) and all(type(index) is int for index in outputs):
            taps = [index + 1 for index in outputs]
        valid = isinstance(taps, list) and all(type(index) is int and 0 <= index <= blocks for index in taps)
        require(valid and len(taps) == 3, "eagle_aux_hidden_state_layer_ids", f"three of {blocks} blocks", taps)

        rotated = bundle.recipe.rotation is not None and bundle.recipe.rotation.kind != "heads"
        turns, advice = "the rotation, which turns what the head reads back", "convert the model again, or with"
        require(not rotated or bundle.rotation is not None, "bundle", turns, "none", f": {advice} --rotation none")
        weight_map, files, _ = open_files(source.folder, False, error)
        stored = {
            key.removeprefix("model.").replace("layers.0.", "midlayer.", 1): (file, key)
            for key, file in weight_map.items()
        }
        hidden, inner = config.hidden_size, config.intermediate_size
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        shapes: dict[str, tuple[int, ...]] = {"fc": (hidden, 3 * target.hidden_size), "lm_head": (draft_vocab, hidden)}
        norms = ("norm", *(f"midlayer.{one}" for one in ("input_layernorm", "hidden_norm", "post_attention_layernorm")))
        shapes |= dict.fromkeys(norms, (hidden,))
        sizes = {"q": (q, 2 * hidden), "k": (kv, 2 * hidden), "v": (kv, 2 * hidden), "o": (hidden, q)}
        shapes |= {f"midlayer.self_attn.{role}_proj": size for role, size in sizes.items()}
        sizes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        shapes |= {f"midlayer.mlp.{role}_proj": size for role, size in sizes.items()}
        expected = {f"{one}.weight": shape for one, shape in shapes.items()}
        if "embed_tokens.weight" in stored:
            expected["embed_tokens.weight"] = (vocab, hidden)
        else:
            require(hidden == target.hidden_size, "tensors", "embed_tokens.weight, as the widths differ", "none")
        require("d2t" in stored or draft_vocab == vocab, "tensors", "d2t, the target's ids of the draft's", "none")
        for key in (*expected, *(set(stored) - set(expected) - set(_MAPS))):
            if key not in stored or key not in expected:
                what = "unexpected" if key in stored else "missing"
                raise error(f"{name}: the weights are no EAGLE-3 head of one Llama block: {what} tensor {key!r:.100}")
            entry = files[stored[key][0]].entries[stored[key][1]]
            fits = entry.shape == expected[key] and entry.code in DTYPES
            require(fits, key, f"{expected[key]} in BF16, F16 or F32", entry)
        if "d2t" in stored:
            entry = files[stored["d2t"][0]].entries[stored["d2t"][1]]
            require(entry == Entry("I64", (draft_vocab,)), "d2t", f"({draft_vocab},) in I64", entry)
        normed = bool(fields.get("norm_before_residual"))
        rotation = None if bundle.rotation is None else torch.from_numpy(bundle.rotation.astype("f4"))
        return cls(name, config, tuple(taps), normed, draft_vocab, rotation, files, stored)

    def has(self, name: str) -> bool:
        return name in self._stored

    def memory(self, dtype: torch.dtype) -> tuple[int, int]:
        """Bytes of the weights, and of each position of a slot."""
        shapes = (self._files[file].entries[name].shape for file, name in self._stored.values())
        return _memory(self.config, shapes, dtype)

    def read(self, name: str) -> Tensor:
        file, stored = self._stored[name]
        entry, data = self._files[file].entries[stored], self._files[file].read(stored)
        dtype = getattr(torch, DTYPES[entry.code][0]) if entry.code in DTYPES else torch.int64
        return data.clone().view(dtype).reshape(entry.shape)

    def weights(self, device: torch.device, dtype: torch.dtype) -> HeadWeights:
        rotation = None if self.rotation is None else self.rotation.to(device)

        def read(name: str) -> Tensor:
            return self.read(f"{name}.weight").to(device).float()

        fc, width, embedding = read("fc"), self.config.hidden_size, None
        qkv = torch.cat([read(f"midlayer.self_attn.{role}_proj") for role in "qkv"])
        embedding_norm = read("midlayer.input_layernorm")
        if rotation is not None:  # the model's hidden states are rotated: rotate the weights that read them
            fc = (fc.view(width, 3, -1) @ rotation).reshape(fc.shape)
        if self.has("embed_tokens.weight"):
            embedding = read("embed_tokens").to(dtype)
        elif rotation is not None:  # the model's embedding: fold its norm into qkv before the rotation
            qkv = torch.cat(((qkv[:, :width] * embedding_norm) @ rotation, qkv[:, width:]), dim=1)
            embedding_norm = torch.ones_like(embedding_norm)
        gate_up = torch.cat([read(f"midlayer.mlp.{role}_proj") for role in ("gate", "up")])
        linears = {"qkv": qkv, "o": read("midlayer.self_attn.o_proj"), "gate_up": gate_up}
        linears["down"] = read("midlayer.mlp.down_proj")
        norms = {"mlp_input": read("midlayer.post_attention_layernorm").to(dtype)}
        block = llama_block(self.config, norms, {name: one.to(dtype) for name, one in linears.items()})
        tensors = {"fc": fc, "embedding_norm": embedding_norm, "hidden_norm": read("midlayer.hidden_norm")}
        tensors |= {"norm": read("norm"), "output": read("lm_head")}
        ids = torch.arange(self.draft_vocab) + (self.read("d2t") if self.has("d2t") else 0)
        if int(ids.min()) < 0 or int(ids.max()) >= self.config.vocab_size:
            raise UnsupportedModelError(f"{self.name}: d2t: expected ids below {self.config.vocab_size}, found others")
        return HeadWeights(self.config, self.taps, block, tensors, self.normed_residual, embedding, ids.to(device))


def _memory(config: ModelConfig, shapes: Iterable[Sequence[int]], dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of weights, and of a position's keys, values and hidden state."""
    position = bytes_per_position(config, dtype) + config.hidden_size * dtype.itemsize
    return sum(map(math.prod, shapes)) * dtype.itemsize, position


@dataclass(frozen=True)
class _Pairs(Positions):
    """Rows (R, P) of several slots, flattened."""

    slots: Tensor = field(kw_only=True)  # (R,)
    target: Tensor = field(kw_only=True)  # (R, P): slots in which keys and values are stored,
    positions: Tensor = field(kw_only=True)  # (R, P): at these positions
    context: int = field(kw_only=True)

    def attend(
        self, config: ModelConfig, index: int, block: Block[Any], q: Tensor, kv: tuple[Tensor, Tensor] | None, _: Any
    ) -> Tensor:
        (rows, count), (heads, _, width), kv_heads = self.positions.shape, q.shape, config.num_kv_heads
        keys, values = self.cache.attention[index][:2]
        assert kv is not None
        for stored, new in zip((keys, values), kv, strict=True):
            stored[self.target, :, self.positions] = new.transpose(0, 1).view(rows, count, kv_heads, width)
        # Grouped-query attention: the query heads of a key head become further query positions.
        q = q.view(heads, rows, count, width).transpose(0, 1).reshape(rows, kv_heads, -1, width)
        mask = torch.arange(self.context, device=q.device) <= self.positions[:, None, :, None]
        keys, values = (stored[self.slots, :, : self.context] for stored in (keys, values))
        mask, scale = mask.repeat(1, 1, heads // kv_heads, 1), config.attention_scale
        attended = functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
        return attended.view(rows, heads, count, width).transpose(0, 1).reshape(heads, -1, width)


class DraftHead(Executor):
    """The head's input at a position is a pair: the hidden state of that position and the next token; its output predicts
    the token after that. Keys and values of pairs with the model's hidden states are cached."""

    def __init__(
        self, weights: HeadWeights, embedding: Tensor, output: Callable[[Tensor], Tensor], slots: int,
        lengths: tuple[int, int], dtype: torch.dtype,
    ) -> None:  # fmt: skip
        """``embedding``: the model's (V, H); ``output``: its output layer, normed states (R, H) to logits (R, V).
        ``lengths``: initial and largest number of positions of a slot."""
        self.taps, self._block, self._ids, self._output = weights.taps, weights.block, weights.ids, output
        self.experts = weights.block.spec.experts
        config = self.config = weights.config
        self._mtp, self._normed_residual = weights.ids is None, weights.normed_residual
        self._embedding = embedding if weights.embedding is None else weights.embedding
        self._weights = {name: weight.to(dtype) for name, weight in weights.tensors.items()}
        device, width, (length, max_length) = self._embedding.device, config.hidden_size, lengths
        self._tables = Rotary(config.rotaries[0], device, dtype).tables(0, max_length, max_length)
        self._cache = KVCache(config, slots + 1, length, device, dtype)  # its ``lengths``: cached pairs
        # The model's fused hidden states, and its tokens (on the host), by slot and position. The additional last slot is
        # for rows and pairs that pad a batch.
        self._hidden = torch.empty(slots + 1, length, width, device=device, dtype=dtype)
        self._tokens = torch.zeros(slots, max_length, dtype=torch.int64)
        self._clear(0)
        # Captures a function as a CUDA graph and returns its replay. By rows, columns, context and count of a draft: its
        # input buffer, output buffer and replay.
        self.capture: Callable[[Callable[[], object], torch.device], Callable[[], object]] | None = None
        self._graphs: dict[tuple[int, ...], tuple[Tensor, Tensor, Callable[[], object]]] = {}

    def _clear(self, filled: int) -> None:
        """Zero positions from ``filled`` on: attention multiplies masked values by 0, which must not be NaN."""
        for tensor in (*self._cache.attention[0][:2], self._hidden[:, None]):
            tensor[:, :, filled:].zero_()

    @property
    def length(self) -> int:
        """Allocated positions of a slot."""
        return self._hidden.shape[1]

    def grow(self, length: int) -> None:
        """Reallocate with ``length`` positions in each slot."""
        filled, old, hidden = self.length, self._cache, self._hidden
        self._cache = KVCache(self.config, len(hidden), length, hidden.device, hidden.dtype)
        self._hidden = hidden.new_empty(len(hidden), length, hidden.shape[2])
        self._cache.lengths = old.lengths
        for new, tensor in zip(self._cache.attention[0][:2], old.attention[0][:2], strict=True):
            new[:, :, :filled] = tensor
        self._hidden[:, :filled] = hidden
        self._clear(filled)
        self._graphs.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the weights without experts."""
        every = (*self._weights.values(), *self._block.linears)
        return sum(one.nbytes for one in every if isinstance(one, Tensor))

    def bytes_read(self, output: int) -> int:
        """Bytes of weights read for each drafted token after the first; ``output``: those of the model's output layer."""
        nbytes = self.nbytes + (output if self._mtp else -self._weights["fc"].nbytes)
        if self.experts is not None:
            experts = [one for one in self.config.projections(0) if one.experts or one.role.startswith("shared")]
            nbytes += sum(one.num_parameters for one in experts) * self._weights["fc"].itemsize
        return nbytes

    def take(self, slots: Sequence[int], positions: Sequence[int], tokens: Sequence[int], taps: Tensor) -> None:
        """Store tokens of the model and their hidden states: taps (R, 3 H), MTP (R, H)."""
        self.note(slots, positions, tokens)
        self.keep(torch.tensor(slots).to(taps.device), torch.tensor(positions).to(taps.device), taps)

    def note(self, slots: Sequence[int], positions: Sequence[int], tokens: Sequence[int]) -> None:
        self._tokens[torch.tensor(slots), torch.tensor(positions)] = torch.tensor(tokens)

    def keep(self, slots: Tensor, positions: Tensor, taps: Tensor, valid: Tensor | None = None) -> None:
        """Fuse and store the hidden states of rows that are ``valid``; all arguments are on the device."""
        if valid is not None:
            slots = torch.where(valid, slots, len(self._hidden) - 1)
            positions = torch.where(valid, positions, 0)
        taps = taps.to(self._hidden.dtype)
        hidden = self._normed("model_norm", taps) if self._mtp else functional.linear(taps, self._weights["fc"])
        self._hidden[slots.long(), positions.long()] = hidden

    def begin(self, slot: int, start: int) -> None:
        """Discard a slot's pairs from ``start`` - 1 on, before the model computes positions from ``start`` on."""
        self._cache.lengths[slot] = min(self._cache.lengths[slot], max(start - 1, 0))  # pair start - 1 has token start

    def copy(self, source: int, target: int, length: int) -> None:
        pairs = self._cache.lengths[source]
        self._cache.copy(source, target, length)
        for tensor in (self._hidden, self._tokens):
            tensor[target, :length] = tensor[source, :length]
        self._cache.lengths[target] = pairs
        self.begin(target, length)

    @torch.inference_mode()
    def draft(self, lengths: Sequence[int], tokens: Sequence[int], counts: Mapping[int, int]) -> dict[int, list[int]]:
        """Drafts of ``counts`` tokens by slot, after its newest of ``tokens`` and its ``lengths`` cached positions."""
        count, padding_slot = max(counts.values()), len(self._hidden) - 1
        pairs, rows = max(count + 1, _PAIRS), []
        for slot in counts:
            stop = lengths[slot]
            start = min(self._cache.lengths[slot], stop - 1)
            while stop - start > pairs:  # after a prefill, or many plain steps
                end = min(start + _CHUNK, stop - pairs)
                row = [slot, start, end - start, *self._tokens[slot, start + 1 : end + 1].tolist()]
                self._pairs(torch.tensor([row], device=self._hidden.device), end)
                start = end
            rows.append([slot, start, stop - start, *self._tokens[slot, start + 1 : stop].tolist(), tokens[slot]])
            self._cache.lengths[slot] = stop
        context, size = max(lengths[slot] for slot in counts) + count, len(rows)
        if self.capture is not None:  # powers of two, for few graphs
            size, context = 1 << (size - 1).bit_length(), max(_CONTEXT, 1 << (context - 1).bit_length())
        rows += [[padding_slot, 0, 1, 0]] * (size - len(rows))
        width = 3 + pairs if self.capture is not None else max(map(len, rows))
        inputs = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        context = min(context, self._hidden.shape[1])
        if self.capture is None:
            drafts = self._chain(inputs.to(self._hidden.device), context, count)
        else:
            key = size, width, context, count
            if key not in self._graphs:
                buffer = inputs.to(self._hidden.device)
                out = buffer.new_empty(size, count)
                replay = self.capture(lambda: out.copy_(self._chain(buffer, context, count)), buffer.device)
                self._graphs[key] = buffer, out, replay
            buffer, drafts, replay = self._graphs[key]
            buffer.copy_(inputs, non_blocking=True)
            replay()
        return {slot: row[: counts[slot]] for slot, row in zip(counts, drafts.tolist(), strict=False)}

    def _chain(self, inputs: Tensor, context: int, count: int) -> Tensor:
        """Rows (R, 3 + P) as in `_pairs`, each with at least one pair, to drafts (R, count)."""
        slots, stop = inputs[:, 0], inputs[:, 1] + inputs[:, 2]
        out = self._pairs(inputs, context)
        hidden = out[torch.arange(len(out), device=out.device), inputs[:, 2] - 1]
        chain: list[Tensor] = []
        while True:
            if self._ids is None:
                chain.append(self._output(hidden).argmax(-1))
            else:
                logits = functional.linear(self._normed("norm", hidden), self._weights["output"])
                chain.append(self._ids[logits.argmax(-1)])
            if len(chain) == count:
                return torch.stack(chain, dim=1)
            last = slots[:, None], (stop + len(chain) - 1)[:, None]
            hidden = self._forward(slots, *last, chain[-1][:, None], hidden[:, None], context)[:, 0]

    def _pairs(self, inputs: Tensor, context: int) -> Tensor:
        """Rows (R, 3 + P) of slot, first pair, number of pairs and their tokens to the head's hidden states (R, P, H)."""
        slots, ids = inputs[:, 0], inputs[:, 3:]
        offsets = torch.arange(ids.shape[1], device=inputs.device)
        valid, positions = offsets < inputs[:, 2:3], inputs[:, 1:2] + offsets
        target, positions = torch.where(valid, slots[:, None], len(self._hidden) - 1), torch.where(valid, positions, 0)
        return self._forward(slots, target, positions, ids, self._hidden[target, positions], context)

    def _forward(
        self, slots: Tensor, target: Tensor, positions: Tensor, ids: Tensor, hidden: Tensor, context: int
    ) -> Tensor:
        """The head on tokens (R, P) and hidden states (R, P, H): its hidden states (R, P, H). Attends to the first
        ``context`` positions of slots (R,); stores keys and values at ``positions`` (R, P) of ``target`` (R, P)."""
        embedded = self._normed("embedding_norm", functional.embedding(ids, self._embedding).to(hidden.dtype))
        n = self._normed("hidden_norm", hidden)
        x, block_input = n if self._normed_residual else hidden, torch.cat((embedded, n), dim=-1).flatten(0, 1)
        given = {"attention_input": block_input}
        if self._mtp:
            x, given = functional.linear(block_input, self._weights["fc"]), {}
        cos, sin = (table[positions].flatten(0, 1) for table in self._tables)
        at = _Pairs(
            self._cache, 0, 0, 0, [(cos, sin)], slots=slots, target=target, positions=positions, context=context
        )
        x = run_block(self.config, 0, self._block, x.flatten(0, -2), at, self, **given).view(*ids.shape, -1)
        return self._normed("norm", x) if self._mtp else x

    def project(self, block: Block[Any], role: str, x: Tensor, first_sparse: int) -> list[Tensor]:
        """See `Executor`."""
        return [functional.linear(x, getattr(block, role))]

    def _normed(self, norm: str, x: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self._weights[norm], self.config.rms_norm_eps)
