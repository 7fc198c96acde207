"""Names that import and do not load: see `ts._refused`."""

from ts._refused import refused_handler

DALIImageClassifier = refused_handler("dali_image_classifier")
