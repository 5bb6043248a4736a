"""Heads that draft: one block that guesses from the model's hidden states which tokens follow, a chain of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from wisparse.formats.bundle import Bundle
from wisparse.formats.checkpoint import DTYPES, MAX_CONFIG_BYTES, Entry, TensorFile, open_files
from wisparse.formats.errors import UnsupportedModelError
from wisparse.formats.guard import read_json
from wisparse.formats.hub import fetch_source
from wisparse.formats.model_config import ModelConfig, dimension

from ..torch.block import Block, Norm, Positions, attention, run_block
from .cache import KVCache
from .rotary import Rotary

_CHUNK = 512  # positions of a prompt that the head reads together
_MAPS = ("d2t", "t2d")
# What some heads are stated to do, and is not known here.
_UNKNOWN = ("norm_before_fc", "fc_norm", "norm_output", "attention_bias", "mlp_bias", "bias")
_DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 2048}


@dataclass(frozen=True)
class HeadFiles:
    """A checked EAGLE-3 head on disk; no weight of it is read yet."""

    name: str
    config: ModelConfig  # as of a Llama of one block
    taps: tuple[int, ...]  # it reads the inputs of these blocks; the number of blocks stands for the last one's output
    normed_residual: bool
    draft_vocab: int
    rotation: Tensor | None  # of the bundle
    _files: Mapping[str, TensorFile]
    _stored: Mapping[str, tuple[str, str]]  # plain name -> file, name there

    @classmethod
    def open(cls, model: str | os.PathLike[str], bundle: Bundle) -> HeadFiles:
        """Configuration and headers of a folder or a Hub id; UnsupportedModelError unless they fit the bundle's model."""
        source, target, error = fetch_source(model), bundle.config, UnsupportedModelError
        name = source.name
        given = read_json(source.folder, "config.json", MAX_CONFIG_BYTES, error)
        layer: Any = given.get("transformer_layer_config", given)
        stated = {**given, **layer} if isinstance(layer, dict) else given

        def require(valid: bool, what: str, wanted: Any, found: Any, advice: str = "") -> None:
            if not valid:
                raise error(f"{name}: {what}: expected {wanted}, found {found!r:.80}{advice}")

        for key in _UNKNOWN:
            require(not stated.get(key), key, "false, the only value known here", stated.get(key))
        require(stated.get("num_hidden_layers", 1) == 1, "num_hidden_layers", 1, stated.get("num_hidden_layers"))
        require("draft_vocab_size" in stated, "config.json", "an EAGLE-3 head, with draft_vocab_size", sorted(given))
        vocab, width = target.vocab_size, stated.get("target_hidden_size") or stated.get("hidden_size")
        require(stated.get("vocab_size") == vocab, "vocab_size", f"the model's, {vocab}", stated.get("vocab_size"))
        require(width == target.hidden_size, "hidden_size", f"the model's, {target.hidden_size}", width)
        scaled = stated.get("rope_scaling") or {}
        old = {"rope_theta": stated.get("rope_theta", 1e4), "rope_type": scaled.get("type", "default"), **scaled}
        full = _DEFAULTS | stated | {"model_type": "llama", "num_hidden_layers": 1, "tie_word_embeddings": False}
        try:
            config = ModelConfig.from_dict(full | {"rope_parameters": stated.get("rope_parameters") or old})
        except UnsupportedModelError as reason:
            raise error(f"{name}: {reason}") from None
        draft_vocab = dimension(stated, "draft_vocab_size") if stated["draft_vocab_size"] is not None else vocab
        # Two spellings: of the blocks whose outputs, or at the top level whose inputs, the head reads.
        blocks, inside = target.num_blocks, (stated.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        taps: Any = stated.get("eagle_aux_hidden_state_layer_ids") or [2, blocks // 2, blocks - 3]
        if isinstance(inside, list) and all(type(one) is int for one in inside):
            taps = [one + 1 for one in inside]
        known = isinstance(taps, list) and all(type(one) is int and 0 <= one <= blocks for one in taps)
        require(known and len(taps) == 3, "eagle_aux_hidden_state_layer_ids", f"three of {blocks} blocks", taps)

        rotated = bundle.recipe.rotation is not None
        require(
            not rotated or bundle.rotation is not None, "bundle", "the rotation, which turns what the head reads back",
            "none", ": convert the model again, or with --rotation none",
        )  # fmt: skip
        weight_map, files = open_files(source.folder, False, error)
        stored = {
            one.removeprefix("model.").replace("layers.0.", "midlayer.", 1): (file, one)
            for one, file in weight_map.items()
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
        for one in (*expected, *(set(stored) - set(expected) - set(_MAPS))):
            if one not in stored or one not in expected:
                what = "unexpected" if one in stored else "missing"
                raise error(f"{name}: the weights are no EAGLE-3 head of one Llama block: {what} tensor {one!r:.100}")
            entry = files[stored[one][0]].entries[stored[one][1]]
            require(entry.shape == expected[one] and entry.code in DTYPES, one, f"{expected[one]} in BF16, F16 or F32", entry)
        if "d2t" in stored:
            entry = files[stored["d2t"][0]].entries[stored["d2t"][1]]
            require(entry == Entry("I64", (draft_vocab,)), "d2t", f"({draft_vocab},) in I64", entry)
        normed = bool(stated.get("norm_before_residual"))
        rotation = None if bundle.rotation is None else torch.from_numpy(bundle.rotation.astype("f4"))
        return cls(name, config, tuple(taps), normed, draft_vocab, rotation, files, stored)

    def has(self, name: str) -> bool:
        return name in self._stored

    def read(self, name: str) -> Tensor:
        file, stored = self._stored[name]
        entry, data = self._files[file].entries[stored], self._files[file].read_bytes(stored)
        dtype = getattr(torch, DTYPES[entry.code][0]) if entry.code in DTYPES else torch.int64
        return data.clone().view(dtype).reshape(entry.shape)


class DraftHead:
    """EAGLE-3's. A pair of a token and the model's hidden state before it lies at that state's position: the head's keys
    and values there, and its guess of the token after. Pairs whose states are the model's own are read once."""

    def __init__(
        self, files: HeadFiles, embedding: Tensor, slots: int, length: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """``embedding``: the bundle's (V, H)."""
        self.taps, config = files.taps, files.config
        self._config, self._normed_residual = config, files.normed_residual
        turn = None if files.rotation is None else files.rotation.to(device)

        def read(name: str) -> Tensor:
            return files.read(f"{name}.weight").to(device).float()

        def norm(name: str) -> Norm:
            return Norm(read(name).to(dtype), config.rms_norm_eps, offset=False)

        fc, width = read("fc"), config.hidden_size
        qkv = torch.cat([read(f"midlayer.self_attn.{role}_proj") for role in "qkv"])
        self._embedding, self._embedding_norm = embedding, norm("midlayer.input_layernorm")
        if turn is not None:  # what is read is turned: so are the weights that read it
            fc = (fc.view(width, 3, -1) @ turn).reshape(fc.shape)
        if files.has("embed_tokens.weight"):
            self._embedding = read("embed_tokens").to(dtype)
        elif turn is not None:  # also the norm's weight, which is tied to the coordinates
            weight = self._embedding_norm.weight.float()
            qkv = torch.cat(((qkv[:, :width] * weight) @ turn, qkv[:, width:]), dim=1)
            self._embedding_norm = Norm(torch.ones_like(weight, dtype=dtype), config.rms_norm_eps, offset=False)
        self._fc, self._norm, self._output = fc.to(dtype), norm("norm"), read("lm_head").to(dtype)
        self._hidden_norm = norm("midlayer.hidden_norm")
        self._block: Block[Tensor] = Block(
            qkv=qkv.to(dtype),
            o=read("midlayer.self_attn.o_proj").to(dtype),
            gate_up=torch.cat([read(f"midlayer.mlp.{role}_proj") for role in ("gate", "up")]).to(dtype),
            down=read("midlayer.mlp.down_proj").to(dtype),
            spec=config.blocks[0],
            attention_input=None if self._normed_residual else self._hidden_norm,
            mlp_input=norm("midlayer.post_attention_layernorm"),
        )
        ids = torch.arange(files.draft_vocab) + (files.read("d2t") if files.has("d2t") else 0)
        if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
            raise UnsupportedModelError(f"{files.name}: d2t: expected ids below {config.vocab_size}, found others")
        self._ids = ids.to(device)  # the model's, of the draft's
        self._tables = Rotary(config.rotaries[0], device, dtype).tables(0, length, length)
        self._cache = KVCache(config, slots, length, device, dtype)
        # Of every slot's positions what the head reads of the model: fused hidden states, and tokens, on the host.
        self._hidden = torch.zeros(slots, length, width, device=device, dtype=dtype)
        self._tokens = torch.zeros(slots, length, dtype=torch.int64)
        self._done = [0] * slots  # pairs that have been read

    def bytes_read(self) -> int:
        """For a token, after the first one."""
        return sum(one.nbytes for one in (*self._block.linears, self._output))

    def take(self, slots: Sequence[int], positions: Sequence[int], tokens: Sequence[int], taps: Tensor) -> None:
        """The model has read these tokens: taps (R, 3 H) are the hidden states."""
        at = torch.tensor(slots), torch.tensor(positions)
        self._tokens[at] = torch.tensor(tokens)
        self._hidden[at[0].to(taps.device), at[1].to(taps.device)] = functional.linear(taps.to(self._fc.dtype), self._fc)

    def begin(self, slot: int, start: int) -> None:
        """Before a slot's positions from ``start`` on are read anew."""
        self._done[slot] = min(self._done[slot], max(start - 1, 0))  # the last pair had another token

    def copy(self, source: int, target: int, length: int) -> None:
        self._cache.copy(source, target, length)
        for tensor in (self._hidden, self._tokens):
            tensor[target, :length] = tensor[source, :length]
        self._done[target] = min(self._done[source], max(length - 1, 0))

    @torch.inference_mode()
    def draft(self, lengths: Sequence[int], tokens: Sequence[int], counts: Mapping[int, int]) -> dict[int, list[int]]:
        """Of some slots so many tokens to follow the newest, ``tokens``, behind ``lengths`` positions."""
        found: dict[int, list[int]] = {}
        for slot, count in counts.items():
            stop = lengths[slot]
            start = min(self._done[slot], stop - 1)
            ids = torch.cat((self._tokens[slot, start + 1 : stop], torch.tensor([tokens[slot]]))).to(self._ids.device)
            hidden = self._hidden[slot, start:stop]
            for first in range(start, stop, _CHUNK):
                last = min(first + _CHUNK, stop)
                out = self._read(slot, first, ids[first - start : last - start], hidden[first - start : last - start])
            self._done[slot], chain = stop, []
            for position in range(stop, stop + count):
                hidden = out[-1:]
                chain.append(self._ids[functional.linear(self._norm(hidden), self._output).argmax(-1)])
                if position + 1 < stop + count:
                    out = self._read(slot, position, chain[-1], hidden)
            found[slot] = torch.cat(chain).tolist()
        return found

    def _read(self, slot: int, start: int, ids: Tensor, hidden: Tensor) -> Tensor:
        """Pairs of tokens (T,) and hidden states (T, H): the block's output."""
        embedded = self._embedding_norm(functional.embedding(ids, self._embedding).to(hidden.dtype))
        if self._normed_residual:
            hidden = self._hidden_norm(hidden)
        tables = [tuple(table[start : start + len(ids)] for table in self._tables)]

        def apply(role: str, x: Tensor) -> Sequence[Tensor]:
            x = torch.cat((embedded, x), dim=-1) if role == "qkv" else x
            return [functional.linear(x, getattr(self._block, role))]

        at = Positions(self._cache, slot, start, tables, None)
        return run_block(self._config, 0, self._block, hidden, at, apply, attention)
