"""Lists and removes models in Hugging Face's cache, which other programs use too."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import CachedRepoInfo, CachedRevisionInfo, constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound
from huggingface_hub.file_download import repo_folder_name

from .choice import choose, chosen_set, gguf_sets
from .errors import ANOTHER_CACHE, HubError
from .names import HubName

_WEIGHTS = ".safetensors"


class CacheSpace(NamedTuple):
    folder: Path  # HF_HUB_CACHE; it may not exist yet
    free_bytes: int
    is_writable: bool


class CachedModel(NamedTuple):
    name: HubName  # in the form that --model takes
    path: Path  # of a GGUF file, of the first file of a split set, or of a folder
    num_bytes: int
    modified: float  # seconds since the epoch
    is_whole: bool  # False: some of its files are not downloaded


def cache_space() -> CacheSpace:
    folder = Path(constants.HF_HUB_CACHE)
    # A folder that may not be looked into counts as one that is not there.
    there = next(one for one in (folder, *folder.parents) if os.path.exists(one))
    return CacheSpace(folder, shutil.disk_usage(there).free, os.access(there, os.W_OK | os.X_OK))


def cached_models() -> list[CachedModel]:
    """Returns the downloaded repositories' models, by name. Raises HubError if the cache cannot be read."""
    found = [model for repo in _repositories() for one in repo.revisions for model in _models(repo, one)]
    return sorted(found, key=lambda model: str(model.name))


def find_cached(name: HubName) -> CachedModel | None:
    """Returns the downloaded model that the name selects from its repository. Raises HubError if several
    fit, or the cache cannot be read."""
    for repo in _repositories():
        if repo.repo_id == name.repo and (revision := _revision(repo, name)) is not None:
            path, sizes = revision.snapshot_path, _sizes(revision)
            if sets := gguf_sets(sizes, name.wanted if name.wants_file else None):
                path /= chosen_set(name, sets).files[0]
            return next((model for model in _models(repo, revision) if model.path == path), None)
    return None


def remove_partial(name: HubName) -> int:
    """Removes the parts that interrupted downloads of the name's repository have left. Returns their bytes."""
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name.repo, repo_type="model") / "blobs"
    num_bytes = 0
    for partial in folder.glob("*.incomplete"):
        num_bytes += partial.stat().st_size
        partial.unlink()
    return num_bytes


def remove(model: CachedModel) -> None:
    """Removes the model's files, and the contents that no other revision uses. Removing the last model also removes the
    repository and the parts of interrupted downloads."""
    for repo in _repositories():
        if repo.repo_id == model.name.repo:
            if len([one for revision in repo.revisions for one in _models(repo, revision)]) <= 1:
                shutil.rmtree(repo.repo_path)
            else:
                _remove_files(repo, model)


def _remove_files(repo: CachedRepoInfo, model: CachedModel) -> None:
    gone = set(_files(repo, model))
    others = {
        file.blob_path for revision in repo.revisions for file in revision.files if file.file_path not in gone
    }
    for revision in repo.revisions:
        for file in revision.files:
            if file.file_path in gone:
                file.file_path.unlink()
                if file.blob_path not in others:
                    file.blob_path.unlink(missing_ok=True)


def _files(repo: CachedRepoInfo, model: CachedModel) -> Iterator[Path]:
    for revision in repo.revisions:
        if model.path == revision.snapshot_path:
            yield from (file.file_path for file in revision.files if file.file_path.suffix != ".gguf")
        for one in gguf_sets(_sizes(revision), None):
            if model.path == revision.snapshot_path / one.files[0]:
                yield from (revision.snapshot_path / file for file in one.files)


def _repositories() -> list[CachedRepoInfo]:
    try:
        return [repo for repo in scan_cache_dir(constants.HF_HUB_CACHE).repos if repo.repo_type == "model"]
    except CacheNotFound:
        return []
    except OSError as error:  # another user's, as under sudo
        raise HubError(
            f"the cache cannot be read: {error.filename}: {error.strerror}; {ANOTHER_CACHE}"
        ) from error
    except ValueError as error:  # as the library says it
        raise HubError(
            f"the cache {constants.HF_HUB_CACHE} is not a folder; name one in HF_HUB_CACHE"
        ) from error


def _revision(repo: CachedRepoInfo, name: HubName) -> CachedRevisionInfo | None:
    wanted = name.revision or "main"
    matching = (one for one in repo.revisions if wanted in one.refs or wanted == one.commit_hash)
    return next(matching, None)


def _sizes(revision: CachedRevisionInfo) -> dict[str, int]:
    """Returns the bytes of each file, by its path in the repository."""
    folder = revision.snapshot_path
    return {file.file_path.relative_to(folder).as_posix(): file.size_on_disk for file in revision.files}


def _models(repo: CachedRepoInfo, revision: CachedRevisionInfo) -> Iterator[CachedModel]:
    sizes, folder = _sizes(revision), revision.snapshot_path
    pin = None if "main" in revision.refs else next(iter(sorted(revision.refs)), revision.commit_hash)
    modified = revision.last_modified
    for one in gguf_sets(sizes, None):
        name = HubName(repo.repo_id, one.files[0], pin)
        yield CachedModel(name, folder / one.files[0], one.bytes, modified, len(one.files) == one.parts)
    weights = [file for file in sizes if file.endswith(_WEIGHTS) and "/" not in file]
    if weights and "config.json" in sizes:
        try:
            num_bytes = sum(sizes[file] for file in choose(HubName(repo.repo_id, None, pin), sizes))
        except HubError:  # the repository also has GGUF files, one of which the name selects
            return
        yield CachedModel(HubName(repo.repo_id, None, pin), folder, num_bytes, modified, True)
