"""The bounds of a picture's size: the server's flags, the tower's own, and those of the request."""

from __future__ import annotations

from moeserve.errors import ConfigError
from moeserve.messages.pictures import EncodePicture, PixelBounds
from moeserve.visualserver.media_decoder import PictureError
from moeserve.visualserver.picture_size import SizeRule
from moeserve.visualserver.shapes.shape import TowerShape


class PictureBounds:
    """A request narrows the server's bounds and never widens them."""

    def __init__(self, shape: TowerShape, min_tokens: int | None, max_tokens: int | None) -> None:
        """min_tokens, max_tokens: --image-min-tokens and --image-max-tokens. Raises ConfigError for a bound that the
        tower does not support."""
        self._shape = shape
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens
        self._of_server = shape.size_rule(min_tokens, max_tokens)

    def rule(self, picture: EncodePicture) -> SizeRule:
        """Returns the rule for the picture's size. Raises PictureError if the tower cannot keep the request's
        bounds."""
        if picture.pixels is None:
            if picture.max_tokens is None:
                return self._of_server
            return self._shape.size_rule(self._min_tokens, self._most(picture.max_tokens))
        try:
            return self._of_pixels(picture.pixels, picture.max_tokens)
        except ConfigError as error:
            said = str(error).partition(": ")[2] or str(error)
            raise PictureError(f"cannot have min_pixels or max_pixels with this model: {said}") from error

    def _of_pixels(self, pixels: PixelBounds, max_tokens: int | None) -> SizeRule:
        """A token has `token_side` x `token_side` pixels. Raises ConfigError."""
        area = self._shape.token_side**2
        most = self._most(max_tokens)
        if pixels.max_pixels is not None:
            default = self._shape.default_max_tokens if most is None else most
            most = max(1, min(default, pixels.max_pixels // area))
        least = self._min_tokens
        if pixels.min_pixels is not None:
            least = max(-(-pixels.min_pixels // area), least or 1)
        if least is not None:
            least = min(least, self._shape.default_max_tokens if most is None else most)
        return self._shape.size_rule(least, most)

    def _most(self, max_tokens: int | None) -> int | None:
        return min((each for each in (self._max_tokens, max_tokens) if each is not None), default=None)
