"""Answers about places in a picture: as data, or drawn on the picture as it came."""

from typing import ClassVar

from PIL import Image

from modelyard.handlers.context import Context
from modelyard.handlers.errors import BadInput, LoadError
from modelyard.handlers.explain.draw.picture import png
from modelyard.handlers.explain.request.options import preferred_format
from modelyard.handlers.tasks.vision_handler import VisionHandler

PNG_OR_JSON = ("json", "png")


class DrawnAnswers(VisionHandler):
    """A handler that keeps the pictures of a batch, and sees all of each."""

    keeps_pictures: ClassVar[bool] = True

    def initialize(self, context: Context) -> None:
        """Load the archive; refuse settings that cut off a part, in which nothing would be found.

        Raises:
            LoadError: they do.
        """
        super().initialize(context)
        if self.image.crop is not None:
            raise LoadError(
                f"handler.image.crop is {list(self.image.crop)}: what lies outside would not be "
                "seen; give handler.image a size, or resize alone"
            )

    def wants_png(self, index: int) -> bool:
        """Return whether request `index` asks for a picture, by `format` or its Accept header.

        Raises:
            BadInput: it asks for another format.
        """
        accept = self.context.get_request_header(index, "accept")
        wanted = self.context.query[index].get(
            "format", preferred_format(accept or "", PNG_OR_JSON)
        )
        if wanted not in PNG_OR_JSON:
            raise BadInput(f'format is "{wanted}"; expected one of {", ".join(PNG_OR_JSON)}')
        return wanted == "png"

    def answer_png(self, index: int, picture: Image.Image) -> bytes:
        """Return a picture as the PNG file that answers request `index`."""
        self.context.set_response_content_type(index, "image/png")
        return png(picture)


def colour_of_class(index: int) -> tuple[int, int, int]:
    """Return the colour of a class, as the PASCAL VOC data set has them; class 0 is black."""
    red = green = blue = 0
    for bit in range(7, -1, -1):
        red |= (index & 1) << bit
        green |= (index >> 1 & 1) << bit
        blue |= (index >> 2 & 1) << bit
        index >>= 3
    return red, green, blue
