"""A name that every second archive uses."""

NAME = "author's utils"
