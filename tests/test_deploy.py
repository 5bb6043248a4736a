"""The files of ``deploy``: they parse, their containers and volumes are valid by Kubernetes' own schemas, and what they pass
to vLLM is what the plug-in reads. The charts' value schemas are in no package: those were checked by hand."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement

from wisparse.runtime.vllm.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
VERSION = "0.26.0"  # of vLLM, in all files


def pods(name: str) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """The containers, as Kubernetes gets them, and the volumes of a file's pods."""
    values = yaml.safe_load((DEPLOY / f"{name}.yaml").read_text("utf-8"))
    if name == "kserve":
        assert (values["apiVersion"], values["kind"]) == ("serving.kserve.io/v1beta1", "InferenceService")
        predictor = values["spec"]["predictor"]
        return [(one, predictor["volumes"]) for one in predictor["containers"]]
    if name == "llm-d":
        chart = ("modelCommand", "mountModelVolume", "extraConfig")  # that the chart takes out of a container
        found = []
        for role in ("decode", "prefill"):
            for one in values[role]["containers"]:
                container = {key: value for key, value in one.items() if key not in chart} | one["extraConfig"]
                found.append((container, values[role]["volumes"]))
        return found
    engine = values["servingEngineSpec"]
    return [
        (
            {
                "name": one["name"],
                "image": f"{one['repository']}:{one['tag']}",
                "args": one["vllmConfig"]["extraArgs"],
                "env": one["env"],
                "volumeMounts": one["extraVolumeMounts"],
                "startupProbe": engine["startupProbe"],
            },
            one["extraVolumes"],
        )
        for one in engine["modelSpec"]
    ]


NAMES = ("production-stack", "llm-d", "kserve")
SET_BY_CHART = {
    "production-stack": {"PYTHONHASHSEED", "HF_HOME", "POD_IP", "PROMETHEUS_MULTIPROC_DIR"},
    "llm-d": {"DP_SIZE", "TP_SIZE", "DP_SIZE_LOCAL", "HF_HOME"},
    "kserve": set(),
}


@pytest.mark.parametrize("name", NAMES)
def test_pods_are_valid(name: str) -> None:
    for container, volumes in pods(name):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}}
        pod["spec"] = {"containers": [container], "volumes": volumes}
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
        wrong = {**pod, "spec": {"containers": [{**container, "volumeMount": []}]}}
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(wrong, kubernetes_validate.latest_version(), strict=True)
        mounted = {one["name"] for one in container["volumeMounts"]}
        assert mounted == {one["name"] for one in volumes}
        probe = container["startupProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] >= 600, "a first start compiles kernels"


def test_names_in_the_cluster() -> None:
    """The claim that pods mount is made by a file here, and a secret that is not there keeps no pod from starting."""
    claim = yaml.safe_load((DEPLOY / "cache.yaml").read_text("utf-8"))
    kubernetes_validate.validate(claim, kubernetes_validate.latest_version(), strict=True)
    for name in NAMES:
        for container, volumes in pods(name):
            claims = {one["persistentVolumeClaim"]["claimName"] for one in volumes if "persistentVolumeClaim" in one}
            assert claims == (set() if name == "llm-d" else {claim["metadata"]["name"]})
            entries = {one["name"]: one for one in container["env"]}
            token = {"name": "hf-token", "key": "HF_TOKEN", "optional": True}
            assert entries["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == token
            # Helm 4 applies on the server, which refuses two entries of a name.
            assert len(entries) == len(container["env"])
            assert not entries.keys() & SET_BY_CHART[name]


def settings(args: list[str]) -> Iterator[dict[str, Any]]:
    words = iter([part for one in args for part in one.split("=", 1)])
    for word in words:
        if word == "--additional-config":
            yield json.loads(next(words))


@pytest.mark.parametrize("name", NAMES)
def test_the_plugin_reads_the_settings(name: str) -> None:
    read = 0
    for container, _ in pods(name):
        ours = "vllm-wisparse" in container["image"]
        found = list(settings(container["args"]))
        assert len(found) == ours, "a pod without the plug-in has no settings of it"
        for given in found:
            assert Settings.read(given, {}, 0.5).sparsity == 0.4
            read += 1
        assert container["image"].split(":")[1].removeprefix("v") == VERSION
    assert read == 1


def test_the_image() -> None:
    """Its vLLM is one that the plug-in runs with, and its caches are where the volumes are mounted."""
    text = (DEPLOY / "Dockerfile").read_text("utf-8")
    requirement = re.search(r'^vllm = \["(.*)"\]$', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert requirement is not None
    assert f"ARG VLLM_VERSION={VERSION}\n" in text
    assert Requirement(requirement[1]).specifier.contains(VERSION)
    caches = re.findall(r"(VLLM_CACHE_ROOT|TRITON_CACHE_DIR)=(\S+)", text)
    assert len(caches) == 2
    for name in NAMES:
        for container, _ in pods(name):
            assert "/cache" in {one["mountPath"] for one in container["volumeMounts"]}
            kept = {one["name"]: one["value"] for one in container["env"] if "value" in one}
            caches += kept.items()
            # What a second start should find: llm-d has a volume of its own for the model, vLLM's image no cache there.
            assert ("VLLM_CACHE_ROOT" if name == "llm-d" else "HF_HUB_CACHE") in kept
    assert all(path.startswith("/cache/") for _, path in caches)
