"""Download of models and bundles from the Hugging Face Hub, and upload of bundles."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub  # imports its submodules lazily
from huggingface_hub import constants

from .errors import AccessError, BundleError, UploadError, UsageError, first_line
from .gguf import MAX_HEADER_BYTES as GGUF_HEADER_BYTES
from .guard import WANTED, WANTED_BUNDLE, file_digest, find_folder, list_files, open_regular, quoted
from .lazy import hub_errors as hub
from .manifest import MANIFEST, listed_files

# Files to download: not Mistral's second copy of the weights (consolidated*), nor exports in sub-folders.
_SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "README.md", "LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*"]
_SMALL_FILES += ["wisparse.safetensors"]
# Of the sub-folders only additional_chat_templates/ is downloaded.
_UNWANTED = ["[!a]*/*", "a[!d]*/*", "consolidated*.safetensors", "adapter_model*"]
# Files that only a conversion writes: a push deletes those of an older push.
_OWNED = ["model*.safetensors", "model.safetensors.index.json", "wisparse.*", "conversion_report.json", "figures/*.png"]
_MAX_FILES = 100_000
# Timeout for the Hub if the cache can be used instead.
_ANSWER_S = 5.0

_OWNER_AND_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}")

_LOGIN = "log in with 'hf auth login' or set HF_TOKEN"
_BY_KIND = {  # messages by the class of the client's error
    "GatedRepoError": "{0} is gated: ask for access at {1}/{2}, then " + _LOGIN + " and run this again",
    "RevisionNotFoundError": "{0} has no revision {3!r} on the Hub",
    "RepositoryNotFoundError": "there is no folder {0} here and no repository of that name on the Hub that you may "
    "read; check the spelling, and for a private one " + _LOGIN,
    "LocalTokenNotFoundError": "{0} needs an account on the Hub: " + _LOGIN,
    "OfflineModeIsEnabled": "{0} is not in the Hub's cache at this revision, and HF_HUB_OFFLINE is set: unset it or give "
    "a folder",
    "LocalEntryNotFoundError": "{0} is not complete in the Hub's cache and the Hub cannot be reached: check the network",
    "HFValidationError": "not a Hub id: {0}",
}
_BY_STATUS = {
    401: "the access token was refused (401): log in again with 'hf auth login' or set another HF_TOKEN",
    403: f"this account or token is not permitted to do that (403); use one that is: {_LOGIN}",
    404: "not found (404)",
    429: "too many requests (429); wait some minutes and run this again",
}


def _api() -> huggingface_hub.HfApi:
    return huggingface_hub.HfApi(library_name="wisparse")


@dataclass(frozen=True)
class Source:
    folder: Path
    commit: str | None  # on the Hub; None for a local folder
    name: str  # the Hub id, or the folder's or GGUF file's own name without path
    gguf: Path | None = None  # the file with the model


def fetch_source(
    model: str | os.PathLike[str],
    revision: str | None = None,
    *,
    weights: bool = True,
    wanted: str = WANTED,
    gguf_file: str | None = None,
) -> Source:
    """A local folder with a model: the folder ``model``, or a download of a Hub id. ``weights=False``: only configuration,
    tokenizer, card and licences, for a preflight. ``wanted``: advice in the error for a file. ``gguf_file``: the name of
    the GGUF file in a repository, of which only this file is downloaded, for a preflight only its header."""
    folder = find_folder(model, wanted)
    if folder is not None:
        if revision is not None:
            raise UsageError(f"--revision names a commit on the Hub, but {str(model)!r} is a folder on disk")
        return Source(folder, None, folder.resolve().name)
    repo_id = _repo_id(model)
    cached = gguf_file is None or huggingface_hub.try_to_load_from_cache(repo_id, gguf_file, revision=revision)
    if gguf_file is not None and not weights and not isinstance(cached, str):
        return _gguf_header(repo_id, revision, gguf_file)
    snapshot = Path(_snapshot(repo_id, revision, weights=weights, gguf_file=gguf_file))
    if gguf_file is not None and not (snapshot / gguf_file).is_file():
        raise AccessError(f"{repo_id!r} holds no {gguf_file!r} at revision {revision or 'main'!r}")
    if not snapshot.is_dir():
        raise AccessError(f"{repo_id!r} holds no model at revision {revision or 'main'!r}: none of its files is one")
    # A snapshot's folder name is its commit.
    return Source(snapshot, snapshot.name, repo_id, None if gguf_file is None else snapshot / gguf_file)


def _gguf_header(repo_id: str, revision: str | None, name: str) -> Source:
    """A GGUF file of the same size as that on the Hub, with its header and without weights; removed with the process."""
    url = huggingface_hub.hf_hub_url(repo_id, name, revision=revision)
    work = Path(tempfile.mkdtemp(prefix="wisparse-gguf-"))
    atexit.register(shutil.rmtree, work, ignore_errors=True)
    with _hub_errors(repo_id, revision, no_folder=True), open(work / Path(name).name, "wb") as file:
        try:
            data = huggingface_hub.get_hf_file_metadata(url)
        except hub.EntryNotFoundError:
            raise AccessError(f"{repo_id!r} holds no {name!r} at revision {revision or 'main'!r}") from None
        headers = {
            **huggingface_hub.utils.build_hf_headers(library_name="wisparse"),
            "Range": f"bytes=0-{GGUF_HEADER_BYTES}",
        }
        with huggingface_hub.utils.get_session().stream("GET", url, headers=headers, follow_redirects=True) as answer:
            huggingface_hub.utils.hf_raise_for_status(answer)
            for chunk in answer.iter_bytes():
                file.write(chunk)
                if file.tell() > GGUF_HEADER_BYTES:  # of a server that ignores the range
                    break
        file.truncate(data.size or 0)
    return Source(work, data.commit_hash, repo_id, work / Path(name).name)


def fetch_bundle(bundle: str | os.PathLike[str], revision: str | None = None) -> Path:
    return fetch_source(bundle, revision, wanted=WANTED_BUNDLE).folder


def require_place(model: str | os.PathLike[str]) -> None:
    """AccessError unless ``model`` is a folder or has the syntax of a Hub id."""
    if find_folder(model) is None:
        _repo_id(model)


def download_bytes(model: str | os.PathLike[str], revision: str | None = None, gguf_file: str | None = None) -> int:
    """Bytes that ``fetch_source`` has to download; 0 for a folder or a cached model."""
    if find_folder(model) is not None:
        return 0
    files = _snapshot(_repo_id(model), revision, weights=True, dry_run=True, gguf_file=gguf_file)
    return sum(file.file_size or 0 for file in files if file.will_download)


def _snapshot(
    repo_id: str, revision: str | None, *, weights: bool, dry_run: bool = False, gguf_file: str | None = None
) -> Any:
    wanted = [*_SMALL_FILES, "*.safetensors"] if weights else _SMALL_FILES
    with _hub_errors(repo_id, revision, no_folder=True):
        return huggingface_hub.snapshot_download(
            repo_id,
            revision=revision,
            allow_patterns=wanted
            if gguf_file is None
            else [gguf_file, "LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*"],
            ignore_patterns=_UNWANTED if weights else [*_UNWANTED, "model*.safetensors"],
            library_name="wisparse",
            dry_run=dry_run,
        )


def check_read_access(model: str | os.PathLike[str], *, dataset: bool = False) -> None:
    """AccessError unless ``model`` is a folder or a repository that the user may read; ``dataset``: of a data set."""
    if dataset or find_folder(model) is None:
        repo_id = _repo_id(model)
        with _hub_errors(repo_id, no_folder=not dataset):
            _api().auth_check(repo_id, repo_type="dataset" if dataset else "model")


def check_write_access(repo: str) -> None:
    """AccessError unless the user may push to ``repo``, which may not exist yet."""
    repo_id = _repo_id(repo, must_have_owner=True)
    owner = repo_id.split("/")[0]
    # First, because the Hub answers "not found" to users who are not logged in.
    with _hub_errors(repo_id):
        account = _api().whoami()
    if ((account.get("auth") or {}).get("accessToken") or {}).get("role") == "read":
        raise AccessError(f"cannot push to {repo_id!r}: the token only reads; log in with one that may write")
    try:
        with _hub_errors(repo_id):
            _api().auth_check(repo_id, write=True)
    except _MissingRepository:
        # It does not exist, or is another user's private one, which its creation reports.
        roles = {org.get("name"): org.get("roleInOrg", "write") for org in account.get("orgs") or []}
        if owner != account.get("name") and roles.get(owner, "read") == "read":
            who = f"you are logged in as {account.get('name')!r}, who may not create repositories under {owner!r}"
            raise AccessError(f"cannot push to {repo_id!r}: {who}") from None


def is_reachable() -> bool:
    """Whether the Hub is reachable; checked once."""
    from huggingface_hub.utils import get_session

    with contextlib.suppress(hub.HTTPError, OSError):  # no network, a timeout, or offline mode
        get_session().head(constants.ENDPOINT, timeout=_ANSWER_S)
        return True
    return False


def is_public(repo: str) -> bool:
    repo_id = _repo_id(repo, must_have_owner=True)
    with contextlib.suppress(_MissingRepository), _hub_errors(repo_id):
        return not _api().model_info(repo_id).private
    return False


@dataclass(frozen=True)
class PushPlan:
    send: dict[str, int]  # name -> bytes of files that are missing or different in the repository
    num_files: int  # of the bundle
    left_out: tuple[str, ...]  # other files in the folder


def push_sizes(folder: Path, repo: str) -> dict[str, int]:
    """Name -> bytes of the files of a first push; without network access."""
    _repo_id(repo, must_have_owner=True)
    return {name: (folder / name).stat().st_size for name in _bundle_files(folder)}


def plan_push(folder: Path, repo: str) -> PushPlan:
    """Compare a verified bundle with the repository; weights by the manifest's sha256."""
    from huggingface_hub.hf_api import RepoFile
    from huggingface_hub.utils.sha import git_hash

    names = _bundle_files(folder)
    repo_id = _repo_id(repo, must_have_owner=True)
    there: list[RepoFile] = []
    with contextlib.suppress(_MissingRepository), _hub_errors(repo_id):
        there = [entry for entry in _api().list_repo_tree(repo_id, recursive=True) if isinstance(entry, RepoFile)]
    listed = listed_files(folder)
    send = {name: (folder / name).stat().st_size for name in names}
    for entry in (entry for entry in there if entry.path in send):
        if entry.lfs:
            same = (listed.get(entry.path) or file_digest(folder / entry.path)) == entry.lfs.sha256
        else:
            same = git_hash((folder / entry.path).read_bytes()) == entry.blob_id
        if same:
            del send[entry.path]
    left_out = {*list_files(folder, _MAX_FILES, BundleError, deep=True)} - {*names}
    return PushPlan(send, len(names), tuple(sorted(left_out)))


def push_bundle(folder: Path, repo: str, private: bool = False) -> str:
    """Upload the files that a bundle's manifest names; returns the address on the Hub. The repository changes in one
    commit after all weights arrived; files that people added there stay. An UploadError and a KeyboardInterrupt hold
    the command to repeat it, which sends no file again."""
    names = _bundle_files(folder)
    repo_id = _repo_id(repo, must_have_owner=True)
    retry = push_command(folder, repo_id, private)
    try:
        with _hub_errors(repo_id):
            url = _api().create_repo(repo_id, private=private or None, exist_ok=True)
            if private and not _api().model_info(repo_id).private:
                raise UploadError(public_repository(folder, repo_id))
            _api().upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                commit_message="Upload a WiSparse bundle",
                allow_patterns=names,  # plain names without wildcards
                delete_patterns=_OWNED,
            )
    except UploadError:
        raise
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"the bundle is kept in {folder}; go on with: {retry}") from None
    except Exception as error:  # after any failure the bundle is kept, and the error has the command to retry
        reason = str(error) if isinstance(error, AccessError) else f"{type(error).__name__}: {first_line(error)}"
        if "/xet-write-token/" in reason:  # a mirror or proxy without the Hub's Xet storage
            reason += " (HF_HUB_DISABLE_XET=1 sends the files without xet)"
        raise UploadError(
            f"the upload to {repo_id!r} failed: {reason}. The bundle is kept in {folder}; repeat with: {retry}"
        ) from error
    return str(url)


def push_command(folder: Path, repo: str, private: bool) -> str:
    return f"wisparse push {shlex.quote(str(folder))} {shlex.quote(repo)}" + (" --private" if private else "")


def public_repository(folder: Path, repo: str) -> str:
    """The message for ``--private`` with a public repository."""
    publish, keep = push_command(folder, repo, False), push_command(folder, f"{repo}-private", True)
    public = f"{repo!r} exists and is public, but --private was given; nothing was uploaded"
    return f"{public}. Publish it there with: {publish}, or keep it private under a new name: {keep}"


def _bundle_files(folder: Path) -> list[str]:
    """The bundle's files that exist: the manifest and the files it names, which must be regular files in the folder."""
    # A bundle from the Hub has no figures.
    names = [MANIFEST, *(name for name in listed_files(folder) if os.path.lexists(folder / name))]
    for name in names:
        open_regular(folder, name, BundleError).close()  # a symlink could publish a file outside the folder
    return names


def _repo_id(model: str | os.PathLike[str], must_have_owner: bool = False) -> str:
    text = str(model)
    if must_have_owner:
        if not _OWNER_AND_NAME.fullmatch(text):
            raise UsageError(f"expected a Hub repository as USER/NAME, found {quoted(text)}")
    elif not isinstance(model, str) or not (_OWNER_AND_NAME.fullmatch(text) or _NAME.fullmatch(text)):
        neither = "there is no such file or folder, and it is not a Hub id of the form USER/NAME"
        raise AccessError(f"cannot open model {quoted(text)}: {neither}")
    return text


class _MissingRepository(AccessError):
    """A repository that does not exist or is private."""


@contextlib.contextmanager
def _hub_errors(repo_id: str, revision: str | None = None, no_folder: bool = False) -> Iterator[None]:
    """Convert access failures to an AccessError of one sentence. Progress bars only on terminals. ``no_folder``: mention
    that there is no folder of that name either."""
    from huggingface_hub.utils import disable_progress_bars

    try:
        with contextlib.nullcontext() if sys.stderr.isatty() else disable_progress_bars():
            yield
    except (hub.HTTPError, OSError, hub.EntryNotFoundError, hub.HFValidationError, RuntimeError) as error:
        # The client wraps the original error in "not in the cache" or "while uploading".
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, (hub.HTTPError, hub.OfflineModeIsEnabled)):
            cause = cause.__cause__
        root = cause or error
        status = root.response.status_code if isinstance(root, hub.HfHubHTTPError) else 0
        words = next((words for kind, words in _BY_KIND.items() if isinstance(root, getattr(hub, kind))), None)
        if words is not None:
            explanation = words.format(repr(repo_id), constants.ENDPOINT, repo_id, revision or "main")
        elif status >= 500:
            explanation = f"{repo_id!r}: the Hub answered with an error of its own ({status}); run this again later"
        elif status:
            explanation = f"{repo_id!r}: {_BY_STATUS.get(status) or first_line(root)}"
        elif isinstance(root, hub.HTTPError):
            failed = f"cannot reach the Hub for {repo_id!r} ({type(root).__name__})"
            explanation = f"{failed}, and it is not complete in the cache: check the network, or give a folder"
        else:
            raise
        if no_folder and not status and not isinstance(root, hub.RevisionNotFoundError | hub.LocalTokenNotFoundError):
            explanation = f"there is no folder {repo_id!r} here; {explanation}"
        missing = isinstance(root, hub.RepositoryNotFoundError) and not isinstance(root, hub.GatedRepoError)
        raise (_MissingRepository if missing else AccessError)(explanation) from root
