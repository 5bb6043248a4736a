"""Greedy tokens by the Triton back end, in a process of its own: whether kernels are interpreted is settled when they
are first imported, so nothing here is imported before."""

import os


def start(interpret: bool) -> None:
    if interpret:
        os.environ["TRITON_INTERPRET"] = "1"
        patch_once()
    else:
        os.environ.pop("TRITON_INTERPRET", None)


def patch_once() -> None:
    """Triton's interpreter searches all of its language for functions to patch at every call of a device function, a third
    of its time; a call within a launch finds them patched."""
    from triton import language
    from triton.runtime.interpreter import InterpretedFunction

    patch_and_call = InterpretedFunction.__call__

    def call(self: InterpretedFunction, *args: object, **kwargs: object) -> object:
        if language.core.is_builtin(language.load) or language.core.is_builtin(language.core.load):
            return patch_and_call(self, *args, **kwargs)
        return self.rewrite()(*args, **kwargs)

    InterpretedFunction.__call__ = call


def answer(bundle: str, prompt: list[int], count: int) -> tuple[list[int], list[list[float]]]:
    """``count`` tokens in float32 and their logits: the prompt read dense, then sparse tokens."""
    import torch
    from family_cases import greedy

    from wisparse.formats.bundle import Bundle
    from wisparse.runtime.cuda.decoder import CudaDecoder

    device = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
    length = len(prompt) + count
    decoder = CudaDecoder(Bundle.open(bundle), device=device, dtype=torch.float32, max_seq_len=length)
    try:
        tokens, logits = greedy(decoder, torch.tensor(prompt), count)
        return tokens, logits.tolist()
    finally:
        decoder.close()
