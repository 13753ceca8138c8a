"""Models from the Hugging Face hub: only the files that are needed, into the hub's own cache.

HF_HOME, HF_TOKEN and HF_HUB_OFFLINE are huggingface-hub's and honoured by it. No code and no pickle is ever fetched.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from huggingface_hub import HfApi, constants, errors, is_offline_mode, snapshot_download, try_to_load_from_cache
from huggingface_hub.utils.tqdm import tqdm

from onekernel.errors import HubError
from onekernel.weights.directory import (
    ADAPTER_CONFIG,
    CONFIG,
    GENERATION_CONFIG,
    INDEX,
    WEIGHTS,
    file_names,
    index_shards,
    refuse_adapter,
    refuse_without_config,
    refuse_without_safetensors,
)

_SETTINGS = (CONFIG, GENERATION_CONFIG, INDEX, "special_tokens_map.json")
_TEXT_PREFIXES = ("tokenizer", "chat_template")
_TEXT_SUFFIXES = (".json", ".jinja", ".model", ".txt")

_LIST_TIMEOUT_S = 10.0
"""How long the hub may take to list a repository before the cache is used without it."""


def is_settings_file(name: str) -> bool:
    """Whether a repository's file is a config, tokenizer, chat template or index: small, and no code."""
    return name in _SETTINGS or ("/" not in name and name.startswith(_TEXT_PREFIXES) and name.endswith(_TEXT_SUFFIXES))


class HubModel:
    """One repository at one revision: `settings` first, `weights` once the config is known to be supported."""

    def __init__(self, repo: str, revision: str | None, progress: Callable[[str], None] | None) -> None:
        """List the files; without the hub (HF_HUB_OFFLINE, or it does not answer) the cache has to do.

        Raises HubError if there is no such repository or revision, or access is refused.
        """
        self._repo, self._revision, self._progress = repo, revision, progress
        self._commit: str | None = None
        self._sizes: dict[str, int] = {}
        self._unreachable = "HF_HUB_OFFLINE is set" if is_offline_mode() else ""
        if self._unreachable:
            return
        try:
            with self._explained():
                info = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=_LIST_TIMEOUT_S)
        except _UnreachableError as error:
            self._unreachable = f"the hub cannot be reached ({error})"
            self._say(f"{self._unreachable}; looking for {repo} in the cache")
            return
        self._commit = info.sha
        self._sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}

    def settings(self) -> Path:
        """Fetch everything but the weights and return the directory."""
        if self._unreachable:
            return self._cached()
        if ADAPTER_CONFIG in self._sizes:
            refuse_adapter(self._repo)
        if CONFIG not in self._sizes:
            refuse_without_config(self._sizes, self._repo)
        return self._fetch(filter(is_settings_file, self._sizes))

    def weights(self, directory: Path) -> Path:
        """Fetch the safetensors that go with `directory`, which `settings` returned, and return the directory.

        Raises HubError if the disk is too small, UnsupportedModelError if there are only pickled weights.
        """
        names = set(index_shards(directory).values()) if INDEX in file_names(directory) else {WEIGHTS}
        if not self._unreachable:
            if not names <= self._sizes.keys():
                refuse_without_safetensors(self._sizes, self._repo)
            return self._fetch(names)
        if lacking := sorted(names - file_names(directory)):
            raise HubError(
                f"{self._repo} is cached without {', '.join(lacking)}, and {self._unreachable}; fetch it once with "
                "network, or give a local directory"
            )
        return directory

    def _cached(self) -> Path:
        found = try_to_load_from_cache(self._repo, CONFIG, revision=self._revision)
        if not isinstance(found, str):
            at = f" at revision {self._revision}" if self._revision else ""
            raise HubError(
                f"{self._repo}{at} is not in the cache ({constants.HF_HUB_CACHE}), and {self._unreachable}; fetch it "
                "once with network, or give a local directory"
            )
        return Path(found).parent

    def _fetch(self, names: Iterable[str]) -> Path:
        wanted = sorted(names)
        missing = [name for name in wanted if not self._is_cached(name)]
        needed = sum(self._sizes[name] for name in missing)
        if missing:
            self._require_disk(needed)
            self._say(f"fetching {needed / 1e6:.1f} MB of {self._repo}: {', '.join(missing)}")
        bars = tqdm if self._progress and sys.stderr.isatty() else _NoBars
        try:
            with self._explained():
                return Path(
                    snapshot_download(self._repo, revision=self._revision, allow_patterns=wanted, tqdm_class=bars)
                )
        except _UnreachableError as error:
            raise HubError(
                f"fetching {self._repo} broke off ({error}); run it again: what has been fetched is kept"
            ) from error

    def _is_cached(self, name: str) -> bool:
        return isinstance(try_to_load_from_cache(self._repo, name, revision=self._commit), str)

    def _require_disk(self, needed: int) -> None:
        cache = Path(constants.HF_HUB_CACHE)
        existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
        free = shutil.disk_usage(existing).free
        if needed > free:
            raise HubError(
                f"{self._repo} needs {needed / 1e9:.2f} GB more in {cache}, where {free / 1e9:.2f} GB are free; make "
                "room, or set HF_HOME to a folder on another disk"
            )

    def _say(self, text: str) -> None:
        if self._progress:
            self._progress(text)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn what huggingface-hub raises into HubError with what to do."""
        page = f"{constants.ENDPOINT}/{self._repo}"
        try:
            yield
        except errors.GatedRepoError as error:
            raise HubError(
                f"{self._repo} is gated; accept its licence at {page} and set HF_TOKEN to a token of that account"
            ) from error
        except errors.RevisionNotFoundError as error:
            raise HubError(f"{self._repo} has no revision {self._revision!r}; see {page}/tree/main") from error
        except errors.RepositoryNotFoundError as error:
            raise HubError(
                f"the hub has no model {self._repo}, or it is private; check the name at {page}, and set HF_TOKEN if "
                "it is yours"
            ) from error
        except errors.HFValidationError as error:
            raise HubError(f"{self._repo!r} is no hub id ({error}); give org/name or a local path") from error
        except errors.HfHubHTTPError as error:
            status = error.response.status_code
            if status in (401, 403):
                raise HubError(
                    f"the hub refuses access to {self._repo} (HTTP {status}); accept its licence at {page} if it has "
                    "one, and set HF_TOKEN to a token that may read it"
                ) from error
            raise _UnreachableError(f"HTTP {status}") from error
        except (httpx.TransportError, ConnectionError, errors.LocalEntryNotFoundError) as error:
            raise _UnreachableError(f"{type(error).__name__}: {error}") from error
        except OSError as error:
            raise HubError(f"{self._repo} cannot be written to {constants.HF_HUB_CACHE}: {error}") from error


class _UnreachableError(HubError):
    """The hub does not answer: a cached copy may still do."""


class _NoBars(tqdm):
    """A progress bar that is never shown."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **(options | {"disable": True}))  # type: ignore[no-untyped-call]
