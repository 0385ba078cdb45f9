"""The socket addresses and files through which a server's processes communicate."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from moeserve.config import ADAPTERS_FILE, ADAPTERS_FILE_ENV, ENV_PREFIX


def has_working_directory() -> bool:
    """True if the working directory still exists. If it was deleted, relative paths fail, and some libraries cannot
    be loaded."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class RuntimePaths:
    """Paths in a server's runtime directory, which is private (mode 0700)."""

    directory: Path

    def _ipc(self, name: str) -> str:
        return f"ipc://{self.directory / name}"

    @property
    def config_file(self) -> Path:
        """ServerConfig as JSON, mode 0600 because it may contain the API key."""
        return self.directory / "config.json"

    @property
    def router(self) -> str:
        """PULL, bound by the router: messages.schema.ToRouter from httpserver and detokenizer."""
        return self._ipc("router")

    @property
    def detokenizer(self) -> str:
        """PULL, bound by the detokenizer: ToDetokenizer from the router."""
        return self._ipc("detokenizer")

    @property
    def http(self) -> str:
        """PULL, bound by httpserver: ToHttp from detokenizer, router, worker and visual server."""
        return self._ipc("http")

    @property
    def visualserver(self) -> str:
        """PULL, bound by the visual server: ToVisualServer from httpserver and launcher."""
        return self._ipc("visualserver")

    @property
    def launcher(self) -> str:
        """PULL, bound by the launcher: ToLauncher from every process."""
        return self._ipc("launcher")

    @property
    def worker(self) -> Path:
        """The worker's rpyc server, a Unix stream socket."""
        return self.directory / "worker"

    @property
    def tower_memory(self) -> Path:
        """The file with the GPU memory that the vision tower takes: bytes, as digits. The visual server writes it when
        it knows the number; the worker waits for it before it plans the rest."""
        return self.directory / "tower-memory"

    @property
    def tower_page(self) -> Path:
        """The page of memory by which the router and the visual server tell each other about their work; see
        `tower_page.py`."""
        return self.directory / "tower-page"

    @property
    def spans(self) -> Path:
        """The folder of requests' embeddings; see `embedding_files.py`."""
        return self.directory / "spans"

    @property
    def adapters_file(self) -> Path:
        """The loaded LoRA adapters as JSON. The router writes the file, and its successor reads it. After an upgrade
        the new server uses the same file."""
        return Path(os.environ.get(ADAPTERS_FILE_ENV) or self.directory / ADAPTERS_FILE)

    @property
    def shared_directory(self) -> Path:
        """The runtime directory of the first server, which all servers of its upgrades share."""
        return self.adapters_file.parent

    @staticmethod
    def from_env() -> RuntimePaths:
        return RuntimePaths(Path(os.environ[ENV_PREFIX + "RUNTIME_DIR"]))
