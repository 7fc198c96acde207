"""Needs a library that nobody has."""

import a_library_that_nobody_has


def handle(data, context):
    return a_library_that_nobody_has.answer(data)
