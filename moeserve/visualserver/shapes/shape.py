"""What the visual server and the memory plan ask of a tower's shape, whichever tower it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from moeserve.models.errors import ModelError
from moeserve.models.interface import ModelShape
from moeserve.models.sources.source import TensorSource
from moeserve.visualserver.picture_size import SizeRule

VISION = "clip.vision."


class TowerShape(Protocol):
    """Frozen."""

    @property
    def hidden(self) -> int:
        """Numbers of a patch's row."""
        ...

    @property
    def layers(self) -> int: ...

    @property
    def patch(self) -> int:
        """Pixels a side of a patch."""
        ...

    @property
    def embedding_size(self) -> int:
        """Numbers of a token's row: see `ModelShape.embedding_size`."""
        ...

    @property
    def default_max_tokens(self) -> int:
        """The most tokens of a picture where --image-max-tokens does not say."""
        ...

    @property
    def token_side(self) -> int:
        """Pixels a side of what becomes one token."""
        ...

    @property
    def token_floats(self) -> int:
        """Floats that a token's patches have in memory at once while they are encoded."""
        ...

    def size_rule(self, min_tokens: int | None, max_tokens: int | None) -> SizeRule:
        """The sizes of pictures of `min_tokens` to `max_tokens` tokens; None: the projector's default. Raises
        ConfigError for bounds that the projector does not have."""
        ...

    def fits(self, text: ModelShape) -> bool:
        """Whether the tower is for models of this architecture."""
        ...

    def tensor_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor that the tower must have by name, row-major."""
        ...


def check_tensors(file: TensorSource, shape: TowerShape) -> None:
    """Raises ModelError if a tensor of the tower is missing or has another shape."""
    for name, expected in shape.tensor_shapes().items():
        tensor = file.tensors.get(name)
        if tensor is None:
            raise ModelError(file.path, f"tensor {name} is missing; download or convert it again")
        if tensor.shape != expected:
            raise ModelError(
                file.path,
                f"tensor {name} has shape {tensor.shape}, not {expected}; convert it again",
            )


def check_pixels(file: TensorSource, mean: float, deviation: float) -> None:
    """Raises ModelError unless the file brings pixels, from 0 to 1, to this mean and deviation in each channel."""
    for name, value in (("image_mean", mean), ("image_std", deviation)):
        key = VISION + name
        if any(each != value for each in file.metadata.require_floats(key, 3)):
            raise file.metadata.error(key, f"is not {value:g} for each channel")
