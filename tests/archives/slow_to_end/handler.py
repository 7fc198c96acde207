"""Takes a second and a half to end, when it may."""

import atexit
import time

atexit.register(time.sleep, 1.5)


def handle(data, context):
    return data and ["fine" for _ in data]
