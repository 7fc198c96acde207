"""Which inputs a model is traced and compared with: `settle` says it for an export.

described   what a model says of itself      tried    what its layers take and it runs with
samples     files of real inputs             sample_batches   their rows, in batches
"""

from modelyard.exporter.inputs.samples import (
    Sample,
    as_request,
    choose_example,
    regroup,
    two_batches,
    why_no_rows,
)
from modelyard.exporter.inputs.settle import Inputs, settle
from modelyard.exporter.inputs.tried import advice, find_values

__all__ = [
    "Inputs",
    "Sample",
    "advice",
    "as_request",
    "choose_example",
    "find_values",
    "regroup",
    "settle",
    "two_batches",
    "why_no_rows",
]
