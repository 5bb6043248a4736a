"""Models and bundles fetched from the Hugging Face Hub, and bundles pushed to it.

A folder on disk always wins over a Hub id of the same spelling. A revision is resolved to a commit once, by the
listing that precedes the download, and everything is fetched at that commit. Without a network the cache serves.
Tokens come from the environment (``HF_TOKEN``) or from ``hf auth login`` and never appear in a message.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import huggingface_hub
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
    get_session,
    tqdm,
)

from .errors import AccessError, BundleError, UploadError, UsageError, first_line
from .guard import file_digest, find_folder, list_files, open_regular, quoted
from .manifest import MANIFEST, SIDECAR, listed_files

# What a conversion or a decoder reads. Mistral's repositories hold every weight a second time (consolidated*), others
# keep exports in sub-folders: neither is wanted.
_SMALL_FILES = (
    "*.json",
    "*.jinja",
    "*.model",
    "*.txt",
    "README.md",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "USE_POLICY*",
    "wisparse.safetensors",
)
_WEIGHT_FILES = ("*.safetensors",)
# Of the folders only additional_chat_templates/ is: a pattern cannot say "but".
_UNWANTED = ("[!a]*/*", "a[!d]*/*", "consolidated*.safetensors", "adapter_model*")

# Files that only a conversion writes: an older push's leftovers are deleted in the commit that replaces them.
_OWNED = ("model*.safetensors", "model.safetensors.index.json", "wisparse.*", "conversion_report.json", "figures/*.png")

_MAX_FILES = 100_000

_TRANSIENT = (408, 429, 500, 502, 503, 504)
_ATTEMPTS = 4
_FIRST_WAIT_S = 2.0
# How long the Hub may take to answer at all, where there is another way without it.
_ANSWER_S = 5.0

_T = TypeVar("_T")


@dataclass(frozen=True)
class Source:
    """A model on this machine's disk.

    Attributes:
        folder: where its files are; for a Hub model the snapshot in the cache.
        commit: the Hub commit it is, None for a local folder.
        name: the Hub id, or the folder's own name; never a path of this machine.
    """

    folder: Path
    commit: str | None
    name: str


def fetch_source(model: str | os.PathLike[str], revision: str | None = None, *, weights: bool = True) -> Source:
    """Bring a model to this machine's disk.

    Args:
        model: a folder, or a Hub id.
        revision: branch, tag or commit on the Hub; None is the default branch.
        weights: False fetches only configuration, tokenizer, card and licences (for a preflight).

    Raises:
        UsageError: a revision was given for a local folder.
        AccessError: no such folder or repository, no permission, no network and nothing in the cache.
    """
    folder = find_folder(model)
    if folder is not None:
        if revision is not None:
            raise UsageError(f"--revision names a commit on the Hub, but {str(model)!r} is a folder on disk")
        return Source(folder, None, folder.resolve().name)
    repo_id = _repo_id(model)
    patterns = [*_SMALL_FILES, *(_WEIGHT_FILES if weights else ())]

    def download() -> str:
        return huggingface_hub.snapshot_download(
            repo_id,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=[*_UNWANTED] if weights else [*_UNWANTED, "model*.safetensors"],
            library_name="wisparse",
            tqdm_class=_Progress,
        )

    snapshot = Path(_with_retries(download, repo_id, revision))
    if not snapshot.is_dir():
        raise AccessError(f"{repo_id!r} holds no model at revision {revision or 'main'!r}: none of its files is one")
    # The cache names a snapshot by its commit: the one place where the revision was resolved.
    return Source(snapshot, snapshot.name, repo_id)


def fetch_bundle(bundle: str | os.PathLike[str], revision: str | None = None) -> Path:
    """Bring a bundle to this machine's disk and return its folder; arguments and errors as ``fetch_source``."""
    return fetch_source(bundle, revision).folder


def download_bytes(model: str | os.PathLike[str], revision: str | None = None) -> int:
    """How many bytes ``fetch_source`` would still have to download; 0 for a folder or a model in the cache."""
    if find_folder(model) is not None:
        return 0
    repo_id = _repo_id(model)

    def plan() -> int:
        files = huggingface_hub.snapshot_download(
            repo_id,
            revision=revision,
            allow_patterns=[*_SMALL_FILES, *_WEIGHT_FILES],
            ignore_patterns=[*_UNWANTED],
            library_name="wisparse",
            tqdm_class=_Progress,
            dry_run=True,
        )
        return sum(file.file_size or 0 for file in files if file.will_download)

    return _with_retries(plan, repo_id, revision)


def check_read_access(model: str | os.PathLike[str], *, dataset: bool = False) -> None:
    """Raise AccessError unless ``model`` is a folder or a repository whose files this user may read.

    ``dataset``: it is a data set's repository, and a folder of that name does not matter.
    """
    if not dataset and find_folder(model) is not None:
        return
    repo_id = _repo_id(model)
    _with_retries(lambda: _api().auth_check(repo_id, repo_type="dataset" if dataset else "model"), repo_id)


def check_write_access(repo: str) -> None:
    """Raise AccessError unless this user may push to ``repo``, which need not exist yet.

    Nothing is created: an existing repository answers for itself, and for a new one the name must be in a namespace
    of this user's.
    """
    repo_id = _repo_id(repo, must_have_owner=True)
    owner = repo_id.split("/")[0]
    # Asked first because the Hub answers "not found" to whoever is not logged in.
    account = _with_retries(lambda: _api().whoami(), repo_id)
    token = (account.get("auth") or {}).get("accessToken") or {}
    if token.get("role") == "read":
        raise AccessError(f"cannot push to {repo_id!r}: the token only reads; log in with one that may write")
    try:
        _with_retries(lambda: _api().auth_check(repo_id, write=True), repo_id)
    except AccessError as error:
        if not isinstance(error.__cause__, RepositoryNotFoundError) or isinstance(error.__cause__, GatedRepoError):
            raise
        # It does not exist (or is somebody's private one, which then shows at creation).
        organisations = {org.get("name"): org for org in account.get("orgs") or []}
        role = organisations.get(owner, {}).get("roleInOrg", "write")
        if owner != account.get("name") and (owner not in organisations or role == "read"):
            raise AccessError(
                f"cannot push to {repo_id!r}: you are logged in as {account.get('name')!r}, who may not create "
                f"repositories under {owner!r}"
            ) from None


def is_reachable() -> bool:
    """Whether the Hub answers at all: asked once, for a few seconds at most."""
    try:
        get_session().head(constants.ENDPOINT, timeout=_ANSWER_S)
    except (HTTPError, OSError):  # no network, no answer, or told to do without
        return False
    return True


def is_public(repo: str) -> bool:
    """Whether ``repo`` exists on the Hub and everybody may read it: the Hub leaves a repository as it was made."""
    repo_id = _repo_id(repo, must_have_owner=True)
    try:
        return not _with_retries(lambda: _api().model_info(repo_id), repo_id).private
    except AccessError as error:
        if isinstance(error.__cause__, RepositoryNotFoundError):
            return False
        raise


@dataclass(frozen=True)
class PushPlan:
    """What a push would do.

    Attributes:
        send: name -> bytes, of the bundle's files that the repository lacks or has with another content.
        num_files: the bundle's files.
        left_out: what else lies in the folder.
    """

    send: dict[str, int]
    num_files: int
    left_out: tuple[str, ...]


def plan_push(folder: Path, repo: str) -> PushPlan:
    """Compare a bundle that was verified with what the repository holds.

    A large file is known by the digest in the manifest: verifying has just read it, and uploading reads it again.

    Raises:
        BundleError: not a bundle, or one of its files is a link that leads out of it.
        AccessError: the Hub cannot be reached.
    """
    names = _bundle_files(folder)
    repo_id = _repo_id(repo, must_have_owner=True)

    def listing() -> dict[str, str]:
        tree = _api().list_repo_tree(repo_id, recursive=True)
        files = [entry for entry in tree if isinstance(entry, RepoFile)]
        return {file.path: file.lfs.sha256 if file.lfs else file.blob_id for file in files}

    try:
        there = _with_retries(listing, repo_id)
    except AccessError as error:
        if not isinstance(error.__cause__, RepositoryNotFoundError):
            raise
        there = {}
    listed = listed_files(folder)
    send = {
        name: (folder / name).stat().st_size
        for name in names
        if not _is_uploaded(folder / name, listed.get(name), there.get(name))
    }
    left_out = {*list_files(folder, _MAX_FILES, BundleError, deep=True)} - {*names}
    return PushPlan(send, len(names), tuple(sorted(left_out)))


def push_bundle(folder: Path, repo: str, private: bool = False) -> str:
    """Upload a bundle, the files that its manifest names and nothing else, and return its address on the Hub.

    The repository is made if need be. Files that are there already, byte for byte, are not sent again, so a push that
    broke off resumes where it stopped and the push of an unchanged bundle changes nothing. The repository changes in
    one commit after all weights arrived: until then it shows its former state. Files that people added there stay.

    Raises:
        BundleError: ``folder`` is not a bundle, or one of its files is a link that leads out of it.
        UploadError: the upload failed; the bundle is kept, and the message holds the command to repeat it.
        KeyboardInterrupt: with that command as its text.
    """
    names = _bundle_files(folder)
    repo_id = _repo_id(repo, must_have_owner=True)

    def upload() -> str:
        api = _api()
        url = api.create_repo(repo_id, private=private or None, exist_ok=True)
        if private and not api.model_info(repo_id).private:
            raise UploadError(public_repository(folder, repo_id))
        api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message="Upload a WiSparse bundle",
            allow_patterns=names,  # plain names: no character of theirs is a wildcard
            delete_patterns=[*_OWNED],
        )
        return str(url)

    retry = push_command(folder, repo_id, private)
    try:
        with _bars_on_terminals():
            return _with_retries(upload, repo_id, insist=True)
    except UploadError:
        raise
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"the bundle is kept in {folder}; go on with: {retry}") from None
    except Exception as error:  # whatever broke, the user keeps the bundle and must learn how to go on
        reason = str(error) if isinstance(error, AccessError) else f"{type(error).__name__}: {first_line(error)}"
        if "/xet-write-token/" in reason:  # a mirror or a proxy that lacks the Hub's newer storage
            reason += " (HF_HUB_DISABLE_XET=1 sends the files without xet)"
        raise UploadError(
            f"the upload to {repo_id!r} failed: {reason}. The bundle is kept in {folder}; repeat with: {retry}"
        ) from error


def push_command(folder: Path, repo: str, private: bool) -> str:
    """What to type to push a bundle."""
    return f"wisparse push {shlex.quote(str(folder))} {shlex.quote(repo)}" + (" --private" if private else "")


def public_repository(folder: Path, repo: str) -> str:
    """What to say to ``--private`` and a public repository."""
    return (
        f"{repo!r} exists and is public, but --private was given; nothing was uploaded. Publish it there with: "
        f"{push_command(folder, repo, False)}, or keep it private under a new name: "
        f"{push_command(folder, f'{repo}-private', True)}"
    )


def _bundle_files(folder: Path) -> list[str]:
    """The files of a bundle that are there: its manifest and what that names; every one a real file of this folder."""
    for name in ("config.json", MANIFEST, SIDECAR):
        if not (folder / name).is_file():
            raise BundleError(f"{folder}: expected a bundle, found no {name}; convert a model first")
    # What was fetched from the Hub comes without pictures.
    names = [MANIFEST, *(name for name in listed_files(folder) if os.path.lexists(folder / name))]
    for name in names:
        open_regular(folder, name, BundleError).close()  # a link that leads out would publish a stranger's file
    return names


def _is_uploaded(path: Path, sha256: str | None, digest: str | None) -> bool:
    """Whether the Hub's ``digest`` is this file's: sha256 of a large one, git's own of a small one.

    ``sha256``: as the manifest has it; None for the manifest itself.
    """
    if digest is None:
        return False
    if len(digest) == 64:
        return (sha256 or file_digest(path)) == digest
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() == digest


class _Progress(tqdm):
    """huggingface_hub's progress bar, on terminals only: in a log file it is noise."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not sys.stderr.isatty():
            kwargs["disable"] = True
        super().__init__(*args, **kwargs)


@contextmanager
def _bars_on_terminals() -> Iterator[None]:
    """The same for uploads, whose bars cannot be passed in."""
    if sys.stderr.isatty() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _api() -> HfApi:
    return HfApi(library_name="wisparse")


_OWNER_AND_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}")


def _repo_id(model: str | os.PathLike[str], must_have_owner: bool = False) -> str:
    """The Hub id that ``model`` spells, or an AccessError that says why it is none."""
    text = str(model)
    if must_have_owner:
        if not _OWNER_AND_NAME.fullmatch(text):
            raise UsageError(f"expected a Hub repository as USER/NAME, found {quoted(text)}")
        return text
    if not isinstance(model, str) or not (_OWNER_AND_NAME.fullmatch(text) or _NAME.fullmatch(text)):
        raise AccessError(
            f"cannot open model {quoted(text)}: there is no such folder, and it is not a Hub id of the form USER/NAME"
        )
    return text


def _with_retries(action: Callable[[], _T], repo_id: str, revision: str | None = None, insist: bool = False) -> _T:
    """Run ``action`` against the Hub: repeat it while it fails in passing, explain it in one sentence when it fails.

    ``insist`` also repeats when no connection can be made: worth it once a conversion hangs on it, not for a laptop on
    a train that asks for a model.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return action()
        except (HTTPError, OSError, EntryNotFoundError, HFValidationError, RuntimeError) as error:
            root = _root_cause(error)
            if attempt < _ATTEMPTS and _is_transient(root, insist):
                time.sleep(_FIRST_WAIT_S * 2 ** (attempt - 1))
                continue
            explanation = _explain(root, repo_id, revision)
            if explanation is None:
                raise
            raise AccessError(explanation) from root
    raise AssertionError("unreachable: the last attempt returns or raises")


def _root_cause(error: BaseException) -> BaseException:
    """The Hub's or the network's own error: the client wraps it in "not in the cache" or "while uploading"."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, (HTTPError, OfflineModeIsEnabled)):
        cause = cause.__cause__
    return cause or error


def _is_transient(error: BaseException, insist: bool) -> bool:
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in _TRANSIENT
    # Whatever else HTTPError covers is the transport: refused, reset, cut off, timed out.
    return isinstance(error, HTTPError) and (insist or type(error).__name__ != "ConnectError")


def _explain(error: BaseException, repo_id: str, revision: str | None) -> str | None:
    """One sentence for a failure that has to do with access; None for any other."""
    login = "log in with 'hf auth login' or set HF_TOKEN"
    if isinstance(error, GatedRepoError):
        page = f"{constants.ENDPOINT}/{repo_id}"
        return f"{repo_id!r} is gated: ask for access at {page}, then {login} and run this again"
    if isinstance(error, RevisionNotFoundError):
        return f"{repo_id!r} has no revision {revision or 'main'!r} on the Hub"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"there is no folder {repo_id!r} here and no repository of that name on the Hub that you may read; "
            f"check the spelling, and for a private one {login}"
        )
    if isinstance(error, LocalTokenNotFoundError):
        return f"{repo_id!r} needs an account on the Hub: {login}"
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        reasons = {
            401: "the access token was refused (401): log in again with 'hf auth login' or set another HF_TOKEN",
            403: f"this account or token is not permitted to do that (403); use one that is: {login}",
            404: "not found (404)",
            429: "too many requests (429); wait some minutes and run this again",
        }
        unavailable = f"the Hub answered with an error of its own ({status}); run this again later"
        return f"{repo_id!r}: {reasons.get(status) or (unavailable if status >= 500 else first_line(error))}"
    if isinstance(error, OfflineModeIsEnabled):
        return f"{repo_id!r} is not in the cache at this revision, and HF_HUB_OFFLINE is set: unset it or give a folder"
    if isinstance(error, HTTPError):
        return (
            f"cannot reach the Hub for {repo_id!r} ({type(error).__name__}), and it is not complete in the cache: "
            "check the network, or give a folder"
        )
    if isinstance(error, LocalEntryNotFoundError):
        return f"{repo_id!r} is not complete in the cache and the Hub cannot be reached: check the network"
    if isinstance(error, HFValidationError):
        return f"not a Hub id: {repo_id!r}"
    return None
