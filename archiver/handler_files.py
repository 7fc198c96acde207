"""What the built-in handlers read beside an artifact: names of files, and of a text's inputs."""

LABELS_FILE = "index_to_name.json"
BACKGROUND_FILE = "background.json"
FEATURES_FILE = "features.json"
SCALER_FILE = "scaler.json"

# Of Hugging Face's folders.
CONFIG_FILE = "config.json"
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
VOCABULARY_FILE = "vocab.json"

MAX_JSON_BYTES = 16 * 1024 * 1024
"""Size of one such file, at most."""

TOKEN_IDS = ("input_ids", "ids", "tokens", "token_ids")
"""Names that a model's input of token ids has."""
MASKS = ("attention_mask", "mask")
TYPES = ("token_type_ids", "segment_ids")
"""Names of inputs beside it, which say how it is to be read."""
