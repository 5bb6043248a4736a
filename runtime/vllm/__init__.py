"""A plug-in for vLLM: a bundle's masks in the linear layers of vLLM's own models; everything else stays vLLM's."""
