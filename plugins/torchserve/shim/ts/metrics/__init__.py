"""A handler's own metrics.

`context.metrics` of a worker collects records until its loop calls `drain`; everywhere else
each record is a line in the log.
"""
