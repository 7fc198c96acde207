"""The author's own module, named like one of ours."""

NAME = "author's exporter"
