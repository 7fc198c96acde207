"""`from ts.utils.util import PredictionException`."""

from handlers.errors import PredictionException as PredictionException
