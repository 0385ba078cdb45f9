"""Downloads a model into Hugging Face's cache, where other programs find it too.

The client library is huggingface_hub, with its environment variables: HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_CACHE,
HF_HUB_OFFLINE. The library (2.4) resumes a file when the connection breaks, but deletes the partial file when the
process ends, and a model has many gigabytes. So files are fetched here, by the library's own `http_get`, into the
places in which the library looks for them; the library does the rest.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import httpx2
from filelock import FileLock
from huggingface_hub import (
    HfApi,
    constants,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RevisionResolutionError,
)
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # documented, not in __all__

from moeserve.models.registry import family_of_config
from moeserve.models.sources.first_bytes import what_instead_of_gguf
from moeserve.models.sources.json_files import read_json

from .cache import cache_space
from .choice import choose
from .errors import HubError
from .explanations import address, explained, not_a_hub, not_here, why_unanswered
from .names import HubName
from .progress import DownloadProgress, Told

log = logging.getLogger(__name__)
logging.getLogger("httpx2").setLevel(
    logging.WARNING
)  # otherwise it logs a line per request, with signed URLs

# The library's own handler would write each of its lines a second time.
logging.getLogger("huggingface_hub").handlers.clear()

_COMMIT = re.compile(r"[0-9a-f]{40,64}")


class _Listing(NamedTuple):
    """The files of a revision: the hub's answer, or what the cache has of them."""

    commit: str
    sizes: dict[str, int]  # bytes, by the file's path in the repository
    why_cached: str = ""  # why the hub's answer is not known; empty if it is


class _NoAnswerError(HubError):
    """The hub does not say which files there are. The message is the reason; the cache may know some."""


def fetch(name: HubName, tell: Told | None = None) -> Path:
    """Returns the model's local path, a .gguf file or a folder, and downloads missing files. `tell`: called with the
    bytes that are there and the bytes of all missing files. Raises HubError if the hub does not have the files, refuses
    them, or cannot be reached."""
    with explained(name):
        try:
            listing = _online(name)
        except _NoAnswerError as error:
            listing = _cached(name, str(error))
        commit, sizes, why_cached = listing
        try:
            files = choose(name, sizes)
        except HubError as error:
            if not why_cached:
                raise
            raise HubError(f"{error}\n({why_cached})") from None
        if not files[0].endswith(".gguf"):
            config = Path(hf_hub_download(name.repo, files[0], revision=commit))
            family_of_config(
                config, read_json(config)
            )  # checked before downloading gigabytes that could not be served
        _download(name, commit, files, tell)
        first = Path(hf_hub_download(name.repo, files[0], revision=commit))
    return first if first.suffix == ".gguf" else first.parent


def listed(name: HubName) -> tuple[list[str], int]:
    """Returns the files on the hub that a name selects, and their bytes. Raises HubError if the hub does not have the
    files, refuses them, or cannot be reached."""
    with explained(name):
        try:
            sizes = _online(name).sizes
        except _NoAnswerError as error:
            raise HubError(f"{name}: not downloaded; {error}") from error
        files = choose(name, sizes)
        return files, sum(sizes[file] for file in files)


def _online(name: HubName) -> _Listing:
    """Returns the hub's listing of the revision. Raises _NoAnswerError if the hub cannot be reached, or has too many
    requests or a failure; HubError if it is no hub."""
    api, repo = HfApi(), name.repo
    try:
        revision = api.resolve_revision(repo, revision=name.revision)
        info = api.model_info(repo, revision=revision.resolved, files_metadata=True)
    except (json.JSONDecodeError, KeyError, httpx2.TooManyRedirects) as error:
        raise not_a_hub(repo) from error
    except (OfflineModeIsEnabled, RevisionResolutionError, httpx2.TransportError, HfHubHTTPError) as error:
        why = why_unanswered(error.__cause__ if isinstance(error, RevisionResolutionError) else error)
        if why is None:
            raise
        raise _NoAnswerError(f"only the cache is there: {why}") from error
    if not _COMMIT.fullmatch(revision.resolved):  # the commit becomes a folder's name
        raise not_a_hub(repo)
    return _Listing(revision.resolved, {file.rfilename: file.size or 0 for file in info.siblings or []})


def _cached(name: HubName, why: str) -> _Listing:
    """Returns the files that were downloaded before. Raises HubError if there are none."""
    try:
        folder = Path(snapshot_download(name.repo, revision=name.revision, local_files_only=True))
    except (LocalEntryNotFoundError, RevisionResolutionError) as error:
        raise not_here(name, why) from error
    log.warning("%s is taken from the cache: %s", name, why)
    files = [path for path in folder.rglob("*") if path.is_file()]
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    return _Listing(folder.name, sizes, why)


@dataclass(frozen=True)
class _Blob:
    """A file's content being downloaded into the cache, named by its hash."""

    file: str
    url: str
    path: Path
    size: int

    @property
    def partial(self) -> Path:
        return self.path.with_name(self.path.name + ".incomplete")

    @property
    def bytes_left(self) -> int:
        return self.size - (self.partial.stat().st_size if self.partial.exists() else 0)


def _download(name: HubName, commit: str, files: list[str], tell: Told | None) -> None:
    """Downloads all files that the cache lacks, one after another."""
    absent = [
        file
        for file in files
        if not isinstance(try_to_load_from_cache(name.repo, file, revision=commit), str)
    ]
    blobs = [_blob(name, commit, file) for file in absent]
    fresh = [blob for blob in blobs if not blob.path.exists()]
    _check_space(name, fresh)
    if fresh:
        total = sum(blob.size for blob in fresh)
        log.info(
            "downloading %s: %d files, %.2f GB, to %s", name, len(fresh), total / 1e9, constants.HF_HUB_CACHE
        )
        with closing(DownloadProgress(total, tell)) as progress:
            for blob in fresh:
                if blob.size <= constants.MAX_HTTP_DOWNLOAD_SIZE:  # larger files come in Xet's chunks
                    _fetch_blob(name, blob, progress)
    for blob in blobs:
        hf_hub_download(name.repo, blob.file, revision=commit)  # finds the content, links the name to it


def _blob(name: HubName, commit: str, file: str) -> _Blob:
    url = hf_hub_url(name.repo, file, revision=commit)
    found = get_hf_file_metadata(url)
    if found.etag is None or found.size is None or not re.fullmatch(r"\w[\w.-]*", found.etag):
        raise HubError(
            f"{name}: {address()} does not state the hash and size of {file}, as a hub does; check "
            "HF_ENDPOINT"
        )
    return _Blob(file, url, _cache_folder(name) / "blobs" / found.etag, found.size)


def _fetch_blob(name: HubName, blob: _Blob, progress: DownloadProgress) -> None:
    """Downloads a file's content. Continues where the last attempt ended, in this process or another."""
    lock = Path(constants.HF_HUB_CACHE) / ".locks" / _cache_folder(name).name / f"{blob.path.name}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    blob.path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock):
        if blob.path.exists():  # another process downloaded it while this one waited
            progress.update(blob.size)
            return
        with open(blob.partial, "ab") as partial:
            if partial.tell() > blob.size:
                partial.truncate(0)
            if partial.tell() == blob.size:
                progress.update(blob.size)
            http_get(
                blob.url,
                partial,
                resume_size=partial.tell(),
                headers=build_hf_headers(),
                expected_size=blob.size,
                displayed_filename=blob.file,
                tqdm_class=cast(Any, progress.file),
            )
        _check_hash(name, blob)
        _check_kind(name, blob)
        os.replace(blob.partial, blob.path)


def _check_hash(name: HubName, blob: _Blob) -> None:
    """Compares the content with the hash that the hub states: SHA-256 of a large file, git's SHA-1 of others. If they
    differ, removes the content and raises HubError."""
    told = blob.path.name
    if re.fullmatch("[0-9a-f]{64}", told):
        digest = hashlib.sha256()
    elif re.fullmatch("[0-9a-f]{40}", told):
        digest = hashlib.sha1(b"blob %d\0" % blob.size, usedforsecurity=False)
    else:
        log.warning("%s: the hub names no hash of %s: it is not checked", name, blob.file)
        return
    with open(blob.partial, "rb") as content:
        found = hashlib.file_digest(content, lambda: digest).hexdigest()
    if found != told:
        blob.partial.unlink()
        raise HubError(
            f"{name}: {blob.file} was damaged on the way: its hash is {found}, {address()} names {told}; "
            "start again to download it anew"
        )


def _check_kind(name: HubName, blob: _Blob) -> None:
    """Removes the content and raises HubError if it is a model by its name alone."""
    if blob.file.endswith(".gguf") and (problem := what_instead_of_gguf(blob.partial)):
        blob.partial.unlink()
        raise HubError(
            f"{name}: {blob.file} on {address()} is not a GGUF file {problem}; it was not kept: try again, "
            "or choose another file"
        )


def _cache_folder(name: HubName) -> Path:
    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name.repo, repo_type="model")


def _check_space(name: HubName, blobs: list[_Blob]) -> None:
    needed = sum(blob.bytes_left for blob in blobs)
    space = cache_space()
    if needed > space.free_bytes:
        raise HubError(
            f"{name}: {needed / 1e9:.2f} GB are to be downloaded, and {space.free_bytes / 1e9:.2f} GB are free in "
            f"{space.folder}: make "
            "room, or put the cache elsewhere (HF_HUB_CACHE)"
        )
