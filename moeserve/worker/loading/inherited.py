"""The data that a GPU's worker inherits from the process that forks it, to start faster.

That process must not initialise the GPU, because the driver does not survive a fork. It has already imported a worker's
modules. While its first fork loads the model, it opens the model's file, builds the vocabulary, and hashes the sources
of the kernels and of Triton: Triton finds compiled kernels on disk by these hashes.
"""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass

from moeserve.config import ServerConfig
from moeserve.errors import UserError
from moeserve.grammar.engine import GrammarEngine
from moeserve.models.sources.source import ModelSource
from moeserve.tokenizer.text_tokenizer import TextTokenizer
from moeserve.worker.loading.setup import open_weights

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Inherited:
    """Inherited data; empty in the first fork."""

    source: ModelSource | None = None
    grammar: GrammarEngine | None = None

    def prepare(self, config: ServerConfig) -> None:
        """Prepares data for the next forks. Ignores errors: each fork tries again and reports them."""
        try:
            self.source = open_weights(config)
            self.grammar = GrammarEngine(TextTokenizer.from_gguf(self.source))
            # imported late: a machine without a GPU may lack Triton
            from moeserve.kernels.launch import hash_sources

            hash_sources()
            from moeserve.worker.engines.gpu.measure.stored import kernel_sources

            kernel_sources()
        except (UserError, ImportError, OSError, MemoryError, ValueError) as error:
            log.debug("the next worker begins without: %s", error)
        gc.collect()
        gc.freeze()  # a garbage collection in a fork would otherwise write to the shared pages and so copy them
