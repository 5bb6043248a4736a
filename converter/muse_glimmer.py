"""A causal LM of Muse Glimmer's text model, for which transformers 5.24 has no class. Importing this module registers it for
``AutoModelForCausalLM``, which then loads such bundles."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationMixin, MuseGlimmerTextConfig, MuseGlimmerTextModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.muse_glimmer.modeling_muse_glimmer import MuseGlimmerPreTrainedModel

from wisparse.kernels.reference import soft_cap


class MuseGlimmerForCausalLM(MuseGlimmerPreTrainedModel, GenerationMixin):
    config_class = MuseGlimmerTextConfig

    def __init__(self, config: MuseGlimmerTextConfig) -> None:
        super().__init__(config)
        self.model = MuseGlimmerTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, logits_to_keep: int = 0, **kwargs: Any) -> CausalLMOutputWithPast:
        out = self.model(input_ids=input_ids, **kwargs)
        logits = self.lm_head(out.last_hidden_state[:, -logits_to_keep:]) * self.config.output_multiplier
        return CausalLMOutputWithPast(logits=soft_cap(logits, self.config.final_logit_softcapping), cache=out.cache)


# Without exist_ok transformers ignores classes for its own configurations.
AutoModelForCausalLM.register(MuseGlimmerTextConfig, MuseGlimmerForCausalLM, exist_ok=True)
