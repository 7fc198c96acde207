"""Headers that say what a client takes, and how gladly (RFC 9110, 12.4)."""


def weights_of(header: str) -> dict[str, float]:
    """Return the weight of each name in an Accept or Accept-Encoding header, in lower case."""
    weights = {}
    for part in header.lower().split(","):
        name, *parameters = (piece.strip() for piece in part.split(";"))
        weights[name] = _weight(parameters)
    return weights


def _weight(parameters: list[str]) -> float:
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return float(parameter[2:])
            except ValueError:
                return 0.0
    return 1.0
