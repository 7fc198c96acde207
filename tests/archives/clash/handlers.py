"""The author's own module, named like one of ours."""

NAME = "author's handlers"


class BaseHandler:
    pass
