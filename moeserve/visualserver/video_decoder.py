"""Turns a video into the frames that a tower reads: from a file, by PyAV in a process of its own, or from pictures."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

import numpy as np
from msgspec.structs import replace

from moeserve.messages.pictures import MOST_FRAMES, EncodePicture, VideoSettings
from moeserve.visualserver.decode_protocol import DecodeVideo, decode_video_reply, encode
from moeserve.visualserver.media_decoder import MediaDecoder, PictureError
from moeserve.visualserver.picture_decoder import PictureDecoder
from moeserve.visualserver.picture_size import FrameRule
from moeserve.visualserver.video_frames import Video, in_twos

VIDEO_TIMEOUT_S: Final = 60.0  # seconds of CPU time


class VideoDecoder(MediaDecoder):
    """The `MediaDecoder` of videos: files, or lists of pictures."""

    def __init__(self, pictures: PictureDecoder, timeout: float = VIDEO_TIMEOUT_S) -> None:
        """pictures: decodes the frames of a video that is a list of pictures."""
        super().__init__("moeserve.visualserver.video_process", "videos", timeout)
        self._pictures = pictures

    def decode(self, video: EncodePicture, rule: FrameRule) -> Video:
        """Returns the frames in the size that `rule` gives for their number. Raises PictureError, or SandboxUnavailable
        if the video is not to blame. Blocks."""
        assert video.video is not None, "the message has a video"
        if video.frames:
            return self._of_pictures(video.frames, video.video, rule)
        if find_spec("av") is None:
            raise PictureError(
                "cannot be decoded by this server, which lacks PyAV (pip install 'moeserve[video]'); send its frames "
                "as a list of pictures"
            )
        reply = self.ask(encode(DecodeVideo(video.data, rule, video.video)), decode_video_reply)
        frames = np.frombuffer(reply.pixels, np.uint8).reshape(reply.frames, reply.height, reply.width, 3)
        return in_twos(frames, reply.seconds)

    def _of_pictures(self, files: tuple[bytes, ...], settings: VideoSettings, rule: FrameRule) -> Video:
        most = min(rule.most_frames, MOST_FRAMES)
        if len(files) > most:
            raise PictureError(
                f"has {len(files)} frames; at most {most} are taken (--video-max-tokens); send fewer"
            )
        rule = replace(rule, num_frames=max(2, len(files)))
        frames = [self._pictures.decode(file, rule) for file in files]
        if any(frame.shape != frames[0].shape for frame in frames):
            raise PictureError("has frames of different sizes; encode it again in one size")
        return in_twos(np.stack(frames), [index / settings.fps for index in range(len(frames))])
