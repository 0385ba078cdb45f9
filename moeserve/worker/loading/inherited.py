"""What a GPU's worker finds in the process that it is forked from, and another one would wait for.

That process must not ask for the GPU: its driver survives no fork. It has imported what a worker imports, and while its
first fork loads the model, it opens the model's file itself, builds the vocabulary and hashes the kernels' sources and
Triton's, which is how Triton finds a compiled kernel on disk.
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
    """Empty in the first fork."""

    source: ModelSource | None = None
    grammar: GrammarEngine | None = None

    def prepare(self, config: ServerConfig) -> None:
        """For the next forks. What cannot be had they try themselves, and say why."""
        try:
            self.source = open_weights(config)
            self.grammar = GrammarEngine(TextTokenizer.from_gguf(self.source))
            from moeserve.kernels.launch import hash_sources  # a machine without a GPU may lack Triton

            hash_sources()
            from moeserve.worker.engines.gpu.measure.kept import kernel_sources

            kernel_sources()
        except (UserError, ImportError, OSError, MemoryError, ValueError) as error:
            log.debug("the next worker begins without: %s", error)
        gc.collect()
        gc.freeze()  # a collection in a fork would write to, and so copy, what is shared
