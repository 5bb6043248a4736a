"""Push and pull through the real huggingface_hub client, over real HTTP, against a stand-in that fails on demand."""

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest
from gguf_files import write_gguf
from hub_standin import READ_TOKEN, TOKEN, Fault, HubStandIn, point_client_at
from huggingface_hub import HfApi, constants
from tiny_bundle import digests, files_of, write_tiny_bundle, write_tiny_model

from wisparse.converter.gguf_source import open_source
from wisparse.converter.preflight import preflight
from wisparse.converter.settings import ConvertSettings
from wisparse.formats import hub
from wisparse.formats.errors import AccessError, BundleError, UploadError, UsageError
from wisparse.formats.hub import check_read_access, check_write_access, fetch_source, plan_push, push_bundle

# The client's own way of sending bytes, on the plain path.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

MODEL = {
    "config.json": b'{"model_type": "llama"}',
    "model-00001-of-00002.safetensors": b"first" * 1000,
    "model-00002-of-00002.safetensors": b"second" * 1000,
    "model.safetensors.index.json": b"{}",
    "consolidated.safetensors": b"the same again" * 1000,
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "LICENSE": b"a licence",
    "USE_POLICY.md": b"a policy",
    "README.md": b"---\nlicense: other\n---\n",
    "additional_chat_templates/rag.jinja": b"{{ documents }}",
    **dict.fromkeys(("onnx/model.onnx", "original/tokenizer.model", "assets/notes.json"), b"not wanted"),
    "pytorch_model.bin": b"never",
}
WANTED = {name for name, content in MODEL.items() if content not in (b"not wanted", b"never")}
WANTED.remove("consolidated.safetensors")


def sign(bundle: Path) -> None:
    files = {name: {"sha256": digest} for name, digest in digests(bundle).items() if name != "wisparse.json"}
    (bundle / "wisparse.json").write_text(json.dumps({"format_version": 2, "files": files}))


@pytest.fixture
def standin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    with HubStandIn().running() as server:
        point_client_at(server, tmp_path / "cache", monkeypatch)
        yield server


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    extra = {"README.md": b"---\nlicense: mit\n---\n# card\n", "figures/sparsity.png": b"a picture"}
    return write_tiny_bundle(tmp_path / "out bundle", write_tiny_model(tmp_path / "model"), extra_files=extra)


def test_a_folder_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("user/name").mkdir(parents=True)
    source = fetch_source("user/name")
    assert (source.folder, source.commit, source.name) == (Path("user/name"), None, "name")
    check_read_access("user/name")
    assert hub.download_bytes("user/name") == 0
    with pytest.raises(UsageError, match="folder on disk"):
        fetch_source("user/name", "main")
    for text in ("./nowhere", "/nowhere/at/all", "a/b/c", "spaces in it", Path("nowhere")):  # neither folder nor Hub id
        with pytest.raises(AccessError, match="no such file or folder"):
            fetch_source(text)


def test_only_what_a_conversion_reads_is_fetched_at_one_commit(standin: HubStandIn) -> None:
    repo = standin.add("org/model", MODEL)
    small = fetch_source("org/model", weights=False)
    assert set(files_of(small.folder)) == {name for name in WANTED if not name.startswith("model-")}
    assert not standin.seen(r"GET .*resolve.*model-0000")
    standin.requests.clear()
    assert hub.download_bytes("org/model") == sum(len(MODEL[name]) for name in WANTED if name.startswith("model-"))
    source = fetch_source("org/model")
    assert files_of(source.folder) == {name: MODEL[name] for name in WANTED}
    assert (source.commit, source.name) == (repo.commits[0][0], "org/model")
    assert len(standin.seen(r"GET /api/models/org/model/revision/main$")) <= 2  # the plan, and the fetch: once each
    assert all(source.commit in request for request in standin.seen("/resolve/"))
    # A revision pins the commit.
    old = repo.commits[0][0]
    repo.commit({**MODEL, "config.json": b'{"newer": true}'}, "newer")
    assert (fetch_source("org/model", old).folder / "config.json").read_bytes() == MODEL["config.json"]
    assert (fetch_source("org/model").folder / "config.json").read_bytes() == b'{"newer": true}'
    with pytest.raises(AccessError, match="'org/model' has no revision 'v9'"):
        fetch_source("org/model", "v9")


@pytest.mark.parametrize(
    ("offline", "words"), [(True, "HF_HUB_OFFLINE"), (False, "cannot reach the Hub for 'org/other'")]
)
def test_the_cache_serves_without_a_network(
    offline: bool, words: str, standin: HubStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    standin.add("org/model", MODEL)
    online, before = fetch_source("org/model"), len(standin.requests)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        huggingface_hub.close_session()  # the client reads the switch when it makes its session
        try:
            assert (fetch_source("org/model"), len(standin.requests)) == (online, before)
            with pytest.raises(AccessError, match=words):
                fetch_source("org/other")
        finally:
            monkeypatch.undo()
            huggingface_hub.close_session()


_REFUSALS = {401: "token was refused", 403: "not permitted", 429: "too many requests"}


@pytest.mark.parametrize("status", [*_REFUSALS, 500, 503])
def test_every_refusal_is_one_sentence(standin: HubStandIn, status: int) -> None:
    message = _REFUSALS.get(status, f"error of its own .{status}.")
    standin.add("org/model", MODEL)
    standin.faults.append(Fault(r"GET /api/models/org/model", status, times=99))
    with pytest.raises(AccessError, match=message) as caught:
        fetch_source("org/model")
    assert "\n" not in str(caught.value)
    assert TOKEN not in str(caught.value)
    with pytest.raises(AccessError, match=message):
        check_read_access("org/model")


def test_what_is_missing_or_gated_says_how_to_get_in(standin: HubStandIn) -> None:
    standin.add("org/gated", MODEL, gated=True)
    for action in (fetch_source, check_read_access, hub.download_bytes):
        with pytest.raises(AccessError, match="no folder 'org/nothing' here and no repository of that name"):
            action("org/nothing")
    for action in (fetch_source, check_read_access):
        with pytest.raises(AccessError, match=r"is gated: ask for access at http.*/org/gated, then log in"):
            action("org/gated")


def test_a_new_conversion_replaces_the_old_one_and_keeps_what_people_added(standin: HubStandIn, bundle: Path) -> None:
    push_bundle(bundle, "alice/model-50")
    repo = standin.repos["alice/model-50"]
    repo.commit({**repo.commits[-1][1], "notes.md": b"by hand"}, "a note")
    (bundle / "model-00001-of-00001.safetensors").rename(bundle / "model-00001-of-00002.safetensors")
    (bundle / "model-00002-of-00002.safetensors").write_bytes(b"more")
    (bundle / "figures" / "sparsity.png").unlink()
    sign(bundle)
    push_bundle(bundle, "alice/model-50")
    names = set(repo.commits[-1][1])
    assert {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "notes.md"} <= names
    assert not {"model-00001-of-00001.safetensors", "figures/sparsity.png"} & names


@pytest.mark.parametrize("status", [403, 500])
def test_a_push_that_broke_off_resumes(status: int, standin: HubStandIn, bundle: Path) -> None:
    (bundle / "model-00002-of-00002.safetensors").write_bytes(b"more" * 10_000)
    sign(bundle)
    standin.faults.append(Fault(r"POST .*/commit/", status, times=99))
    with pytest.raises(UploadError, match=r"repeat with: wisparse push .* alice/model-50"):
        push_bundle(bundle, "alice/model-50")
    stored = dict(standin.objects)
    assert len(stored) == 4  # two shards, the sidecar, the figure: everything large had arrived
    assert len(standin.repos["alice/model-50"].commits) == 1
    standin.faults.clear()
    before = len(standin.requests)
    push_bundle(bundle, "alice/model-50")
    assert not standin.seen("^PUT", since=before)
    assert (standin.objects, len(standin.repos["alice/model-50"].commits)) == (stored, 2)


def test_private_never_goes_to_a_public_repository(standin: HubStandIn, bundle: Path) -> None:
    standin.add("alice/public", {"README.md": b"x"})
    with pytest.raises(UploadError, match="is public, but --private was given; nothing was uploaded"):
        push_bundle(bundle, "alice/public", private=True)
    assert hub.is_public("alice/public")
    assert not hub.is_public("alice/nothing")
    assert len(standin.repos["alice/public"].commits) == 1


def test_only_the_bundles_own_files_go(standin: HubStandIn, bundle: Path, tmp_path: Path) -> None:
    own = {*files_of(bundle)}
    (tmp_path / "outside_key").write_text("PRIVATE KEY")
    (bundle / "id_rsa").symlink_to("../outside_key")
    left_out = (".env", "figures/mine.png", "id_rsa", "notes.txt")
    for name in set(left_out) - {"id_rsa"}:
        (bundle / name).write_text("mine")
    assert plan_push(bundle, "alice/model-50").left_out == left_out
    push_bundle(bundle, "alice/model-50")
    assert {*standin.repos["alice/model-50"].commits[-1][1]} == {".gitattributes", *own}


@pytest.mark.parametrize("name", ["README.md", "figures/sparsity.png", "config.json", "wisparse.json"])
def test_what_is_no_bundle_is_not_pushed(name: str, standin: HubStandIn, bundle: Path, tmp_path: Path) -> None:
    (bundle / name).unlink()
    if name != "wisparse.json":
        (tmp_path / "outside_key").write_text("PRIVATE KEY")
        (bundle / name).symlink_to(tmp_path / "outside_key")
    for attempt in (push_bundle, plan_push):
        with pytest.raises(BundleError, match=rf"{name}: (a symlink that leaves the folder|missing)"):
            attempt(bundle, "alice/model-50")
    assert standin.requests == []


def test_what_is_there_already_is_known(standin: HubStandIn, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {name: len(content) for name, content in files_of(bundle).items()}
    assert plan_push(bundle, "alice/model-50").send == sizes
    push_bundle(bundle, "alice/model-50")
    with monkeypatch.context() as patched:  # what verifying has read is not read once more
        patched.setattr(hub, "file_digest", lambda path: pytest.fail(f"reads {path.name}"))
        assert plan_push(bundle, "alice/model-50").send == {}
    (bundle / "README.md").write_text("another card")
    (bundle / "model-00001-of-00001.safetensors").write_bytes(b"Weights" * 5000)
    sign(bundle)
    changed = {"README.md", "model-00001-of-00001.safetensors", "wisparse.json"}
    assert {*plan_push(bundle, "alice/model-50").send} == changed


def test_a_stopped_push_says_how_to_go_on(standin: HubStandIn, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HfApi, "upload_folder", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt) as caught:
        push_bundle(bundle, "alice/model-50", private=True)
    assert str(caught.value).endswith(f"go on with: wisparse push '{bundle}' alice/model-50 --private")


def test_write_access(standin: HubStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("alice/mine", "bob/his"):
        standin.add(name, {})
    for allowed in ("alice/mine", "alice/new", "team/new"):
        check_write_access(allowed)
    assert "alice/new" not in standin.repos
    for name, error, words in (
        ("bob/his", AccessError, "not permitted"),
        *((name, AccessError, "logged in as 'alice'") for name in ("bob/new", "readers/new")),
        ("no-owner", UsageError, "USER/NAME"),
    ):
        with pytest.raises(error, match=words):
            check_write_access(name)
    monkeypatch.setenv("HF_TOKEN", READ_TOKEN)
    with pytest.raises(AccessError, match="only reads"):
        check_write_access("alice/mine")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(AccessError, match="token was refused") as caught:
        check_write_access("alice/mine")
    assert "hf_wrong" not in str(caught.value)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", os.devnull)
    with pytest.raises(AccessError, match=r"needs an account on the Hub: .*hf auth login"):
        check_write_access("alice/mine")


def test_of_a_gguf_repository_only_the_named_file_is_read(
    standin: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    write_gguf("llama", tmp_path / "m.gguf", "Q8_0")
    content = (tmp_path / "m.gguf").read_bytes()
    standin.add("team/m-GGUF", {"m-Q8_0.gguf": content, "m-Q4_0.gguf": b"not wanted", "LICENSE": b"a licence"})
    monkeypatch.setattr(hub, "GGUF_HEADER_BYTES", 20_000)
    plan = preflight(ConvertSettings("team/m-GGUF", tmp_path / "out", gguf_file="m-Q8_0.gguf", device="cpu"))
    assert plan.source.gguf.stat().st_size == len(content)  # of the same size, but sparse
    assert plan.source.gguf.read_bytes().rstrip(b"\0") == content[:20_001].rstrip(b"\0")
    assert plan.dequantised_from == "Q8_0 (22)"
    assert plan.download_bytes == len(content) + len(b"a licence")
    source = open_source("team/m-GGUF", None, "m-Q8_0.gguf")
    assert source.gguf.read_bytes() == content
    assert (source.folder / "LICENSE").read_bytes() == b"a licence"
    assert not standin.seen("Q4_0")
    with pytest.raises(AccessError, match=r"m\.gguf"):
        open_source("team/m-GGUF", None, "m.gguf", weights=False)
